//! The tests of one completion, and their result.

use std::error::Error;

use serde::Deserialize;
use serde_json::Value;

/// A pair of `metadata[cases]`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct IoCase {
    pub input: String,
    pub output: String,
}

/// A completion's code and its tests.
pub(super) struct TestSuite {
    /// The code, without fences.
    pub code: String,
    /// Assertions in the code's own language.
    pub tests: Option<String>,
    /// The function that `check(candidate)` of the tests gets.
    pub entry: Option<String>,
    /// Inputs with their expected outputs.
    pub cases: Vec<IoCase>,
    /// Calls with their expected values.
    pub calls: Vec<FunctionCall>,
}

/// The result of a suite.
#[derive(Clone, Copy, Default)]
pub(super) struct TestCounts {
    /// Tests that passed.
    pub passed: usize,
    /// All tests.
    pub total: usize,
}

/// Why a suite has no result.
pub(super) type SuiteError = Box<dyn Error + Send + Sync>;

/// The source of tests that are a text, or a JSON list of texts.
pub(super) fn tests(text: &str) -> String {
    serde_json::from_str::<Vec<String>>(text).map_or_else(|_| text.to_owned(), |t| t.join("\n"))
}

/// Compares outputs line by line, without white space at line ends and empty lines at the end.
pub(super) fn same_output(actual: &str, expected: &str) -> bool {
    actual.trim_end().lines().map(str::trim_end).eq(expected.trim_end().lines().map(str::trim_end))
}

/// The only argument of a call, and the value that the function must return, which never enters the sandbox.
pub(super) type FunctionCall = (Value, Value);

/// Whether two JSON values are equal in Python: numbers and booleans by value, objects without
/// regard to order. Integers beyond 64 bits are compared as 64-bit floats.
pub(super) fn same_value(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same_value(a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            let same = |(key, value): (&String, &Value)| {
                b.get(key).is_some_and(|other| same_value(value, other))
            };
            a.len() == b.len() && a.iter().all(same)
        }
        (Value::Number(_) | Value::Bool(_), Value::Number(_) | Value::Bool(_)) => {
            match (integer(a), integer(b)) {
                (Some(a), Some(b)) => a == b,
                _ => number(a).is_some() && number(a) == number(b),
            }
        }
        _ => a == b,
    }
}

fn integer(value: &Value) -> Option<i128> {
    let unsigned = value.as_u64().map(i128::from);
    unsigned.or(value.as_i64().map(i128::from)).or(value.as_bool().map(i128::from))
}

fn number(value: &Value) -> Option<f64> {
    value.as_f64().or(value.as_bool().map(|holds| f64::from(u8::from(holds))))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_are_equal_as_in_python() {
        for (a, b, equal) in [
            (json!(1), json!(1.0), true),
            (json!(1), json!(true), true),
            (json!(0.0), json!(false), true),
            (json!(-0.0), json!(0), true),
            (json!(1), json!("1"), false),
            (json!(0), json!(null), false),
            (json!(""), json!(null), false),
            (json!([]), json!({}), false),
            (json!(0.1 + 0.2), json!(0.3), false),
            (json!([1, [2, "a"]]), json!([1.0, [2, "a"]]), true),
            (json!([1, 2]), json!([2, 1]), false),
            (json!([1]), json!([1, 1]), false),
            (json!({"a": 1, "b": [true]}), json!({"b": [1], "a": 1}), true),
            (json!({"a": 1}), json!({"a": 1, "b": null}), false),
            (json!({"a": null}), json!({"b": null}), false),
            (json!(u64::MAX), json!(u64::MAX - 1), false),
            (json!(u64::MAX), json!(-1), false),
            (json!(i64::MIN), json!(i64::MIN), true),
        ] {
            assert_eq!(same_value(&a, &b), equal, "{a} {b}");
            assert_eq!(same_value(&b, &a), equal, "{b} {a}");
        }
    }
}
