//! OpenAI's graders, in the unmodified JSON of fine-tuning and evals.
//!
//! `schema` reads the JSON, `template` renders `{{ item.* }}` and `{{ sample.* }}`, `formula`
//! combines the parts of a `multi` grader, [`Grader`] grades, and `outcome` is the response of
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
mod schema;
mod template;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use async_trait::async_trait;
use serde_json::{Map, Value, json};

use hone_core::config::Problem;
use hone_core::types::Message;

use crate::reward_fn::indicator;
use crate::{RewardFn, ScoreInput};
use outcome::GradeFault;
use schema::{GraderKind, GraderPrompt, GraderSpec};
use template::Template;

pub use backend::{
    Backends, CodeFailure, CodeRunner, GraderSampling, ModelClient, ModelFailure, ModelReply,
    ModelRequest, TokenUsage,
};
pub use outcome::{GradeErrors, GradeMetadata, GradeOutcome};

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
    pub fn new(at: &str, json: &Value, backends: Backends) -> Result<Self, Problem> {
        Ok(Self { spec: schema::read(at, json)?, backends })
    }

    /// Its name; its type if the JSON has no name.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Whether it uses [`Backends::code`].
    pub fn needs_code(&self) -> bool {
        self.spec.single().iter().any(|spec| matches!(spec.kind, GraderKind::Python { .. }))
    }

    /// The names of the models that it asks, by [`Backends::model`].
    pub fn models(&self) -> BTreeSet<&str> {
        let prompts = self.spec.single().iter().filter_map(GraderSpec::prompt);
        prompts.map(|prompt| prompt.model.as_str()).collect()
    }

    /// Limits the tokens of each answer of a model, also where the grader sets no limit.
    ///
    /// # Errors
    /// A limit of the grader that is greater than `most`.
    pub fn limit_tokens(&mut self, most: u32) -> Result<(), u32> {
        let single = match &mut self.spec.kind {
            GraderKind::Multi { parts, .. } => parts.as_mut_slice(),
            _ => std::slice::from_mut(&mut self.spec),
        };
        for spec in single {
            if let GraderKind::ScoreModel { prompt, .. } | GraderKind::LabelModel { prompt, .. } =
                &mut spec.kind
            {
                let limit = prompt.sampling.max_tokens.get_or_insert(most);
                if *limit > most {
                    return Err(*limit);
                }
            }
        }
        Ok(())
    }

    /// Grades one sample; `sample` is a value of [`sample`](fn@sample), `item` an object.
    pub async fn run(&self, sample: &Value, item: &Value) -> GradeOutcome {
        run(&self.spec, GradeInput { backends: &self.backends, item, sample }).await
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

/// The backends of a run, and the values of the two template namespaces.
#[derive(Clone, Copy)]
struct GradeInput<'a> {
    backends: &'a Backends,
    item: &'a Value,
    sample: &'a Value,
}

/// Runs a grader; the parts of a `multi` grader run concurrently.
async fn run(spec: &GraderSpec, input: GradeInput<'_>) -> GradeOutcome {
    let start = Instant::now();
    let mut outcome = GradeOutcome::new(&spec.name, spec.type_name);
    if let GraderKind::Multi { parts, formula } = &spec.kind {
        let runs = parts.iter().map(|part| input.run_single(part));
        let runs = futures::future::join_all(runs).await;
        let values: Vec<Option<f64>> = runs.iter().map(|run| run.reward).collect();
        for (part, run) in parts.iter().zip(runs) {
            outcome.add_part(&part.name, run);
        }
        outcome.set_grade(formula.evaluate(&values).map_err(GradeFault::Formula));
    } else {
        outcome = input.run_single(spec).await;
    }
    outcome.metadata.execution_time = start.elapsed().as_secs_f64();
    outcome
}

