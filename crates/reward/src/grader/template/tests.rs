use proptest::prelude::*;
use serde_json::json;

use super::*;

fn render(text: &str) -> Result<String, String> {
    let item = json!({
        "answer": "42", "n": 1.5, "yes": true, "none": null, "list": [{"key": "deep"}, [7]],
        "a b": "spaced", "trap": "{{ item.answer }}", "x-y": "dash", "ключ": "значение",
    });
    let sample = json!({
        "output_text": "Hi {{ item.answer }} {% raw %}", "output_json": {"name": "Jo"},
        "output_tools": [{"function": {"name": "f", "arguments": "{\"a\":1}"}}], "choices": [],
    });
    let template = Template::parse(text)?;
    template.render(&item, &sample).map_err(|e| e.to_string())
}

fn error(text: &str) -> String {
    render(text).unwrap_err()
}

#[test]
fn values_are_inserted_in_the_text() {
    for (text, wanted) in [
        ("", ""),
        ("plain { } }} text", "plain { } }} text"),
        ("{{item.answer}}", "42"),
        ("<{{ item.answer }}|{{item.n}}|{{ item.yes }}>", "<42|1.5|true>"),
        ("{{ item.list[0].key }} {{item.list[1][0]}}", "deep 7"),
        ("{{ item.list }}", "[{\"key\":\"deep\"},[7]]"),
        ("{{ item[\"a b\"] }} {{ item['answer'] }}", "spaced 42"),
        ("{{ item.x-y }} {{ item.ключ }}", "dash значение"),
        ("{{ sample.output_json.name }}", "Jo"),
        ("{{sample.output_tools[0].function.name}}", "f"),
        ("{\"smiles\": \"{{item.answer}}\"}", "{\"smiles\": \"42\"}"),
    ] {
        assert_eq!(render(text).as_deref(), Ok(wanted), "{text}");
    }
}

#[test]
fn values_are_not_parsed_as_templates() {
    assert_eq!(render("{{ sample.output_text }}!").unwrap(), "Hi {{ item.answer }} {% raw %}!");
    assert_eq!(render("{{ item.trap }}").unwrap(), "{{ item.answer }}");
}

#[test]
fn missing_values_and_long_texts_are_refused() {
    for (text, wanted) in [
        ("{{ item.other }}", "item.other is missing"),
        ("{{ item.none }}", "item.none is missing"),
        ("{{ item.answer.more }}", "item.answer.more is missing"),
        ("{{ item.list[9] }}", "item.list[9] is missing"),
        ("{{ sample.choices[0].message }}", "sample.choices[0].message is missing"),
        ("{{ sample.output_json.age }}", "sample.output_json.age is missing"),
    ] {
        assert_eq!(error(text), wanted);
    }
    let item = json!({"a": "x".repeat(LONGEST_OUTPUT / 2)});
    let template = Template::parse("{{item.a}}{{item.a}}{{item.a}}").unwrap();
    assert_eq!(template.render(&item, &Value::Null), Err(RenderFault::TooLong));
}

#[test]
fn errors_contain_the_position() {
    insta::assert_snapshot!(error("é {{ item.a"), @r#""{{" at character 3 is never closed by "}}""#);
    insta::assert_snapshot!(error("{{ answer }}"), @r#"{{ answer }} at character 1 must begin with "item." or "sample.""#);
    insta::assert_snapshot!(error("{{}}"), @r#"{{}} at character 1 must begin with "item." or "sample.""#);
    insta::assert_snapshot!(error("{{ item }}"), @r#"{{ item }} at character 1 must name a variable, as in "item.key""#);
    insta::assert_snapshot!(error("{{ item[0] }}"), @"{{ item[0] }} at character 1 must name a key of the item first, which is an object");
    insta::assert_snapshot!(error("ab {{ sample.output_audio }}"), @"{{ sample.output_audio }} at character 4 is not known: a sample has output_text, output_json, output_tools, choices");
    insta::assert_snapshot!(error("{{ item.a | upper }}"), @r#"{{ item.a | upper }} at character 1 has " | upper" where ".", "[" or "}}" is expected"#);
    insta::assert_snapshot!(error("{{ item..a }}"), @r#"{{ item..a }} at character 1 has "." without a key after it"#);
    insta::assert_snapshot!(error("{{ item.a[-1] }}"), @r#"{{ item.a[-1] }} at character 1 has "[" without a number or a quoted key and "]" after it"#);
    insta::assert_snapshot!(error(&"{{item.answer}}".repeat(MOST_VALUES + 1)), @"the template has more than 256 values");
    insta::assert_snapshot!(error(&"a".repeat(LONGEST + 1)), @"the template has 262145 bytes: it may have 262144");
    insta::assert_snapshot!(error("{{{item.answer}}}"), @r#"{{{item.answer}} at character 1 must begin with "item." or "sample.""#);
    assert!(
        error(&format!("{{{{item{}}}}}", ".a".repeat(65)))
            .ends_with("more than 64 keys and indices")
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(50_000))]

    #[test]
    fn any_template_renders_or_fails(
        text in "(\\{\\{|\\}\\}|item|sample|\\.|\\[|\\]|[0-9]|\"|'|answer|list|output_json|output_tools| |é){0,24}",
    ) {
        if let Err(error) = render(&text) {
            prop_assert!(!error.is_empty());
        }
    }

    #[test]
    fn any_string_without_braces_renders_unchanged(text in any::<String>()) {
        let given = render(&text);
        if !text.contains("{{") {
            prop_assert_eq!(given, Ok(text));
        }
    }
}
