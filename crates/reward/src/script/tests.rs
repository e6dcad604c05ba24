use std::sync::Arc;

use proptest::prelude::*;

use hone_core::types::{Message, Role};

use super::*;
use crate::kinds::tests::samples::with_answer;

fn input(text: &str) -> ScoreInput {
    let message = |role, content: &str| Message::new(role, content);
    let messages = vec![
        message(Role::System, "be brief"),
        message(Role::User, "6 x 7?"),
        message(Role::Assistant, "hm"),
    ];
    let messages = Arc::new(messages);
    ScoreInput { messages, ids: vec![1, 2, 3], ..with_answer(text, Some("42")) }
}

fn script(source: &str, max_operations: u64) -> Result<ScriptReward, String> {
    ScriptReward::new(&ScriptParams { source: source.into(), max_operations })
}

fn value(source: &str, text: &str) -> Result<Option<f64>, String> {
    evaluate(&script(source, 10_000)?, &input(text))
}

fn evaluate(script: &ScriptReward, input: &ScoreInput) -> Result<Option<f64>, String> {
    script.evaluate(input, &vec![input.text.clone().into()], 0)
}

#[test]
fn numbers_booleans_and_unit_are_rewards() {
    for (source, wanted) in [
        ("2", Some(2.0)),
        ("-0.5", Some(-0.5)),
        ("true", Some(1.0)),
        ("false", Some(0.0)),
        ("()", None),
        ("", None),
        ("tokens", Some(3.0)),
        ("prompt == \"6 x 7?\"", Some(1.0)),
        ("messages.len() + messages[0].content.len()", Some(11.0)),
        ("messages[2].role == \"assistant\"", Some(1.0)),
        ("to_number(extract_tag(text, \"answer\")) == to_number(metadata.answer)", Some(1.0)),
        ("metadata.missing", None),
        ("if metadata.missing == () { 0.25 } else { 1 }", Some(0.25)),
        ("fn half(x) { x / 2.0 } half(3.0)", Some(1.5)),
    ] {
        assert_eq!(value(source, "<answer> 42 </answer>").unwrap(), wanted, "{source}");
    }
}

#[test]
fn helpers_match_their_documentation() {
    for (source, wanted) in [
        ("contains(text, \"b\")", Some(1.0)),
        ("contains(text, \"x\")", Some(0.0)),
        ("count(text, \"aa\")", Some(2.0)),
        ("text.count(\"\")", Some(0.0)),
        ("extract_tag(text, \"t\")", None),
        ("to_number(\"1,234.5\")", Some(1234.5)),
        ("to_number(\"one\")", None),
        ("to_number(extract_tag(text, \"t\"))", None),
        ("matches(text, \"^a+b\")", Some(1.0)),
        ("text.matches(\"^b\")", Some(0.0)),
        ("extract_tag(\"<t>1</t> <t>2</t> <t>\", \"t\") == \"2\"", Some(1.0)),
    ] {
        assert_eq!(value(source, "aaaaab").unwrap(), wanted, "{source}");
    }
}

#[test]
fn scripts_are_compiled_at_construction() {
    let error = script("let x = 1;\nx +* 2", 1_000).err().unwrap();
    insta::assert_snapshot!(error, @"source does not compile, line 2, column 4: Unexpected '*'");
    let error = script("eval(\"1\")", 1_000).err().unwrap();
    assert!(error.starts_with("source does not compile, line 1, column 1: "), "{error}");
}

