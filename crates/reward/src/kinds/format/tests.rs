use super::*;
use crate::kinds::tests::samples::{near, score_text};

#[test]
fn thinking_formats() {
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
        let scores = (score_text(&ThinkFormat {}, text), score_text(&ThinkAnswer {}, text));
        assert_eq!(scores, (format, answered), "{text}");
    }
}

#[test]
fn only_the_complete_format_is_accepted() {
    let (strict, incremental) = (FormatStrict::default(), FormatIncremental::default());
    for good in [
        "<reasoning>a</reasoning><answer>b</answer>",
        "\n<reasoning>\na\n</reasoning>\n\t<answer>\nb\n</answer>\n",
        "<reasoning></reasoning><answer></answer>",
        "\u{a0}<reasoning>é</reasoning>\u{2003}<answer>ü</answer>",
    ] {
        assert_eq!(score_text(&strict, good), 1.0, "{good:?}");
        assert!(score_text(&incremental, good) >= 0.998, "{good:?}");
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
        assert_eq!(score_text(&strict, bad), 0.0, "{bad:?}");
    }
}

#[test]
fn whole_numbers() {
    let p = IntegerAnswer::default();
    for text in ["7", "-7", "+7", "1,234", " 007 "] {
        assert!(is_integer(text), "{text}");
        assert_eq!(score_text(&p, &format!("<answer>{text}</answer>")), 1.0);
    }
    for text in ["", "7.0", "1e3", "seven", "1,23", "7 8"] {
        assert!(!is_integer(text), "{text}");
        assert_eq!(score_text(&p, &format!("<answer>{text}</answer>")), 0.0);
    }
    assert_eq!([score_text(&p, "7"), score_text(&p, "It is 7")], [1.0, 0.0]);
}

#[test]
fn patterns_may_be_counted() {
    let digits = |count| RegexMatch { pattern: r"\d".to_owned(), full: false, count };
    for (text, once, thrice) in [("", 0.0, 0.0), ("a1", 1.0, 1.0 / 3.0), ("1234", 1.0, 1.0)] {
        assert_eq!(score_text(&digits(1), text), once);
        assert!(near(score_text(&digits(3), text), thrice));
    }
}

#[test]
fn each_of_four_tags_earns_a_quarter_less_the_trailing_text() {
    let check = |text: &str, value: f64| {
        assert!(near(score_text(&FormatIncremental::default(), text), value), "{text:?}");
    };
    check("", 0.0);
    check("<reasoning>still thinking", 0.25);
    check("<reasoning>a</reasoning>", 0.5);
    check("<reasoning>a</reasoning><answer>5", 0.75);
    check("<reasoning>a</reasoning><answer>5</answer>", 1.0);
    check("<reasoning>a</reasoning><answer>5</answer>\n\u{1c} ", 1.0);
    check("<reasoning>a</reasoning><answer>5</answer>\n é é\n", 0.997);
    check(&format!("<answer>5</answer>{}", "x".repeat(600)), -0.1);
    check("<answer>5</answer><answer>5</answer>more", 0.5);
}

#[test]
fn repeated_tags_may_be_charged_and_may_not_count() {
    let text = "<answer>5</answer><answer>6</answer> more";
    let charged = FormatIncremental { charge_repeated: true, ..FormatIncremental::default() };
    assert!(near(score_text(&charged, text), 0.496));
    let once = FormatIncremental { once: true, ..charged };
    assert!(near(score_text(&once, text), -0.004));
    assert!(near(score_text(&once, "<reasoning></reasoning><answer></answer>"), 1.0));
}

