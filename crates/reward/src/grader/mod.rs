//! OpenAI's graders, in the unmodified JSON of fine-tuning and evals.
//!
//! `schema` reads the JSON, `template` renders `{{ item.* }}` and `{{ sample.* }}`, `formula`
//! combines the parts of a `multi` grader, `run` grades, and `outcome` is the response of
//! `POST /v1/fine_tuning/alpha/graders/run`. Judges and sandboxes implement the traits of `backend`.
//! A run is one future on the caller's task; the parts of a `multi` grader run concurrently in it.
//!
//! Callers may rely on this: a grade is finite or missing, a missing grade sets an error flag, and
//! [`Grader::new`] finds every error that does not depend on a sample.
//!
//! Differences from OpenAI: a sample that cannot be graded has a missing value instead of 0 (a
//! judge's answer without a score, failing code, an item without a value of a template); `cosine`
//! compares words, see [`text::cosine`](crate::text::cosine); images and audio are refused;
//! `image_tag` and `pass_threshold` are accepted and do not change the grade.

mod backend;
mod formula;
mod outcome;
mod read;
mod run;
mod schema;
mod template;

use std::collections::{BTreeMap, BTreeSet};

use async_trait::async_trait;
use run::GradeInput;
use schema::{GraderKind, GraderSpec};
use serde_json::{Map, Value, json};

use crate::{RewardFn, ScoreInput};

pub use backend::{
    Backends, CodeFailure, CodeRunner, GraderSampling, ModelClient, ModelFailure, ModelReply,
    ModelRequest, TokenUsage,
};
pub use formula::FormulaError;
pub use outcome::{GradeErrors, GradeMetadata, GradeOutcome};
pub use read::GraderError;
pub use template::TemplateError;

/// A grader that is ready to run. As a [`RewardFn`] it uses the sample's metadata as [`item`].
///
/// Range by type: 0 or 1 for `string_check` and `label_model`, 0 to 1 for `text_similarity`, `range`
/// (default 0 to 1) for `score_model`, any finite number for `python` and `multi`. Typical weight 1
/// to 2.
pub struct Grader {
    spec: GraderSpec,
    backends: Backends,
}

impl Grader {
    /// Reads a grader's JSON. Errors prefix field names with the path `at`, as in
    /// `grader.operation`; it may be empty.
    ///
    /// # Errors
    /// The first error, with the field's path, its value and the allowed values.
    pub fn new(at: &str, json: &Value, backends: Backends) -> Result<Self, GraderError> {
        Ok(Self { spec: schema::read(at, json)?, backends })
    }

    /// Its name; its type if the JSON has no name.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Whether it uses [`Backends::model`].
    pub fn needs_model(&self) -> bool {
        self.any(|kind| {
            matches!(kind, GraderKind::ScoreModel { .. } | GraderKind::LabelModel { .. })
        })
    }

    /// Whether it uses [`Backends::code`].
    pub fn needs_code(&self) -> bool {
        self.any(|kind| matches!(kind, GraderKind::Python { .. }))
    }

    /// The names of the models that it asks.
    pub fn models<'a>(&'a self) -> BTreeSet<&'a str> {
        let asked = |kind: &'a GraderKind| match kind {
            GraderKind::ScoreModel { prompt, .. } | GraderKind::LabelModel { prompt, .. } => {
                Some(prompt.model.as_str())
            }
            _ => None,
        };
        self.kinds().into_iter().filter_map(asked).collect()
    }

    /// Limits the tokens of each answer of a model, also where the grader sets no limit.
    ///
    /// # Errors
    /// A limit of the grader that is greater than `most`.
    pub fn limit_tokens(&mut self, most: u32) -> Result<(), u32> {
        let kinds = match &mut self.spec.kind {
            GraderKind::Multi { parts, .. } => {
                parts.iter_mut().map(|part| &mut part.kind).collect()
            }
            kind => vec![kind],
        };
        for kind in kinds {
            if let GraderKind::ScoreModel { prompt, .. } | GraderKind::LabelModel { prompt, .. } =
                kind
            {
                let limit = prompt.sampling.max_tokens.get_or_insert(most);
                if *limit > most {
                    return Err(*limit);
                }
            }
        }
        Ok(())
    }

    fn any(&self, wanted: impl Fn(&GraderKind) -> bool) -> bool {
        self.kinds().into_iter().any(wanted)
    }

    fn kinds(&self) -> Vec<&GraderKind> {
        match &self.spec.kind {
            GraderKind::Multi { parts, .. } => parts.iter().map(|part| &part.kind).collect(),
            kind => vec![kind],
        }
    }

    /// Grades one sample; `sample` is a value of [`sample`](fn@sample), `item` an object.
    pub async fn run(&self, sample: &Value, item: &Value) -> GradeOutcome {
        run::run(&self.spec, GradeInput { backends: &self.backends, item, sample }).await
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

/// The `sample` namespace of a completion: `output_text`; `output_json` if the text is valid JSON;
/// `output_tools`, the tool calls as in a chat completion; `choices` with the one choice.
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
/// Metadata are strings. A string that contains a JSON object or array becomes that value, so that
/// paths can select within it. A number or boolean is converted only if it is in JSON's canonical
/// form, so that a template renders the original text (`1.50` and `007` stay strings).
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
