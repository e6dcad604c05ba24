//! OpenAI's grader JSON, read into types.

use std::collections::BTreeMap;

use serde_json::Value;

use hone_core::config::Problem;
use hone_core::text::shortened;
use hone_core::types::Role;

use super::backend::GraderSampling;
use super::formula::Formula;
use super::read::{GraderObject, SHOWN, wrong};
use super::template::Template;
use crate::text::Metric;

/// Maximum length of a `python` grader's source in bytes.
pub const LONGEST_CODE: usize = 256 * 1024;
/// Maximum number of parts of a `multi` grader.
pub const MOST_PARTS: usize = 64;
/// Maximum number of messages of a model grader.
const MOST_MESSAGES: usize = 64;
/// Maximum length of a name in characters.
const NAME_CHARS: usize = 256;

type ReadKind = fn(GraderObject<'_>) -> Result<GraderKind, Problem>;

/// Every grader type, with its fields and the function that reads them.
const TYPES: [(&str, (&str, ReadKind)); 6] = [
    ("string_check", ("type name input reference operation", string_check)),
    ("text_similarity", (SIMILARITY_FIELDS, text_similarity)),
    ("score_model", ("type name input model range sampling_params pass_threshold", score_model)),
    ("label_model", ("type name input model labels passing_labels sampling_params", label_model)),
    ("python", ("type name source image_tag", python)),
    ("multi", ("type name graders calculate_output", multi)),
];
const SIMILARITY_FIELDS: &str = "type name input reference evaluation_metric pass_threshold";

/// A valid grader.
#[derive(Clone, Debug)]
pub(super) struct GraderSpec {
    pub(super) name: String,
    /// OpenAI's name of the type.
    pub(super) type_name: &'static str,
    pub(super) kind: GraderKind,
}

#[derive(Clone, Debug)]
pub(super) enum GraderKind {
    StringCheck { input: Template, reference: Template, operation: StringOperation },
    TextSimilarity { input: Template, reference: Template, metric: Metric },
    ScoreModel { prompt: GraderPrompt, range: (f64, f64) },
    LabelModel { prompt: GraderPrompt, labels: Vec<String>, passing: Vec<String> },
    Python { source: String },
    Multi { parts: Vec<GraderSpec>, formula: Formula },
}

/// Whether the input fits the reference.
pub(super) type StringOperation = fn(&str, &str) -> bool;

/// The question of a model grader.
#[derive(Clone, Debug)]
pub(super) struct GraderPrompt {
    pub(super) model: String,
    pub(super) messages: Vec<(Role, Template)>,
    pub(super) sampling: GraderSampling,
}

impl GraderSpec {
    /// The graders that compute: the parts of a `multi` grader, else the grader itself.
    pub(super) fn single(&self) -> &[Self] {
        match &self.kind {
            GraderKind::Multi { parts, .. } => parts,
            _ => std::slice::from_ref(self),
        }
    }

    /// The question to a model, if it asks one.
    pub(super) fn prompt(&self) -> Option<&GraderPrompt> {
        match &self.kind {
            GraderKind::ScoreModel { prompt, .. } | GraderKind::LabelModel { prompt, .. } => {
                Some(prompt)
            }
            _ => None,
        }
    }
}

/// Reads the grader at a path.
pub(super) fn read(at: &str, value: &Value) -> Result<GraderSpec, Problem> {
    let object = GraderObject::new(at, value)?;
    let (type_name, (fields, read_kind)) = object.choice("type", &TYPES)?;
    object.only(type_name, fields)?;
    let kind = read_kind(object)?;
    // Examples in OpenAI's guide omit the name.
    let name = name(object)?.unwrap_or_else(|| type_name.to_owned());
    Ok(GraderSpec { name, type_name, kind })
}

fn name(object: GraderObject<'_>) -> Result<Option<String>, Problem> {
    let Some(_) = object.get("name") else { return Ok(None) };
    let name = object.text("name")?;
    if name.is_empty() || name.chars().count() > NAME_CHARS {
        return Err(object.wrong("name", format_args!("1 to {NAME_CHARS} characters long")));
    }
    Ok(Some(name.to_owned()))
}

fn string_check(object: GraderObject<'_>) -> Result<GraderKind, Problem> {
    let unequal: StringOperation = |input, reference| input != reference;
    let operations: [(&str, StringOperation); 5] = [
        ("eq", |input, reference| input == reference),
        ("ne", unequal),
        ("like", |input, reference| input.contains(reference)),
        ("ilike", |input, reference| input.to_lowercase().contains(&reference.to_lowercase())),
        // OpenAI's guide has `neq` in its table and `ne` in its schema.
        ("neq", unequal),
    ];
    let (_, operation) = object.choice("operation", &operations)?;
    let (input, reference) = (object.template("input")?, object.template("reference")?);
    Ok(GraderKind::StringCheck { input, reference, operation })
}

fn text_similarity(object: GraderObject<'_>) -> Result<GraderKind, Problem> {
    pass_threshold(object)?;
    let (_, metric) = object.choice("evaluation_metric", &Metric::ALL)?;
    let (input, reference) = (object.template("input")?, object.template("reference")?);
    Ok(GraderKind::TextSimilarity { input, reference, metric })
}

fn score_model(object: GraderObject<'_>) -> Result<GraderKind, Problem> {
    pass_threshold(object)?;
    Ok(GraderKind::ScoreModel { prompt: prompt(object)?, range: range(object)? })
}

fn label_model(object: GraderObject<'_>) -> Result<GraderKind, Problem> {
    let (labels, passing) = (object.words("labels")?, object.words("passing_labels")?);
    if !passing.iter().all(|label| labels.contains(label)) {
        let allowed = format!("a list of some of the labels {}", labels.join(", "));
        return Err(object.wrong("passing_labels", allowed));
    }
    Ok(GraderKind::LabelModel { prompt: prompt(object)?, labels, passing })
}

fn python(object: GraderObject<'_>) -> Result<GraderKind, Problem> {
    // The sandbox has one fixed set of packages; the tag is accepted and ignored.
    object.get("image_tag").map(|_| object.text("image_tag")).transpose()?;
    let source = object.text("source")?;
    if source.len() > LONGEST_CODE || !source.contains("grade") {
        let allowed =
            format!("Python with a function grade(sample, item), at most {LONGEST_CODE} bytes");
        return Err(object.wrong("source", allowed));
    }
    Ok(GraderKind::Python { source: source.to_owned() })
}

/// Checks the grade from which evals count a sample as passed. The grade itself does not depend on it.
fn pass_threshold(object: GraderObject<'_>) -> Result<(), Problem> {
    match object.get("pass_threshold") {
        Some(value) if !value.is_number() => Err(object.wrong("pass_threshold", "a number")),
        _ => Ok(()),
    }
}

/// The range of a score; `[0, 1]` by default.
fn range(object: GraderObject<'_>) -> Result<(f64, f64), Problem> {
    let Some(value) = object.get("range") else { return Ok((0.0, 1.0)) };
    let bounds: Option<Vec<f64>> =
        value.as_array().and_then(|list| list.iter().map(Value::as_f64).collect());
    match bounds.as_deref() {
        Some([low, high]) if low < high => Ok((*low, *high)),
        _ => Err(object.wrong("range", "two numbers, the lower first")),
    }
}

fn prompt(object: GraderObject<'_>) -> Result<GraderPrompt, Problem> {
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

fn message(at: &str, value: &Value) -> Result<(Role, Template), Problem> {
    let object = GraderObject::new(at, value)?;
    object.only("model", "role content type")?;
    object.get("type").map(|_| object.choice("type", &[("message", ())])).transpose()?;
    let roles = [Role::System, Role::Developer, Role::User, Role::Assistant];
    let (_, role) = object.choice("role", &roles.map(|role| (role.as_str(), role)))?;
    let path = object.path("content");
    let text = content(&path, object.need("content", CONTENT)?, true)?;
    let error = |error| Problem::new(path, format!(": {error}"));
    Ok((role, Template::parse(&text).map_err(error)?))
}

const CONTENT: &str = "a string, a text such as {\"type\": \"input_text\", \"text\": ...}, or a list \
                       of those; images and audio are not supported";

/// Text in any of OpenAI's forms; a list of texts becomes paragraphs.
fn content(path: &str, value: &Value, list_allowed: bool) -> Result<String, Problem> {
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

/// OpenAI's guide and reference use three names for the token limit.
const LIMITS: [&str; 3] = ["max_completions_tokens", "max_completion_tokens", "max_tokens"];

fn sampling(object: GraderObject<'_>) -> Result<GraderSampling, Problem> {
    let Some(value) = object.get("sampling_params") else { return Ok(GraderSampling::default()) };
    let path = object.path("sampling_params");
    let params = GraderObject::new(&path, value)?;
    let fields = format!("temperature top_p seed reasoning_effort {}", LIMITS.join(" "));
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
    let efforts = ["none", "minimal", "low", "medium", "high", "xhigh"].map(|name| (name, ()));
    let effort =
        params.get("reasoning_effort").map(|_| params.choice("reasoning_effort", &efforts));
    Ok(GraderSampling {
        temperature: params.number("temperature", 0.0, 2.0)?,
        top_p: params.number("top_p", 0.0, 1.0)?,
        seed: params.get("seed").map(whole).transpose()?,
        max_tokens,
        reasoning_effort: effort.transpose()?.map(|(name, ())| name.to_owned()),
    })
}

fn multi(object: GraderObject<'_>) -> Result<GraderKind, Problem> {
    let parts = parts(object)?;
    let text = object.text("calculate_output")?;
    let names: Vec<&str> = parts.iter().map(|part| part.name.as_str()).collect();
    let formula = Formula::parse(text, &names).map_err(|error| {
        Problem::new(
            object.path("calculate_output"),
            format!(" is {:?}: {error}", shortened(text, SHOWN)),
        )
    })?;
    Ok(GraderKind::Multi { parts, formula })
}

/// The parts with their names in the formula: a map's keys, or the parts' own names.
fn parts(object: GraderObject<'_>) -> Result<Vec<GraderSpec>, Problem> {
    let allowed = format!("a list or an object of 1 to {MOST_PARTS} graders");
    let path = object.path("graders");
    let parts: Vec<GraderSpec> = match object.need("graders", &allowed)? {
        Value::Array(list) if (1..=MOST_PARTS).contains(&list.len()) => {
            let own = |(at, value)| named(&format!("{path}[{at}]"), value);
            list.iter().enumerate().map(own).collect::<Result<_, _>>()?
        }
        // In OpenAI's published types the field is a single grader.
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

fn named(at: &str, value: &Value) -> Result<GraderSpec, Problem> {
    GraderObject::new(at, value)?.need("name", "the name that calculate_output uses")?;
    part(at, value)
}

fn part(at: &str, value: &Value) -> Result<GraderSpec, Problem> {
    let object = GraderObject::new(at, value)?;
    if object.get("type").and_then(Value::as_str) == Some("multi") {
        let allowed = "another type than multi: a multi grader cannot hold another";
        return Err(object.wrong("type", allowed));
    }
    read(at, value)
}
