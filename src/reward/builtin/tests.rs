use std::collections::BTreeMap;
use std::sync::Arc;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;

fn input(text: &str, answer: Option<&str>) -> ScoreInput {
    let metadata: BTreeMap<_, _> =
        answer.map(|a| ("answer".to_owned(), a.to_owned())).into_iter().collect();
    ScoreInput {
        messages: Arc::new(Vec::new()),
        metadata: Arc::new(metadata),
        text: text.to_owned(),
        ids: vec![0; text.len()],
    }
}

fn in_tags() -> Regex {
    Regex::new(r"(?s)<answer>(.*?)</answer>").unwrap()
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
        numeric_match(&input(text, answer), "answer", 0.01, Some(&tags))
    };
    assert_eq!(score("so <answer> 1,234 </answer>.", Some("1234")), Some(1.0));
    assert_eq!(score("<answer>0.995</answer>", Some("1")), Some(1.0));
    assert_eq!(score("<answer>0.98</answer>", Some("1")), Some(0.0));
    assert_eq!(score("<answer>1</answer><answer>2</answer>", Some("2")), Some(0.0));
    assert_eq!(score("1234", Some("1234")), Some(0.0), "no answer is wrong, not missing");
    assert_eq!(score("<answer>many</answer>", Some("1234")), Some(0.0));
    assert_eq!(score("<answer>1</answer>", None), None, "no reference is missing, not wrong");
    assert_eq!(score("<answer>1</answer>", Some("one")), None);
    assert_eq!(numeric_match(&input(" 7\n", Some("7")), "answer", 0.0, None), Some(1.0));
    assert_eq!(numeric_match(&input("It is 7", Some("7")), "answer", 0.0, None), Some(0.0));
}

#[test]
fn exact_match_trims_and_may_ignore_case() {
    let tags = in_tags();
    let score = |text: &str, answer: Option<&str>, ignore_case: bool| {
        exact_match(&input(text, answer), "answer", ignore_case, Some(&tags))
    };
    assert_eq!(score("<answer>\n Paris </answer>", Some(" Paris"), false), Some(1.0));
    assert_eq!(score("<answer>paris</answer>", Some("Paris"), false), Some(0.0));
    assert_eq!(score("<answer>ÉCOLE</answer>", Some("école"), true), Some(1.0));
    assert_eq!(score("Paris", Some("Paris"), false), Some(0.0));
    assert_eq!(score("<answer>Paris</answer>", None, false), None);
    assert_eq!(exact_match(&input("Paris", Some("Paris")), "city", false, None), None);
    assert_eq!(exact_match(&input("Paris\n", Some("Paris")), "answer", false, None), Some(1.0));
}

#[test]
fn the_strict_format_takes_no_less_and_no_more() {
    for good in [
        "<reasoning>a</reasoning><answer>b</answer>",
        "\n<reasoning>\na\n</reasoning>\n\t<answer>\nb\n</answer>\n",
        "<reasoning></reasoning><answer></answer>",
        "\u{a0}<reasoning>é</reasoning>\u{2003}<answer>ü</answer>",
    ] {
        assert_eq!(format_strict(good), 1.0, "{good:?}");
        assert!(format_incremental(good) >= 0.998, "{good:?}");
    }
    for bad in [
        "",
        "<reasoning>a</reasoning><answer>b",
        "<answer>b</answer><reasoning>a</reasoning>",
        "x<reasoning>a</reasoning><answer>b</answer>",
        "<reasoning>a</reasoning>x<answer>b</answer>",
        "<reasoning>a</reasoning><answer>b</answer>x",
        "<reasoning>a<reasoning></reasoning><answer>b</answer>",
        "<reasoning>a</reasoning><answer>b</answer></answer>",
        "<reasoning><answer>a</reasoning>b</answer>",
        "</reasoning><reasoning><answer></answer>",
        "<Reasoning>a</Reasoning><answer>b</answer>",
    ] {
        assert_eq!(format_strict(bad), 0.0, "{bad:?}");
    }
}

