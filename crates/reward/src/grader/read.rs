//! Reads the fields of a grader's JSON; errors contain the field's path and value.

use std::fmt::Display;

use serde_json::{Map, Value};

use hone_core::config::Problem;
use hone_core::text::shortened;

use super::template::Template;

/// Characters of a value that an error shows.
pub(super) const SHOWN: usize = 80;

/// An object in the JSON. A null field counts as absent.
#[derive(Clone, Copy)]
pub(super) struct GraderObject<'a> {
    map: &'a Map<String, Value>,
    at: &'a str,
}

impl<'a> GraderObject<'a> {
    /// The object at a path; the path of the whole grader may be empty.
    pub(super) fn new(at: &'a str, value: &'a Value) -> Result<Self, Problem> {
        let path = if at.is_empty() { "the grader" } else { at };
        let map = value.as_object().ok_or_else(|| wrong(path, value, "an object"))?;
        Ok(Self { map, at })
    }

    pub(super) fn path(&self, name: &str) -> String {
        if self.at.is_empty() { name.to_owned() } else { format!("{}.{name}", self.at) }
    }

    pub(super) fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    pub(super) fn need(&self, name: &str, allowed: &str) -> Result<&'a Value, Problem> {
        self.get(name).ok_or_else(|| Problem::value(&self.path(name), "missing", allowed))
    }

    pub(super) fn wrong(&self, name: &str, allowed: impl Display) -> Problem {
        wrong(&self.path(name), self.map.get(name).unwrap_or(&Value::Null), allowed)
    }

    /// Refuses other fields than these, which are separated by spaces.
    pub(super) fn only(&self, kind: &str, fields: &str) -> Result<(), Problem> {
        let unknown = |(name, value): &(&String, &Value)| {
            !value.is_null() && !fields.split(' ').any(|field| field == *name)
        };
        match self.map.iter().find(unknown) {
            Some((name, _)) => {
                let fields = fields.replace(' ', ", ");
                let rest = format!(" is not a field of a {kind} grader: the fields are {fields}");
                Err(Problem::new(self.path(name), rest))
            }
            None => Ok(()),
        }
    }

    pub(super) fn text(&self, name: &str) -> Result<&'a str, Problem> {
        self.need(name, "a string")?.as_str().ok_or_else(|| self.wrong(name, "a string"))
    }

    /// The option that the field names.
    pub(super) fn choice<T: Copy>(
        &self,
        name: &str,
        options: &[(&'static str, T)],
    ) -> Result<(&'static str, T), Problem> {
        let names: Vec<&str> = options.iter().map(|(known, _)| *known).collect();
        let allowed = format!("one of {}", names.join(", "));
        let word = self.need(name, &allowed)?.as_str();
        let option = options.iter().find(|(known, _)| Some(*known) == word);
        option.copied().ok_or_else(|| self.wrong(name, allowed))
    }

    pub(super) fn number(&self, name: &str, least: f64, most: f64) -> Result<Option<f64>, Problem> {
        let fits = |value: &Value| value.as_f64().filter(|x| (least..=most).contains(x));
        let wrong = || self.wrong(name, format_args!("a number from {least} to {most}"));
        self.get(name).map(|value| fits(value).ok_or_else(wrong)).transpose()
    }

    pub(super) fn template(&self, name: &str) -> Result<Template, Problem> {
        let error = |error| Problem::new(self.path(name), format!(": {error}"));
        Template::parse(self.text(name)?).map_err(error)
    }

    /// A list of distinct strings, at least one.
    pub(super) fn words(&self, name: &str) -> Result<Vec<String>, Problem> {
        const ALLOWED: &str = "a list of different strings, at least one";
        let list = self.need(name, ALLOWED)?.as_array();
        let words = |list: &Vec<Value>| -> Option<Vec<String>> {
            list.iter().map(|value| value.as_str().map(str::to_owned)).collect()
        };
        let different = |list: &Vec<String>| {
            !list.is_empty() && list.iter().enumerate().all(|(at, word)| !list[..at].contains(word))
        };
        let words = list.filter(|list| list.len() <= 1000).and_then(words).filter(different);
        words.ok_or_else(|| self.wrong(name, ALLOWED))
    }
}

pub(super) fn wrong(path: &str, value: &Value, allowed: impl Display) -> Problem {
    let text = match value {
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
        other => other.to_string(),
    };
    Problem::value(path, shortened(&text, SHOWN), &allowed.to_string())
}
