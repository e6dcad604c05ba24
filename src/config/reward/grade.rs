//! Parameters of the rewards that OpenAI's graders have: `text_similarity` and `grader`.

use serde::{Deserialize, Serialize};

use super::{answer_key, answer_pattern};
use crate::config::describe::{Problem, one_of};

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
    pub grader: serde_json::Value,
}
