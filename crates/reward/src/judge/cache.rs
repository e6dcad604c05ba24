//! A cache of judges' answers that evicts the least recently used.

use std::collections::{BTreeMap, HashMap};

use hone_core::digest::Digest;
use hone_core::types::Message;

use super::model::JudgeSampling;

/// The SHA-256 of a question.
pub(super) type PromptKey = [u8; 32];

/// The key of a question: a digest of the model, every message and the sampling parameters.
pub(super) fn key(model: &str, messages: &[Message], sampling: &JudgeSampling) -> PromptKey {
    let messages = messages.iter().flat_map(|m| [m.role.as_str(), &m.content]);
    messages
        .fold(Digest::new().field(model), Digest::field)
        .bytes(sampling.temperature.to_bits().to_le_bytes())
        .bytes(sampling.max_tokens.to_le_bytes())
        .bytes(sampling.seed.to_le_bytes())
        .finish()
}

/// Answers by question.
pub(super) struct JudgementCache {
    capacity: usize,
    /// Counts uses.
    clock: u64,
    /// Time of the last use, and the answer.
    entries: HashMap<PromptKey, (u64, String)>,
    /// Questions by the time of their last use; one for each entry.
    by_age: BTreeMap<u64, PromptKey>,
}

impl JudgementCache {
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, clock: 0, entries: HashMap::new(), by_age: BTreeMap::new() }
    }

    pub(super) fn get(&mut self, key: &PromptKey) -> Option<&String> {
        let (used, answer) = self.entries.get_mut(key)?;
        self.by_age.remove(used);
        self.clock += 1;
        *used = self.clock;
        self.by_age.insert(self.clock, *key);
        Some(answer)
    }

    pub(super) fn insert(&mut self, key: PromptKey, answer: String) {
        if self.capacity == 0 {
            return;
        }
        self.clock += 1;
        if let Some((used, _)) = self.entries.insert(key, (self.clock, answer)) {
            self.by_age.remove(&used);
        }
        self.by_age.insert(self.clock, key);
        while self.entries.len() > self.capacity {
            let Some((_, oldest)) = self.by_age.pop_first() else { return };
            self.entries.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use hone_core::types::Role;

    use super::*;

    #[test]
    fn evicts_the_least_recently_used() {
        let mut cache = JudgementCache::new(2);
        let key = |n: u8| [n; 32];
        cache.insert(key(1), "one".into());
        cache.insert(key(2), "two".into());
        assert_eq!(cache.get(&key(1)).map(String::as_str), Some("one"));
        cache.insert(key(3), "three".into());
        assert_eq!(cache.get(&key(2)), None);
        assert_eq!(cache.get(&key(1)).map(String::as_str), Some("one"));
        cache.insert(key(1), "other".into());
        assert_eq!(cache.get(&key(1)).map(String::as_str), Some("other"));
        let mut none = JudgementCache::new(0);
        none.insert(key(1), "one".into());
        assert_eq!(none.get(&key(1)), None);
    }

    #[test]
    fn the_key_depends_on_every_input() {
        let sampling = JudgeSampling { temperature: 0.0, max_tokens: 8, seed: 0 };
        let message = |role, content: &str| Message::new(role, content);
        let base = key("m", &[message(Role::User, "ab")], &sampling);
        let others = [
            key("n", &[message(Role::User, "ab")], &sampling),
            key("m", &[message(Role::System, "ab")], &sampling),
            key("m", &[message(Role::User, "a"), message(Role::User, "b")], &sampling),
            key("m", &[message(Role::User, "ab")], &JudgeSampling { seed: 1, ..sampling }),
            key("m", &[message(Role::User, "ab")], &JudgeSampling { max_tokens: 9, ..sampling }),
            key("m", &[message(Role::User, "ab")], &JudgeSampling { temperature: 1.0, ..sampling }),
        ];
        assert!(others.iter().all(|other| *other != base));
        assert_eq!(key("m", &[message(Role::User, "ab")], &sampling), base);
    }

    proptest! {
        #[test]
        fn never_exceeds_its_capacity(uses in prop::collection::vec((any::<bool>(), 0_u8..9), 0..60)) {
            let mut cache = JudgementCache::new(4);
            for (insert, n) in uses {
                if insert {
                    cache.insert([n; 32], n.to_string());
                } else if let Some(answer) = cache.get(&[n; 32]) {
                    prop_assert_eq!(answer, &n.to_string());
                }
                prop_assert!(cache.entries.len() <= 4);
                prop_assert_eq!(cache.entries.len(), cache.by_age.len());
            }
        }
    }
}
