//! Whose feedback is set aside: keys flagged by hand or by rule, until they are released.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::types::{SampleId, UnixMillis};

/// Why a key's feedback does not count.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "rule", rename_all = "snake_case")]
pub enum Reason {
    /// Somebody said so.
    ByHand {
        /// What they wrote.
        note: String,
    },
    /// It is far from what the others say of the same samples.
    Disagrees {
        /// How many times as far as the others are from each other.
        z: f64,
        /// On how many samples.
        samples: usize,
    },
    /// It posts too much.
    Flood {
        /// So many pieces.
        count: usize,
        /// Within so many milliseconds.
        window_ms: u64,
    },
}

/// One key in quarantine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Why.
    pub reason: Reason,
    /// Since when.
    pub since: UnixMillis,
}

/// Who is in quarantine, and who was released when. Saved as it is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Quarantine {
    entries: BTreeMap<String, Entry>,
    released: BTreeMap<String, UnixMillis>,
}

impl Quarantine {
    /// Sets a key's feedback aside; returns whether it counted until now. The first reason stays.
    pub fn flag(&mut self, key_id: &str, reason: Reason, now: UnixMillis) -> bool {
        if self.entries.contains_key(key_id) {
            return false;
        }
        self.entries.insert(key_id.to_owned(), Entry { reason, since: now });
        true
    }

    /// Lets a key's feedback count again, that which it gave meanwhile too, and has the rules look
    /// only at what it posts from now on; `None` where it counted already.
    pub fn release(&mut self, key_id: &str, now: UnixMillis) -> Option<Entry> {
        let entry = self.entries.remove(key_id)?;
        self.released.insert(key_id.to_owned(), now);
        Some(entry)
    }

    /// Every key in quarantine, by name.
    pub fn list(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.entries.iter().map(|(key, entry)| (key.as_str(), entry))
    }

    /// Whether feedback of this key counts; that of nobody in particular does.
    pub fn counts(&self, key_id: Option<&str>) -> bool {
        key_id.is_none_or(|key| !self.entries.contains_key(key))
    }

    /// Whether a rule may look at what a key posted then: not at what its release forgave.
    pub fn may_judge(&self, key_id: &str, created: UnixMillis) -> bool {
        self.released.get(key_id).is_none_or(|released| created > *released)
    }
}

/// One rating for [`disagreements`]: the newest of its rater, sample and name.
#[derive(Clone, Debug, PartialEq)]
pub struct Judged<'a> {
    /// What was judged.
    pub sample: SampleId,
    /// By whom.
    pub key_id: &'a str,
    /// The value.
    pub value: f64,
}

/// Least distance that raters are taken to have from each other, in units of the value: where the
/// others agree to the last digit, one tenth is not yet an outlier.
const LEAST_DISTANCE: f64 = 0.1;

