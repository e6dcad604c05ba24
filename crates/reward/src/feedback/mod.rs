//! Feedback: reading posted values, aggregating several raters of one sample, and capping the share
//! of one API key.
//!
//! All functions are pure; the caller reads and writes the ledger.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use hone_core::text::shortened;

use crate::kinds::define::define_kind;
use crate::reward_fn::indicator;

pub use hone_core::types::{Aggregate, aggregate, latest_per_rater};

/// Why a key's feedback is in quarantine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "rule", rename_all = "snake_case")]
pub enum QuarantineReason {
    /// An operator decided it.
    #[serde(rename = "by_hand")]
    Operator {
        /// The operator's reason.
        note: String,
    },
}

/// Reads the value of feedback named `name`: a number within the bounds, 1 or 0 for a boolean, which may also
/// be posted as such a number, and `None` for a name of type `comment`.
///
/// # Errors
/// The field, and a sentence with it and its value: the value has another type, is out of range or is absent, or a
/// required comment is absent.
pub fn read_value(
    name: &str,
    params: &FeedbackParams,
    value: Option<&Value>,
    comment: Option<&str>,
) -> Result<Option<f64>, (&'static str, String)> {
    let value = value.filter(|v| !v.is_null());
    let wrong = |field, shown: Option<String>, allowed: &str| {
        let value = shown.unwrap_or_else(|| "absent".to_owned());
        Err((field, format!("{field} is {value}: {name:?} takes {allowed}")))
    };
    if params.r#type == FeedbackType::Comment {
        if let Some(value) = value {
            return wrong("value", Some(shown(value)), "a comment and no value");
        }
        return match comment.map(str::trim) {
            None => wrong("comment", None, "a comment"),
            Some("") => wrong("comment", Some("\"\"".to_owned()), "a comment that is not empty"),
            Some(_) => Ok(None),
        };
    }
    let number = match (params.r#type, value) {
        (_, Some(Value::Bool(yes))) => Some(indicator(*yes)),
        (_, Some(Value::Number(n))) => n.as_f64(),
        _ => None,
    };
    let inside = |v: &f64| match params.r#type {
        FeedbackType::Boolean => *v == 0.0 || *v == 1.0,
        _ => params.bounds().is_some_and(|[low, high]| (low..=high).contains(v)),
    };
    match number.filter(inside) {
        Some(number) => Ok(Some(number)),
        None => wrong("value", value.map(shown), &allowed(params)),
    }
}

fn allowed(params: &FeedbackParams) -> String {
    match (params.r#type, params.bounds()) {
        (FeedbackType::Number, Some([low, high])) => format!("a number from {low} to {high}"),
        _ => "true or false, or 1 or 0".to_owned(),
    }
}

fn shown(value: &Value) -> String {
    shortened(&value.to_string(), 40).into_owned()
}

/// The weights of a batch of feedback.
#[derive(Clone, Debug, PartialEq)]
pub struct Shares {
    /// Weight of each item, above 0 and at most 1, in the batch's order.
    pub weights: Vec<f64>,
    /// The keys that were cut; `None` is the feedback without a key.
    pub capped: Vec<Option<String>>,
}

type Counts<'a> = BTreeMap<Option<&'a str>, usize>;
type Masses<'a> = BTreeMap<Option<&'a str>, f64>;

/// Relative rounding error allowed in a quotient of whole numbers.
const ROUNDING: f64 = 1e-9;

/// Weights for a batch of feedback such that no key's weights sum to more than `max_share` of the
/// total. `keys` has the key of each item; items without a key count as one key.
///
/// The cap is at least 1 / (number of keys), as of three keys one must have a third. Every capped key gets the
/// same mass `x = s U / (1 - m s)`, for `m` capped keys and the mass `U` of the others. Deterministic.
pub fn cap_shares(keys: &[Option<&str>], max_share: f64) -> Shares {
    let mut counts = Counts::new();
    for key in keys {
        *counts.entry(*key).or_default() += 1;
    }
    let share = max_share.max(1.0 / counts.len().max(1) as f64);
    let masses = capped_masses(&counts, share);
    let weights = keys.iter().map(|key| masses[key] / counts[key] as f64).collect();
    let cut = counts.iter().filter(|(key, count)| masses[*key] < **count as f64);
    Shares { weights, capped: cut.map(|(key, _)| key.map(str::to_owned)).collect() }
}