#[test]
fn each_of_six_tags_earns_a_sixth() {
    let tags = ["plan", "work", "out"].map(str::to_owned).to_vec();
    let strict = FormatStrict { tags: tags.clone() };
    let soft = FormatSoft { tags: tags.clone(), ..FormatSoft::default() };
    let incremental =
        FormatIncremental { tags, trailing_penalty: 0.5, ..FormatIncremental::default() };
    let text = "<plan>a</plan> <work>b</work>\n<out>c</out>";
    assert_eq!((score_text(&strict, text), score_text(&soft, text)), (1.0, 1.0));
    assert!(near(score_text(&incremental, text), 1.0));
    let partly = "<plan>a</plan><out>c</out>é";
    assert!(near(score_text(&incremental, partly), 4.0 / 6.0 - 0.5));
    assert_eq!(score_text(&strict, "<plan></plan><out></out><work></work>"), 0.0);
}

#[test]
fn the_soft_format_requires_the_order_and_may_require_adjacency() {
    let space = FormatSoft { between: BetweenPairs::Space, ..FormatSoft::default() };
    for (text, any, adjacent) in [
        ("Well, <reasoning>a</reasoning>\n\u{1c}<answer>5</answer> it is", 1.0, 1.0),
        ("Well, <reasoning>a</reasoning> so <answer>5</answer> it is", 1.0, 0.0),
        ("<reasoning>a<reasoning></reasoning><answer></answer></answer>", 1.0, 1.0),
        ("<reasoning>a</reasoning> x </reasoning><answer></answer>", 1.0, 1.0),
        ("<answer>5</answer><reasoning>a</reasoning>", 0.0, 0.0),
        ("<reasoning>a</reasoning><answer>5", 0.0, 0.0),
        ("", 0.0, 0.0),
    ] {
        assert_eq!(score_text(&FormatSoft::default(), text), any, "{text}");
        assert_eq!(score_text(&space, text), adjacent, "{text}");
    }
}

#[test]
fn short_reasoning_and_blank_answers_earn_a_part() {
    let p = ThinkGraded { min_reasoning: 3, partial: 0.25 };
    for (text, value) in [
        ("", 0.0),
        ("<answer>5</answer>", 0.0),
        ("<think>abc</think> so <answer>5</answer>", 0.0),
        ("<think> éé\u{1f}</think>\n<answer>5</answer>", 0.25),
        ("<think>ééé</think>\n<answer>5</answer>", 1.0),
        ("Well: <think>abc</think><answer> </answer>.", 0.25),
        ("<think>a</think>b</think><answer>5</answer>", 1.0),
        ("<think>a</think><answer>5</answer><think>abc</think><answer>5</answer>", 0.25),
    ] {
        assert_eq!(score_text(&p, text), value, "{text}");
    }
}

#[test]
fn json_is_the_whole_completion_or_in_a_fence() {
    for (text, plain, fenced) in [
        ("{\"a\": [1, 2.5, null]}\n", 1.0, 1.0),
        ("Here:\n```json\n{\"a\": 1}\n```\nDone", 0.0, 1.0),
        ("```\n[]```", 0.0, 1.0),
        ("```json\n{a}\n```", 0.0, 0.0),
        ("```json\n{\"code\": \"use ``` here\"}\n```", 0.0, 1.0),
        ("````json\n{\"a\": \"\\n```\\n\"}\n````", 0.0, 1.0),
        ("~~~\n[1]\n~~~\n```json\n[}\n```", 0.0, 1.0),
        ("{\"a\": 1} {\"b\": 2}", 0.0, 0.0),
        ("{\"a\": 1,}", 0.0, 0.0),
        ("", 0.0, 0.0),
    ] {
        let [without, with] = [false, true].map(|fenced| score_text(&JsonValid { fenced }, text));
        assert_eq!((without, with), (plain, fenced), "{text}");
    }
    // Any depth is read, as no level takes memory on the stack.
    let deep = ["[", "]"].map(|bracket| bracket.repeat(100_000));
    for (text, value) in [(deep.concat(), 1.0), (deep[0].clone(), 0.0)] {
        assert_eq!(score_text(&JsonValid { fenced: false }, &text), value);
    }
}