/// Keys that disagree with the others: those whose `z` is above `least_z` on at least
/// `least_samples` samples that two or more others rated.
///
/// `z = d / max(s, 0.1)`: `d` is the root mean square, over those samples, of the key's value less
/// the mean of the others'; `s` the same of each of the others against the rest of them, this key
/// left out, so that it cannot widen what it is measured by. 0 is in full agreement.
pub fn disagreements(
    ratings: &[Judged<'_>],
    least_z: f64,
    least_samples: usize,
) -> Vec<(String, Reason)> {
    let mut samples: BTreeMap<SampleId, Vec<(&str, f64)>> = BTreeMap::new();
    for rating in ratings.iter().filter(|r| r.value.is_finite()) {
        samples.entry(rating.sample).or_default().push((rating.key_id, rating.value));
    }
    let mut keys: BTreeMap<&str, Distances> = BTreeMap::new();
    for raters in samples.values().filter(|raters| raters.len() >= 3) {
        let sum: f64 = raters.iter().map(|(_, value)| value).sum();
        let others = (raters.len() - 1) as f64;
        for (i, (key, own)) in raters.iter().enumerate() {
            let of_key = keys.entry(key).or_default();
            of_key.own.add(own - (sum - own) / others);
            for (j, (_, value)) in raters.iter().enumerate() {
                if i != j {
                    of_key.others.add(value - (sum - own - value) / (others - 1.0));
                }
            }
        }
    }
    let judged = keys.into_iter().filter(|(_, d)| d.own.count >= least_samples);
    judged
        .map(|(key, d)| (key, d.own.root() / d.others.root().max(LEAST_DISTANCE), d.own.count))
        .filter(|(_, z, _)| *z > least_z)
        .map(|(key, z, samples)| (key.to_owned(), Reason::Disagrees { z, samples }))
        .collect()
}

/// A key's distances from the others, and theirs from each other.
#[derive(Default)]
struct Distances {
    own: Squares,
    others: Squares,
}

#[derive(Default)]
struct Squares {
    sum: f64,
    count: usize,
}

impl Squares {
    fn add(&mut self, x: f64) {
        self.sum += x * x;
        self.count += 1;
    }

    fn root(&self) -> f64 {
        if self.count == 0 { 0.0 } else { (self.sum / self.count as f64).sqrt() }
    }
}

/// Keys that posted more than `most` pieces within some `window_ms` milliseconds, with their
/// greatest count. `posts` are keys and times, in any order.
pub fn floods(posts: &[(&str, UnixMillis)], window_ms: u64, most: usize) -> Vec<(String, Reason)> {
    let mut by_time = posts.to_vec();
    by_time.sort_by_key(|(_, time)| *time);
    let mut windows: BTreeMap<&str, (VecDeque<UnixMillis>, usize)> = BTreeMap::new();
    for (key, time) in by_time {
        let (window, greatest) = windows.entry(key).or_default();
        window.push_back(time);
        while window.front().is_some_and(|first| time - first >= window_ms.max(1)) {
            window.pop_front();
        }
        *greatest = (*greatest).max(window.len());
    }
    let flooding = windows.into_iter().filter(|(_, (_, count))| *count > most);
    flooding.map(|(key, (_, count))| (key.to_owned(), Reason::Flood { count, window_ms })).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn flags_lists_and_releases() {
        let mut quarantine = Quarantine::default();
        let by_hand = || Reason::ByHand { note: "spam".to_owned() };
        assert!(quarantine.flag("mallory", by_hand(), 10));
        assert!(!quarantine.flag("mallory", Reason::Flood { count: 9, window_ms: 1 }, 11));
        assert!(!quarantine.counts(Some("mallory")) && quarantine.counts(Some("alice")));
        assert!(quarantine.counts(None));
        let entry = Entry { reason: by_hand(), since: 10 };
        assert_eq!(quarantine.list().collect::<Vec<_>>(), [("mallory", &entry)]);
        assert_eq!(quarantine.release("mallory", 20), Some(entry));
        assert_eq!(quarantine.release("mallory", 20), None);
        assert!(quarantine.counts(Some("mallory")));
        assert!(!quarantine.may_judge("mallory", 20) && quarantine.may_judge("mallory", 21));
        assert!(quarantine.may_judge("alice", 0));
    }

    #[test]
    fn is_saved_as_it_is() {
        let mut quarantine = Quarantine::default();
        quarantine.flag("a", Reason::Disagrees { z: 4.5, samples: 9 }, 1);
        quarantine.flag("b", Reason::ByHand { note: String::new() }, 2);
        quarantine.release("b", 3);
        let text = serde_json::to_string(&quarantine).unwrap();
        insta::assert_snapshot!(text, @r#"{"entries":{"a":{"reason":{"rule":"disagrees","z":4.5,"samples":9},"since":1}},"released":{"b":3}}"#);
        assert_eq!(serde_json::from_str::<Quarantine>(&text).unwrap(), quarantine);
        assert_eq!(serde_json::from_str::<Quarantine>("{}").unwrap(), Quarantine::default());
    }

    /// Ten samples by three honest raters, and one who says the opposite.
    fn inverted(liar: bool) -> Vec<Judged<'static>> {
        let mut all = Vec::new();
        for i in 0..10_u32 {
            let sample = SampleId::new();
            let truth = f64::from(i % 2);
            for key_id in ["alice", "bob", "carol"] {
                all.push(Judged { sample, key_id, value: truth });
            }
            let value = if liar { 1.0 - truth } else { truth };
            all.push(Judged { sample, key_id: "mallory", value });
        }
        all
    }

    #[test]
    fn who_says_the_opposite_stands_out() {
        let found = disagreements(&inverted(true), 3.0, 8);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].0, "mallory");
        let Reason::Disagrees { z, samples } = found[0].1 else { panic!("{found:?}") };
        // A distance of 1 from others who agree: 1 / 0.1.
        assert!((z - 10.0).abs() < 1e-9);
        assert_eq!(samples, 10);
        assert_eq!(disagreements(&inverted(true), 3.0, 11), []);
        assert_eq!(disagreements(&inverted(false), 0.0, 1), []);
        // Of two who differ neither is the outlier.
        let sample = SampleId::new();
        let two = [("a", 0.0), ("b", 1.0)].map(|(key_id, value)| Judged { sample, key_id, value });
        assert_eq!(disagreements(&two, 0.0, 1), []);
    }

    #[test]
    fn floods_are_counted_in_any_window() {
        let posts: Vec<(&str, u64)> =
            (0..5).map(|i| ("fast", 1000 - i)).chain((0..5).map(|i| ("slow", i * 100))).collect();
        let flood = |count| ("fast".to_owned(), Reason::Flood { count, window_ms: 100 });
        assert_eq!(floods(&posts, 100, 4), [flood(5)]);
        assert_eq!(floods(&posts, 100, 5), []);
        assert_eq!(floods(&posts, 101, 1).len(), 2);
    }

    proptest! {
        #[test]
        fn distances_are_finite_and_beyond_the_bound(
            values in prop::collection::vec((0_usize..4, 0_u8..5), 0..60),
        ) {
            let samples: Vec<SampleId> = (0..5).map(|_| SampleId::new()).collect();
            let keys = ["a", "b", "c", "d"];
            let all: Vec<Judged<'_>> = values.iter().enumerate().map(|(i, (k, v))| Judged {
                sample: samples[i % 5], key_id: keys[*k], value: f64::from(*v),
            }).collect();
            for (_, reason) in disagreements(&all, 1.0, 1) {
                let Reason::Disagrees { z, .. } = reason else { panic!("{reason:?}") };
                prop_assert!(z.is_finite() && z > 1.0);
            }
        }
    }
}
