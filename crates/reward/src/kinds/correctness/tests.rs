use super::*;
use crate::kinds::tests::samples::{near, reference, sample, score, with_answer};

#[test]
fn exact_match_trims_and_may_ignore_case() {
    let tagged = |text: &str, answer: Option<&str>, ignore_case: bool| {
        score(&ExactMatch { ignore_case, ..ExactMatch::default() }, &with_answer(text, answer))
    };
    assert_eq!(tagged("<answer>\n Paris </answer>", Some(" Paris"), false), Some(1.0));
    assert_eq!(tagged("<answer>paris</answer>", Some("Paris"), false), Some(0.0));
    assert_eq!(tagged("<answer>ÉCOLE</answer>", Some("école"), true), Some(1.0));
    assert_eq!(tagged("Paris", Some("Paris"), false), Some(1.0), "without tags");
    assert_eq!(tagged("It is Paris", Some("Paris"), false), Some(0.0));
    assert_eq!(tagged("<answer>Paris</answer>", None, false), None);
    let whole = |reference: &str| {
        let p = ExactMatch {
            reference: reference.to_owned(),
            extract: String::new(),
            ..ExactMatch::default()
        };
        score(&p, &with_answer("Paris\n", Some("Paris")))
    };
    assert_eq!((whole("city"), whole("answer")), (None, Some(1.0)));
}

#[test]
fn keywords_are_whole_words() {
    let in_text = |words: &str| {
        score(&Keywords::default(), &sample("The river Seine; É-coli.", &[("keywords", words)]))
    };
    assert_eq!(in_text("seine, RIVER, sein, é"), Some(0.75));
    assert_eq!(in_text("[\"river seine\"]"), Some(1.0));
    let chinese = sample("很抱歉我不能", &[("keywords", "抱歉,不能,能不")]);
    assert!(near(score(&Keywords::default(), &chinese).unwrap(), 2.0 / 3.0));
    assert_eq!((in_text(" , "), score(&Keywords::default(), &sample("a", &[]))), (None, None));
}

#[test]
fn numeric_match_compares_within_the_tolerance() {
    let tagged = |text: &str, answer: Option<&str>| {
        let p = NumericMatch { tolerance: 0.01, ..NumericMatch::default() };
        score(&p, &with_answer(text, answer))
    };
    assert_eq!(tagged("so <answer> 1,234 </answer>.", Some("1234")), Some(1.0));
    assert_eq!(tagged("<answer>0.995</answer>", Some("1")), Some(1.0));
    assert_eq!(tagged("<answer>0.98</answer>", Some("1")), Some(0.0));
    assert_eq!(
        tagged("<answer>1</answer><answer>2</answer>", Some("2")),
        Some(1.0),
        "the last one"
    );
    assert_eq!(tagged("<think><answer>1</answer></think><answer>2</answer>", Some("1")), Some(0.0));
    assert_eq!(tagged("1234", Some("1234")), Some(1.0), "without tags all of it is the answer");
    assert_eq!(tagged("It is 1234", Some("1234")), Some(0.0), "no number is wrong, not missing");
    for (answer, wanted) in [
        ("$12.50", "12.5"),
        ("18 dollars", "18"),
        ("-€3", "-3"),
        ("€ 1,234.5", "1234.5"),
        ("40%", "40"),
        ("12 cm.", "12"),
        ("3 £", "3"),
        ("60 km/h", "60"),
    ] {
        let text = format!("<answer>{answer}</answer>");
        assert_eq!(tagged(&text, Some(wanted)), Some(1.0), "{answer}");
        assert_eq!(tagged(&text, Some("7")), Some(0.0), "{answer}");
    }
    for other in ["5 million", "5 or 6", "from 5 to", "5 5"] {
        assert_eq!(tagged(&format!("<answer>{other}</answer>"), Some("5")), Some(0.0), "{other}");
    }
    assert_eq!(tagged("<answer>many</answer>", Some("1234")), Some(0.0));
    assert_eq!(tagged("<answer>1</answer>", None), None, "no reference is missing, not wrong");
    assert_eq!(tagged("<answer>1</answer>", Some("one")), None);
    let p = NumericMatch {
        tolerance: 0.0,
        relative_tolerance: 0.01,
        extract: String::new(),
        ..NumericMatch::default()
    };
    let whole = |text: &str, answer| score(&p, &with_answer(text, Some(answer)));
    assert_eq!(whole(" 7\n", "7"), Some(1.0));
    assert_eq!(whole("It is 7", "7"), Some(0.0));
    assert_eq!((whole("1010", "1000"), whole("-1011", "-1000")), (Some(1.0), Some(0.0)));
}