/// The mass of each key, with as few as possible of the heaviest keys capped: `m` of them, so that
/// the next is below the cap.
fn capped_masses<'a>(counts: &Counts<'a>, share: f64) -> Masses<'a> {
    let mut heaviest: Vec<usize> = counts.values().copied().collect();
    heaviest.sort_unstable_by(|a, b| b.cmp(a));
    let mut others: usize = heaviest.iter().sum();
    let mut cap = f64::INFINITY;
    for (m, &next) in heaviest.iter().enumerate() {
        // Ends at the latest when m + 1 shares are the whole: then the cap is `others` or more.
        cap = share * others as f64 / (1.0 - m as f64 * share);
        if next as f64 <= cap * (1.0 + ROUNDING) {
            break;
        }
        others -= next;
    }
    counts.iter().map(|(key, count)| (*key, (*count as f64).min(cap))).collect()
}

/// The type of a feedback part's values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FeedbackType {
    /// A number, or a boolean as 1 or 0.
    #[default]
    Number,
    /// `true` or `false` (1 or 0).
    Boolean,
    /// A comment without a value, which trains nothing.
    Comment,
}

define_kind! {
    /// The defaults accept -1 to 1; the last value counts.
    pub struct FeedbackParams {
        /// The type of the values.
        pub r#type: FeedbackType = FeedbackType::Number,
        /// Least and greatest number, both allowed; absent: -1 and 1.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub range: Option<[f64; 2]> = None,
        /// How the values of several raters of one sample become one.
        pub aggregate: Aggregate = Aggregate::Last,
        /// Largest share of a batch's feedback that one key may contribute, by scaling all of it down; 1 is no cap.
        pub max_key_share: f64 = 1.0 => share(),
    }
    kind: "feedback",
    range: "any finite number; true is 1, false is 0",
    typical_weight: "1.0",
    bounds: [f64::NEG_INFINITY, f64::INFINITY],
    formula: "the value that clients post to /v1/feedback under the part's name",
}

/// The range of numbers without a configured one. Every part has a range, because a single value far outside
/// of the others would make them equal in the running baseline.
const DEFAULT_RANGE: [f64; 2] = [-1.0, 1.0];