impl GradeInput<'_> {
    async fn run_single(self, spec: &GraderSpec) -> GradeOutcome {
        let mut outcome = GradeOutcome::new(&spec.name, spec.type_name);
        let grade = self.grade(&spec.kind, &mut outcome).await;
        outcome.set_grade(grade);
        outcome
    }

    async fn grade(self, kind: &GraderKind, outcome: &mut GradeOutcome) -> Result<f64, GradeFault> {
        match kind {
            GraderKind::StringCheck { input, reference, operation } => {
                let (input, reference) = (self.fill(input)?, self.fill(reference)?);
                Ok(indicator(operation(&input, &reference)))
            }
            GraderKind::TextSimilarity { input, reference, metric } => {
                Ok(metric.score(&self.fill(input)?, &self.fill(reference)?))
            }
            GraderKind::ScoreModel { prompt, range: (low, high) } => {
                let format = format("score", json!({"type": "number"}));
                let text = self.ask(prompt, format, outcome).await?;
                let score = score(&text).ok_or(GradeFault::ModelParse(text))?;
                Ok(score.clamp(*low, *high))
            }
            GraderKind::LabelModel { prompt, labels, passing } => {
                let format = format("label", json!({"type": "string", "enum": labels}));
                let text = self.ask(prompt, format, outcome).await?;
                let label = label(&text, labels).ok_or(GradeFault::ModelParse(text))?;
                Ok(indicator(passing.contains(label)))
            }
            GraderKind::Python { source } => {
                let none = || CodeFailure::Server("no sandbox is configured".to_owned());
                let code = self.backends.code.as_ref().ok_or_else(none)?;
                let value = code.grade(source, self.sample, self.item).await?;
                if value.is_finite() {
                    return Ok(value);
                }
                let text = format!("grade returned {value}, not a finite number");
                Err(CodeFailure::Runtime(text).into())
            }
            // The schema refuses a `multi` grader as a part of another.
            GraderKind::Multi { .. } => {
                Err(CodeFailure::Server("a multi grader cannot be a part".to_owned()).into())
            }
        }
    }

    fn fill(self, template: &Template) -> Result<String, GradeFault> {
        Ok(template.render(self.item, self.sample)?)
    }

    /// Asks the judge and returns the text of its answer.
    async fn ask(
        self,
        prompt: &GraderPrompt,
        response_format: Value,
        outcome: &mut GradeOutcome,
    ) -> Result<String, GradeFault> {
        let fill = |(role, template): &(_, Template)| Ok(Message::new(*role, self.fill(template)?));
        let messages = prompt.messages.iter().map(fill).collect::<Result<_, GradeFault>>()?;
        let none = || ModelFailure::Server("no judge is configured".to_owned());
        let model = self.backends.model.as_ref().ok_or_else(none)?;
        let request = ModelRequest {
            model: prompt.model.clone(),
            messages,
            sampling: prompt.sampling.clone(),
            response_format,
        };
        let reply = model.complete(&request).await?;
        outcome.add_reply(&reply);
        Ok(reply.text)
    }
}

/// The `response_format` of a model grader's answer: reasoning steps, then the result.
fn format(name: &str, result: Value) -> Value {
    let text = json!({"type": "string"});
    let step = json!({
        "type": "object",
        "properties": {"description": text, "conclusion": text},
        "required": ["description", "conclusion"],
        "additionalProperties": false,
    });
    json!({"type": "json_schema", "json_schema": {"name": name, "strict": true, "schema": {
        "type": "object",
        "properties": {"steps": {"type": "array", "items": step}, "result": result},
        "required": ["steps", "result"],
        "additionalProperties": false,
    }}})
}

/// The result in an answer: that of `{"result": ...}`, fenced or not, or the whole answer.
fn result(text: &str) -> Value {
    let text = text.trim();
    let fenced = text.strip_prefix("```json").or_else(|| text.strip_prefix("```"));
    let inside = fenced.and_then(|rest| rest.strip_suffix("```")).unwrap_or(text).trim();
    match serde_json::from_str(inside) {
        Ok(Value::Object(mut map)) => map.remove("result").unwrap_or(Value::Null),
        Ok(other) => other,
        Err(_) => Value::String(inside.to_owned()),
    }
}

/// The score in a judge's answer; `None` if the result is not a finite number.
fn score(text: &str) -> Option<f64> {
    let number = match result(text) {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => text.trim().parse().ok(),
        _ => None,
    };
    number.filter(|number| number.is_finite())
}

/// The label in a judge's answer; `None` if the result is not one of `labels`.
fn label<'l>(text: &str, labels: &'l [String]) -> Option<&'l String> {
    let given = match result(text) {
        Value::String(text) => text,
        // Labels such as `1` or `true`, unquoted.
        other @ (Value::Number(_) | Value::Bool(_)) => other.to_string(),
        _ => return None,
    };
    labels.iter().find(|label| *label == given.trim())
}

#[cfg(test)]
mod tests;