#[test]
fn reasoning_must_end_before_the_answer_counts() {
    let p = ReasoningAccuracy {
        delimiters: vec!["</think>".to_owned(), "</reasoning>".to_owned()],
        extract: String::new(),
        ..ReasoningAccuracy::default()
    };
    let third = |text: &str| score(&p, &with_answer(text, Some("1/3")));
    // The examples of TRL's documentation.
    assert_eq!(third("<think> x </think> The answer is \\boxed{\\frac{1}{3}}"), Some(1.0));
    assert_eq!(third("<think> x </think> The answer is \\boxed{\\frac{1}{2}}"), Some(0.0));
    assert_eq!(third("<think> partly \\boxed{\\frac{1}{3}} but no end"), Some(0.0));
    assert_eq!(third("\\boxed{1/3}</reasoning> \\boxed{1/2}"), Some(0.0));
    assert_eq!(third("a</think>\\boxed{1/2}</think>1/3"), Some(1.0), "after the last");
    assert_eq!(score(&p, &with_answer("no end", Some(""))), None);
}

#[derive(Deserialize)]
struct Same {
    value: f64,
    texts: Vec<String>,
}

fn finder(pattern: &str) -> AnswerFinder {
    AnswerFinder::new(pattern).unwrap()
}

#[test]
fn texts_that_sympy_reads_as_one_value_are_equal() {
    for Same { value, texts } in reference("same") {
        for text in &texts {
            for other in &texts {
                assert_eq!(is_equal(text, other, 1e-9, &finder("")), Some(true), "{text} {other}");
            }
            let wrong = format!("2*({value}) + 1");
            assert_eq!(is_equal(text, &wrong, 1e-9, &finder("")), Some(false), "{text}");
        }
    }
}

#[test]
fn the_answer_is_in_the_tags_or_else_the_last_box() {
    let tags = finder("(?s)<answer>(.*?)</answer>");
    let equal = |text: &str| is_equal(text, "\\frac12", 1e-6, &tags);
    assert_eq!(equal("so <answer> 0.5 </answer>"), Some(true));
    assert_eq!(equal("\\boxed{3} <answer>\\boxed{\\frac{1}{2}}</answer>"), Some(true));
    assert_eq!(equal("\\boxed{0.5} <answer>3</answer>"), Some(false), "the tags decide");
    assert_eq!(equal("\\boxed{3} and \\boxed {\\frac{1}{2}}."), Some(true), "the last box");
    assert_eq!(equal("\\boxed{0.5} and \\boxed{0.5"), Some(false), "never closed");
    assert_eq!(equal("0.5"), Some(false), "neither tags nor box");
    let default = finder(&answer_pattern());
    let whole = |text: &str| is_equal(text, "\\frac12", 1e-6, &default);
    assert_eq!((whole("0.5"), whole("so it is 0.5")), (Some(true), Some(false)));
    assert_eq!(whole("<answer>1 \\oplus 2</answer>"), None, "cannot be read");
    assert_eq!(is_equal("0.5", "1/2", 0.0, &finder("")), Some(true));
    assert_eq!(is_equal("0.5", " $ ", 0.0, &finder("")), None, "a blank reference is missing");
}

#[test]
fn phrases_come_from_the_configuration_or_the_reference() {
    let listed = |mode, ignore_case| Contains {
        phrases: vec!["Paris".to_owned(), "Seine".to_owned()],
        mode,
        ignore_case,
        ..Contains::default()
    };
    let text = sample("paris is on the Seine", &[]);
    for (mode, ignore_case, value) in [
        (ContainsMode::All, false, 0.0),
        (ContainsMode::All, true, 1.0),
        (ContainsMode::Any, false, 1.0),
    ] {
        assert_eq!(score(&listed(mode, ignore_case), &text), Some(value));
    }
    let referred =
        |answer: &str| score(&Contains::default(), &with_answer("a, b and c", Some(answer)));
    assert_eq!(referred("a, b"), Some(1.0), "one phrase");
    assert_eq!((referred("[\"a\", \"c\"]"), referred("[\"a\", \"z\"]")), (Some(1.0), Some(0.0)));
    assert_eq!((referred(" "), referred("[]")), (None, None));
    assert_eq!(score(&Contains::default(), &sample("a", &[])), None);
    let tagged = Contains { extract: answer_pattern(), ..listed(ContainsMode::All, false) };
    assert_eq!(score(&tagged, &sample("Paris Seine", &[])), Some(1.0), "without tags");
}

#[derive(Deserialize)]
struct Case {
    a: String,
    b: String,
    ratio: f64,
}

#[test]
fn rapidfuzz_of_python_finds_the_same_ratios() {
    for Case { a, b, ratio } in reference("fuzzy") {
        assert!(near(similarity(&a, &b), ratio), "{a:?} {b:?}: {} {ratio}", similarity(&a, &b));
    }
}

#[test]
fn similarities_below_the_threshold_are_0() {
    let whole = |threshold, ignore_case| {
        let extract = String::new();
        let p = FuzzyMatch { threshold, ignore_case, extract, ..FuzzyMatch::default() };
        score(&p, &with_answer(" Kitten", Some("kitten "))).unwrap()
    };
    assert!(near(whole(0.5, false), 10.0 / 12.0));
    assert_eq!((whole(0.9, false), whole(0.9, true)), (0.0, 1.0));
    let p = FuzzyMatch::default();
    assert_eq!(score(&p, &with_answer("a", Some("a"))), Some(1.0), "without tags");
    let p = FuzzyMatch { extract: String::new(), ..p };
    assert_eq!(score(&p, &with_answer("a", None)), None);
}
