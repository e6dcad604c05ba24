//! The errors of invalid graders; and no JSON panics.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::super::*;

fn error(grader: Value) -> String {
    match Grader::new("", &grader, Backends::default()) {
        Ok(_) => String::from("accepted"),
        Err(error) => {
            let text = error.sentence();
            assert!(text.starts_with(&error.key), "{text}");
            text
        }
    }
}

fn check(key: &str, value: Value) -> Value {
    let mut grader = json!({
        "type": "string_check", "name": "x", "input": "{{ sample.output_text }}",
        "reference": "{{ item.answer }}", "operation": "eq",
    });
    grader[key] = value;
    grader
}

fn judge(key: &str, value: Value) -> Value {
    let mut grader =
        json!({"type": "score_model", "model": "m", "input": [{"role": "user", "content": "?"}]});
    grader[key] = value;
    grader
}

fn multi(graders: Value, formula: &str) -> Value {
    json!({"type": "multi", "graders": graders, "calculate_output": formula})
}

#[test]
fn errors_contain_the_path_and_the_value() {
    insta::assert_snapshot!(error(json!(3)), @"the grader is 3: it must be an object");
    insta::assert_snapshot!(error(json!({})), @"type is missing: it must be one of string_check, text_similarity, score_model, label_model, python, multi");
    insta::assert_snapshot!(error(json!({"type": "regex"})), @r#"type is "regex": it must be one of string_check, text_similarity, score_model, label_model, python, multi"#);
    insta::assert_snapshot!(error(check("operation", json!("foo"))), @r#"operation is "foo": it must be one of eq, ne, like, ilike, neq"#);
    insta::assert_snapshot!(error(check("input", json!(null))), @"input is missing: it must be a string");
    insta::assert_snapshot!(error(check("input", json!(["a"]))), @"input is a list: it must be a string");
    insta::assert_snapshot!(error(check("input", json!("{{ item.a"))), @r#"input: "{{" at character 1 is never closed by "}}""#);
    insta::assert_snapshot!(error(check("name", json!(""))), @r#"name is "": it must be 1 to 256 characters long"#);
    insta::assert_snapshot!(error(check("refrence", json!("a"))), @"refrence is not a field of a string_check grader: the fields are type, name, input, reference, operation");
    insta::assert_snapshot!(error(json!({"type": "text_similarity", "input": "a", "reference": "b", "evaluation_metric": "rouge_6"})), @r#"evaluation_metric is "rouge_6": it must be one of cosine, fuzzy_match, bleu, gleu, meteor, rouge_1, rouge_2, rouge_3, rouge_4, rouge_5, rouge_l"#);
    insta::assert_snapshot!(error(json!({"type": "python", "source": "pass"})), @r#"source is "pass": it must be Python with a function grade(sample, item), at most 262144 bytes"#);
    let result = Grader::new("grader", &check("operation", json!(1)), Backends::default());
    let text = result.err().unwrap().sentence();
    assert_eq!(text, "grader.operation is 1: it must be one of eq, ne, like, ilike, neq");
    let text = Grader::new("grader", &json!([]), Backends::default()).err().unwrap().sentence();
    assert_eq!(text, "grader is a list: it must be an object");
}

#[test]
fn errors_of_model_graders_contain_the_path() {
    insta::assert_snapshot!(error(judge("range", json!([1, 0]))), @"range is a list: it must be two numbers, the lower first");
    insta::assert_snapshot!(error(judge("input", json!([]))), @"input is a list: it must be a list of 1 to 64 messages");
    insta::assert_snapshot!(error(judge("input", json!([{"role": "tool", "content": "?"}]))), @r#"input[0].role is "tool": it must be one of system, developer, user, assistant"#);
    insta::assert_snapshot!(error(judge("input", json!([{"role": "user", "content": [{"type": "input_image"}]}]))), @r#"input[0].content[0] is an object: it must be a string, a text such as {"type": "input_text", "text": ...}, or a list of those; images and audio are not supported"#);
    insta::assert_snapshot!(error(judge("sampling_params", json!({"temperature": 3}))), @"sampling_params.temperature is 3: it must be a number from 0 to 2");
    insta::assert_snapshot!(error(judge("sampling_params", json!({"top_k": 3}))), @"sampling_params.top_k is not a field of a model grader: the fields are temperature, top_p, seed, reasoning_effort, max_completions_tokens, max_completion_tokens, max_tokens");
    insta::assert_snapshot!(error(judge("pass_threshold", json!("high"))), @r#"pass_threshold is "high": it must be a number"#);
    let labels = |labels: Value, passing: Value| {
        json!({"type": "label_model", "model": "m", "input": [{"role": "user", "content": "?"}],
               "labels": labels, "passing_labels": passing})
    };
    insta::assert_snapshot!(error(labels(json!(["a", "a"]), json!(["a"]))), @"labels is a list: it must be a list of different strings, at least one");
    insta::assert_snapshot!(error(labels(json!(["a", "b"]), json!(["c"]))), @"passing_labels is a list: it must be a list of some of the labels a, b");
}

#[test]
fn errors_of_multi_graders_contain_the_path() {
    let x = check("operation", json!("eq"));
    insta::assert_snapshot!(error(multi(json!({"x": check("operation", json!("foo"))}), "x")), @r#"graders.x.operation is "foo": it must be one of eq, ne, like, ilike, neq"#);
    insta::assert_snapshot!(error(multi(json!([x, x]), "x")), @r#"graders[1].name is "x": it must be another than that of graders[0]"#);
    insta::assert_snapshot!(error(multi(json!([check("name", json!(null))]), "x")), @"graders[0].name is missing: it must be the name that calculate_output uses");
    insta::assert_snapshot!(error(multi(json!([]), "1")), @"graders is a list: it must be a list or an object of 1 to 64 graders");
    insta::assert_snapshot!(error(multi(json!({"m": multi(json!([x]), "x")}), "m")), @r#"graders.m.type is "multi": it must be another type than multi: a multi grader cannot hold another"#);
    insta::assert_snapshot!(error(multi(json!({"x": x}), "x + y")), @r#"calculate_output is "x + y": unknown name "y" at character 5: the graders are x"#);
    insta::assert_snapshot!(error(multi(json!({"x": x}), "x +")), @r#"calculate_output is "x +": expected a number, a grader's name, a function or "(" at character 4, found the end"#);
}

#[test]
fn every_documented_form_is_accepted() {
    let x = check("name", json!("x"));
    let text = json!({"type": "output_text", "text": "{{ item.a }}"});
    for grader in [
        check("operation", json!("neq")),
        check("pass_threshold", json!(null)),
        multi(json!([x]), "x"),
        multi(json!({"x": x}), "x"),
        multi(x.clone(), "x"),
        multi(json!({"type": x}), "type ** 2"),
        judge(
            "sampling_params",
            json!({"seed": 1, "top_p": 1, "temperature": 1, "max_completions_tokens": 32768, "reasoning_effort": "medium"}),
        ),
        judge("sampling_params", json!({"max_tokens": 9})),
        judge("pass_threshold", json!(0.5)),
        judge("range", json!([-1, 1.5])),
        judge("input", json!([{"type": "message", "role": "user", "content": [text, "b"]}])),
        judge("input", json!([{"role": "user", "content": text}])),
        json!({"type": "python", "name": "p", "image_tag": "2025-05-08", "source": "def grade(sample, item):\n    return 1.0"}),
    ] {
        assert_eq!(error(grader.clone()), "accepted", "{grader}");
    }
    let grader = multi(json!([judge("name", json!("j"))]), "j");
    let grader = Grader::new("", &grader, Backends::default()).unwrap();
    assert!(!grader.models().is_empty() && !grader.needs_code());
}

/// Random JSON with the field names and values of graders.
fn any_grader() -> impl Strategy<Value = Value> {
    let word = "type|name|x|eq|multi|python|string_check|score_model|label_model|grade|user|\\{\\{item\\.a\\}\\}|x\\+1";
    let leaf = prop_oneof![
        word.prop_map(Value::String),
        any::<f64>().prop_map(|number| json!(number)),
        Just(Value::Null),
        any::<bool>().prop_map(Value::Bool),
    ];
    let key = "type|name|input|reference|operation|model|range|labels|passing_labels|source|graders|calculate_output|sampling_params|role|content|x";
    leaf.prop_recursive(4, 64, 8, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::Array),
            prop::collection::btree_map(key, inner, 0..8).prop_map(|map| json!(map)),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn any_json_is_accepted_or_refused(json in any_grader(), kind in 0..6_usize) {
        let mut json = json;
        if let Some(map) = json.as_object_mut() {
            let kinds = ["string_check", "text_similarity", "score_model", "label_model", "python", "multi"];
            map.insert("type".to_owned(), kinds[kind].into());
        }
        prop_assert!(!error(json).is_empty());
    }
}
