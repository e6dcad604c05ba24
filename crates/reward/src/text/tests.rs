use std::collections::BTreeMap;

use proptest::prelude::*;
use serde::Deserialize;
use serde_json::Value;

use super::*;

fn named(name: &str) -> Metric {
    Metric::named(name).unwrap()
}

#[derive(Deserialize)]
struct Reference {
    cases: Vec<Case>,
    stems: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Case {
    candidate: String,
    reference: String,
    #[serde(flatten)]
    scores: BTreeMap<String, Value>,
}

fn reference() -> Reference {
    serde_json::from_str(include_str!("../../../../tests/reference/rewards/text_metrics.json"))
        .unwrap()
}

#[test]
fn rouge_reads_every_script() {
    for text in [
        "кошка спит дома",
        "猫が好きです",
        "สวัสดีชาวโลก",
        "हिन्दी भाषा",
        "مرحبا بالعالم",
        "Ünïcödé wörds",
    ] {
        for metric in ["rouge_1", "rouge_2", "rouge_l"].map(named) {
            assert_eq!(metric.score(text, text), 1.0, "{text}");
            assert_eq!(metric.score(text, "другой 文字 text"), 0.0, "{text}");
        }
    }
    assert_eq!(named("rouge_1").score("кошка спит", "Кошка, ест"), 0.5);
    assert_eq!(words_of_any_script("好的 ok 很x高兴"), ["好", "的", "ok", "很", "x", "高", "兴"]);
}

#[test]
fn every_metric_equals_the_python_libraries() {
    let cases = reference().cases;
    assert!(cases.len() >= 60, "{}", cases.len());
    let mut wrong = Vec::new();
    for Case { candidate, reference, scores } in &cases {
        assert_eq!(scores.len(), Metric::ALL.len());
        for (name, metric) in Metric::ALL {
            let (value, wanted) =
                (metric.score(candidate, reference), scores[name].as_f64().unwrap());
            // rouge-score drops all letters but a to z.
            if name.starts_with("rouge") && !(candidate.is_ascii() && reference.is_ascii()) {
                continue;
            }
            if (value - wanted).abs() > 1e-12 {
                wrong.push(format!(
                    "{name}({candidate:.60?}, {reference:.60?}): {value}, not {wanted}"
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn stems_equal_nltk() {
    for (word, wanted) in reference().stems {
        assert_eq!(meteor::stem(&word), wanted, "{word}");
    }
}

#[test]
fn other_names_select_no_metric() {
    assert!(Metric::named("rouge_6").is_none() && Metric::named("BLEU").is_none());
}

#[test]
fn long_texts_are_compared_by_their_beginnings() {
    let words = ROUGE_L_WORDS.max(FUZZY_CHARS / 2);
    let long = "a ".repeat(20 * words);
    let other = format!("{}{}", "a ".repeat(words), "b ".repeat(words));
    assert_eq!(fuzzy_match(&long, &other), 1.0);
    assert_eq!(rouge_l(&long, &other), 1.0);
}

/// Text of the patterns that the tokenizers and the stemmer act on.
fn text() -> impl Strategy<Value = String> {
    let word = "[a-eiyls]{1,6}(ing|ed|ies|ational|alli|logi|ion|ss|y|e|ll)?|[0-9]{1,3}[.,-]?|\\PC|[.,&<-]|\n|&amp;|<skipped>";
    prop::collection::vec(word, 0..24).prop_map(|words| words.join(" "))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3_000))]

    #[test]
    fn scores_are_in_range_and_equal_texts_score_highest(a in text(), b in text()) {
        for (name, metric) in Metric::ALL {
            let (same, other) = (metric.score(&a, &a), metric.score(&a, &b));
            prop_assert!((0.0..=1.0).contains(&other), "{name} {other}");
            prop_assert!((0.0..=1.0).contains(&same), "{name} {same}");
            // Up to rounding; METEOR prefers long runs of matches to equality.
            prop_assert!(same + 1e-12 >= other || same == 0.0 || name == "meteor", "{name}");
        }
    }

    #[test]
    fn symmetric_metrics_are_symmetric(a in text(), b in text()) {
        for name in ["cosine", "fuzzy_match", "gleu", "rouge_1", "rouge_l"] {
            let metric = named(name);
            let (one, two) = (metric.score(&a, &b), metric.score(&b, &a));
            prop_assert!((one - two).abs() < 1e-12, "{name} {one} {two}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100_000))]

    #[test]
    fn any_string_is_scored(a in any::<String>(), b in any::<String>()) {
        for (name, metric) in Metric::ALL {
            prop_assert!((0.0..=1.0).contains(&metric.score(&a, &b)), "{name}");
        }
        prop_assert!(meteor::stem(&a).len() <= a.len() + 1);
    }
}

/// The longest common subsequence by the whole table, as defined.
fn common_by_table(a: &[String], b: &[String]) -> usize {
    let mut row = vec![0; b.len() + 1];
    for x in a {
        let mut corner = 0;
        for (at, y) in b.iter().enumerate() {
            let above = row[at + 1];
            row[at + 1] = if x == y { corner + 1 } else { above.max(row[at]) };
            corner = above;
        }
    }
    row[b.len()]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn the_bit_parallel_common_subsequence_is_the_longest(
        a in prop::collection::vec("[abcd]", 0..200),
        b in prop::collection::vec("[abce]", 0..200),
    ) {
        let common = common_by_table(&a, &b) as f64;
        let sum = (a.len() + b.len()) as f64;
        let wanted = if common == 0.0 { 0.0 } else { 2.0 * common / sum };
        prop_assert!((rouge_l(&a.join(" "), &b.join(" ")) - wanted).abs() < 1e-12);
    }
}
