//! Running a grader on one sample.

use std::time::Instant;

use serde_json::{Value, json};

use hone_core::types::Message;

use super::backend::{Backends, CodeFailure, ModelFailure, ModelRequest};
use super::outcome::{Fault, GradeOutcome};
use super::schema::{GraderKind, GraderPrompt, GraderSpec, Operation};
use super::template::Template;

/// What graders look at: the two namespaces of templates.
#[derive(Clone, Copy)]
pub(super) struct Subject<'a> {
    pub(super) item: &'a Value,
    pub(super) sample: &'a Value,
}

pub(super) async fn run(
    spec: &GraderSpec,
    backends: &Backends,
    subject: Subject<'_>,
) -> GradeOutcome {
    let started = Instant::now();
    let mut outcome = GradeOutcome::new(&spec.name, spec.kind.name());
    if let GraderKind::Multi { parts, formula } = &spec.kind {
        let runs = parts.iter().map(|part| single(part, backends, subject));
        let runs = futures::future::join_all(runs).await;
        let values: Vec<Option<f64>> = runs.iter().map(|run| run.reward).collect();
        for (part, run) in parts.iter().zip(runs) {
            outcome.absorb(&part.name, run);
        }
        outcome.settle(formula.evaluate(&values).map_err(Fault::Formula));
    } else {
        outcome = single(spec, backends, subject).await;
    }
    outcome.metadata.execution_time = started.elapsed().as_secs_f64();
    outcome
}

async fn single(spec: &GraderSpec, backends: &Backends, subject: Subject<'_>) -> GradeOutcome {
    let mut outcome = GradeOutcome::new(&spec.name, spec.kind.name());
    let grade = grade(&spec.kind, backends, subject, &mut outcome).await;
    outcome.settle(grade);
    outcome
}

async fn grade(
    kind: &GraderKind,
    backends: &Backends,
    subject: Subject<'_>,
    outcome: &mut GradeOutcome,
) -> Result<f64, Fault> {
    match kind {
        GraderKind::StringCheck { input, reference, operation } => {
            let (input, reference) = (fill(input, subject)?, fill(reference, subject)?);
            Ok(f64::from(u8::from(operation.holds(&input, &reference))))
        }
        GraderKind::TextSimilarity { input, reference, metric } => {
            Ok(metric.score(&fill(input, subject)?, &fill(reference, subject)?))
        }
        GraderKind::ScoreModel { prompt, range: (low, high) } => {
            let text = ask(prompt, score_format(), backends, subject, outcome).await?;
            let score = score(&text).ok_or(Fault::ModelParse(text))?;
            Ok(score.clamp(*low, *high))
        }
        GraderKind::LabelModel { prompt, labels, passing } => {
            let text = ask(prompt, label_format(labels), backends, subject, outcome).await?;
            let label = label(&text, labels).ok_or(Fault::ModelParse(text))?;
            Ok(f64::from(u8::from(passing.contains(label))))
        }
        GraderKind::Python { source } => {
            let none = || Fault::CodeServer("no sandbox is configured".to_owned());
            let code = backends.code.as_ref().ok_or_else(none)?;
            match code.grade(source, subject.sample, subject.item).await {
                Ok(value) if value.is_finite() => Ok(value),
                Ok(value) => {
                    Err(Fault::CodeRuntime(format!("grade returned {value}, not a finite number")))
                }
                Err(CodeFailure::Server(kind)) => Err(Fault::CodeServer(kind)),
                Err(CodeFailure::Runtime(text)) => Err(Fault::CodeRuntime(text)),
            }
        }
        // The schema lets no multi grader be a part of another.
        GraderKind::Multi { .. } => Err(Fault::CodeServer("a multi grader is no part".to_owned())),
    }
}

fn fill(template: &Template, subject: Subject<'_>) -> Result<String, Fault> {
    template.render(subject.item, subject.sample).map_err(Fault::Render)
}

impl Operation {
    fn holds(self, input: &str, reference: &str) -> bool {
        match self {
            Self::Equal => input == reference,
            Self::NotEqual => input != reference,
            Self::Contains => input.contains(reference),
            Self::ContainsIgnoringCase => input.to_lowercase().contains(&reference.to_lowercase()),
        }
    }
}

async fn ask(
    prompt: &GraderPrompt,
    response_format: Value,
    backends: &Backends,
    subject: Subject<'_>,
    outcome: &mut GradeOutcome,
) -> Result<String, Fault> {
    let fill = |(role, template): &(_, Template)| {
        Ok(Message { role: *role, content: fill(template, subject)? })
    };
    let messages = prompt.messages.iter().map(fill).collect::<Result<_, Fault>>()?;
    let none = || Fault::ModelServer("no judge is configured".to_owned());
    let model = backends.model.as_ref().ok_or_else(none)?;
    let request = ModelRequest {
        model: prompt.model.clone(),
        messages,
        sampling: prompt.sampling.clone(),
        response_format,
    };
    match model.complete(&request).await {
        Ok(reply) => {
            outcome.count(&reply);
            Ok(reply.text)
        }
        Err(ModelFailure::Server(text)) => Err(Fault::ModelServer(text)),
        Err(ModelFailure::Refusal(text)) => Err(Fault::ModelRefusal(text)),
    }
}

fn score_format() -> Value {
    format("score", json!({"type": "number"}))
}

fn label_format(labels: &[String]) -> Value {
    format("label", json!({"type": "string", "enum": labels}))
}

/// OpenAI's answer of a model grader: the reasoning's steps, then the result.
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

/// What the answer gives as its result: `{"result": ...}`, fenced or not, or all of it.
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

/// The score in a judge's answer; `None` where it has no finite number for a result.
fn score(text: &str) -> Option<f64> {
    let number = match result(text) {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => text.trim().parse().ok(),
        _ => None,
    };
    number.filter(|number| number.is_finite())
}

/// The label in a judge's answer; `None` where its result is none of them.
fn label<'l>(text: &str, labels: &'l [String]) -> Option<&'l String> {
    let given = match result(text) {
        Value::String(text) => text,
        // Labels such as `1` or `true`, unquoted.
        other @ (Value::Number(_) | Value::Bool(_)) => other.to_string(),
        _ => return None,
    };
    labels.iter().find(|label| *label == given.trim())
}
