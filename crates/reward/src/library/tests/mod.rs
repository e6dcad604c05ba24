mod form;

use std::collections::BTreeMap;
use std::sync::Arc;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use regex::Regex;
use serde::Deserialize;

use super::answer::*;
use super::choice::letter;
use super::length::*;
use super::number::{is_integer, parse_number};
use super::style::*;
use crate::config::{Contains, ContainsMode, ExactMatch, FuzzyMatch, Keywords, NumericMatch};
use crate::{ScoreInput, config};

fn with(text: &str, metadata: &[(&str, &str)]) -> ScoreInput {
    let metadata: BTreeMap<_, _> =
        metadata.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    ScoreInput {
        messages: Arc::new(Vec::new()),
        metadata: Arc::new(metadata),
        text: text.to_owned(),
        ids: vec![0; text.len()],
    }
}

fn input(text: &str, answer: Option<&str>) -> ScoreInput {
    let metadata: Vec<(&str, &str)> = answer.map(|a| ("answer", a)).into_iter().collect();
    with(text, &metadata)
}

fn in_tags() -> Regex {
    Regex::new(r"(?s)<answer>(.*?)</answer>").unwrap()
}

fn near(value: f64, wanted: f64) -> bool {
    (value - wanted).abs() < 1e-12
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
fn what_is_not_a_number_is_refused() {
    for text in [
        "", " ", "-", ".", "e3", "1e", "1e+", "1e1.5", "abc", "4 2", "1,23", "1,2345", ",123",
        "1234,567", "1.5.2", "1.2,345", "--1", "+-1", "inf", "NaN", "1e999", "٣", "0x10", "12px",
    ] {
        assert_eq!(parse_number(text), None, "{text:?}");
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

#[test]
fn numeric_match_compares_within_the_tolerance() {
    let tags = in_tags();
    let score = |text: &str, answer: Option<&str>| {
        let p = NumericMatch { tolerance: 0.01, ..NumericMatch::default() };
        numeric_match(&input(text, answer), &p, Some(&tags))
    };
    assert_eq!(score("so <answer> 1,234 </answer>.", Some("1234")), Some(1.0));
    assert_eq!(score("<answer>0.995</answer>", Some("1")), Some(1.0));
    assert_eq!(score("<answer>0.98</answer>", Some("1")), Some(0.0));
    assert_eq!(score("<answer>1</answer><answer>2</answer>", Some("2")), Some(0.0));
    assert_eq!(score("1234", Some("1234")), Some(0.0), "no answer is wrong, not missing");
    assert_eq!(score("<answer>many</answer>", Some("1234")), Some(0.0));
    assert_eq!(score("<answer>1</answer>", None), None, "no reference is missing, not wrong");
    assert_eq!(score("<answer>1</answer>", Some("one")), None);
    let p = NumericMatch { tolerance: 0.0, relative_tolerance: 0.01, ..NumericMatch::default() };
    let whole = |text: &str, answer| numeric_match(&input(text, Some(answer)), &p, None);
    assert_eq!(whole(" 7\n", "7"), Some(1.0));
    assert_eq!(whole("It is 7", "7"), Some(0.0));
    assert_eq!((whole("1010", "1000"), whole("-1011", "-1000")), (Some(1.0), Some(0.0)));
}

#[test]
fn exact_match_trims_and_may_ignore_case() {
    let tags = in_tags();
    let score = |text: &str, answer: Option<&str>, ignore_case: bool| {
        let p = ExactMatch { ignore_case, ..ExactMatch::default() };
        exact_match(&input(text, answer), &p, Some(&tags))
    };
    assert_eq!(score("<answer>\n Paris </answer>", Some(" Paris"), false), Some(1.0));
    assert_eq!(score("<answer>paris</answer>", Some("Paris"), false), Some(0.0));
    assert_eq!(score("<answer>ÉCOLE</answer>", Some("école"), true), Some(1.0));
    assert_eq!(score("Paris", Some("Paris"), false), Some(0.0));
    assert_eq!(score("<answer>Paris</answer>", None, false), None);
    let whole = |reference: &str| {
        let p = ExactMatch { reference: reference.to_owned(), ..ExactMatch::default() };
        exact_match(&input("Paris\n", Some("Paris")), &p, None)
    };
    assert_eq!((whole("city"), whole("answer")), (None, Some(1.0)));
}

#[test]
fn whole_numbers() {
    for text in ["7", "-7", "+7", "1,234", " 007 "] {
        assert!(is_integer(text), "{text}");
        assert_eq!(integer_answer(&format!("<answer>{text}</answer>"), Some(&in_tags())), 1.0);
    }
    for text in ["", "7.0", "1e3", "seven", "1,23", "7 8"] {
        assert!(!is_integer(text), "{text}");
        assert_eq!(integer_answer(&format!("<answer>{text}</answer>"), Some(&in_tags())), 0.0);
    }
    assert_eq!(integer_answer("7", Some(&in_tags())), 0.0);
}

#[test]
fn letters_are_found_where_models_write_them() {
    for (text, found) in [
        ("B", Some('B')),
        ("b", Some('B')),
        ("(c)", Some('C')),
        ("**D**", Some('D')),
        ("B. Paris", Some('B')),
        ("(B) Paris, not (C)", Some('B')),
        ("The answer is B.", Some('B')),
        ("The answer is A because of that", Some('A')),
        ("the correct answer is: (J)", Some('J')),
        ("**Answer:** C\nas it is", Some('C')),
        ("Answer: b.", Some('B')),
        ("First I took choice A, but the answer is E", Some('E')),
        ("option D is right", None),
        ("I pick option D", Some('D')),
        ("\\boxed{F} rather than answer is G", Some('F')),
        ("\\boxed{\\text{(H)}}", Some('H')),
        ("so it must be (I)", Some('I')),
        ("A dog barks", None),
        ("the answer is a dog", None),
        ("It's Bob's answer", None),
        ("K", None),
        ("(Z)", None),
        ("", None),
        ("\\boxed{42}", None),
    ] {
        assert_eq!(letter(text, 10), found, "{text}");
    }
    assert_eq!((letter("E", 4), letter("Z", 26)), (None, Some('Z')));
}

#[test]
fn the_letter_is_compared_with_the_reference() {
    let p = config::MultipleChoice::default();
    let score = |text: &str, wanted: Option<&str>| {
        super::choice::multiple_choice(&input(text, wanted), &p, Some(&in_tags()))
    };
    assert_eq!(score("<answer>(B)</answer> not C", Some("B. Paris")), Some(1.0));
    assert_eq!(score("the answer is C", Some("b")), Some(0.0));
    assert_eq!(score("no idea", Some("B")), Some(0.0));
    assert_eq!((score("B", Some("Paris")), score("B", None)), (None, None));
}

#[test]
fn phrases_of_the_configuration_or_the_reference() {
    let own = |mode, ignore_case| Contains {
        phrases: vec!["Paris".to_owned(), "Seine".to_owned()],
        mode,
        ignore_case,
        ..Contains::default()
    };
    let text = with("paris lies on the Seine", &[]);
    for (mode, ignore_case, value) in [
        (ContainsMode::All, false, 0.0),
        (ContainsMode::All, true, 1.0),
        (ContainsMode::Any, false, 1.0),
    ] {
        assert_eq!(contains(&text, &own(mode, ignore_case), None), Some(value));
    }
    let referred =
        |answer: &str| contains(&input("a, b and c", Some(answer)), &Contains::default(), None);
    assert_eq!(referred("a, b"), Some(1.0), "one phrase");
    assert_eq!((referred("[\"a\", \"c\"]"), referred("[\"a\", \"z\"]")), (Some(1.0), Some(0.0)));
    assert_eq!((referred(" "), referred("[]")), (None, None));
    assert_eq!(contains(&with("a", &[]), &Contains::default(), None), None);
    assert_eq!(
        contains(&with("Paris Seine", &[]), &own(ContainsMode::All, false), Some(&in_tags())),
        Some(0.0)
    );
}

#[test]
fn keywords_are_whole_words() {
    let score = |words: &str| {
        keywords(&with("The river Seine; É-coli.", &[("keywords", words)]), &Keywords::default())
    };
    assert_eq!(score("seine, RIVER, sein, é"), Some(0.75));
    assert_eq!(score("[\"river seine\"]"), Some(1.0));
    assert_eq!((score(" , "), keywords(&with("a", &[]), &Keywords::default())), (None, None));
}

#[derive(Deserialize)]
struct Cases {
    fuzzy: Vec<Fuzzy>,
    cosine: Vec<Cosine>,
    repetition: Vec<Repetition>,
    overlong: Vec<Overlong>,
}

#[derive(Deserialize)]
struct Fuzzy {
    a: String,
    b: String,
    ratio: f64,
}

#[derive(Deserialize)]
struct Cosine {
    tokens: usize,
    correct: bool,
    value: f64,
}

#[derive(Deserialize)]
struct Repetition {
    text: String,
    n: usize,
    value: f64,
}

#[derive(Deserialize)]
struct Overlong {
    max_tokens: u32,
    cache: u32,
    tokens: usize,
    value: f64,
}

/// What `tests/reference/rewards.py` computed.
fn cases() -> Cases {
    let text =
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/reference/rewards.json"));
    serde_json::from_str(text).unwrap()
}

#[test]
fn rapidfuzz_of_python_finds_the_same_ratios() {
    for Fuzzy { a, b, ratio } in cases().fuzzy {
        assert!(near(similarity(&a, &b), ratio), "{a:?} {b:?}: {} {ratio}", similarity(&a, &b));
    }
}

#[test]
fn similarities_below_the_threshold_are_nothing() {
    let score = |threshold, ignore_case| {
        let p = FuzzyMatch { threshold, ignore_case, ..FuzzyMatch::default() };
        fuzzy_match(&input(" Kitten", Some("kitten ")), &p, None).unwrap()
    };
    assert!(near(score(0.5, false), 10.0 / 12.0));
    assert_eq!((score(0.9, false), score(0.9, true)), (0.0, 1.0));
    let p = FuzzyMatch::default();
    assert_eq!(fuzzy_match(&input("a", Some("a")), &p, Some(&in_tags())), Some(0.0));
    assert_eq!(fuzzy_match(&input("a", None), &p, None), None);
}

#[test]
fn published_formulas() {
    let Cases { cosine, repetition, overlong, .. } = cases();
    let p: config::CosineScaled = serde_json::from_str(r#"{"max_tokens": 100}"#).unwrap();
    for Cosine { tokens, correct, value } in cosine {
        assert!(near(cosine_scaled(tokens, correct, &p), value), "{tokens} {correct}");
    }
    for Repetition { text, n, value } in repetition {
        let p = config::RepetitionPenalty { ngram: n, max_penalty: -0.5, ..Default::default() };
        assert!(near(repetition_penalty(&input(&text, None), &p), value), "{text:?} {n}");
    }
    for Overlong { max_tokens, cache, tokens, value } in overlong {
        let p = config::SoftOverlong { max_tokens, cache };
        assert!(near(soft_overlong(tokens, &p), value), "{max_tokens} {cache} {tokens}");
    }
}

#[test]
fn tokens_may_be_counted_instead_of_words() {
    let p = config::RepetitionPenalty {
        ngram: 2,
        unit: config::RepetitionUnit::Tokens,
        ..Default::default()
    };
    // The examples of TRL's documentation.
    for (ids, value) in [(vec![1, 2, 3, 4], 0.0), (vec![5; 5], -0.75), (vec![1], 0.0)] {
        let sample = ScoreInput { ids, ..input("a a a a a", None) };
        assert!(near(repetition_penalty(&sample, &p), value));
    }
}
