use proptest::prelude::*;

use super::*;

fn value(text: &str) -> Result<f64, String> {
    let formula = Formula::parse(text, &["a", "b", "gone", "min"])?;
    formula.evaluate(&[Some(0.5), Some(0.25), None, Some(3.0)])
}

fn error(text: &str) -> String {
    value(text).unwrap_err()
}

#[test]
fn formulas_have_the_values_of_python() {
    for (text, wanted) in [
        ("(a + b) / 2", 0.375),
        ("0.5 * a + 0.5 * b", 0.375),
        ("1 - 2 - 3", -4.0),
        ("8 / 4 / 2", 1.0),
        ("2 + 3 * 4", 14.0),
        ("2 ^ 3 ^ 2", 512.0),
        ("2 ** 3 ** 2", 512.0),
        ("-2 ^ 2", -4.0),
        ("2 ^ -1", 0.5),
        ("2 * -3", -6.0),
        ("--1", 1.0),
        ("1 -+- 1", 2.0),
        ("min(a, b, 1)", 0.25),
        ("max(a)", 0.5),
        ("min + 1", 4.0),
        ("abs(b - a)", 0.25),
        ("floor(1.5) + ceil(1.5)", 3.0),
        ("sqrt(16) + log(exp(2))", 6.0),
        ("1e-1 + .5 + 5. + 1.5E+1", 20.6),
        ("\ta\n+\u{a0}b ", 0.75),
        ("0 * a ^ 0", 0.0),
    ] {
        let given = value(text).unwrap();
        assert!((given - wanted).abs() < 1e-12, "{text}: {given}");
    }
}

#[test]
fn errors_contain_the_position() {
    insta::assert_snapshot!(error(""), @r#"expected a number, a grader's name, a function or "(" at character 1, found the end"#);
    insta::assert_snapshot!(error("a +"), @r#"expected a number, a grader's name, a function or "(" at character 4, found the end"#);
    insta::assert_snapshot!(error("a b"), @r#"expected an operator or the end at character 3, found "b""#);
    insta::assert_snapshot!(error("(a + b"), @r#"expected an operator or ")" at character 7, found the end"#);
    insta::assert_snapshot!(error("max(a; b)"), @r#"expected an operator, "," or ")" at character 6, found ";""#);
    insta::assert_snapshot!(error("é + a"), @r#"unknown name "é" at character 1: the graders are a, b, gone, min"#);
    insta::assert_snapshot!(error("a + c"), @r#"unknown name "c" at character 5: the graders are a, b, gone, min"#);
    insta::assert_snapshot!(error("a(1)"), @r#"unknown function "a" at character 1: the functions are min, max, abs, floor, ceil, exp, sqrt, log"#);
    insta::assert_snapshot!(error("1 + sqrt(a, b)"), @"sqrt at character 5 has 2 values: it takes 1");
    insta::assert_snapshot!(error("a + 1e999"), @r#"expected a finite number at character 5, found "1e999""#);
    insta::assert_snapshot!(error("."), @r#"expected a finite number at character 1, found ".""#);
    insta::assert_snapshot!(error(&"(".repeat(100)), @"the formula is nested more than 64 deep at character 65");
    insta::assert_snapshot!(error(&"-".repeat(100)), @"the formula is nested more than 64 deep at character 65");
    insta::assert_snapshot!(error(&"2^".repeat(100)), @"the formula is nested more than 64 deep at character 129");
    insta::assert_snapshot!(error(&"a".repeat(5000)), @"the formula has 5000 characters: it may have 4096");
}

#[test]
fn undefined_results_are_errors() {
    assert_eq!(error("a / 0"), "division by zero");
    assert_eq!(error("a / (b - 0.25)"), "division by zero");
    assert_eq!(error("a + gone"), "the grader \"gone\" gave no value");
    for text in
        ["sqrt(0 - a)", "log(0)", "exp(1000)", "(0 - 8) ^ a", "10 ^ 400", "1e308 * 10", "0 ^ -1"]
    {
        assert_eq!(error(text), "the result is not a finite number", "{text}");
    }
    assert_eq!(value("a"), Ok(0.5), "a grader that the formula does not use may be missing");
}

#[test]
fn the_longest_chain_neither_recurses_nor_fails() {
    let text = format!("1{}", "+1".repeat(LONGEST / 2 - 1));
    assert_eq!(value(&text), Ok(LONGEST as f64 / 2.0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(50_000))]

    #[test]
    fn any_value_is_finite_or_an_error(text in "[-+*/^(),. 0-9eab]{0,40}|(min|max|log|exp|sqrt|gone|\\(|\\)|[-+*/^,]|\\*\\*|a|b|[0-9.]{1,4}| ){0,30}") {
        if let Ok(value) = value(&text) {
            prop_assert!(value.is_finite());
        }
    }

    #[test]
    fn any_string_is_parsed_or_refused(text in any::<String>()) {
        if let Err(error) = Formula::parse(&text, &["a"]) {
            prop_assert!(!error.is_empty());
        }
    }
}
