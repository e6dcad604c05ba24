//! Feedback: reading posted values, aggregating several raters of one sample, and capping the share
//! of one API key.
//!
//! All functions are pure; the caller reads and writes the ledger.

mod aggregate;
mod params;
mod share;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use aggregate::{aggregate, aggregator, latest_per_rater};
pub use params::{Aggregate, FeedbackParams, FeedbackType, ShareRule};
pub use share::{Shares, cap_shares};

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

/// Posted feedback that its part does not accept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {value}: {name:?} takes {allowed}")]
pub struct FeedbackError {
    /// `value` or `comment`.
    pub field: &'static str,
    /// The posted value, shortened; `absent` where there is none.
    pub value: String,
    /// The feedback's name.
    pub name: String,
    /// The values that the name accepts.
    pub allowed: String,
}

/// Reads the value of feedback named `name`: a number within the bounds, 1 or 0 for a boolean, which may also
/// be posted as such a number, and `None` for a name of type `comment`.
///
/// # Errors
/// If the value has another type, is out of range or is absent, or a required comment is absent.
pub fn read_value(
    name: &str,
    params: &FeedbackParams,
    value: Option<&Value>,
    comment: Option<&str>,
) -> Result<Option<f64>, FeedbackError> {
    let value = value.filter(|v| !v.is_null());
    let wrong = |field, shown: Option<String>, allowed: &str| {
        let value = shown.unwrap_or_else(|| "absent".to_owned());
        Err(FeedbackError { field, value, name: name.to_owned(), allowed: allowed.to_owned() })
    };
    if params.kind == FeedbackType::Comment {
        if let Some(value) = value {
            return wrong("value", Some(shown(value)), "a comment and no value");
        }
        return match comment.map(str::trim) {
            None => wrong("comment", None, "a comment"),
            Some("") => wrong("comment", Some("\"\"".to_owned()), "a comment that is not empty"),
            Some(_) => Ok(None),
        };
    }
    let number = match (params.kind, value) {
        (_, Some(Value::Bool(yes))) => Some(f64::from(u8::from(*yes))),
        (_, Some(Value::Number(n))) => n.as_f64(),
        _ => None,
    };
    let inside = |v: &f64| match params.kind {
        FeedbackType::Boolean => *v == 0.0 || *v == 1.0,
        _ => params.bounds().is_some_and(|[low, high]| (low..=high).contains(v)),
    };
    match number.filter(inside) {
        Some(number) => Ok(Some(number)),
        None => wrong("value", value.map(shown), &allowed(params)),
    }
}

fn allowed(params: &FeedbackParams) -> String {
    match (params.kind, params.bounds()) {
        (FeedbackType::Number, Some([low, high])) => format!("a number from {low} to {high}"),
        _ => "true or false, or 1 or 0".to_owned(),
    }
}

fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(40) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn params(toml: &str) -> FeedbackParams {
        toml::from_str(toml).unwrap()
    }

    fn read(toml: &str, value: Value) -> Result<Option<f64>, String> {
        read_value("stars", &params(toml), Some(&value), None).map_err(|e| e.to_string())
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
        insta::assert_snapshot!(read_value("stars", &params(""), None, Some("hm")).unwrap_err(), @r#"value is absent: "stars" takes a number from -1 to 1"#);
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
            read_value("why", &comments, value, comment).map_err(|e| e.to_string())
        };
        let one = json!(1);
        assert_eq!(read(None, Some("too long")), Ok(None));
        assert_eq!(read(Some(&Value::Null), Some("too long")), Ok(None));
        insta::assert_snapshot!(read(Some(&one), Some("x")).unwrap_err(), @r#"value is 1: "why" takes a comment and no value"#);
        insta::assert_snapshot!(read(None, None).unwrap_err(), @r#"comment is absent: "why" takes a comment"#);
        insta::assert_snapshot!(read(None, Some(" ")).unwrap_err(), @r#"comment is "": "why" takes a comment that is not empty"#);
    }
}
