//! OpenAI's graders: the JSON of fine-tuning and evals, accepted as it is.
//!
//! `schema` reads the JSON; `template` fills `{{ item.* }}` and `{{ sample.* }}` in; `formula`
//! computes what a `multi` grader makes of its parts; `run` grades; `outcome` is what comes out, in
//! the shape of `POST /v1/fine_tuning/alpha/graders/run`; `backend` is what judges and sandboxes
//! implement.
//!
//! Invariants: a grade is finite or missing, and a missing one has a flag among the errors; what
//! could be found wrong without a sample is found by [`Grader::new`].
//!
//! Where hone differs from OpenAI: what cannot be graded is missing, where OpenAI counts 0
//! (a judge's answer without a score, failing code, a sample without what a template asks for);
//! `cosine` compares words, see [`text::cosine`](super::text::cosine); images and audio are
//! refused; `image_tag` and `pass_threshold` are accepted and do not change the grade.

mod backend;
mod formula;
mod outcome;
mod read;
mod run;
mod schema;
mod template;

use std::collections::BTreeMap;

use async_trait::async_trait;
use run::Subject;
use schema::{GraderKind, GraderSpec};
use serde_json::{Map, Value, json};

use super::{RewardFn, ScoreInput};

pub use backend::{
    Backends, CodeFailure, CodeRunner, JudgeSampling, ModelClient, ModelFailure, ModelReply,
    ModelRequest, TokenUsage,
};
pub use formula::FormulaError;
pub use outcome::{GradeErrors, GradeMetadata, GradeOutcome};
pub use read::GraderError;
pub use template::TemplateError;

/// A grader, ready to run. As a [`RewardFn`] its item is the sample's metadata, see [`item`].
///
/// The range is that of its type: 0 or 1 for `string_check` and `label_model`, 0..1 for
/// `text_similarity`, `range` (0..1 unless given) for `score_model`, any finite number for `python`
/// and `multi`. Typical weight 1 to 2.
pub struct Grader {
    spec: GraderSpec,
    backends: Backends,
}

impl Grader {
    /// Reads a grader's JSON. `at` is the path that errors put before the fields' names, as
    /// `grader` in `grader.operation`; it may be empty.
    ///
    /// # Errors
    /// Names the path, its value and what is allowed.
    pub fn new(at: &str, json: &Value, backends: Backends) -> Result<Self, GraderError> {
        Ok(Self { spec: schema::read(at, json)?, backends })
    }

    /// Its name; its type where the JSON gives none.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Whether it asks [`Backends::model`].
    pub fn needs_model(&self) -> bool {
        self.any(|kind| {
            matches!(kind, GraderKind::ScoreModel { .. } | GraderKind::LabelModel { .. })
        })
    }

    /// Whether it asks [`Backends::code`].
    pub fn needs_code(&self) -> bool {
        self.any(|kind| matches!(kind, GraderKind::Python { .. }))
    }

    fn any(&self, wanted: impl Fn(&GraderKind) -> bool) -> bool {
        match &self.spec.kind {
            GraderKind::Multi { parts, .. } => parts.iter().any(|part| wanted(&part.kind)),
            kind => wanted(kind),
        }
    }

    /// Grades one sample, a value of [`sample`], for an item, an object.
    pub async fn run(&self, sample: &Value, item: &Value) -> GradeOutcome {
        run::run(&self.spec, &self.backends, Subject { item, sample }).await
    }
}

#[async_trait]
impl RewardFn for Grader {
    async fn score(&self, samples: &[ScoreInput]) -> Vec<Option<f64>> {
        let one = async |input: &ScoreInput| {
            let outcome = self.run(&sample(&input.text, Vec::new()), &item(&input.metadata)).await;
            if outcome.metadata.errors.any() {
                tracing::debug!(grader = self.name(), errors = ?outcome.metadata.errors, "graded with errors");
            }
            outcome.reward
        };
        futures::future::join_all(samples.iter().map(one)).await
    }
}

/// The `sample` namespace of a completion: `output_text`; `output_json` where the text is valid
/// JSON; `output_tools`, the tool calls as in a chat completion; `choices` with the one choice.
pub fn sample(text: &str, tool_calls: Vec<Value>) -> Value {
    let mut message = json!({"role": "assistant", "content": text});
    if !tool_calls.is_empty() {
        message["tool_calls"] = Value::Array(tool_calls.clone());
    }
    let mut sample = json!({
        "output_text": text,
        "output_tools": tool_calls,
        "choices": [{"index": 0, "message": message}],
    });
    if let Ok(parsed) = serde_json::from_str(text) {
        sample["output_json"] = parsed;
    }
    sample
}

/// The `item` namespace of a request's metadata or a dataset's row.
///
/// Metadata are strings. One that is a JSON object or array becomes that, so that paths lead into
/// it; one that is a number or a boolean becomes it only if it is written as JSON would write it,
/// so that a template gives back exactly what stood there (`1.50` and `007` stay strings).
pub fn item(metadata: &BTreeMap<String, String>) -> Value {
    let value = |text: &String| {
        let parsed: Value = serde_json::from_str(text).unwrap_or_default();
        let written = match &parsed {
            Value::Object(_) | Value::Array(_) => return parsed,
            Value::Number(_) | Value::Bool(_) => parsed.to_string(),
            _ => return Value::String(text.clone()),
        };
        if written == *text { parsed } else { Value::String(text.clone()) }
    };
    let fields = metadata.iter().map(|(key, text)| (key.clone(), value(text)));
    Value::Object(fields.collect::<Map<_, _>>())
}

#[cfg(test)]
mod tests;
