use proptest::prelude::*;
use serde::Deserialize;

use super::*;

#[derive(Deserialize)]
struct Same {
    value: f64,
    texts: Vec<String>,
}

#[derive(Deserialize)]
struct Expression {
    plain: String,
    latex: String,
    value: String,
}

#[derive(Deserialize)]
struct Cases {
    same: Vec<Same>,
    expressions: Vec<Expression>,
}

fn cases() -> Cases {
    let text = include_str!(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/reference/rewards/rewards.json"
    ));
    serde_json::from_str(text).unwrap()
}

#[test]
fn values_equal_sympy() {
    for Same { value, texts } in cases().same {
        for text in &texts {
            let plain = tidy(boxed(text).unwrap_or(text));
            let read = super::value(&plain).map(Number::to_f64).unwrap_or(f64::NAN);
            assert!((read - value).abs() <= 1e-12 * value.abs().max(1.0), "{text}: {read} {value}");
        }
    }
}

#[test]
fn random_expressions_equal_sympy() {
    for Expression { plain, latex, value } in cases().expressions {
        let wanted = parse::value(&value).unwrap();
        for text in [&plain, &latex] {
            let read = parse::value(&tidy(text)).unwrap_or_else(|| panic!("{text}"));
            assert!(read.equals(wanted, 1e-12), "{text}: {read:?} {wanted:?}");
        }
    }
}

#[test]
fn different_answers_are_not_the_same() {
    for (answer, wanted) in [
        ("0.3333", "1/3"),
        ("1000001", "1000000"),
        ("100000000000000000001", "100000000000000000000"),
        ("5", "-5"),
        ("1/2", "2"),
        ("1 2", "12"),
        ("1,23", "123"),
        ("2x", "2"),
        ("", "5"),
        ("(1,2)", "[1,2]"),
        ("(1,2)", "(2,1)"),
        ("(1,2)", "(1,2,3)"),
        ("1,2", "3"),
        ("1/0", "5"),
        ("0/0", "0"),
        ("\\sqrt{-1}", "1"),
        ("x+1", "x+2"),
        ("\\text{east}", "west"),
        ("5%", "6"),
        ("a = b = 5", "5"),
        ("ab = 5", "5"),
    ] {
        assert!(!same(answer, wanted, 1e-6), "{answer} {wanted}");
        assert!(!same(wanted, answer, 1e-6), "{wanted} {answer}");
    }
}

#[test]
fn answers_that_are_not_numbers_are_compared_as_text() {
    for (answer, wanted) in [
        ("(1, \\frac{1}{2})", "(1,0.5)"),
        ("\\left[0, 1\\right)", "[0,1)"),
        ("\\{1, 2\\}", "{1,2}"),
        ("3, 4", "3,4"),
        ("x + 1", "x+1"),
        ("\\text{East}", "east"),
        ("(x, 2)", "(x,2.0)"),
        ("50%", "50"),
        ("50", "50\\%"),
        ("(5)", "5"),
        ("(1+2)*(3)", "9"),
        ("\\infty", "$\\infty$"),
    ] {
        assert!(same(answer, wanted, 1e-6), "{answer} {wanted}");
    }
}

#[test]
fn depth_and_length_are_bounded() {
    for text in [
        "(".repeat(100_000),
        "\\sqrt".repeat(10_000),
        "\\frac".repeat(10_000),
        "-".repeat(100_000),
        "2^".repeat(500),
        "9".repeat(4000),
        ["{".repeat(500), "}".repeat(500)].concat(),
    ] {
        assert!(!same(&text, "5", 1e-6));
    }
    assert!(same(&format!("{}5{}", "(".repeat(40), ")".repeat(40)), "5", 1e-6));
}

proptest! {
    /// Adding a fraction and subtracting it again leaves the same value.
    #[test]
    fn fractions_are_exact(a in -99999_i64..99999, b in 1_i64..99999, c in -99999_i64..99999, d in 1_i64..99999) {
        let sum = format!("\\frac{{{a}}}{{{b}}} + ({c})/{d} - \\dfrac{{{c}}}{{{d}}}");
        let ratio = format!("{a}/{b}");
        prop_assert!(same(&sum, &ratio, 0.0));
        let next = format!("{}/{}", a * 1_000_000_000 + 1, b * 1_000_000_000);
        prop_assert!(!same(&sum, &next, 1e-6));
    }

    #[test]
    fn same_is_symmetric(a in "[0-9.,()/*^+% \\\\-]{0,12}", b in "[0-9.,()/*^+% -]{0,12}") {
        prop_assert!(same(&a, &a, 0.0));
        prop_assert_eq!(same(&a, &b, 0.0), same(&b, &a, 0.0));
    }
}
