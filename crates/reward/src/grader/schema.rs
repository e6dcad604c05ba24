//! OpenAI's grader JSON as types.

use std::collections::BTreeMap;

use serde_json::Value;

use hone_core::types::Role;

use super::backend::JudgeSampling;
use super::formula::Formula;
use super::read::{Found, GraderError, Object, short, wrong};
use super::template::Template;
use crate::text::Metric;

/// Longest code of a `python` grader, in bytes.
pub const LONGEST_CODE: usize = 256 * 1024;
/// Most parts of a `multi` grader.
pub const MOST_PARTS: usize = 64;
/// Most messages of a model grader.
const MOST_MESSAGES: usize = 64;
/// Longest name, in characters.
const NAME_CHARS: usize = 256;

const TYPES: [&str; 6] =
    ["string_check", "text_similarity", "score_model", "label_model", "python", "multi"];
const MODEL_FIELDS: &[&str] =
    &["type", "name", "input", "model", "range", "sampling_params", "pass_threshold"];
const LABEL_FIELDS: &[&str] =
    &["type", "name", "input", "model", "labels", "passing_labels", "sampling_params"];

/// One grader, found right.
#[derive(Clone, Debug)]
pub(super) struct GraderSpec {
    pub(super) name: String,
    pub(super) kind: GraderKind,
}

#[derive(Clone, Debug)]
pub(super) enum GraderKind {
    StringCheck { input: Template, reference: Template, operation: Operation },
    TextSimilarity { input: Template, reference: Template, metric: Metric },
    ScoreModel { prompt: GraderPrompt, range: (f64, f64) },
    LabelModel { prompt: GraderPrompt, labels: Vec<String>, passing: Vec<String> },
    Python { source: String },
    Multi { parts: Vec<GraderSpec>, formula: Formula },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Equal,
    NotEqual,
    Contains,
    ContainsIgnoringCase,
}

/// What a model grader asks.
#[derive(Clone, Debug)]
pub(super) struct GraderPrompt {
    pub(super) model: String,
    pub(super) messages: Vec<(Role, Template)>,
    pub(super) sampling: JudgeSampling,
}

impl GraderKind {
    /// OpenAI's name of it.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::StringCheck { .. } => TYPES[0],
            Self::TextSimilarity { .. } => TYPES[1],
            Self::ScoreModel { .. } => TYPES[2],
            Self::LabelModel { .. } => TYPES[3],
            Self::Python { .. } => TYPES[4],
            Self::Multi { .. } => TYPES[5],
        }
    }
}

/// Reads the grader at a path.
pub(super) fn read(at: &str, value: &Value) -> Result<GraderSpec, GraderError> {
    let object = Object::new(at, value)?;
    let kind = TYPES[object.choice("type", &TYPES)?];
    let kind = if kind == "multi" { multi(object)? } else { single(kind, object)? };
    // The guide's own examples leave the name out.
    let name = name(object)?.unwrap_or_else(|| kind.name().to_owned());
    Ok(GraderSpec { name, kind })
}

fn name(object: Object<'_>) -> Found<String> {
    let Some(_) = object.get("name") else { return Ok(None) };
    let name = object.text("name")?;
    if name.is_empty() || name.chars().count() > NAME_CHARS {
        return Err(object.wrong("name", format_args!("1 to {NAME_CHARS} characters long")));
    }
    Ok(Some(name.to_owned()))
}

