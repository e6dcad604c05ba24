//! Options of TRL by name, with their values as far as these are literals.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use hone_core::text::shortened;

use crate::config::counterpart;

/// What a file has for an option.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Given {
    Literal(Value),
    /// Python that would have to run.
    Expression(String),
}

/// The options of a file.
#[derive(Debug, Default)]
pub(super) struct TrlOptions {
    given: BTreeMap<String, (Given, Option<usize>)>,
    /// Whether the file calls PEFT's `LoraConfig`, which has defaults of its own.
    pub(super) has_lora_config: bool,
}

impl TrlOptions {
    /// The entries of a mapping, and those of mappings in it, such as `lora: {r: 16}`.
    ///
    /// # Errors
    /// If no name is TRL's, or one that the guides use.
    pub(super) fn from_mapping(mapping: Map<String, Value>) -> Result<Self, String> {
        let mut options = Self::default();
        let takes_mapping = |name: &str| {
            counterpart(name).is_some_and(|row| row.is_trl)
                || ["rank_pattern", "alpha_pattern"].contains(&name)
        };
        for (name, value) in mapping {
            match value {
                Value::Object(section) if !takes_mapping(&name) => {
                    for (name, value) in section {
                        options.insert(&name, Given::Literal(value), None);
                    }
                }
                value => options.insert(&name, Given::Literal(value), None),
            }
        }
        if options.given.keys().any(|name| counterpart(name).is_some()) {
            return Ok(options);
        }
        Err("it has no option of TRL's GRPOConfig".to_owned())
    }

    /// Adds an option unless it is there. `line` is its place in the file.
    pub(super) fn insert(&mut self, name: &str, given: Given, line: Option<usize>) {
        self.given.entry(name.to_owned()).or_insert((given, line));
    }

    /// Adds the options that are not there.
    pub(super) fn extend(&mut self, other: Self) {
        for (name, (given, line)) in other.given {
            self.insert(&name, given, line);
        }
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.given.contains_key(name)
    }

    /// The first of several names of an option that is there, or else the first.
    pub(super) fn present(&self, names: &[&'static str]) -> &'static str {
        let found = names.iter().find(|name| self.has(name));
        found.or(names.first()).copied().unwrap_or_default()
    }

    /// Whether the option is there with this value.
    pub(super) fn is(&self, name: &str, value: &Value) -> bool {
        matches!(self.given.get(name), Some((Given::Literal(given), _)) if given == value)
    }

    /// What a comment says about the origin of a value that is `name`'s, or else TRL's default.
    pub(super) fn origin(&self, name: &str) -> String {
        match self.given.get(name) {
            Some((Given::Literal(value), _)) if !value.is_null() => name.to_owned(),
            Some((Given::Expression(_), _)) => format!("{name} is not a literal: TRL's default"),
            _ => format!("{name}: TRL's default"),
        }
    }

    /// Removes a literal. `None` if there is none, or it is null.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        if !matches!(self.given.get(name)?.0, Given::Literal(_)) {
            return None;
        }
        match self.given.remove(name)?.0 {
            Given::Literal(value) => Some(value).filter(|value| !value.is_null()),
            Given::Expression(_) => None,
        }
    }

    fn convert<T>(
        &mut self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, String> {
        let line = self.given.get(name).and_then(|(_, line)| *line);
        let Some(value) = self.take(name) else { return Ok(None) };
        let line = line.map_or_else(String::new, |line| format!("line {line}: "));
        let wrong = || {
            let shown = value.to_string();
            format!("{line}{name} is {}: it must be {expected}", shortened(&shown, 60))
        };
        read(&value).map(Some).ok_or_else(wrong)
    }

    pub(super) fn number(&mut self, name: &str) -> Result<Option<f64>, String> {
        self.convert(name, "a number", number)
    }

    pub(super) fn count(&mut self, name: &str) -> Result<Option<u64>, String> {
        // 1e3 is written 1000.
        let whole = |value: &Value| number(value)?.to_string().parse::<u64>().ok();
        self.convert(name, "a whole number, 0 or more", |value| {
            value.as_u64().or_else(|| whole(value))
        })
    }

    pub(super) fn flag(&mut self, name: &str) -> Result<Option<bool>, String> {
        self.convert(name, "true or false", Value::as_bool)
    }

    pub(super) fn text(&mut self, name: &str) -> Result<Option<String>, String> {
        self.convert(name, "a text", |value| value.as_str().map(str::to_owned))
    }

    /// The options that nothing has taken, in alphabetical order. Those that are null are left out,
    /// because null is "not set".
    pub(super) fn rest(self) -> impl Iterator<Item = (String, Given, Option<usize>)> {
        let is_set = |given: &Given| *given != Given::Literal(Value::Null);
        let rest = self.given.into_iter().filter(move |(_, (given, _))| is_set(given));
        rest.map(|(name, (given, line))| (name, given, line))
    }
}

fn number(value: &Value) -> Option<f64> {
    let number = match value {
        Value::Number(number) => number.as_f64(),
        // YAML 1.1 reads 5e-6 as a text, and TRL converts it.
        Value::String(text) => text.trim().parse().ok(),
        _ => None,
    };
    number.filter(|number| number.is_finite())
}
