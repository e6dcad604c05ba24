//! Templates: `{{ item.key }}` and `{{ sample.output_json.list[0].key }}` within text.
//!
//! A value is put in as it is and never read again as a template, so nothing that a model or a
//! dataset says is ever a template. There are no filters, loops or conditions.

use serde_json::Value;

/// Longest template, in bytes.
pub const LONGEST: usize = 256 * 1024;
/// Most values in a template.
pub const MOST_VALUES: usize = 256;
/// Longest text that a template gives, in bytes.
pub const LONGEST_OUTPUT: usize = 4 * 1024 * 1024;
/// Most keys and indices of one value.
const MOST_STEPS: usize = 64;

/// The variables of a sample.
const SAMPLE: [&str; 4] = ["output_text", "output_json", "output_tools", "choices"];

/// What is wrong with a template; characters are counted from 1.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// More than `LONGEST` bytes.
    #[error("the template has {0} bytes: it may have {LONGEST}")]
    TooLong(usize),
    /// More than `MOST_VALUES`.
    #[error("the template has more than {MOST_VALUES} values")]
    TooManyValues,
    /// Braces that nothing closes.
    #[error("\"{{{{\" at character {0} is never closed by \"}}}}\"")]
    Unclosed(usize),
    /// What stands between the braces.
    #[error("{{{{{source_text}}}}} at character {at} {reason}")]
    Value {
        /// What stands there, shortened.
        source_text: String,
        /// Where its braces begin.
        at: usize,
        /// What is wrong with it.
        reason: String,
    },
}

/// Why a template gives no text for one sample.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RenderFault {
    /// The item has no such value, or null.
    #[error("{0} is missing")]
    Item(String),
    /// The sample has no such value, or null: as `output_json` where the text is not JSON.
    #[error("{0} is missing")]
    Sample(String),
    /// More than [`LONGEST_OUTPUT`] bytes.
    #[error("the text would be longer than {LONGEST_OUTPUT} bytes")]
    TooLong,
}

/// A template that was found right.
#[derive(Clone, Debug)]
pub struct Template(Vec<Part>);

#[derive(Clone, Debug)]
enum Part {
    Text(String),
    Value { of_sample: bool, steps: Vec<Step>, path: String },
}

#[derive(Clone, Debug)]
enum Step {
    Key(String),
    Index(usize),
}

impl Template {
    /// Reads a template.
    ///
    /// # Errors
    /// Says what is wrong and where.
    pub fn parse(text: &str) -> Result<Self, TemplateError> {
        if text.len() > LONGEST {
            return Err(TemplateError::TooLong(text.len()));
        }
        let (mut parts, mut rest) = (Vec::new(), text);
        while let Some((before, opened)) = rest.split_once("{{") {
            let at = text[..text.len() - opened.len() - 2].chars().count() + 1;
            let (inside, after) = opened.split_once("}}").ok_or(TemplateError::Unclosed(at))?;
            if parts.len() >= 2 * MOST_VALUES {
                return Err(TemplateError::TooManyValues);
            }
            parts.push(Part::Text(before.to_owned()));
            parts.push(value(inside).map_err(|reason| {
                let source_text = inside.chars().take(80).collect();
                TemplateError::Value { source_text, at, reason }
            })?);
            rest = after;
        }
        parts.push(Part::Text(rest.to_owned()));
        Ok(Self(parts))
    }

    /// The text with the values in place: strings as they are, everything else as compact JSON.
    ///
    /// # Errors
    /// If a value is missing, or null, or all is too long.
    pub fn render(&self, item: &Value, sample: &Value) -> Result<String, RenderFault> {
        let mut out = String::new();
        for part in &self.0 {
            match part {
                Part::Text(text) => out.push_str(text),
                Part::Value { of_sample, steps, path } => {
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

fn step<'v>(value: &'v Value, step: &Step) -> Option<&'v Value> {
    match step {
        Step::Key(key) => value.as_object()?.get(key),
        Step::Index(index) => value.as_array()?.get(*index),
    }
}

/// Reads `item.key[0].key`; an error continues "`{{...}}` at character N".
fn value(inside: &str) -> Result<Part, String> {
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
            return Err(format!("has {rest:?} where \".\", \"[\" or \"}}}}\" must stand"));
        };
        steps.push(step);
        rest = after;
    }
    match steps.first() {
        None => Err(format!("must name a variable, as in \"{space}.key\"")),
        Some(Step::Key(key)) if space == "item" || SAMPLE.contains(&key.as_str()) => {
            Ok(Part::Value { of_sample: space == "sample", steps, path: path.to_owned() })
        }
        Some(Step::Index(_)) if space == "item" => {
            Err("must name a key of the item first, which is an object".to_owned())
        }
        Some(_) => Err(format!("is not known: a sample has {}", SAMPLE.join(", "))),
    }
}

fn dotted(rest: &str) -> Result<(Step, &str), String> {
    let belongs = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '$');
    let end = rest.find(|c| !belongs(c)).unwrap_or(rest.len());
    if end == 0 {
        return Err("has \".\" without a key after it".to_owned());
    }
    Ok((Step::Key(rest[..end].to_owned()), &rest[end..]))
}

/// A number, or a key in quotes for names that cannot stand after a dot.
fn indexed(rest: &str) -> Result<(Step, &str), String> {
    let wanted = || "has \"[\" without a number or a quoted key and \"]\" after it".to_owned();
    if let Some(quote) = rest.chars().next().filter(|c| matches!(c, '"' | '\'')) {
        let (key, after) = rest[1..].split_once(quote).ok_or_else(wanted)?;
        let after = after.strip_prefix(']').ok_or_else(wanted)?;
        return Ok((Step::Key(key.to_owned()), after));
    }
    let (number, after) = rest.split_once(']').ok_or_else(wanted)?;
    let digits = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
    let index = if digits { number.parse().ok() } else { None };
    Ok((Step::Index(index.ok_or_else(wanted)?), after))
}

#[cfg(test)]
mod tests;
