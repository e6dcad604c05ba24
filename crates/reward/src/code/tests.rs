use proptest::prelude::*;

use super::suite::same_output;
use super::*;
use crate::kinds::Kind;
use crate::kinds::tests::samples::sample;

fn rhai(text: &str, metadata: &[(&str, &str)]) -> Option<f64> {
    let params = CodeParams {
        language: CodeLanguage::Rhai,
        timeout_ms: 300,
        max_output_bytes: 1_024,
        ..CodeParams::default()
    };
    score(params, text, metadata)
}

fn score(params: CodeParams, text: &str, metadata: &[(&str, &str)]) -> Option<f64> {
    let reward = CodeReward::new(params, None).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let values = runtime.block_on(reward.score(&[sample(text, metadata)]));
    assert_eq!(values.len(), 1);
    values[0]
}

#[test]
fn rhai_counts_the_tests_that_pass() {
    let code = "Sure:\n```rhai\nfn add(a, b) { a + b }\n```";
    let tests =
        "add(1, 2) == 3\n// a comment\nadd(2, 2) == 5\nadd(\"a\", \"b\") == \"ab\"\nsub(1, 2)";
    assert_eq!(rhai(code, &[("tests", tests)]), Some(0.5));
    assert_eq!(rhai("fn add(a, b) {", &[("tests", tests)]), Some(0.0));
    assert_eq!(rhai(code, &[]), None);
    assert_eq!(rhai(code, &[("tests", "  \n")]), None);
    assert_eq!(rhai(code, &[("tests", "add(1,")]), None, "broken tests give no value");
}

#[test]
fn rhai_statements_of_a_solution_cannot_end_a_test() {
    let tests = "add(1, 2) == 3";
    for code in ["return true;", "true", "return; fn sub() { 1 }", "throw ()", "exit(true)"] {
        assert_eq!(rhai(code, &[("tests", tests)]), Some(0.0), "{code}");
    }
}

#[test]
fn rhai_pairs_compare_printed_text_or_the_last_value() {
    let cases = r#"[{"input": "3", "output": "9"}, {"input": "4", "output": "16\n"}]"#;
    let right = "let n = parse_int(input); print(n * n);";
    assert_eq!(rhai(right, &[("cases", cases)]), Some(1.0));
    assert_eq!(rhai("let n = parse_int(input); n * n", &[("cases", cases)]), Some(1.0));
    assert_eq!(rhai("9", &[("cases", cases)]), Some(0.5));
    assert_eq!(rhai("loop { print(9) }", &[("cases", cases)]), Some(0.0));
    assert_eq!(rhai(right, &[("cases", "[1]")]), None);
    let both = [("cases", cases), ("tests", "false\ntrue")];
    assert_eq!(rhai(right, &both), Some(0.75));
}

#[test]
fn rhai_attacks_score_zero() {
    for attack in [
        "fn f() { loop {} }",
        "fn f() { f() }",
        "fn f() { let x = [0]; loop { x += x; } }",
        "fn f() { let x = \"ab\"; loop { x += x; } }",
        "fn f() { let x = blob(1 << 40, 0); x.len() == 0 }",
        "fn f() { eval(\"true\") }",
        "fn f() { import \"/etc/passwd\" as p; true }",
    ] {
        assert_eq!(rhai(attack, &[("tests", "f()")]), Some(0.0), "{attack}");
    }
    // Cannot block the thread either: sleeping takes no time.
    assert_eq!(rhai("fn f() { sleep(1000000); true }", &[("tests", "f()")]), Some(1.0));
}

#[test]
fn without_partial_credit_all_tests_must_pass_and_the_first_block_may_count() {
    let params = CodeParams { language: CodeLanguage::Rhai, partial: false, ..Default::default() };
    assert_eq!(score(params.clone(), "fn f() { 1 }", &[("tests", "f() == 1\nfalse")]), Some(0.0));
    assert_eq!(score(params, "fn f() { 1 }", &[("tests", "f() == 1\ntrue")]), Some(1.0));
    let params = |block| CodeParams { language: CodeLanguage::Rhai, block, ..Default::default() };
    let text = "```\nfn f() { 1 }\n```\n```\nfn f() { 2 }\n```";
    let tests = [("tests", "f() == 1")];
    assert_eq!(score(params(BlockChoice::First), text, &tests), Some(1.0));
    assert_eq!(score(params(BlockChoice::Last), text, &tests), Some(0.0));
    // Rhai ignores calls.
    assert_eq!(score(params(BlockChoice::First), text, &[("test_cases", "[[1, 1]]")]), None);
}

#[tokio::test]
async fn rhai_syntax_is_checked() {
    let params = CodeSyntax { language: CodeLanguage::Rhai, ..CodeSyntax::default() };
    let reward = SyntaxReward::new(params, None).unwrap();
    let texts = ["```rhai\nlet x = 1;\n```", "```\nlet x = \n```", "let x = 1;", "```\n\n```"];
    let nested = format!("```\n{}\n```", "(".repeat(10_000));
    let inputs: Vec<ScoreInput> =
        texts.iter().chain([&nested.as_str()]).map(|t| sample(t, &[])).collect();
    assert_eq!(reward.score(&inputs).await, [1.0, 0.0, 0.0, 0.0, 0.0].map(Some));
    assert!(SyntaxReward::new(CodeSyntax::default(), None).is_err());
}

#[test]
fn errors_name_the_parameter_or_the_missing_sandbox() {
    let error = CodeParams { timeout_ms: 1, ..Default::default() }.check().unwrap_err();
    insta::assert_snapshot!(error.sentence(), @"timeout_ms is 1: it must be from 10 to 600000");
    let same = CodeParams { cases: "tests".into(), ..Default::default() }.check().unwrap_err();
    assert_eq!(same.key, "cases");
    let same = CodeParams { calls: "cases".into(), ..Default::default() }.check().unwrap_err();
    insta::assert_snapshot!(same.sentence(), @r#"calls is "cases": it must be another key than those of other tests"#);
    let blank = CodeParams { function: " ".into(), ..Default::default() }.check().unwrap_err();
    assert_eq!(blank.key, "function");
    assert_eq!(CodeParams::default().check(), Ok(()));
    let error = CodeReward::new(CodeParams::default(), None).err().unwrap();
    insta::assert_snapshot!(error, @r#"code is not executed here: language = "python" needs the sandbox, which is not set up"#);
}

#[test]
fn outputs_compare_equal_up_to_trailing_white_space() {
    assert!(same_output("a \nb\n\n", "a\nb"));
    assert!(same_output("", "\n"));
    assert!(!same_output(" a", "a"));
    assert!(!same_output("a\n\nb", "a\nb"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn random_solutions_do_not_panic(code in "\\PC{0,60}", test in "[a-z0-9 ()+=<>{}\\[\\]\"']{0,20}") {
        let value = rhai(&code, &[("tests", &test)]);
        prop_assert!(value.is_none_or(|v| (0.0..=1.0).contains(&v)));
    }
}

fn last_block(text: &str) -> &str {
    extract_block(text, BlockChoice::Last, CodeLanguage::Python).unwrap_or(text)
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
    let first = |text| extract_block(text, BlockChoice::First, CodeLanguage::Python);
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
    assert_eq!(extract_block("```bash\nls\n```", BlockChoice::Last, CodeLanguage::Python), None);
    assert_eq!(
        extract_block("```rhai\n1\n```", BlockChoice::Last, CodeLanguage::Rhai),
        Some("1\n")
    );
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
