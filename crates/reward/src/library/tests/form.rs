//! Form, length and style.

use regex::Regex;

use super::super::format::*;
use super::super::json::{LastSchema, Schema, compile, json_schema, json_valid};
use super::super::language::{by_code, language};
use super::super::length::*;
use super::super::style::*;
use super::{near, with};
use crate::config;

fn tags() -> Tags {
    Tags::new(&["reasoning", "answer"])
}

#[test]
fn the_strict_format_takes_no_less_and_no_more() {
    for good in [
        "<reasoning>a</reasoning><answer>b</answer>",
        "\n<reasoning>\na\n</reasoning>\n\t<answer>\nb\n</answer>\n",
        "<reasoning></reasoning><answer></answer>",
        "\u{a0}<reasoning>é</reasoning>\u{2003}<answer>ü</answer>",
    ] {
        assert_eq!(format_strict(good, &tags()), 1.0, "{good:?}");
        assert!(format_incremental(good, &tags(), 0.001) >= 0.998, "{good:?}");
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
        assert_eq!(format_strict(bad, &tags()), 0.0, "{bad:?}");
    }
}

#[test]
fn the_incremental_format_gives_a_quarter_a_tag_less_what_trails() {
    let near = |text: &str, value: f64| {
        assert!((format_incremental(text, &tags(), 0.001) - value).abs() < 1e-12, "{text:?}");
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

#[test]
fn three_tags_make_sixths() {
    let three = Tags::new(&["plan", "work", "out"]);
    let text = "<plan>a</plan> <work>b</work>\n<out>c</out>";
    assert_eq!((format_strict(text, &three), format_soft(text, &three)), (1.0, 1.0));
    assert!(near(format_incremental(text, &three, 0.5), 1.0));
    let partly = "<plan>a</plan><out>c</out>é";
    assert!(near(format_incremental(partly, &three, 0.5), 4.0 / 6.0 - 0.5));
    assert_eq!(format_strict("<plan></plan><out></out><work></work>", &three), 0.0);
}

#[test]
fn the_soft_format_wants_order_alone() {
    for (text, value) in [
        ("Well, <reasoning>a</reasoning> so <answer>5</answer> it is", 1.0),
        ("<reasoning>a<reasoning></reasoning><answer></answer></answer>", 1.0),
        ("<answer>5</answer><reasoning>a</reasoning>", 0.0),
        ("<reasoning>a</reasoning><answer>5", 0.0),
        ("", 0.0),
    ] {
        assert_eq!(format_soft(text, &tags()), value, "{text}");
    }
}

#[test]
fn thinking_formats() {
    let both = Tags::new(&["think", "answer"]);
    for (text, format, answered) in [
        ("<think>\nThis is my reasoning.\n</think>\nThis is my answer.", 1.0, 0.0),
        ("<think>\nThis is my reasoning.\nThis is my answer.", 0.0, 0.0),
        ("<think>a</think><answer>b</answer>", 1.0, 1.0),
        ("<think>a</think>\n<answer> </answer>", 1.0, 0.0),
        ("<think>a<think>b</think>c", 0.0, 0.0),
        (" <think>a</think><answer>b</answer>", 0.0, 1.0),
        ("</think><think>", 0.0, 0.0),
        ("<think></think>", 1.0, 0.0),
    ] {
        assert_eq!((think_format(text), think_answer(text, &both)), (format, answered), "{text}");
    }
}

#[test]
fn json_stands_alone_or_in_a_fence() {
    for (text, plain, fenced) in [
        ("{\"a\": [1, 2.5, null]}\n", 1.0, 1.0),
        ("Here:\n```json\n{\"a\": 1}\n```\nDone", 0.0, 1.0),
        ("```\n[]```", 0.0, 1.0),
        ("```json\n{a}\n```", 0.0, 0.0),
        ("{\"a\": 1} {\"b\": 2}", 0.0, 0.0),
        ("{\"a\": 1,}", 0.0, 0.0),
        ("", 0.0, 0.0),
    ] {
        assert_eq!((json_valid(text, false), json_valid(text, true)), (plain, fenced), "{text}");
    }
    assert_eq!(json_valid(&"[".repeat(100_000), false), 0.0);
}

#[test]
fn schemas_come_from_the_configuration_or_the_sample() {
    let schema = r#"{"type": "object", "required": ["n"], "properties": {"n": {"type": "integer", "minimum": 0, "pattern": "^a$"}}}"#;
    let fixed = Schema::Fixed(compile(&serde_json::from_str(schema).unwrap()).unwrap());
    let own = Schema::Metadata("schema".to_owned(), LastSchema::default());
    for (text, value) in
        [("{\"n\": 3}", 1.0), ("{\"n\": -3}", 0.0), ("{}", 0.0), ("3", 0.0), ("{", 0.0)]
    {
        let sample = with(text, &[("schema", schema)]);
        assert_eq!(json_schema(&sample, &fixed, false), Some(value), "{text}");
        assert_eq!(json_schema(&sample, &own, false), Some(value), "{text}");
    }
    for unsound in ["", "{", "{\"type\": 5}", "{\"$ref\": \"http://example.com/schema\"}"] {
        let sample = with("3", &[("schema", unsound)]);
        assert_eq!(json_schema(&sample, &own, false), None, "{unsound}");
    }
    assert_eq!(json_schema(&with("3", &[]), &own, false), None);
    let long = format!("{{\"title\": \"{}\"}}", "a".repeat(70_000));
    assert_eq!(json_schema(&with("3", &[("schema", &long)]), &own, false), None);
    let circular = with("{\"a\": {\"a\": 1}}", &[("schema", "{\"$ref\": \"#\"}")]);
    assert!(json_schema(&circular, &own, false).is_none_or(|value| value == 1.0));
}

#[test]
fn patterns_may_be_counted() {
    let digit = Regex::new(r"\d").unwrap();
    for (text, once, thrice) in [("", 0.0, 0.0), ("a1", 1.0, 1.0 / 3.0), ("1234", 1.0, 1.0)] {
        assert_eq!(regex_match(text, &digit, 1), once);
        assert!(near(regex_match(text, &digit, 3), thrice));
    }
}

#[test]
fn lengths_in_a_range() {
    let p = config::LengthRange { min: 10, max: 20, fade: 4 };
    for (tokens, value) in
        [(10, 1.0), (20, 1.0), (9, 0.75), (22, 0.5), (24, 0.0), (0, 0.0), (999, 0.0)]
    {
        assert!(near(length_range(tokens, &p), value), "{tokens}");
        let hard = config::LengthRange { fade: 0, ..p.clone() };
        assert_eq!(length_range(tokens, &hard), f64::from(u8::from(value == 1.0)), "{tokens}");
    }
}

#[test]
fn steps_are_marked() {
    for (text, markers) in [
        ("", 0),
        ("Step 1: a\nStep 2: b", 2),
        ("1. a\n 2) b\n10. c", 3),
        ("- a\n* b\n-c\n3.5 d", 2),
        ("First, a. Then, b. Finally, c", 3),
        ("Step one: a. Step : b", 0),
    ] {
        assert!(near(reasoning_steps(text, 10), f64::from(markers) / 10.0), "{text}");
    }
    assert_eq!(reasoning_steps("- a\n- b\n- c\n- d", 3), 1.0);
}

#[test]
fn citations_count_once() {
    for (text, found) in [
        ("", 0),
        ("as [1] and [2], again [1]", 2),
        ("[a] [1234] []", 0),
        ("(Smith, 2020) (Smith, 2020) (Jones et al., 1999a; Li, 2001)", 3),
        ("(in May, 2020) (Smith, 20) (see 2020)", 0),
        ("see https://a.example/x, [b](https://a.example/x) and http://b.example.", 2),
        ("http:// https", 0),
    ] {
        assert!(near(citations(text, 10), f64::from(found) / 10.0), "{text}");
    }
}

#[test]
fn forbidden_phrases_cost_up_to_the_floor() {
    let p = config::ForbiddenPhrases {
        phrases: vec!["sorry".to_owned(), "as an AI".to_owned(), "!!".to_owned()],
        penalty: 0.25,
        floor: -0.6,
        ignore_case: true,
    };
    let pattern = phrase_pattern(&p.phrases, p.ignore_case).unwrap();
    for (text, value) in [
        ("fine, sorrybox", 0.0),
        ("Sorry.", -0.25),
        ("Sorry, AS AN AI", -0.5),
        ("sorry!! sorry", -0.6),
    ] {
        assert!(near(forbidden_phrases(text, &p, &pattern), value), "{text}");
    }
    let exact = phrase_pattern(&p.phrases, false).unwrap();
    assert_eq!(forbidden_phrases("SORRY", &p, &exact), 0.0);
}

#[test]
fn languages() {
    let english = by_code("eng").unwrap();
    let text = "The quick brown fox jumps over the lazy dog and then it sleeps in the sun.";
    assert_eq!(language(text, english, 0.0), Some(1.0));
    let german = "Der schnelle braune Fuchs springt über den faulen Hund und schläft in der Sonne.";
    assert_eq!(language(german, english, 0.0), Some(0.0));
    assert_eq!(language(german, by_code("deu").unwrap(), 0.0), Some(1.0));
    assert_eq!(language("今日はいい天気ですね。", by_code("jpn").unwrap(), 0.9), Some(1.0));
    assert_eq!((language("", english, 0.0), language("123 ...", english, 0.0)), (None, None));
    assert!(by_code("en").is_none() && by_code("xxx").is_none());
}
