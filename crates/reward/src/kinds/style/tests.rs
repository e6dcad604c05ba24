use futures::FutureExt;

use super::*;
use crate::Tools;
use crate::kinds::tests::samples::{near, reference, sample, score, score_text};

#[test]
fn forbidden_phrases_cost_up_to_the_floor() {
    let p = ForbiddenPhrases {
        phrases: vec!["sorry".to_owned(), "as an AI".to_owned(), "!!".to_owned()],
        penalty: 0.25,
        floor: -0.6,
        ignore_case: true,
    };
    for (text, value) in [
        ("fine, sorrybox", 0.0),
        ("Sorry.", -0.25),
        ("Sorry, AS AN AI", -0.5),
        ("sorry!! sorry", -0.6),
    ] {
        assert!(near(score_text(&p, text), value), "{text}");
    }
    let phrases = vec!["抱歉".to_owned(), "извините".to_owned()];
    let other = ForbiddenPhrases { phrases, ..p.clone() };
    for (text, value) in [("很抱歉我不能", -0.25), ("Извините.", -0.25), ("извинитель", 0.0)]
    {
        assert!(near(score_text(&other, text), value), "{text}");
    }
    assert_eq!(score_text(&ForbiddenPhrases { ignore_case: false, ..p }, "SORRY"), 0.0);
}

#[derive(Deserialize)]
struct Case {
    text: String,
    n: usize,
    value: f64,
}

#[test]
fn values_equal_open_r1() {
    for Case { text, n, value } in reference("repetition") {
        let p = RepetitionPenalty { ngram: n, max_penalty: -0.5, ..Default::default() };
        assert!(near(score_text(&p, &text), value), "{text:?} {n}");
    }
}

#[test]
fn words_of_scripts_without_spaces_and_tokens_are_counted() {
    let p = RepetitionPenalty { ngram: 2, ..Default::default() };
    assert!(near(score_text(&p, &"好的".repeat(7)), -11.0 / 13.0));
    assert_eq!(score_text(&p, "我今天很高兴"), 0.0);
    assert!(near(score_text(&p, "да нет да нет"), -1.0 / 3.0));
    let p = RepetitionPenalty { ngram: 2, unit: RepetitionUnit::Tokens, ..Default::default() };
    // The examples of TRL's documentation.
    for (ids, value) in [(vec![1, 2, 3, 4], 0.0), (vec![5; 5], -0.75), (vec![1], 0.0)] {
        let sample = ScoreInput { ids, ..sample("a a a a a", &[]) };
        assert!(near(score(&p, &sample).unwrap(), value));
    }
}

#[test]
fn a_threshold_makes_the_penalty_full_or_0() {
    let p = RepetitionPenalty { ngram: 1, min_distinct: 0.75, ..Default::default() };
    for (text, value) in [("", 0.0), ("a b c C", 0.0), ("a b c c c", -1.0), ("a", 0.0)] {
        assert_eq!(score_text(&p, text), value, "{text}");
    }
}

fn values(p: &Diversity, texts: &[&str]) -> Vec<Option<f64>> {
    let samples: Vec<ScoreInput> = texts.iter().map(|text| sample(text, &[])).collect();
    p.score(&samples).now_or_never().unwrap()
}

#[test]
fn equal_completions_earn_0_and_those_that_share_nothing_1() {
    let p = Diversity::default();
    assert_eq!(values(&p, &["a b", "A  b", "b a"]), [Some(0.0); 3]);
    assert_eq!(values(&p, &["a", "b", "c"]), [Some(1.0); 3]);
    assert_eq!(values(&p, &["", ""]), [Some(0.0); 2]);
    assert_eq!(values(&p, &["", "a"]), [Some(1.0); 2]);
    assert_eq!((values(&p, &["a"]), values(&p, &[])), (vec![None], vec![]));
    assert_eq!(values(&p, &["好的", "的好"]), [Some(0.0); 2]);
    for (value, wanted) in values(&p, &["a b c", "a b d", "x"]).iter().zip([0.75, 0.75, 1.0]) {
        assert!(near(value.unwrap(), wanted));
    }
}

