use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;

use super::*;
use crate::kinds::tests::samples::reference;

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

#[test]
fn values_equal_sympy() {
    for Same { value, texts } in reference("same") {
        for text in &texts {
            let plain = tidy(boxed(text).unwrap_or(text));
            let read = measure(&plain).map_or(f64::NAN, |(value, _)| value.to_f64());
            assert!((read - value).abs() <= 1e-12 * value.abs().max(1.0), "{text}: {read} {value}");
        }
    }
}

#[test]
fn random_expressions_equal_sympy() {
    for Expression { plain, latex, value } in reference("expressions") {
        let wanted = parse::value(&value, 0).unwrap();
        for text in [&plain, &latex] {
            let read = parse::value(&tidy(text), 0).unwrap_or_else(|| panic!("{text}"));
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
        ("no", "on"),
        ("10^{-20}\\pi", "2\\pi/10^{20}"),
        ("\\sqrt{2}/10^{16}", "0"),
        ("\\sqrt{x^2}", "x"),
        ("a+d", "b+c"),
        ("(2, 1,000)", "(2,1,0)"),
        ("1,234.5", "(1,234.5)+1"),
        ("1\\text{foo}2", "1"),
        ("\\infty", "-\\infty"),
        ("\\infty", "3"),
    ] {
        assert_ne!(same(answer, wanted, 1e-6), Some(true), "{answer} {wanted}");
        assert_ne!(same(wanted, answer, 1e-6), Some(true), "{wanted} {answer}");
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
        ("+∞", "\\infty"),
        ("(-\\infty, 5]", "(-∞,5]"),
        ("(1,2),(3,4)", "(3,4), (1,2)"),
        ("(2, 1,000)", "(2, 1000)"),
        ("1,234.5", "1234.5"),
        ("5kg", "5"),
        ("5\\text{ m}^2", "5"),
        ("5^\\circ\\text{C}", "5"),
        ("5\\text{°C}", "5"),
        ("5°C", "5 C"),
        ("\\sqrt{x}\\sqrt{x}", "x"),
        ("\\sqrt{8} - 2\\sqrt{2}", "0"),
        ("ab", "ba"),
        ("10^{-20}\\pi", "\\pi/10^{20}"),
    ] {
        assert_eq!(same(answer, wanted, 1e-6), Some(true), "{answer} {wanted}");
    }
}

/// Pairs on which the verdicts differ from Math-Verify's, with the reason.
const DIFFERENCES: [(&str, &str, &str); 3] = [
    ("2(3)", "6", "Math-Verify reads a function of 3"),
    (r"5\text{ m}", r"5\text{ km}", "Math-Verify drops both units"),
    ("(1,000)", "(1,0)", "Math-Verify reads a pair with 000"),
];

#[derive(Deserialize)]
struct Verified {
    /// Two answers, the right verdict, and Math-Verify's.
    pairs: Vec<(String, String, bool, bool)>,
}

#[test]
fn verdicts_are_right_and_mostly_math_verifys() {
    let text = include_str!(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/reference/rewards/math_equal.json"
    ));
    let mut wrong = Vec::new();
    for (first, second, right, verified) in serde_json::from_str::<Verified>(text).unwrap().pairs {
        for (answer, wanted) in [(&first, &second), (&second, &first)] {
            let answer = boxed(answer).unwrap_or(answer);
            let found = same(answer, boxed(wanted).unwrap_or(wanted), 1e-6);
            if found != Some(right) {
                wrong.push(format!("{answer} and {wanted}: {found:?}, not {right}"));
            }
        }
        let differs =
            DIFFERENCES.iter().any(|(a, b, _)| (*a, *b) == (first.as_str(), second.as_str()));
        assert_eq!(right != verified, differs, "{first} and {second}");
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn what_cannot_be_read_is_neither_right_nor_wrong() {
    for (answer, wanted) in [
        ("1 \\oplus 2", "3"),
        ("3", "\\begin{pmatrix} 1 & 2 \\end{pmatrix}"),
        ("x > 3", "x < 3"),
        ("\\sin(2x)", "2"),
        ("\\pm 2", "2"),
        ("5!", "120"),
        ("2\\foo3", "23"),
    ] {
        assert_eq!(same(answer, wanted, 1e-6), None, "{answer} {wanted}");
        assert_eq!(same(answer, answer, 1e-6), Some(true));
    }
    for (answer, wanted) in [
        ("I do not know", "3"),
        ("", "3"),
        ("x", "3"),
        ("north", "3"),
        ("12 cm", "13"),
        ("5 cm", "5 kg"),
        ("5 million", "6"),
        ("(1,2)", "3"),
    ] {
        let found = same(answer, wanted, 1e-6);
        assert!(found == Some(false) || answer.contains("million"), "{answer} {wanted}: {found:?}");
    }
    for (answer, wanted) in
        [("12 cm", "12"), ("18 dollars", "18 dollar"), ("(B)", "b"), ("x=5", "5 m")]
    {
        assert_eq!(same(answer, wanted, 1e-6), Some(true), "{answer} {wanted}");
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
        assert_ne!(same(&text, "5", 1e-6), Some(true));
    }
    let nested = format!("{}5{}", "(".repeat(40), ")".repeat(40));
    assert_eq!(same(&nested, "5", 1e-6), Some(true));
}

proptest! {
    /// Adding a fraction and subtracting it again leaves the same value.
    #[test]
    fn fractions_are_exact_and_other_texts_are_refused(a in -99999_i64..99999, b in 1_i64..99999, c in -99999_i64..99999, d in 1_i64..99999) {
        let sum = format!("\\frac{{{a}}}{{{b}}} + ({c})/{d} - \\dfrac{{{c}}}{{{d}}}");
        let ratio = format!("{a}/{b}");
        prop_assert_eq!(same(&sum, &ratio, 0.0), Some(true));
        let next = format!("{}/{}", a * 1_000_000_000 + 1, b * 1_000_000_000);
        prop_assert_eq!(same(&sum, &next, 1e-6), Some(false));
    for text in [
        "", " ", "-", ".", "e3", "1e", "1e+", "1e1.5", "abc", "4 2", "1,23", "1,2345", ",123",
        "1234,567", "1.5.2", "1.2,345", "--1", "+-1", "inf", "NaN", "1e999", "٣", "0x10", "12px",
    ] {
        assert_eq!(parse_number(text), None, "{text:?}");
    }
    }

    #[test]
    fn same_is_symmetric(a in "[0-9.,()/*^+% \\\\-]{0,12}", b in "[0-9.,()/*^+% -]{0,12}") {
        prop_assert_eq!(same(&a, &a, 0.0), Some(true));
        prop_assert_eq!(same(&a, &b, 0.0), same(&b, &a, 0.0));
    }
}

#[test]
fn numbers_are_read_as_people_write_them() {
    for (text, number) in [
        ("42", 42.0),
        (" +42\n", 42.0),
        ("-7", -7.0),
        ("\u{2212}7", -7.0),
        ("1,234", 1234.0),
        ("12,345,678.5", 12_345_678.5),
        ("0.25", 0.25),
        (".5", 0.5),
        ("5.", 5.0),
        ("1e3", 1000.0),
        ("2.5E-1", 0.25),
        ("007", 7.0),
    ] {
        assert_eq!(parse_number(text), Some(number), "{text:?}");
    }
}

#[test]
fn every_finite_number_that_rust_prints_is_read_back() {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    for _ in 0..10_000 {
        let number = f64::from_bits(rng.random());
        if number.is_finite() {
            assert_eq!(parse_number(&format!("{number:e}")), Some(number));
        }
    }
}
