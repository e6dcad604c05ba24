//! Compares the declaration of a request with its reader.

use serde_json::{Map, Value, json};

use super::{FieldTable, fields_of, object_schema};
use crate::error::ApiError;

/// Values of every type, some of which most fields accept.
fn values() -> Vec<Value> {
    let long = "x".repeat(5000);
    let call = json!({"name": "f"});
    vec![
        json!(true),
        json!(false),
        json!(0),
        json!(1),
        json!(-1),
        json!(2),
        json!(9),
        json!(101),
        json!(1.5),
        json!(0.5),
        json!(1e30),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(""),
        json!("a"),
        json!("auto"),
        json!("required"),
        json!("high"),
        json!(long),
        json!([]),
        json!(["a"]),
        json!([""]),
        json!(["text"]),
        json!(["a", 1]),
        json!(["a", "b", "c", "d", "e"]),
        json!([1, 2]),
        json!([[1], [2]]),
        json!([-1]),
        json!([1.5]),
        json!([null]),
        json!([{}]),
        json!([{"role": "user", "content": "a"}]),
        json!([{"role": "user", "content": [{"type": "text", "text": "a"}], "other": 1}]),
        json!([{"role": "user", "content": [{"type": "image_url"}]}]),
        json!([{"role": "user", "content": "a", "tool_calls": [call]}]),
        json!([{"role": "assistant", "tool_calls": [{"id": "i", "function": {"name": "f", "arguments": ""}}]}]),
        json!([{"role": "assistant", "tool_calls": [], "content": null}]),
        json!([{"role": "assistant", "content": "", "function_call": call}]),
        json!([{"role": "tool", "content": "a"}]),
        json!([{"role": "tool", "content": "a", "tool_call_id": "i"}]),
        json!([{"role": "robot", "content": "a"}]),
        json!([{"type": "function", "function": call}]),
        json!([{"type": "function", "function": {"name": "f", "parameters": {}, "strict": true}}]),
        json!([{"type": "function", "function": {"name": "a b"}}]),
        json!([{"type": "function", "function": {"name": "f", "other": 1}}]),
        json!([{"type": "custom", "custom": call}]),
        json!({}),
        json!({"a": "b"}),
        json!({"a": 1}),
        json!({"1": 100}),
        json!({"1": 101}),
        json!({"messages": 1}),
        json!({"include_usage": true}),
        json!({"include_usage": 1}),
        json!({"type": "function", "function": call}),
        json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}),
        json!({"type": "text"}),
        json!({"type": "json_object"}),
        json!({"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}),
        json!({"type": "json_schema", "json_schema": {"schema": {}}}),
        json!({"json": {}}),
        json!({"regex": "a"}),
        json!({"choice": ["a"], "disable_fallback": false}),
        json!({"choice": "a"}),
        json!({"whitespace_pattern": " "}),
    ]
}

/// Asserts for each field and a number of values that the reader accepts the body exactly if its schema does.
/// `base` is a valid body. Left out are the fields `except`, whose values the schema cannot describe.
pub fn assert_agreement(
    table: FieldTable,
    base: &Value,
    except: &[&str],
    read: impl Fn(&Map<String, Value>) -> Result<(), ApiError>,
) {
    let validator = jsonschema::validator_for(&object_schema(table)).unwrap();
    let agree = |body: &Value| {
        let result = read(body.as_object().unwrap());
        let reason = result.as_ref().err().map(ApiError::to_json);
        assert_eq!(validator.is_valid(body), result.is_ok(), "{body}: {reason:?}");
        result.is_ok()
    };
    assert!(agree(base));
    let mut accepted = 0;
    for field in fields_of(table).filter(|field| !except.contains(&field.name)) {
        for value in values().into_iter().chain([Value::Null]) {
            let mut body = base.clone();
            body[field.name] = value;
            accepted += usize::from(agree(&body));
        }
        let mut body = base.clone();
        body.as_object_mut().unwrap().remove(field.name);
        agree(&body);
    }
    let mut body = base.clone();
    body["temprature"] = json!(1);
    assert!(!agree(&body));
    assert!(accepted > 2 * fields_of(table).count(), "{accepted} accepted");
}