fn single(kind: &'static str, object: Object<'_>) -> Result<GraderKind, GraderError> {
    match kind {
        "string_check" => {
            object.only(kind, &["type", "name", "input", "reference", "operation"])?;
            let operation =
                match object.choice("operation", &["eq", "ne", "like", "ilike", "neq"])? {
                    0 => Operation::Equal,
                    2 => Operation::Contains,
                    3 => Operation::ContainsIgnoringCase,
                    // The guide's table says `neq` where its schema says `ne`.
                    _ => Operation::NotEqual,
                };
            let (input, reference) = (object.template("input")?, object.template("reference")?);
            Ok(GraderKind::StringCheck { input, reference, operation })
        }
        "text_similarity" => {
            let fields =
                ["type", "name", "input", "reference", "evaluation_metric", "pass_threshold"];
            object.only(kind, &fields)?;
            pass_threshold(object)?;
            let (_, metric) = Metric::ALL
                [object.choice("evaluation_metric", &Metric::ALL.map(|(name, _)| name))?];
            let (input, reference) = (object.template("input")?, object.template("reference")?);
            Ok(GraderKind::TextSimilarity { input, reference, metric })
        }
        "score_model" => {
            object.only(kind, MODEL_FIELDS)?;
            pass_threshold(object)?;
            Ok(GraderKind::ScoreModel { prompt: prompt(object)?, range: range(object)? })
        }
        "label_model" => {
            object.only(kind, LABEL_FIELDS)?;
            let (labels, passing) = (object.words("labels")?, object.words("passing_labels")?);
            if !passing.iter().all(|label| labels.contains(label)) {
                let allowed = format!("a list of some of the labels {}", labels.join(", "));
                return Err(object.wrong("passing_labels", allowed));
            }
            Ok(GraderKind::LabelModel { prompt: prompt(object)?, labels, passing })
        }
        _ => {
            object.only(kind, &["type", "name", "source", "image_tag"])?;
            // Which packages there are is the sandbox's matter; the tag is accepted, not obeyed.
            object.get("image_tag").map(|_| object.text("image_tag")).transpose()?;
            let source = object.text("source")?;
            if source.len() > LONGEST_CODE || !source.contains("grade") {
                let allowed = format!(
                    "Python with a function grade(sample, item), at most {LONGEST_CODE} bytes"
                );
                return Err(object.wrong("source", allowed));
            }
            Ok(GraderKind::Python { source: source.to_owned() })
        }
    }
}

/// Evals call a sample passed from here on; the grade itself does not depend on it, so it is
/// checked and not applied.
fn pass_threshold(object: Object<'_>) -> Result<(), GraderError> {
    match object.get("pass_threshold") {
        Some(value) if !value.is_number() => Err(object.wrong("pass_threshold", "a number")),
        _ => Ok(()),
    }
}

/// `[0, 1]` unless given.
fn range(object: Object<'_>) -> Result<(f64, f64), GraderError> {
    let Some(value) = object.get("range") else { return Ok((0.0, 1.0)) };
    let bounds: Option<Vec<f64>> =
        value.as_array().and_then(|list| list.iter().map(Value::as_f64).collect());
    match bounds.as_deref() {
        Some([low, high]) if low < high => Ok((*low, *high)),
        _ => Err(object.wrong("range", "two numbers, the lower first")),
    }
}

fn prompt(object: Object<'_>) -> Result<GraderPrompt, GraderError> {
    let model = object.text("model")?;
    if model.is_empty() {
        return Err(object.wrong("model", "a model's name"));
    }
    let allowed = format!("a list of 1 to {MOST_MESSAGES} messages");
    let list = object.need("input", &allowed)?.as_array();
    let list = list.filter(|list| (1..=MOST_MESSAGES).contains(&list.len()));
    let list = list.ok_or_else(|| object.wrong("input", allowed))?;
    let path = object.path("input");
    let message = |(at, value)| message(&format!("{path}[{at}]"), value);
    let messages = list.iter().enumerate().map(message).collect::<Result<_, _>>()?;
    Ok(GraderPrompt { model: model.to_owned(), messages, sampling: sampling(object)? })
}

fn message(at: &str, value: &Value) -> Result<(Role, Template), GraderError> {
    let object = Object::new(at, value)?;
    object.only("model", &["role", "content", "type"])?;
    object.get("type").map(|_| object.choice("type", &["message"])).transpose()?;
    let role = match object.choice("role", &["system", "developer", "user", "assistant"])? {
        0 => Role::System,
        1 => Role::Developer,
        2 => Role::User,
        _ => Role::Assistant,
    };
    let path = object.path("content");
    let text = content(&path, object.need("content", CONTENT)?, true)?;
    let error = |error| GraderError::Template { path, error };
    Ok((role, Template::parse(&text).map_err(error)?))
}

const CONTENT: &str = "a string, a text such as {\"type\": \"input_text\", \"text\": ...}, or a list \
                       of those; images and audio are not supported";

/// Text in any of OpenAI's forms; several texts become paragraphs.
fn content(path: &str, value: &Value, list_allowed: bool) -> Result<String, GraderError> {
    let refused = || wrong(path, value, CONTENT);
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Array(list) if list_allowed && !list.is_empty() => {
            let one = |(at, value)| content(&format!("{path}[{at}]"), value, false);
            Ok(list.iter().enumerate().map(one).collect::<Result<Vec<_>, _>>()?.join("\n\n"))
        }
        Value::Object(map) => {
            let is_text = matches!(
                map.get("type").and_then(Value::as_str),
                Some("input_text" | "output_text" | "text")
            );
            let text = map.get("text").and_then(Value::as_str).filter(|_| is_text);
            text.map(str::to_owned).ok_or_else(refused)
        }
        _ => Err(refused()),
    }
}

