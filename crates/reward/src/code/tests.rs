use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::kinds::Kind;

#[test]
fn errors_name_the_parameter_that_is_out_of_range() {
    let error = CodeParams { timeout_ms: 1, ..Default::default() }.check().unwrap_err();
    insta::assert_snapshot!(error.sentence(), @"timeout_ms is 1: it must be from 10 to 600000");
    let same = CodeParams { cases: "tests".into(), ..Default::default() }.check().unwrap_err();
    assert_eq!(same.key, "cases");
    let same = CodeParams { calls: "cases".into(), ..Default::default() }.check().unwrap_err();
    insta::assert_snapshot!(same.sentence(), @r#"calls is "cases": it must be another key than those of other tests"#);
    let blank = CodeParams { function: " ".into(), ..Default::default() }.check().unwrap_err();
    assert_eq!(blank.key, "function");
    assert_eq!(CodeParams::default().check(), Ok(()));
}

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

#[test]
fn outputs_compare_equal_up_to_trailing_white_space() {
    assert!(same_output("a \nb\n\n", "a\nb"));
    assert!(same_output("", "\n"));
    assert!(!same_output(" a", "a"));
    assert!(!same_output("a\n\nb", "a\nb"));
}

fn last_block(text: &str) -> &str {
    extract_block(text, BlockChoice::Last).unwrap_or(text)
}

#[test]
fn a_block_of_code_is_taken() {
    assert_eq!(last_block("a\n```python\nx = 1\n```\nb\n```py\ny\nz\n```\nend"), "y\nz\n");
    assert_eq!(last_block("x = 1"), "x = 1");
    assert_eq!(last_block("```py\nx = 1"), "x = 1");
    assert_eq!(last_block("```\n"), "");
    assert_eq!(last_block("````\n```\ninner\n```\n````"), "```\ninner\n```\n");
    assert_eq!(last_block("~~~\na\n```\nb\n~~~"), "a\n```\nb\n");
    assert_eq!(last_block("```inline```"), "```inline```");
    assert_eq!(last_block("    ```\nnot a fence"), "    ```\nnot a fence");
    assert_eq!(last_block("```\r\nx\r\n```\r\n"), "x\r\n");
    let first = |text| extract_block(text, BlockChoice::First);
    assert_eq!(first("a\n```python\nx = 1\n```\nb\n```\ny\n```\nend"), Some("x = 1\n"));
    assert_eq!(first("```\nx\n```\n```\nopen"), Some("x\n"));
    assert_eq!(first("```\nopen"), Some("open"));
    assert_eq!(first("```\n```"), Some(""));
    assert_eq!(first("x = 1"), None);
    let answer =
        |name: &str, rest: &str| last_block(&format!("```{name}\nx = 1\n```\n{rest}")).to_owned();
    for name in ["python", "Python", "py", "python3", "python title=\"a\"", "{.python}"] {
        for rest in ["Output:\n```\n5\n```", "```bash\npython a.py\n```", "```text\nopen"] {
            assert_eq!(answer(name, rest), "x = 1\n", "{name} {rest}");
        }
    }
    assert_eq!(answer("", "```bash\npython a.py\n```"), "x = 1\n");
    assert_eq!(extract_block("```bash\nls\n```", BlockChoice::Last), None);
}

proptest! {
    #[test]
    fn never_panics_and_returns_a_part(text in "([`~ \n\ra-cé]{0,6}\n?){0,12}") {
        prop_assert!(text.contains(last_block(&text)));
    }

    #[test]
    fn fenced_code_is_found(code in "[a-z =0-9\n]{0,80}", before in "[a-z \n]{0,20}") {
        let text = format!("{before}\n```python\n{code}\n```\nafter");
        prop_assert_eq!(last_block(&text), format!("{code}\n"));
    }
}