#[test]
fn limits_stop_a_script() {
    let failed = |value: Result<Option<f64>, String>| {
        value.is_err_and(|error| error.starts_with("the script failed: "))
    };
    for source in [
        "loop {}",
        "let n = 0; while true { n += 1; }",
        "fn f(n) { f(n + 1) } f(0)",
        "let s = \"ab\"; loop { s += s; }",
        "let a = [0]; loop { a += a; }",
        "let a = []; a.pad(1000000000, 0); 1",
        "let b = blob(1000000000, 0); 1",
        "let m = #{}; let n = 0; loop { m[n.to_string()] = n; n += 1; }",
        "let n = 0; loop { matches(text, n.to_string()); n += 1; }",
        "matches(text, \"(a{1000}){1000}\")",
        "text[1 << 40]",
        "throw \"up\"",
        "text = \"other\"; 1",
    ] {
        assert!(failed(value(source, "aaaa")), "{source}");
    }
    // The text that helpers scan is limited although it takes few operations.
    let many = script("let n = 0; loop { n += count(text, \"zz\"); }", 100_000_000).unwrap();
    assert!(failed(evaluate(&many, &input(&"z ".repeat(50_000)))));
    // Each evaluation has its own budget.
    let one = script("count(text, \"zz\")", 1_000).unwrap();
    assert_eq!(evaluate(&one, &input("zz")).unwrap(), Some(1.0));
}

#[test]
fn other_values_are_missing() {
    for source in ["\"text\"", "[1]", "1.0 / 0.0", "'c'", "messages"] {
        let error = value(source, "").unwrap_err();
        assert!(error.starts_with("the script's value is the "), "{source}: {error}");
    }
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let reward = script("if tokens > 0 { text } else { 1 }", 1_000).unwrap();
    let mut empty = input("");
    empty.ids.clear();
    assert_eq!(runtime.block_on(reward.score(&[input("a"), empty])), [None, Some(1.0)]);
}

#[test]
fn scripts_see_their_group() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let values = |source: &str, texts: &[&str]| {
        let samples: Vec<ScoreInput> = texts.iter().map(|text| input(text)).collect();
        runtime.block_on(script(source, 10_000).unwrap().score(&samples))
    };
    // The share of the group's other completions that differ.
    let source = "
        if group.len() < 2 { return (); }
        let others = group.filter(|other| other != text).len();
        if group[index] != text { throw \"the index is wrong\"; }
        others.to_float() / (group.len() - 1)";
    assert_eq!(values(source, &["a", "b", "a"]), [Some(0.5), Some(1.0), Some(0.5)]);
    assert_eq!(values(source, &["a"]), [None]);
    // Long completions fit, and a script cannot change them for the next one.
    let long = ["x".repeat(40_000), "y".repeat(40_000)];
    let texts: Vec<&str> = (0..16).map(|i| long[i % 2].as_str()).collect();
    assert_eq!(values("group[index].len() - group[0].len()", &texts), [Some(0.0); 16]);
    assert_eq!(values("group.push(\"c\"); 1", &["a"]), [None]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn random_scripts_do_not_panic(source in "\\PC{0,60}", text in "\\PC{0,30}") {
        if let Ok(script) = script(&source, 1_000) {
            let _ = evaluate(&script, &input(&text));
        }
    }

    #[test]
    fn random_pieces_do_not_panic(
        pieces in proptest::collection::vec(
            proptest::sample::select(vec![
                "text", "tokens", "metadata", "messages", "(", ")", "[", "]", "{", "}", "+", "-",
                "*", "/", "%", "<<", "**", "let x = ", "x", ";", "loop", "if", "else", "fn f(a)",
                "f", "0", "-1", "9223372036854775807", "1e308", "\"é\"", ".", "sub_string",
                "split", "pad", "range", ",", "..", "=", "==", "matches", "extract_tag", "sleep",
            ]),
            0..16,
        ),
        text in "\\PC{0,30}",
    ) {
        if let Ok(script) = script(&pieces.join(" "), 1_000) {
            let _ = evaluate(&script, &input(&text));
        }
    }

    #[test]
    fn tags_of_random_texts_do_not_panic(text in "(<t>|</t>|<|é| ){0,20}", tag in "[<>/té]{0,3}") {
        let source = format!("extract_tag(text, \"{tag}\")");
        let _ = value(&source, &text);
    }
}
