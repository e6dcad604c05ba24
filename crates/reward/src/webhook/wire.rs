//! The JSON of requests and answers.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::ScoreInput;

/// The body of a request for the rewards of `samples`.
pub(super) fn request(id: &str, route: &str, name: &str, samples: &[ScoreInput]) -> Vec<u8> {
    let sample = |(index, input): (usize, &ScoreInput)| {
        json!({
            "index": index,
            "messages": *input.messages,
            "completion": input.text,
            "completion_tokens": input.ids.len(),
            "metadata": *input.metadata,
        })
    };
    let samples: Vec<Value> = samples.iter().enumerate().map(sample).collect();
    let body = json!({"id": id, "route": route, "name": name, "samples": samples});
    body.to_string().into_bytes()
}

#[derive(Deserialize)]
struct WebhookAnswer {
    rewards: Vec<Value>,
}

/// The values of an answer.
#[derive(Debug, Default, PartialEq)]
pub(super) struct ParsedRewards {
    /// One value for each sample.
    pub(super) values: Vec<Option<f64>>,
    /// The number of missing values by reason.
    pub(super) missing: BTreeMap<&'static str, usize>,
    /// The error, for the log.
    pub(super) detail: String,
}

impl ParsedRewards {
    /// Values that are all missing for one reason.
    pub(super) fn all_missing(reason: &'static str, samples: usize, detail: String) -> Self {
        Self { values: vec![None; samples], missing: BTreeMap::from([(reason, samples)]), detail }
    }

    /// Parses the answer for `samples` samples.
    ///
    /// A list of numbers must be as long as the batch. Otherwise it is unknown which sample each number
    /// belongs to, so all are missing. Entries `{index, value}` may be in any order and number.
    pub(super) fn parse(answer: &[u8], samples: usize) -> Self {
        let text = String::from_utf8_lossy(answer);
        let rewards = match serde_json::from_str::<WebhookAnswer>(&quote_non_finite(&text)) {
            Ok(answer) => answer.rewards,
            Err(error) => return Self::all_missing("bad_answer", samples, error.to_string()),
        };
        let entries = rewards.first().is_some_and(Value::is_object);
        if !entries && rewards.len() != samples {
            let reason = if rewards.len() < samples { "too_few" } else { "too_many" };
            let detail = format!("{} rewards for {samples} samples", rewards.len());
            return Self::all_missing(reason, samples, detail);
        }
        let ordered =
            if entries { by_index(&rewards, samples) } else { rewards.iter().map(Some).collect() };
        let mut parsed = Self::default();
        for value in ordered {
            let value = value.map_or(Err("too_few"), number);
            if let Err(reason) = value {
                *parsed.missing.entry(reason).or_default() += 1;
            }
            parsed.values.push(value.ok());
        }
        parsed
    }
}

/// Puts `{index, value}` entries in order. Ignores indices outside the batch. A repeated index has an
/// invalid value, because it is unknown which entry counts.
fn by_index(rewards: &[Value], samples: usize) -> Vec<Option<&Value>> {
    const REPEATED: &Value = &Value::Bool(false);
    let mut values = vec![None; samples];
    for entry in rewards {
        let index =
            entry.get("index").and_then(Value::as_u64).and_then(|i| usize::try_from(i).ok());
        if let Some(place) = index.and_then(|i| values.get_mut(i)) {
            let value = entry.get("value").unwrap_or(&Value::Null);
            *place = Some(if place.is_some() { REPEATED } else { value });
        }
    }
    values
}

fn number(value: &Value) -> Result<f64, &'static str> {
    match value {
        Value::Null => Err("null"),
        Value::Number(n) => n.as_f64().filter(|v| v.is_finite()).ok_or("non_finite"),
        Value::String(text) if text == NON_FINITE => Err("non_finite"),
        _ => Err("not_a_number"),
    }
}

const NON_FINITE: &str = "non-finite";

