use proptest::prelude::*;
use unicode_width::UnicodeWidthStr;

use super::*;

fn sample(
    prompt: &str,
    completion: &str,
    parts: &[(&str, Option<f64>)],
    total: Option<f64>,
) -> ScoredSample {
    ScoredSample {
        prompt: prompt.to_owned(),
        completion: completion.to_owned(),
        parts: parts.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect(),
        total,
        extracted: BTreeMap::new(),
    }
}

#[test]
fn the_answers_that_parts_find_have_a_column() {
    let mut all = samples();
    let answer = |part: &str, text: Option<&str>| (part.to_owned(), text.map(str::to_owned));
    all[0].extracted = [answer("correct", Some("42")), answer("near", Some("42"))].into();
    all[1].extracted = [answer("correct", None), answer("near", Some("\u{1b}[2J"))].into();
    let table = render(&all);
    let header = table.lines().next().unwrap();
    let at = header.find("found").unwrap();
    assert!(header[..at].contains("completion") && header[at..].contains("correct"), "{table}");
    assert!(table.contains(" 42 ") && table.contains("– | ␛[2J"), "{table}");
    assert!(!render(&all[2..]).contains("found"), "no part extracts an answer");
    let json = scores_json(&all[1..], 1).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["samples"][0]["extracted"]["correct"], serde_json::Value::Null);
    assert_eq!(json["samples"][1].get("extracted"), None);
    let old: ScoredSample =
        serde_json::from_str(r#"{"prompt":"a","completion":"b","parts":{},"total":1.0}"#).unwrap();
    assert!(old.extracted.is_empty(), "states of earlier runs load");
}

fn samples() -> Vec<ScoredSample> {
    vec![
        sample(
            "What is 17 + 25?",
            "<reasoning>17 + 25 is 42, because 10 + 20 is 30 and 7 + 5 is 12</reasoning>\n<answer>42</answer>",
            &[("correct", Some(1.0)), ("format", Some(0.5))],
            Some(2.5),
        ),
        sample(
            "何ですか、この長い質問は？",
            "\u{1b}[31mred\u{7}",
            &[("correct", None), ("format", Some(-0.001))],
            Some(0.0),
        ),
        sample("Empty?", "", &[("correct", Some(0.0))], None),
    ]
}

#[test]
fn scores_end_with_statistics() {
    insta::assert_snapshot!(scores_text(&samples(), 1), @"
    prompt                      completion                                                    correct  format  total
    What is 17 + 25?            <reasoning>17 + 25 is 42, because 10 + 20 is 30 and 7 + 5 is     1.00    0.50   2.50
                                12</reasoning>⏎<answer>42</answer>
    何ですか、この長い質問は？  ␛[31mred␇                                                           –    0.00   0.00
    Empty?                                                                                       0.00       –      –

    part     mean  95 %         std   min   max  missing
    correct  0.50  0.09  0.91  0.71  0.00  1.00        1
    format   0.25  0.00  0.50  0.35  0.00  0.50        1
    total    1.25  0.00  2.50  1.77  0.00  2.50        1
    ");
    assert_eq!(scores_text(&[], 1), "no samples\n");
    assert_eq!(render(&[]), "");
}

#[test]
fn long_completions_are_shortened() {
    let table = render(&[sample("a", &"word ".repeat(400), &[], None)]);
    assert!(table.lines().count() == 1 + LINES && table.contains('…'), "{table}");
}

#[test]
fn scores_as_json() {
    let json: serde_json::Value =
        serde_json::from_str(&scores_json(&samples()[2..], 1).unwrap()).unwrap();
    let stats = |estimate: serde_json::Value, ends: Option<f64>, missing: usize| {
        serde_json::json!({
            "estimate": estimate, "std": null, "min": ends, "max": ends, "missing": missing,
        })
    };
    let estimate = serde_json::json!({"mean": 0.0, "interval": null, "n": 1});
    let sample = serde_json::json!({
        "prompt": "Empty?", "completion": "", "parts": {"correct": 0.0}, "total": null,
    });
    let parts = serde_json::json!({"correct": stats(estimate, Some(0.0), 0)});
    let total = stats(serde_json::Value::Null, None, 1);
    assert_eq!(json, serde_json::json!({"samples": [sample], "parts": parts, "total": total}));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn no_line_is_wider_than_the_table(
        texts in prop::collection::vec((any::<String>(), any::<String>()), 1..4),
    ) {
        let samples: Vec<ScoredSample> = texts
            .iter()
            .map(|(p, c)| sample(p, c, &[("correct", Some(0.5)), ("format", None)], None))
            .collect();
        for line in render(&samples).lines() {
            prop_assert!(line.width() <= usize::from(WIDTH), "{}: {line:?}", line.width());
            prop_assert!(!line.chars().any(char::is_control), "{line:?}");
        }
    }
}
