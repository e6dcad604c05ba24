//! Who asks and who rates: an API key, and the end user that its client names.
//!
//! A client is identified by its API key's id, such as `2bd806c97f0e`. If the client names its end user,
//! a dot and a hash follow, as in `2bd806c97f0e.9f86d081884c`. Without a key only these remain. Records
//! have this text where they identify a client, so that the end users of one key count as raters of their
//! own, and the ledger never has an end user's name.

use std::collections::BTreeSet;

use crate::digest::{Digest, hex};

/// Precedes the hash of the end user.
const SEPARATOR: char = '.';

/// Identifies a client: the id of its API key, and of the end user that it names.
pub fn rater_id(key_id: Option<&str>, end_user: Option<&str>) -> Option<String> {
    let Some(user) = end_user else { return key_id.map(str::to_owned) };
    let key = key_id.unwrap_or_default();
    // With the key, so that equal names of two clients have different hashes.
    let hash = hex(&Digest::new().field(key).field(user).prefix::<6>());
    Some(format!("{key}{SEPARATOR}{hash}"))
}

/// The id of the API key in [`rater_id`]'s text; `None` without a key.
pub fn key_of_rater(rater: &str) -> Option<&str> {
    let key = rater.split(SEPARATOR).next().unwrap_or_default();
    (!key.is_empty()).then_some(key)
}

/// Whether `id`, of an API key or of one of its end users, concerns a rater.
pub fn concerns_rater(id: &str, rater: &str) -> bool {
    id == rater || key_of_rater(rater) == Some(id)
}

/// Whether one of `ids` concerns a rater.
pub fn include_rater(ids: &BTreeSet<String>, rater: &str) -> bool {
    ids.contains(rater) || key_of_rater(rater).is_some_and(|key| ids.contains(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_users_of_a_key_are_raters_of_that_key() {
        let alice = rater_id(Some("2bd806c97f0e"), Some("alice")).unwrap();
        let bob = rater_id(Some("2bd806c97f0e"), Some("bob")).unwrap();
        assert!(alice != bob && alice.len() == 25 && !alice.contains("alice"), "{alice}");
        assert_eq!(key_of_rater(&alice), Some("2bd806c97f0e"));
        assert_eq!(rater_id(Some("2bd806c97f0e"), None).as_deref(), Some("2bd806c97f0e"));
        assert_ne!(rater_id(Some("72ee9d4355cc"), Some("alice")).unwrap()[12..], alice[12..]);
        // Without a key, an end user is a rater, and of no key.
        assert_eq!(rater_id(None, None), None);
        let open = rater_id(None, Some("alice")).unwrap();
        assert_eq!((open.len(), key_of_rater(&open)), (13, None));
    }

    #[test]
    fn an_id_concerns_a_key_with_its_end_users_or_one_of_them() {
        let alice = rater_id(Some("2bd806c97f0e"), Some("alice")).unwrap();
        let bob = rater_id(Some("2bd806c97f0e"), Some("bob")).unwrap();
        assert!(concerns_rater("2bd806c97f0e", &alice) && concerns_rater(&alice, &alice));
        assert!(!concerns_rater(&alice, &bob) && !concerns_rater(&alice, "2bd806c97f0e"));
        assert!(!concerns_rater("2bd806c97f0", &alice));
        let ids = |id: &str| BTreeSet::from([id.to_owned()]);
        assert!(include_rater(&ids("2bd806c97f0e"), &alice));
        assert!(include_rater(&ids(&alice), &alice) && !include_rater(&ids(&alice), &bob));
        assert!(!include_rater(&BTreeSet::new(), &alice));
    }
}