/// Replaces `NaN` and `Infinity`, which Python's `json` writes although they are not JSON, and numbers
/// beyond 64-bit floats by a string, so that one such value does not invalidate the others.
fn quote_non_finite(text: &str) -> Cow<'_, str> {
    let mut out = String::new();
    let mut copied = 0;
    let (mut quoted, mut escaped) = (false, false);
    let mut start = None;
    for (i, c) in text.char_indices() {
        let in_word = !quoted && (c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.'));
        if in_word {
            start.get_or_insert(i);
            continue;
        }
        if let Some(start) = start.take()
            && text[start..i].parse::<f64>().is_ok_and(|v| !v.is_finite())
        {
            out.push_str(&text[copied..start]);
            out.push_str(&format!("\"{NON_FINITE}\""));
            copied = i;
        }
        match c {
            _ if escaped => escaped = false,
            '\\' if quoted => escaped = true,
            '"' => quoted = !quoted,
            _ => {}
        }
    }
    if copied == 0 {
        return Cow::Borrowed(text);
    }
    out.push_str(&text[copied..]);
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(answer: &str, samples: usize) -> (Vec<Option<f64>>, Vec<(&'static str, usize)>) {
        let parsed = ParsedRewards::parse(answer.as_bytes(), samples);
        (parsed.values, parsed.missing.into_iter().collect())
    }

    #[test]
    fn numbers_are_in_sample_order() {
        assert_eq!(
            of(r#"{"rewards":[1, -0.5, null]}"#, 3),
            (vec![Some(1.0), Some(-0.5), None], vec![("null", 1)])
        );
        assert_eq!(of(r#"{"rewards":[]}"#, 0), (vec![], vec![]));
        assert_eq!(of(r#"{"rewards":[1]}"#, 2), (vec![None, None], vec![("too_few", 2)]));
        assert_eq!(of(r#"{"rewards":[1,2,3]}"#, 2), (vec![None, None], vec![("too_many", 2)]));
        assert_eq!(
            of(r#"{"rewards":[true,"2"]}"#, 2),
            (vec![None, None], vec![("not_a_number", 2)])
        );
    }

    #[test]
    fn a_non_finite_value_leaves_the_others_valid() {
        let given = r#"{"note":"NaN \" NaN, \\","rewards":[NaN,-Infinity, 1e999 ,0.5]}"#;
        assert_eq!(of(given, 4), (vec![None, None, None, Some(0.5)], vec![("non_finite", 3)]));
    }

    #[test]
    fn entries_name_their_sample() {
        let given =
            r#"{"rewards":[{"index":2,"value":3},{"index":0,"value":null},{"index":9,"value":1}]}"#;
        assert_eq!(of(given, 3), (vec![None, None, Some(3.0)], vec![("null", 1), ("too_few", 1)]));
        let twice = r#"{"rewards":[{"index":0,"value":3},{"index":0,"value":4}]}"#;
        assert_eq!(of(twice, 1), (vec![None], vec![("not_a_number", 1)]));
    }

    #[test]
    fn anything_else_is_a_bad_answer() {
        for answer in ["", "{}", "[1]", "<html>", "{\"rewards\":1}", "{\"rewards\":[1}"] {
            assert_eq!(of(answer, 1), (vec![None], vec![("bad_answer", 1)]), "{answer}");
        }
    }

    proptest! {
        #[test]
        fn never_panics_and_always_fits(answer in ".{0,80}", samples in 0_usize..5) {
            let (values, missing) = of(&answer, samples);
            prop_assert_eq!(values.len(), samples);
            let counted: usize = missing.iter().map(|(_, n)| n).sum();
            prop_assert_eq!(counted, values.iter().filter(|v| v.is_none()).count());
        }

        #[test]
        fn finite_numbers_are_unchanged(eighths in prop::collection::vec(-80_000_i32..80_000, 0..9)) {
            let values: Vec<f64> = eighths.iter().map(|n| f64::from(*n) / 8.0).collect();
            let answer = serde_json::json!({ "rewards": values }).to_string();
            let expected: Vec<Option<f64>> = values.iter().copied().map(Some).collect();
            prop_assert_eq!(of(&answer, values.len()), (expected, vec![]));
        }
    }
}
