//! Parses judges' answers, which come in many forms.

use std::sync::LazyLock;

use regex::Regex;
use serde_json::Value;

/// The expected content of an answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum AnswerFormat {
    Score {
        min: f64,
        max: f64,
    },
    /// `A`, `B` or `tie`.
    Winner,
}

impl AnswerFormat {
    /// The message to a judge whose answer could not be parsed.
    pub(super) fn reminder(&self) -> String {
        match self {
            Self::Score { min, max } => {
                format!("Reply with the number only, from {min} to {max}.")
            }
            Self::Winner => "Reply with one word only: A, B or tie.".to_owned(),
        }
    }

    /// The judgement in an answer, from 0 to 1: a position on the scale, or the result of the first of two
    /// candidates. Ignores reasoning up to the last `</think>`.
    /// Errors: the label in metrics, `refused` or `unparsable`, of an answer without a judgement.
    pub(super) fn parse(&self, text: &str) -> Result<f64, &'static str> {
        let text = text.rsplit("</think>").next().unwrap_or_default().trim();
        let judgement = match *self {
            Self::Score { min, max } => {
                let scale = Scale { min, max };
                let score = match scale.explicit(text) {
                    // An explicit score outside the scale is not replaced by another number.
                    Some(score) => score,
                    None if is_refusal(text) => None,
                    None => scale.last_number(text),
                };
                score.map(|s| (s - min) / (max - min))
            }
            Self::Winner => winner(text),
        };
        judgement.ok_or(if is_refusal(text) { "refused" } else { "unparsable" })
    }
}

fn is_refusal(text: &str) -> bool {
    const BEGINNINGS: &str = "i can't|i cannot|i can not|i won't|i will not|i'm sorry|i am sorry|\
        sorry|i'm unable|i am unable|i'm not able|i am not able|i must decline|as an ai";
    let start: String = text.chars().take(20).collect();
    let start = start.replace('\u{2019}', "'").to_lowercase();
    BEGINNINGS.split('|').any(|beginning| start.starts_with(beginning))
}

/// JSON objects examined, from the end of an answer.
const MAX_OBJECTS: usize = 32;

/// The value of `key` in the text's last JSON object with this key.
fn json_field(text: &str, key: &str) -> Option<Value> {
    text.rmatch_indices('{').take(MAX_OBJECTS).find_map(|(start, _)| {
        let mut objects = serde_json::Deserializer::from_str(&text[start..]).into_iter::<Value>();
        objects.next()?.ok()?.get_mut(key).map(Value::take)
    })
}

/// A number with an optional maximum: `7`, `7/10`, `7 out of 10`, `70%`.
macro_rules! number {
    () => {
        r"([-+]?\d+(?:\.\d+)?)(?:\s*(?:/|out\s+of)\s*(\d+(?:\.\d+)?)|\s*(%))?"
    };
}

static NUMBER: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(concat!(r"(?i)(?:^|[^\w.+-])", number!())).ok());
static BARE: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(concat!(r"(?i)^[\s*_`(\[]*", number!(), r"[\s*_`)\].]*$")).ok());
static NAMED: LazyLock<Option<Regex>> = LazyLock::new(|| {
    let name = r#"(?i)\b(?:score|rating|grade)\b[\s*_:="'`]*(?:(?:is|of)\b)?[\s*_:"'`(\[]*"#;
    Regex::new(&format!("{name}{}", number!())).ok()
});
static WINNER: LazyLock<Option<Regex>> = LazyLock::new(|| {
    let named = r#"(?i)\bwinner\b[\s*_:="'`]*(?:is\b)?[\s*_:"'`(\[]*(?:answer\s+)?(a|b|tie)\b"#;
    Regex::new(named).ok()
});
static BRACKETED: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r"(?i)\[\[\s*(a|b|c|tie)\s*\]\]").ok());

struct Scale {
    min: f64,
    max: f64,
}

impl Scale {
    /// A score that is labelled as one or is the whole text; `Some(None)` if it is off the scale.
    fn explicit(&self, text: &str) -> Option<Option<f64>> {
        match json_field(text, "score") {
            Some(Value::Number(n)) => Some(n.as_f64().and_then(|x| self.place(x, None))),
            Some(Value::String(text)) => Some(self.last_match(&BARE, &text).flatten()),
            Some(_) => Some(None),
            None => self.last_match(&NAMED, text).or_else(|| self.last_match(&BARE, text)),
        }
    }

    /// The last match; `Some(None)` if it is off the scale.
    fn last_match(&self, pattern: &Option<Regex>, text: &str) -> Option<Option<f64>> {
        pattern.as_ref()?.captures_iter(text).last().map(|c| self.captured(&c))
    }

    /// The text's last number that is on the scale.
    fn last_number(&self, text: &str) -> Option<f64> {
        NUMBER.as_ref()?.captures_iter(text).filter_map(|c| self.captured(&c)).last()
    }

    fn captured(&self, captures: &regex::Captures<'_>) -> Option<f64> {
        let number = |i| captures.get(i).and_then(|m| m.as_str().parse::<f64>().ok());
        let maximum = number(2).or(captures.get(3).map(|_| 100.0));
        self.place(number(1)?, maximum)
    }

    /// `x` if it is on the scale. `x` of another maximum is rescaled if the scale begins at 0.
    fn place(&self, x: f64, maximum: Option<f64>) -> Option<f64> {
        let x = match maximum {
            Some(maximum) if maximum != self.max => {
                if self.min != 0.0 || maximum <= 0.0 {
                    return None;
                }
                x / maximum * self.max
            }
            _ => x,
        };
        (self.min..=self.max).contains(&x).then_some(x)
    }
}

/// The result of the first of two candidates: 1, 0, or 0.5 for a tie.
fn winner(text: &str) -> Option<f64> {
    if let Some(value) = json_field(text, "winner") {
        return letter(value.as_str()?);
    }
    let last = |pattern: &Option<Regex>| {
        let captures = pattern.as_ref()?.captures_iter(text).last()?;
        letter(captures.get(1)?.as_str())
    };
    last(&BRACKETED).or_else(|| last(&WINNER)).or_else(|| letter(text))
}

fn letter(text: &str) -> Option<f64> {
    let plain = |c: char| !c.is_alphanumeric();
    let text = text.trim_matches(plain).to_lowercase();
    match text.strip_prefix("answer").unwrap_or(&text).trim_matches(plain) {
        "a" | "first" => Some(1.0),
        "b" | "second" => Some(0.0),
        "tie" | "c" | "draw" | "both" | "equal" => Some(0.5),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
