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

/// Reads the value of feedback named `name`: a finite number, 1 or 0 for a boolean, `None` for a
/// name of type `comment`.
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
        (FeedbackType::Number, Some(Value::Number(n))) => n.as_f64().filter(|v| v.is_finite()),
        _ => None,
    };
    let inside = |v: &f64| params.range.is_none_or(|[low, high]| (low..=high).contains(v));
    match number.filter(inside) {
        Some(number) => Ok(Some(number)),
        None => wrong("value", value.map(shown), &allowed(params)),
    }
}

fn allowed(params: &FeedbackParams) -> String {
    match (params.kind, params.range) {
        (FeedbackType::Boolean, _) => "true or false".to_owned(),
        (_, Some([low, high])) => format!("a number from {low} to {high}"),
        (_, None) => "a finite number or a boolean".to_owned(),
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
    fn the_defaults_accept_any_finite_number() {
        for (value, number) in [(json!(-1e9), -1e9), (json!(true), 1.0), (json!(false), 0.0)] {
            assert_eq!(read("", value), Ok(Some(number)));
        }
        insta::assert_snapshot!(read("", json!("5")).unwrap_err(), @r#"value is "5": "stars" takes a finite number or a boolean"#);
        insta::assert_snapshot!(read_value("stars", &params(""), None, Some("hm")).unwrap_err(), @r#"value is absent: "stars" takes a finite number or a boolean"#);
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
        insta::assert_snapshot!(read(thumbs, json!(1)).unwrap_err(), @r#"value is 1: "stars" takes true or false"#);
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
