//! Python's literals, and texts that no format should trip over.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};

use super::super::convert;
use super::super::python::options;

/// The literal after `x=`; `None` if it is no literal.
fn value(text: &str) -> Option<Value> {
    options(&format!("A = 3\nGRPOConfig(x={text})")).unwrap().take("x")
}

#[test]
fn literals_are_read_as_python_does() {
    for (text, expected) in [
        ("1_000", json!(1000)),
        ("-5", json!(-5)),
        ("+5", json!(5)),
        ("0x1F", json!(31)),
        ("0b101", json!(5)),
        ("5e-6", json!(5e-6)),
        ("-1E+3", json!(-1000.0)),
        (".5", json!(0.5)),
        ("5.", json!(5.0)),
        ("True", json!(true)),
        ("'a' \"b\"", json!("ab")),
        (r"'\x41\u00e4\n\'\q'", json!("A\u{e4}\n'\\q")),
        (r"r'\d+\''", json!(r"\d+\'")),
        ("'''a\n'b''c'''", json!("a\n'b''c")),
        ("f'plain'", json!("plain")),
        ("[1, 'a', [True, ], ]", json!([1, "a", [true]])),
        ("(1,)", json!([1])),
        ("((1))", json!(1)),
        ("()", json!([])),
        ("{'a': 1, \"b\": [2]}", json!({"a": 1, "b": [2]})),
        ("[  # a comment, with a bracket )\n 1]", json!([1])),
        ("A", json!(3)),
        ("[A, \\\n -2]", json!([3, -2])),
    ] {
        assert_eq!(value(text), Some(expected), "{text}");
    }
    for text in [
        "2 * 8",
        "int(3)",
        "f'{A}'",
        "b'a'",
        "1j",
        "-A",
        "[x for x in y]",
        "{1, 2}",
        "{**a}",
        "B",
        "A.b",
        "lambda: 1",
        r"'\N{DASH}'",
        "1 if A else 2",
        "not A",
        "[1][0]",
        "'a' + 'b'",
        "",
    ] {
        assert_eq!(value(text), None, "{text}");
    }
    let deep = format!("{}1{}", "[".repeat(5000), "]".repeat(5000));
    assert_eq!(value(&deep), None);
}

proptest! {
    #[test]
    fn any_bytes_are_converted_or_refused(bytes in vec(any::<u8>(), 0..300)) {
        for extension in ["py", "json", "yaml", ""] {
            let _either = convert(&bytes, extension, "run");
        }
    }

    #[test]
    fn any_tokens_are_converted_or_refused(parts in vec(select(vec![
        "GRPOConfig", "(", ")", "[", "]", "{", "}", ",", "=", ":", "*", "**", "-", "1", "1e", "0x", ".",
        "'", "\"\"\"", "r'", "\\", "\n", "# ", " ", "beta", "learning_rate=", "num_generations=",
        "LoraConfig(", "reward_funcs=", "GRPOTrainer(", "load_dataset(", "None", "True", "\u{e4}", "\u{2028}",
        "max_steps=", "optim=", "lr_scheduler_kwargs=", "'cosine'", "1e308", "18446744073709551615", "&a",
    ]), 0..40)) {
        let text = parts.concat();
        let call = format!("GRPOConfig({text})");
        for extension in ["py", "yaml", "json"] {
            let _either = convert(text.as_bytes(), extension, "run");
            let _either = convert(call.as_bytes(), extension, "run");
        }
    }
}
