//! Judgements that were made before, the least recently used forgotten first.

use std::collections::{BTreeMap, HashMap};

use sha2::{Digest, Sha256};

use hone_core::types::Message;

use super::JudgeSampling;

/// A question's SHA-256.
pub(super) type Key = [u8; 32];

/// The key of a question: of the model, every message and how its answer is sampled.
pub(super) fn key(model: &str, messages: &[Message], sampling: &JudgeSampling) -> Key {
    let mut hash = Sha256::new();
    // Lengths first, so that no text can run into the next.
    let mut add = |text: &str| {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    };
    add(model);
    for message in messages {
        add(message.role.as_str());
        add(&message.content);
    }
    hash.update(sampling.temperature.to_bits().to_le_bytes());
    hash.update(sampling.max_tokens.to_le_bytes());
    hash.update(sampling.seed.to_le_bytes());
    hash.finalize().into()
}

/// Answers by question.
pub(super) struct Cache {
    capacity: usize,
    clock: u64,
    entries: HashMap<Key, (u64, String)>,
    /// Which question was last looked up when; as many as `entries`.
    by_age: BTreeMap<u64, Key>,
}

impl Cache {
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, clock: 0, entries: HashMap::new(), by_age: BTreeMap::new() }
    }

    pub(super) fn get(&mut self, key: &Key) -> Option<&String> {
        let (used, answer) = self.entries.get_mut(key)?;
        self.by_age.remove(used);
        self.clock += 1;
        *used = self.clock;
        self.by_age.insert(self.clock, *key);
        Some(answer)
    }

    pub(super) fn insert(&mut self, key: Key, answer: String) {
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
    fn forgets_what_was_used_longest_ago() {
        let mut cache = Cache::new(2);
        let key = |n: u8| [n; 32];
        cache.insert(key(1), "one".into());
        cache.insert(key(2), "two".into());
        assert_eq!(cache.get(&key(1)).map(String::as_str), Some("one"));
        cache.insert(key(3), "three".into());
        assert_eq!(cache.get(&key(2)), None);
        assert_eq!(cache.get(&key(1)).map(String::as_str), Some("one"));
        cache.insert(key(1), "other".into());
        assert_eq!(cache.get(&key(1)).map(String::as_str), Some("other"));
        let mut none = Cache::new(0);
        none.insert(key(1), "one".into());
        assert_eq!(none.get(&key(1)), None);
    }

    #[test]
    fn everything_that_is_asked_is_in_the_key() {
        let sampling = JudgeSampling { temperature: 0.0, max_tokens: 8, seed: 0 };
        let message = |role, content: &str| Message { role, content: content.to_owned() };
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
        fn never_holds_more_than_it_may(uses in prop::collection::vec((any::<bool>(), 0_u8..9), 0..60)) {
            let mut cache = Cache::new(4);
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
