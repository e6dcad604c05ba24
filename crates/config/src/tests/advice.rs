//! The advice of training warnings.

use hone_train::monitoring::warnings::WarningKind;

use crate::environment_names;

#[test]
fn advice_names_keys_that_exist_and_is_one_sentence() {
    let mut known: Vec<String> = environment_names().into_iter().map(|(_, key)| key).collect();
    known.extend(["route.reward.kind".to_owned(), "route.reward.weight".to_owned()]);
    for kind in WarningKind::ALL {
        let advice = kind.advice();
        let keys: Vec<&str> = advice.split('`').skip(1).step_by(2).collect();
        assert!(!keys.is_empty(), "{kind}");
        for key in keys {
            assert!(known.iter().any(|k| k == key), "{kind}: {key} is no key");
        }
        assert!(advice.ends_with('.') && !advice.contains(". "), "{advice}");
        assert_eq!(serde_json::to_value(kind).unwrap(), kind.as_str());
    }
}
