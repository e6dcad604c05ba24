//! Errors of a configuration as one sentence: the key, its value, and the allowed values.
//!
//! The functions that check ranges make them for values out of range; [`describe`] turns serde's errors
//! into them.

use serde_path_to_error::{Path, Segment};
use toml::Value;

use crate::text::shortened;

/// An invalid key or value of a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The dotted key, such as `train.learning_rate` or `route[0].reward[1]`.
    pub key: String,
    /// The rest of the sentence, which begins after the key.
    pub rest: String,
}

impl Problem {
    /// A sentence that begins with the key; `rest` begins with its own space.
    pub fn new(key: impl Into<String>, rest: impl Into<String>) -> Self {
        Self { key: key.into(), rest: rest.into() }
    }

    /// `key is value: it must be allowed`.
    pub fn value(key: &str, value: impl std::fmt::Display, allowed: &str) -> Self {
        Self::new(key, format!(" is {value}: it must be {allowed}"))
    }

    /// The same problem with `prefix` before its key, for a section that contains the one that was
    /// checked. `prefix` ends with its own dot.
    #[must_use]
    pub fn prefixed(self, prefix: &str) -> Self {
        Self { key: format!("{prefix}{}", self.key), rest: self.rest }
    }

    /// The whole sentence.
    pub fn sentence(&self) -> String {
        format!("{}{}", self.key, self.rest)
    }
}

/// Turns a serde error into a [`Problem`]. `path` is the place below `root` where deserialization
/// failed, and `message` is serde's text.
pub fn describe(path: &Path, message: &str, root: &Value) -> Problem {
    let mut key = String::new();
    let mut value = Some(root);
    for segment in path {
        match segment {
            Segment::Map { key: name } => {
                if !key.is_empty() {
                    key.push('.');
                }
                key.push_str(name);
                value = value.and_then(|v| v.get(name));
            }
            Segment::Seq { index } => {
                key.push_str(&format!("[{index}]"));
                value = value.and_then(|v| v.get(index));
            }
            // A variant's name is not part of the dotted key.
            Segment::Enum { variant } => value = value.and_then(|v| v.get(variant)),
            Segment::Unknown => {}
        }
    }
    let shown = value.map_or_else(|| "not readable".to_owned(), |v| show(&key, v));
    explain(key, &shown, message)
}

/// The value as the file contains it, shortened. API keys are secrets and never shown.
fn show(key: &str, value: &Value) -> String {
    if is_secret(key) {
        return "a hidden value".to_owned();
    }
    let text = match value {
        Value::Table(_) => "a table".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        other => other.to_string(),
    };
    shortened(&text, 80).into_owned()
}

/// Whether a value is a bearer key, or may be one in the wrong place.
fn is_secret(key: &str) -> bool {
    let entry = |rest: &str| {
        let whole = rest.ends_with(']') && !rest.contains(".scopes");
        whole || rest.ends_with(".key") || rest.ends_with(".sha256")
    };
    key.contains("_keys")
        || key == "server.keys"
        || key.strip_prefix("server.keys[").is_some_and(entry)
}

fn explain(key: String, shown: &str, message: &str) -> Problem {
    if let Some(rest) = message.strip_prefix("unknown field ") {
        return unknown_key(&key, rest);
    }
    if let Some(rest) = message.strip_prefix("missing field ") {
        let dot = if key.is_empty() { "" } else { "." };
        return Problem::new(format!("{key}{dot}{}", rest.replace('`', "")), " is missing");
    }
    if message.starts_with("unknown variant ") {
        let names = backticked(message).into_iter().skip(1);
        let allowed: Vec<String> = names.map(|n| format!("\"{n}\"")).collect();
        return Problem::value(&key, shown, &one_of(&allowed));
    }
    match message.rsplit_once("expected ") {
        Some((_, expected)) if message.starts_with("invalid ") => {
            Problem::value(&key, shown, in_words(expected))
        }
        _ if message.contains("socket address") => {
            Problem::value(&key, shown, in_words("socket address"))
        }
        // An element's own sentence, which begins with its key.
        _ if key.ends_with(']') => Problem::new(format!("{key}."), message),
        _ => Problem::new(key, format!(" is {shown}: {message}")),
    }
}

/// `rest` is serde's text after "unknown field": ``` `found`, expected one of `a`, `b` ```.
fn unknown_key(parent: &str, rest: &str) -> Problem {
    let names = backticked(rest);
    let (found, known) = names.split_first().map_or(("", &[] as &[&str]), |(f, k)| (*f, k));
    not_a_key(parent.strip_suffix(found).unwrap_or(parent).trim_end_matches('.'), found, known)
}

/// The problem that the section `parent` has no key `found`, with the most similar of its keys, or all of them.
pub fn not_a_key(parent: &str, found: &str, known: &[&str]) -> Problem {
    let dot = if parent.is_empty() { "" } else { "." };
    let hint = match (nearest(found, known), known) {
        (Some(name), _) => format!(": did you mean {parent}{dot}{name}?"),
        (None, []) => ": nothing is allowed there".to_owned(),
        (None, known) => format!(": the keys there are {}", known.join(", ")),
    };
    Problem::new(format!("{parent}{dot}{found}"), format!(" is not a key{hint}"))
}

fn backticked(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// The names as a list in a sentence: `a, b or c`; `nothing` if there are none.
pub fn one_of(names: &[String]) -> String {
    match names {
        [] => "nothing".to_owned(),
        [one] => one.clone(),
        [first @ .., last] => format!("{} or {last}", first.join(", ")),
    }
}

/// A type as serde names it, in the words of someone who writes TOML.
fn in_words(expected: &str) -> &str {
    match expected {
        "u64" | "usize" => "a whole number, 0 or more",
        "u32" => "a whole number from 0 to 4294967295",
        "i32" | "i64" => "a whole number",
        "f64" | "f32" => "a number",
        "a boolean" => "true or false",
        "a string" | "string or table" => "a text in quotes",
        "path string" => "a path in quotes",
        "socket address" => "an address and a port, such as \"127.0.0.1:8080\"",
        "a sequence" => "a list",
        "a map" => "a table",
        _ if expected.starts_with("struct ") => "a table",
        _ => expected,
    }
}

/// The known name that `found` probably misspells: the one at the smallest edit distance, if that
/// is at most a third of the name's length.
pub fn nearest<'a>(found: &str, known: &[&'a str]) -> Option<&'a str> {
    known
        .iter()
        .map(|name| (distance(found, name), *name))
        .filter(|(d, name)| *d <= name.len().div_ceil(3))
        .min_by_key(|(d, _)| *d)
        .map(|(_, name)| name)
}

/// The Levenshtein distance in bytes.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = i;
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misspelled_names_are_recognized_by_edit_distance() {
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("same", "same"), 0);
        assert_eq!(nearest("lerning_rate", &["seed", "learning_rate"]), Some("learning_rate"));
        assert_eq!(nearest("banana", &["seed", "learning_rate"]), None);
    }
}