#[test]
fn ngrams_and_tokens_may_be_compared() {
    let pairs = Diversity { ngram: 2, ..Diversity::default() };
    assert_eq!(values(&pairs, &["a b a", "b a b"]), [Some(0.0); 2]);
    assert_eq!(values(&pairs, &["a b", "b a"]), [Some(1.0); 2]);
    // A text of fewer words is one n-gram.
    assert_eq!(values(&pairs, &["a", "a"]), [Some(0.0); 2]);
    // The tokens of these samples are all 0.
    let tokens = Diversity { unit: RepetitionUnit::Tokens, ngram: 3 };
    assert_eq!(values(&tokens, &["a b c", "x y z u"]), [Some(0.0); 2]);
    assert_eq!(values(&tokens, &["a", "xy"]), [Some(1.0); 2]);
}

#[test]
fn languages_are_detected() {
    let within = |text: &str, code: &str, confidence| {
        score(&Language { language: code.to_owned(), confidence }, &sample(text, &[]))
    };
    let text = "The quick brown fox jumps over the lazy dog and then it sleeps in the sun.";
    assert_eq!(within(text, "eng", 0.0), Some(1.0));
    let german = "Der schnelle braune Fuchs springt über den faulen Hund und schläft in der Sonne.";
    assert_eq!(within(german, "eng", 0.0), Some(0.0));
    assert_eq!(within(german, "deu", 0.0), Some(1.0));
    assert_eq!(within("今日はいい天気ですね。", "jpn", 0.9), Some(1.0));
    assert_eq!((within("", "eng", 0.0), within("123 ...", "eng", 0.0)), (None, None));
    let context = BuildContext { tools: &Tools::default(), route: "r", part: "p" };
    for code in ["en", "xxx"] {
        let unknown = Language { language: code.to_owned(), confidence: 0.0 };
        assert!(unknown.build(&context).is_err(), "{code}");
    }
}

#[test]
fn markers_are_counted() {
    for (text, markers) in [
        ("", 0),
        ("Step 1: a\nStep 2: b", 2),
        ("1. a\n 2) b\n10. c", 3),
        ("- a\n* b\n-c\n3.5 d", 2),
        ("First, a. Then, b. Finally, c", 3),
        ("Step one: a. Step : b", 0),
    ] {
        let value = score_text(&ReasoningSteps { target: 10 }, text);
        assert!(near(value, f64::from(markers) / 10.0), "{text}");
    }
    assert_eq!(score_text(&ReasoningSteps { target: 3 }, "- a\n- b\n- c\n- d"), 1.0);
}

#[test]
fn each_connector_counts_once() {
    let parts = Connectors { target: 4, ..Connectors::default() };
    let whole = Connectors { whole_words: true, extract: String::new(), ..parts.clone() };
    for (text, by_parts, by_words) in [
        ("because", 0.0, 0.25),
        ("<reasoning>Because a, THUS b, thus c.</reasoning> Finally", 0.5, 0.75),
        ("<reasoning>sincere enthusiasm</reasoning>", 0.5, 0.0),
        ("<reasoning>first second next finally however</reasoning>", 1.0, 1.0),
    ] {
        assert!(near(score_text(&parts, text), by_parts), "{text}");
        assert!(near(score_text(&whole, text), by_words), "{text}");
    }
}

#[test]
fn a_repeated_citation_counts_once() {
    for (text, found) in [
        ("", 0),
        ("as [1] and [2], again [1]", 2),
        ("[a] [1234] []", 0),
        ("(Smith, 2020) (Smith, 2020) (Jones et al., 1999a; Li, 2001)", 3),
        ("(in May, 2020) (Smith, 20) (see 2020)", 0),
        ("see https://a.example/x, [b](https://a.example/x) and http://b.example.", 2),
        ("http:// https", 0),
    ] {
        let value = score_text(&Citations { target: 10, phrases: Vec::new() }, text);
        assert!(near(value, f64::from(found) / 10.0), "{text}");
    }
}

#[test]
fn each_listed_phrase_counts_once() {
    let phrases = ["According to", "as stated in"].map(str::to_owned).to_vec();
    let p = Citations { target: 4, phrases };
    for (text, value) in [
        ("accordingly", 0.0),
        ("ACCORDING TO him, and according to her", 0.25),
        ("According to [1], as stated in [2]", 1.0),
    ] {
        assert_eq!(score_text(&p, text), value, "{text}");
    }
}
