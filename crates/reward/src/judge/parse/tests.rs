use proptest::prelude::*;

use super::*;

const TEN: AnswerFormat = AnswerFormat::Score { min: 0.0, max: 10.0 };
const STARS: AnswerFormat = AnswerFormat::Score { min: 1.0, max: 5.0 };

fn score(form: AnswerFormat, text: &str) -> Result<f64, &'static str> {
    form.parse(text)
}

#[test]
fn scores_are_found_in_many_forms() {
    for text in [
        "{\"score\": 7}",
        "Well.\n```json\n{\"reason\": \"{ok}\", \"score\": 7.0}\n```",
        "{\"score\": \"7/10\"}",
        "{\"score\": 3}\nOn reflection: {\"score\": 7, \"notes\": {\"a\": 1}}",
        "Score: 7/10",
        "**Score:** 7",
        "score = 7",
        "The score is 7 out of 10, as 2 of 3 steps are right.",
        "Rating: 70%",
        "First I'd say Score: 3. No. Score: 7",
        "7",
        " **7/10**. ",
        "7.0",
        "3.5/5",
        "I'd give it a 7 of sorts",
        "On the scale from 0 to 10 this earns 7, and not 70 or -3",
        "It is right, 14/20 at least",
        "<think>Score: 2</think>Score: 7",
    ] {
        assert_eq!(score(TEN, text), Ok(0.7), "{text}");
    }
    assert_eq!(score(STARS, "4/5"), Ok(0.75));
    assert_eq!(score(STARS, "Score: 1"), Ok(0.0));
    let signed = AnswerFormat::Score { min: -1.0, max: 1.0 };
    assert_eq!(score(signed, "Score: -1"), Ok(0.0));
    assert_eq!(score(signed, "-0.5"), Ok(0.25));
}

#[test]
fn refusals_and_unparsable_answers_are_distinguished() {
    for text in [
        "",
        "It is good.",
        "{\"score\": 11}",
        "{\"score\": null}",
        "{\"score\": 0.7e99}",
        "11",
        "GPT4 and v1.2.3",
        "Score: 15, for 3 reasons",
        "-3",
    ] {
        assert_eq!(score(TEN, text), Err("unparsable"), "{text}");
    }
    // Another maximum, on a scale that does not begin at 0.
    assert_eq!(score(STARS, "Score: 8/10"), Err("unparsable"));
    for text in ["I cannot rate item 3.", "I\u{2019}m sorry, but no.", "As an AI, I rate 5 things"]
    {
        assert_eq!(score(TEN, text), Err("refused"), "{text}");
    }
    // An apology followed by a score.
    assert_eq!(score(TEN, "I'm sorry to say: Score: 2"), Ok(0.2));
}

#[test]
fn winners_are_found_in_many_forms() {
    let winner = |text: &str| AnswerFormat::Winner.parse(text).ok();
    for (text, points) in [
        ("{\"winner\": \"A\"}", Some(1.0)),
        ("A is longer, but B is right. {\"winner\": \"B\"}", Some(0.0)),
        ("{\"winner\": \"tie\"}", Some(0.5)),
        ("Winner: **B**", Some(0.0)),
        ("The winner is answer A.", Some(1.0)),
        ("Both fine. [[C]]", Some(0.5)),
        ("[[A]]", Some(1.0)),
        ("b", Some(0.0)),
        ("Answer A.", Some(1.0)),
        ("Tie", Some(0.5)),
        ("{\"winner\": \"D\"}", None),
        ("A or B, who knows", None),
        ("", None),
    ] {
        assert_eq!(winner(text), points, "{text}");
    }
    assert_eq!(AnswerFormat::Winner.parse("I can't choose"), Err("refused"));
}

proptest! {
    #[test]
    fn never_panics_and_stays_within_bounds(text in "[a-zA-Z0-9{}\":\\[\\] .,/%\n\u{e9}-]{0,120}") {
        if let Ok(value) = score(STARS, &text) {
            prop_assert!((0.0..=1.0).contains(&value));
        }
        let _ = AnswerFormat::Winner.parse(&text);
    }

    #[test]
    fn a_bare_number_is_a_score(n in 0_u32..=10) {
        prop_assert_eq!(score(TEN, &n.to_string()), Ok(f64::from(n) / 10.0));
    }
}
