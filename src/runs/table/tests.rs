use proptest::prelude::*;

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
    let wide = render(&all, 108);
    let header = wide.lines().next().unwrap();
    let at = header.find("found").unwrap();
    assert!(header[..at].contains("completion") && header[at..].contains("correct"), "{wide}");
    assert!(wide.contains(" 42 ") && wide.contains("– | ␛[2J"), "{wide}");
    assert!(render(&all, 50).contains("found 42 · correct 1.00"), "{}", render(&all, 50));
    assert!(!render(&all[2..], 108).contains("found"), "no part extracts an answer");
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
fn a_wide_table() {
    insta::assert_snapshot!(render(&samples(), 88), @"
    prompt               completion                              correct   format    total
    ───────────────────  ──────────────────────────────────────  ───────  ───────  ───────
    What is 17 + 25?     <reasoning>17 + 25 is 42, because 10 +     1.00     0.50     2.50
                         20 is 30 and 7 + 5 is
                         12</reasoning>⏎<answer>42</answer>
    何ですか、この長い   ␛[31mred␇                                     –     0.00     0.00
    質問は？
    Empty?                                                          0.00        –        –
    ");
}

#[test]
fn narrow_terminals_show_blocks() {
    insta::assert_snapshot!(render(&samples(), 50), @"
    What is 17 + 25?
      <reasoning>17 + 25 is 42, because 10 + 20 is
      30 and 7 + 5 is 12</reasoning>⏎<answer>42</ans
      wer>
      correct 1.00 · format 0.50 · total 2.50

    何ですか、この長い質問は？
      ␛[31mred␇
      correct – · format 0.00 · total 0.00

    Empty?
      correct 0.00 · format – · total –
    ");
}

#[test]
fn scores_end_with_statistics() {
    let text = scores_text(&samples(), 60, 1);
    let at = text.find("  part").unwrap();
    insta::assert_snapshot!(&text[at..], @"
    part       mean    95 %             std     min     max  missing
    correct    0.50    0.09    0.91    0.71    0.00    1.00        1
    format     0.25    0.00    0.50    0.35    0.00    0.50        1
    total      1.25    0.00    2.50    1.77    0.00    2.50        1
    ");
    assert_eq!(scores_text(&[], 80, 1), "  no samples\n");
    assert_eq!(render(&[], 80), "");
}

#[test]
fn scores_as_json() {
    insta::assert_snapshot!(scores_json(&samples()[2..], 1).unwrap(), @r#"
    {
      "samples": [
        {
          "prompt": "Empty?",
          "completion": "",
          "parts": {
            "correct": 0.0
          },
          "total": null
        }
      ],
      "parts": {
        "correct": {
          "estimate": {
            "mean": 0.0,
            "interval": null,
            "n": 1
          },
          "std": null,
          "min": 0.0,
          "max": 0.0,
          "missing": 0
        }
      },
      "total": {
        "estimate": null,
        "std": null,
        "min": null,
        "max": null,
        "missing": 1
      }
    }
    "#);
}

#[test]
fn control_characters_never_reach_the_terminal() {
    assert_eq!(one_line(" a\r\nb\tc\u{1b}[0m\u{9b}2J\u{202e}d "), "a⏎b c␛[0m\u{fffd}2Jd");
}

#[test]
fn cutting_counts_columns() {
    assert_eq!(cut("日本語", 6), "日本語");
    assert_eq!(cut("日本語", 5), "日本…");
    assert_eq!(cut("日本語", 4), "日…");
    assert_eq!(cut("abc", 0), "");
    assert_eq!(wrapped("one two three four", 9, 9), ["one two", "three", "four"]);
    assert_eq!(wrapped("one two three four", 9, 2), ["one two", "three fo…"]);
    assert_eq!(wrapped("aaaaaaaaaa", 4, 9), ["aaaa", "aaaa", "aa"]);
    assert_eq!(wrapped("  ", 4, 9), [""; 0]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn no_line_is_wider_than_requested(
        texts in prop::collection::vec((any::<String>(), any::<String>()), 1..4), width in 64usize..200,
    ) {
        let samples: Vec<ScoredSample> = texts
            .iter()
            .map(|(p, c)| sample(p, c, &[("correct", Some(0.5)), ("format", None)], None))
            .collect();
        for line in render(&samples, width).lines() {
            prop_assert!(line.width() <= width, "{}: {line:?}", line.width());
            prop_assert!(!line.chars().any(char::is_control), "{line:?}");
        }
    }

    #[test]
    fn wrapping_loses_only_spaces(text in "[a-z 日本é]{0,80}", width in 2usize..20) {
        let lines = wrapped(&text, width, usize::MAX);
        prop_assert!(lines.iter().all(|line| line.width() <= width));
        let letters = |text: &str| text.replace(' ', "");
        prop_assert_eq!(letters(&lines.concat()), letters(&text));
    }
}
