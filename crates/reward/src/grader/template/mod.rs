//! Templates: `{{ item.key }}` and `{{ sample.output_json.list[0].key }}` within text.
//!
//! Values are inserted verbatim and not parsed again, so text from a model or a dataset never acts as
//! a template. There are no filters, loops or conditions.

use serde_json::Value;

/// Maximum length of a template in bytes.
pub const LONGEST: usize = 256 * 1024;
/// Maximum number of values in a template.
pub const MOST_VALUES: usize = 256;
/// Maximum length of a rendered text in bytes.
pub const LONGEST_OUTPUT: usize = 4 * 1024 * 1024;
/// Maximum number of keys and indices of one value.
const MOST_STEPS: usize = 64;

/// The variables of a sample.
const SAMPLE: [&str; 4] = ["output_text", "output_json", "output_tools", "choices"];

/// Why a template cannot be rendered for one sample.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RenderFault {
    /// The item has no value at this path, or null.
    #[error("{0} is missing")]
    Item(String),
    /// The sample has no value at this path, or null, such as `output_json` of other text.
    #[error("{0} is missing")]
    Sample(String),
    /// The text would have more than [`LONGEST_OUTPUT`] bytes.
    #[error("the text would be longer than {LONGEST_OUTPUT} bytes")]
    TooLong,
}

/// A valid template.
#[derive(Clone, Debug)]
pub struct Template(Vec<TemplatePart>);

#[derive(Clone, Debug)]
enum TemplatePart {
    Text(String),
    Value { of_sample: bool, steps: Vec<PathStep>, path: String },
}

#[derive(Clone, Debug)]
enum PathStep {
    Key(String),
    Index(usize),
}

impl Template {
    /// Parses a template.
    /// Errors: the first error, with its position; characters are counted from 1.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.len() > LONGEST {
            let length = text.len();
            return Err(format!("the template has {length} bytes: it may have {LONGEST}"));
        }
        let (mut parts, mut rest) = (Vec::new(), text);
        while let Some((before, opened)) = rest.split_once("{{") {
            let at = text[..text.len() - opened.len() - 2].chars().count() + 1;
            let unclosed = || format!("\"{{{{\" at character {at} is never closed by \"}}}}\"");
            let (inside, after) = opened.split_once("}}").ok_or_else(unclosed)?;
            if parts.len() >= 2 * MOST_VALUES {
                return Err(format!("the template has more than {MOST_VALUES} values"));
            }
            parts.push(TemplatePart::Text(before.to_owned()));
            parts.push(value(inside).map_err(|reason| {
                let shown: String = inside.chars().take(80).collect();
                format!("{{{{{shown}}}}} at character {at} {reason}")
            })?);
            rest = after;
        }
        parts.push(TemplatePart::Text(rest.to_owned()));
        Ok(Self(parts))
    }

    /// Renders the text: strings are inserted verbatim, other values as compact JSON.
    /// Errors: if a value is missing or null, or the text is too long.
    pub fn render(&self, item: &Value, sample: &Value) -> Result<String, RenderFault> {
        let mut out = String::new();
        for part in &self.0 {
            match part {
                TemplatePart::Text(text) => out.push_str(text),
                TemplatePart::Value { of_sample, steps, path } => {
                    let space = if *of_sample { sample } else { item };
                    match steps.iter().try_fold(space, step) {
                        Some(Value::String(text)) => out.push_str(text),
                        Some(Value::Null) | None if *of_sample => {
                            return Err(RenderFault::Sample(path.clone()));
                        }
                        Some(Value::Null) | None => return Err(RenderFault::Item(path.clone())),
                        Some(other) => out.push_str(&other.to_string()),
                    }
                }
            }
            if out.len() > LONGEST_OUTPUT {
                return Err(RenderFault::TooLong);
            }
        }
        Ok(out)
    }
}

fn step<'v>(value: &'v Value, step: &PathStep) -> Option<&'v Value> {
    match step {
        PathStep::Key(key) => value.as_object()?.get(key),
        PathStep::Index(index) => value.as_array()?.get(*index),
    }
}

/// Parses `item.key[0].key`; an error is the rest of a sentence that begins "`{{...}}` at character N".
fn value(inside: &str) -> Result<TemplatePart, String> {
    let path = inside.trim();
    let end = path.find(['.', '[']).unwrap_or(path.len());
    let (space, mut rest) = path.split_at(end);
    if !matches!(space, "item" | "sample") {
        return Err("must begin with \"item.\" or \"sample.\"".to_owned());
    }
    let mut steps = Vec::new();
    while !rest.is_empty() {
        if steps.len() == MOST_STEPS {
            return Err(format!("has more than {MOST_STEPS} keys and indices"));
        }
        let (step, after) = if let Some(keyed) = rest.strip_prefix('.') {
            dotted(keyed)?
        } else if let Some(bracketed) = rest.strip_prefix('[') {
            indexed(bracketed)?
        } else {
            return Err(format!("has {rest:?} where \".\", \"[\" or \"}}}}\" is expected"));
        };
        steps.push(step);
        rest = after;
    }
    match steps.first() {
        None => Err(format!("must name a variable, as in \"{space}.key\"")),
        Some(PathStep::Key(key)) if space == "item" || SAMPLE.contains(&key.as_str()) => {
            Ok(TemplatePart::Value { of_sample: space == "sample", steps, path: path.to_owned() })
        }
        Some(PathStep::Index(_)) if space == "item" => {
            Err("must name a key of the item first, which is an object".to_owned())
        }
        Some(_) => Err(format!("is not known: a sample has {}", SAMPLE.join(", "))),
    }
}

fn dotted(rest: &str) -> Result<(PathStep, &str), String> {
    let belongs = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '$');
    let end = rest.find(|c| !belongs(c)).unwrap_or(rest.len());
    if end == 0 {
        return Err("has \".\" without a key after it".to_owned());
    }
    Ok((PathStep::Key(rest[..end].to_owned()), &rest[end..]))
}

/// An index, or a quoted key for names that are not valid after a dot.
fn indexed(rest: &str) -> Result<(PathStep, &str), String> {
    let wanted = || "has \"[\" without a number or a quoted key and \"]\" after it".to_owned();
    if let Some(quote) = rest.chars().next().filter(|c| matches!(c, '"' | '\'')) {
        let (key, after) = rest[1..].split_once(quote).ok_or_else(wanted)?;
        let after = after.strip_prefix(']').ok_or_else(wanted)?;
        return Ok((PathStep::Key(key.to_owned()), after));
    }
    let (number, after) = rest.split_once(']').ok_or_else(wanted)?;
    let digits = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
    let index = if digits { number.parse().ok() } else { None };
    Ok((PathStep::Index(index.ok_or_else(wanted)?), after))
}

#[cfg(test)]
mod tests;