/// The guide and the reference name the limit of tokens in three ways.
const LIMITS: [&str; 3] = ["max_completions_tokens", "max_completion_tokens", "max_tokens"];

fn sampling(object: Object<'_>) -> Result<JudgeSampling, GraderError> {
    let Some(value) = object.get("sampling_params") else { return Ok(JudgeSampling::default()) };
    let path = object.path("sampling_params");
    let params = Object::new(&path, value)?;
    let [one, two, three] = LIMITS;
    let fields = ["temperature", "top_p", "seed", "reasoning_effort", one, two, three];
    params.only("model", &fields)?;
    let mut max_tokens = None;
    for name in LIMITS {
        let whole = |value: &Value| {
            let number = value.as_u64().and_then(|n| u32::try_from(n).ok()).filter(|n| *n > 0);
            number.ok_or_else(|| params.wrong(name, "a whole number from 1"))
        };
        max_tokens = params.get(name).map(whole).transpose()?.or(max_tokens);
    }
    let whole =
        |value: &Value| value.as_i64().ok_or_else(|| params.wrong("seed", "a whole number"));
    const EFFORTS: [&str; 6] = ["none", "minimal", "low", "medium", "high", "xhigh"];
    let effort =
        params.get("reasoning_effort").map(|_| params.choice("reasoning_effort", &EFFORTS));
    Ok(JudgeSampling {
        temperature: params.number("temperature", 0.0, 2.0)?,
        top_p: params.number("top_p", 0.0, 1.0)?,
        seed: params.get("seed").map(whole).transpose()?,
        max_tokens,
        reasoning_effort: effort.transpose()?.map(|at| EFFORTS[at].to_owned()),
    })
}

fn multi(object: Object<'_>) -> Result<GraderKind, GraderError> {
    object.only("multi", &["type", "name", "graders", "calculate_output"])?;
    let parts = parts(object)?;
    let text = object.text("calculate_output")?;
    let names: Vec<&str> = parts.iter().map(|part| part.name.as_str()).collect();
    let formula = Formula::parse(text, &names).map_err(|error| GraderError::Formula {
        path: object.path("calculate_output"),
        formula: short(text),
        error,
    })?;
    Ok(GraderKind::Multi { parts, formula })
}

/// The parts, named as the formula names them: by a map's keys, or their own names.
fn parts(object: Object<'_>) -> Result<Vec<GraderSpec>, GraderError> {
    let allowed = format!("a list or an object of 1 to {MOST_PARTS} graders");
    let path = object.path("graders");
    let parts: Vec<GraderSpec> = match object.need("graders", &allowed)? {
        Value::Array(list) if (1..=MOST_PARTS).contains(&list.len()) => {
            let own = |(at, value)| named(&format!("{path}[{at}]"), value);
            list.iter().enumerate().map(own).collect::<Result<_, _>>()?
        }
        // OpenAI's published type of the field is one grader.
        Value::Object(map) if map.get("type").is_some_and(Value::is_string) => {
            vec![named(&path, &Value::Object(map.clone()))?]
        }
        Value::Object(map) if (1..=MOST_PARTS).contains(&map.len()) => {
            let keyed = |(key, value): (&String, &Value)| {
                Ok(GraderSpec { name: key.clone(), ..part(&format!("{path}.{key}"), value)? })
            };
            map.iter().map(keyed).collect::<Result<_, _>>()?
        }
        _ => return Err(object.wrong("graders", allowed)),
    };
    let mut seen = BTreeMap::new();
    for (at, part) in parts.iter().enumerate() {
        if let Some(first) = seen.insert(&part.name, at) {
            let value = Value::String(part.name.clone());
            let allowed = format!("another than that of {path}[{first}]");
            return Err(wrong(&format!("{path}[{at}].name"), &value, allowed));
        }
    }
    Ok(parts)
}

fn named(at: &str, value: &Value) -> Result<GraderSpec, GraderError> {
    Object::new(at, value)?.need("name", "the name that calculate_output uses")?;
    part(at, value)
}

fn part(at: &str, value: &Value) -> Result<GraderSpec, GraderError> {
    let object = Object::new(at, value)?;
    if object.get("type").and_then(Value::as_str) == Some("multi") {
        let allowed = "another type than multi: a multi grader cannot hold another";
        return Err(object.wrong("type", allowed));
    }
    read(at, value)
}