#[test]
fn the_incremental_format_gives_a_quarter_a_tag_less_what_trails() {
    let near = |text: &str, value: f64| {
        assert!((format_incremental(text) - value).abs() < 1e-12, "{text:?}");
    };
    near("", 0.0);
    near("<reasoning>still thinking", 0.25);
    near("<reasoning>a</reasoning>", 0.5);
    near("<reasoning>a</reasoning><answer>5", 0.75);
    near("<reasoning>a</reasoning><answer>5</answer>", 1.0);
    near("<reasoning>a</reasoning><answer>5</answer>éé", 0.998);
    near("<answer>5</answer><answer>5</answer>", 0.0);
    near(&format!("<answer>5</answer>{}", "x".repeat(600)), 0.0);
}

#[test]
fn length_falls_in_a_line_on_both_sides() {
    for (tokens, value) in [(100, 1.0), (75, 0.5), (125, 0.5), (50, 0.0), (150, 0.0), (999, 0.0)] {
        assert!((length(tokens, 100, 50) - value).abs() < 1e-12, "{tokens}");
    }
}

/// Text made of what the functions look for, and of everything else.
fn scrap(rng: &mut ChaCha8Rng) -> String {
    const PIECES: [&str; 16] = [
        "<reasoning>",
        "</reasoning>",
        "<answer>",
        "</answer>",
        "<",
        "/answer>",
        " ",
        "\n",
        "1",
        ",234",
        ".5",
        "e9",
        "-",
        "é",
        "\u{2212}",
        "\u{3000}",
    ];
    let mut text = String::new();
    for _ in 0..rng.random_range(0..12) {
        if rng.random_bool(0.9) {
            text.push_str(PIECES[rng.random_range(0..PIECES.len())]);
        } else {
            text.push(char::from_u32(rng.random_range(0..0x11_0000)).unwrap_or('\u{fffd}'));
        }
    }
    text
}

#[test]
fn no_input_leaves_the_ranges_or_panics() {
    let strict =
        Regex::new(r"(?s)^\s*<reasoning>(.*?)</reasoning>\s*<answer>(.*?)</answer>\s*$").unwrap();
    let tags = in_tags();
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let mut well_formed = 0;
    for round in 0..100_000 {
        let text = if round % 4 == 0 {
            let (lead, thought) = (scrap(&mut rng), scrap(&mut rng));
            let lead = if round % 8 == 0 { String::new() } else { lead };
            format!("{lead}<reasoning>{thought}</reasoning><answer>{}</answer>", scrap(&mut rng))
        } else {
            scrap(&mut rng)
        };
        let once = TAGS.iter().all(|tag| text.matches(tag).count() == 1);
        let wanted = f64::from(u8::from(once && strict.is_match(&text)));
        assert_eq!(format_strict(&text), wanted, "{text:?}");
        well_formed += usize::from(wanted == 1.0);
        assert!((0.0..=1.0).contains(&format_incremental(&text)), "{text:?}");
        let asked = input(&text, Some(&scrap(&mut rng)));
        for extract in [None, Some(&tags)] {
            for ignore_case in [false, true] {
                let value = exact_match(&asked, "answer", ignore_case, extract);
                assert!(matches!(value, Some(0.0 | 1.0)), "{text:?}");
            }
            let value = numeric_match(&asked, "answer", 0.5, extract);
            assert!(matches!(value, None | Some(0.0 | 1.0)), "{text:?}");
        }
        assert!(matches!(regex_match(&asked, &tags), 0.0 | 1.0));
        let value = length(rng.random_range(0..1_000), rng.random(), rng.random());
        assert!((0.0..=1.0).contains(&value));
    }
    assert!(well_formed > 1_000, "the inputs must reach the well-formed case: {well_formed}");
}

#[test]
fn scoring_time_is_linear_in_the_text() {
    // A backtracking matcher would take minutes over these.
    let text = "<reasoning><answer>".repeat(50_000);
    let began = std::time::Instant::now();
    let asked = input(&text, Some("1"));
    assert_eq!(format_strict(&text), 0.0);
    assert_eq!(format_incremental(&text), 0.0);
    assert_eq!(numeric_match(&asked, "answer", 0.0, Some(&in_tags())), Some(0.0));
    let nested = Regex::new("(<.*>)*x$").unwrap();
    assert_eq!(regex_match(&asked, &nested), 0.0);
    assert_eq!(parse_number(&"9".repeat(1_000_000)), None);
    assert!(began.elapsed().as_secs() < 10, "{:?}", began.elapsed());
}
