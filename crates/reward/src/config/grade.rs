//! Parameters of the rewards that OpenAI's graders have: `text_similarity` and `grader`.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use hone_core::config::describe::{Problem, one_of};

use super::{answer_key, answer_pattern};

/// The metrics of `kind = "text_similarity"`, as OpenAI names them.
pub const METRICS: [&str; 11] = [
    "bleu",
    "gleu",
    "meteor",
    "rouge_1",
    "rouge_2",
    "rouge_3",
    "rouge_4",
    "rouge_5",
    "rouge_l",
    "cosine",
    "fuzzy_match",
];

/// Parameters of `kind = "text_similarity"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextSimilarity {
    /// One of `METRICS`.
    pub metric: String,
    /// Metadata key of the reference.
    #[serde(default = "answer_key")]
    pub reference: String,
    /// Regex whose first group is the answer within the completion; empty takes it all.
    #[serde(default = "answer_pattern")]
    pub extract: String,
}

impl TextSimilarity {
    /// Whether the metric is known.
    ///
    /// # Errors
    /// The metric and those that exist.
    pub fn check(&self) -> Result<(), Problem> {
        if METRICS.contains(&self.metric.as_str()) {
            return Ok(());
        }
        let allowed = one_of(&METRICS.map(|metric| format!("{metric:?}")));
        Err(Problem::value("metric", format!("{:?}", self.metric), &allowed))
    }
}

/// Parameters of `kind = "grader"`: an OpenAI grader, as a table of the same fields or as the JSON
/// text itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Grade {
    /// The grader.
    pub grader: Value,
}

/// The name under which a model grader asks this server's own base model.
pub const OWN_MODEL: &str = "self";

impl Grade {
    /// Whether it or a part of it is a `python` grader.
    pub fn runs_python(&self) -> bool {
        self.parts().iter().any(|part| kind(part) == "python")
    }

    /// The models that it or its parts ask.
    pub fn models(&self) -> Vec<String> {
        let asks = |part: &Value| ["score_model", "label_model"].contains(&kind(part));
        let model = |part: &Value| Some(part.get("model")?.as_str()?.to_owned());
        self.parts().iter().filter(|part| asks(part)).filter_map(model).collect()
    }

    /// The grader and, of a `multi` grader, its parts.
    fn parts(&self) -> Vec<Value> {
        let whole = match &self.grader {
            Value::String(text) => serde_json::from_str(text).unwrap_or_default(),
            grader => grader.clone(),
        };
        let mut parts: Vec<Value> = match whole.get("graders") {
            Some(Value::Object(map)) => map.values().cloned().collect(),
            Some(Value::Array(list)) => list.clone(),
            _ => Vec::new(),
        };
        parts.push(whole);
        parts
    }
}

fn kind(grader: &Value) -> &str {
    grader.get("type").and_then(Value::as_str).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn python_is_found_by_type_and_not_by_word() {
        let code = json!({"type": "python", "name": "p", "source": "def grade(a, b): return 1"});
        let words = json!({"type": "score_model", "input": [{"content": "Is it good python?"}]});
        for (grader, found) in [
            (code.clone(), true),
            (Value::String(code.to_string()), true),
            (json!({"type": "multi", "graders": {"a": words, "b": code}}), true),
            (json!({"type": "multi", "graders": [words]}), false),
            (words, false),
        ] {
            assert_eq!(Grade { grader: grader.clone() }.runs_python(), found, "{grader}");
        }
    }
}
