//! Runs a grader on one sample.

use std::time::Instant;

use serde_json::{Value, json};

use hone_core::types::Message;

use super::backend::{Backends, CodeFailure, ModelFailure, ModelRequest};
use super::outcome::{GradeFault, GradeOutcome};
use super::schema::{GraderKind, GraderPrompt, GraderSpec, StringOperation};
use super::template::Template;

/// The backends of a run, and the values of the two template namespaces.
#[derive(Clone, Copy)]
pub(super) struct GradeInput<'a> {
    pub(super) backends: &'a Backends,
    pub(super) item: &'a Value,
    pub(super) sample: &'a Value,
}

/// Runs a grader; the parts of a `multi` grader run concurrently.
pub(super) async fn run(spec: &GraderSpec, input: GradeInput<'_>) -> GradeOutcome {
    let start = Instant::now();
    let mut outcome = GradeOutcome::new(&spec.name, spec.type_name);
    if let GraderKind::Multi { parts, formula } = &spec.kind {
        let runs = parts.iter().map(|part| input.run_single(part));
        let runs = futures::future::join_all(runs).await;
        let values: Vec<Option<f64>> = runs.iter().map(|run| run.reward).collect();
        for (part, run) in parts.iter().zip(runs) {
            outcome.add_part(&part.name, run);
        }
        outcome.set_grade(formula.evaluate(&values).map_err(GradeFault::from));
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
                Ok(f64::from(u8::from(operation.holds(&input, &reference))))
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
                Ok(f64::from(u8::from(passing.contains(label))))
            }
            GraderKind::Python { source } => {
                let none = || GradeFault::CodeServer("no sandbox is configured".to_owned());
                let code = self.backends.code.as_ref().ok_or_else(none)?;
                match code.grade(source, self.sample, self.item).await {
                    Ok(value) if value.is_finite() => Ok(value),
                    Ok(value) => {
                        let text = format!("grade returned {value}, not a finite number");
                        Err(GradeFault::CodeRuntime(text))
                    }
                    Err(CodeFailure::Server(kind)) => Err(GradeFault::CodeServer(kind)),
                    Err(CodeFailure::Runtime(text)) => Err(GradeFault::CodeRuntime(text)),
                }
            }
            // The schema refuses a `multi` grader as a part of another.
            GraderKind::Multi { .. } => {
                Err(GradeFault::CodeServer("a multi grader cannot be a part".to_owned()))
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
        let none = || GradeFault::ModelServer("no judge is configured".to_owned());
        let model = self.backends.model.as_ref().ok_or_else(none)?;
        let request = ModelRequest {
            model: prompt.model.clone(),
            messages,
            sampling: prompt.sampling.clone(),
            response_format,
        };
        match model.complete(&request).await {
            Ok(reply) => {
                outcome.add_reply(&reply);
                Ok(reply.text)
            }
            Err(ModelFailure::Server(text)) => Err(GradeFault::ModelServer(text)),
            Err(ModelFailure::Refusal(text)) => Err(GradeFault::ModelRefusal(text)),
        }
    }
}

impl StringOperation {
    fn holds(self, input: &str, reference: &str) -> bool {
        match self {
            Self::Equal => input == reference,
            Self::NotEqual => input != reference,
            Self::Contains => input.contains(reference),
            Self::ContainsIgnoringCase => input.to_lowercase().contains(&reference.to_lowercase()),
        }
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