impl FeedbackParams {
    /// The least and the greatest value that clients may post; `None` for comments, which have no value.
    pub fn bounds(&self) -> Option<[f64; 2]> {
        match self.r#type {
            FeedbackType::Boolean => Some([0.0, 1.0]),
            FeedbackType::Number => Some(self.range.unwrap_or(DEFAULT_RANGE)),
            FeedbackType::Comment => None,
        }
    }

    /// A value scaled so that 0 is the least and 1 the greatest that clients may post; `None` for comments.
    pub fn scaled(&self, value: f64) -> Option<f64> {
        let [low, high] = self.bounds()?;
        Some(((value - low) / (high - low)).clamp(0.0, 1.0))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::kinds::Kind;

    fn params(toml: &str) -> FeedbackParams {
        toml::from_str(toml).unwrap()
    }

    fn read(toml: &str, value: Value) -> Result<Option<f64>, String> {
        read_value("stars", &params(toml), Some(&value), None).map_err(|(_, message)| message)
    }

    #[test]
    fn the_defaults_accept_thumbs_of_every_kind() {
        for (value, number) in [
            (json!(-1), -1.0),
            (json!(0.25), 0.25),
            (json!(1), 1.0),
            (json!(true), 1.0),
            (json!(false), 0.0),
        ] {
            assert_eq!(read("", value), Ok(Some(number)));
        }
        for value in [json!(1e6), json!(1e308), json!(-1.000_001)] {
            let refused = read("", value).unwrap_err();
            assert!(refused.ends_with("takes a number from -1 to 1"), "{refused}");
        }
        insta::assert_snapshot!(read("", json!("5")).unwrap_err(), @r#"value is "5": "stars" takes a number from -1 to 1"#);
        insta::assert_snapshot!(read_value("stars", &params(""), None, Some("hm")).unwrap_err().1, @r#"value is absent: "stars" takes a number from -1 to 1"#);
        assert!(read("", Value::Null).unwrap_err().contains("absent"));
    }

    #[test]
    fn types_and_ranges_are_checked() {
        let stars = "range = [1, 5]";
        assert_eq!(read(stars, json!(5)), Ok(Some(5.0)));
        assert_eq!(read(stars, json!(true)), Ok(Some(1.0)));
        insta::assert_snapshot!(read(stars, json!(5.5)).unwrap_err(), @r#"value is 5.5: "stars" takes a number from 1 to 5"#);
        assert!(read(stars, json!(false)).is_err());
        let thumbs = "type = \"boolean\"";
        assert_eq!(read(thumbs, json!(true)), Ok(Some(1.0)));
        assert_eq!(
            [json!(1), json!(0), json!(1.0)].map(|v| read(thumbs, v)),
            [1.0, 0.0, 1.0].map(|v| Ok(Some(v)))
        );
        insta::assert_snapshot!(read(thumbs, json!(0.5)).unwrap_err(), @r#"value is 0.5: "stars" takes true or false, or 1 or 0"#);
        let long = read(thumbs, json!("é".repeat(99))).unwrap_err();
        assert!(long.chars().count() < 100, "{long}");
    }

    #[test]
    fn a_comment_has_no_value() {
        let comments = params("type = \"comment\"");
        let read = |value: Option<&Value>, comment| {
            read_value("why", &comments, value, comment).map_err(|(_, message)| message)
        };
        let one = json!(1);
        assert_eq!(read(None, Some("too long")), Ok(None));
        assert_eq!(read(Some(&Value::Null), Some("too long")), Ok(None));
        insta::assert_snapshot!(read(Some(&one), Some("x")).unwrap_err(), @r#"value is 1: "why" takes a comment and no value"#);
        insta::assert_snapshot!(read(None, None).unwrap_err(), @r#"comment is absent: "why" takes a comment"#);
        insta::assert_snapshot!(read(None, Some(" ")).unwrap_err(), @r#"comment is "": "why" takes a comment that is not empty"#);
    }

    fn batch(text: &str) -> Vec<Option<&str>> {
        text.split_terminator("").skip(1).map(|k| (k != "-").then_some(k)).collect()
    }

    #[test]
    fn a_heavy_key_is_cut_to_its_share() {
        // x = 0.5 (x + 2)
        let shares = cap_shares(&batch("aaaabc"), 0.5);
        assert_eq!(shares.weights, [0.5, 0.5, 0.5, 0.5, 1.0, 1.0]);
        assert_eq!(shares.capped, [Some("a".to_owned())]);
        // Items without a key are one key: x = 0.5 (x + 2).
        let shares = cap_shares(&batch("----ab"), 0.5);
        let weights = vec![0.5, 0.5, 0.5, 0.5, 1.0, 1.0];
        assert_eq!((shares.weights, shares.capped), (weights, vec![None]));
        // An impossible cap makes all keys equal.
        let shares = cap_shares(&batch("aaaabb"), 0.1);
        assert_eq!(shares.weights, [0.5, 0.5, 0.5, 0.5, 1.0, 1.0]);
        let shares = cap_shares(&batch("aaab"), 1.0);
        assert_eq!(shares, Shares { weights: vec![1.0; 4], capped: vec![] });
        // A single key has the whole batch.
        assert_eq!(cap_shares(&batch("aa"), 0.1).weights, [1.0, 1.0]);
        assert!(cap_shares(&[], 0.1).weights.is_empty());
        assert_eq!(cap_shares(&batch("aabbcc"), 1.0 / 3.0).capped, []);
    }

    proptest! {
        #[test]
        fn no_key_exceeds_the_cap(
            batch in prop::collection::vec(0_u8..6, 1..60), max_share in 0.01_f64..1.0,
        ) {
            let names: Vec<String> = batch.iter().map(u8::to_string).collect();
            let keys: Vec<Option<&str>> = names.iter().map(|n| Some(n.as_str())).collect();
            let shares = cap_shares(&keys, max_share);
            let mut masses: BTreeMap<Option<&str>, f64> = BTreeMap::new();
            for (key, weight) in keys.iter().zip(&shares.weights) {
                prop_assert!((0.0..=1.0).contains(weight));
                *masses.entry(*key).or_default() += weight;
            }
            let total: f64 = masses.values().sum();
            let share = max_share.max(1.0 / masses.len() as f64);
            let fits = |mass: &f64| *mass > 0.0 && *mass <= total * share + 1e-6;
            prop_assert!(masses.values().all(fits), "{masses:?} of {total}");
            prop_assert_eq!(&cap_shares(&keys, max_share), &shares);
        }
    }

    fn refusal(text: &str) -> String {
        params(text).check().unwrap_err().sentence()
    }

    #[test]
    fn values_are_scaled_to_their_named_range() {
        let stars = params("range = [1, 5]");
        assert_eq!([1.0, 4.0, 5.0].map(|v| stars.scaled(v)), [0.0, 0.75, 1.0].map(Some));
        assert_eq!(params("type = \"boolean\"").scaled(1.0), Some(1.0));
        assert_eq!([-1.0, 0.0, 1.0].map(|v| params("").scaled(v)), [0.0, 0.5, 1.0].map(Some));
        assert_eq!(params("type = \"comment\"").scaled(1.0), None);
        insta::assert_snapshot!(refusal("range = [5, 1]"), @"range is [5, 1]: it must be two finite numbers, the lesser first");
        insta::assert_snapshot!(refusal("type = \"boolean\"\nrange = [0, 1]"), @r#"range is [0, 1]: it must be absent unless type = "number""#);
        insta::assert_snapshot!(refusal("max_key_share = 0"), @"max_key_share is 0: it must be greater than 0 and at most 1");
    }
}
