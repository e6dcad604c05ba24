//! The result of a conversion: keys of Hone with comments, and notes.

use toml::Value;

/// Sections in the order of `configs/default.toml`, with their subsections.
const SECTIONS: [&str; 14] = [
    "model",
    "data",
    "rollout",
    "dataset",
    "run",
    "train",
    "train.schedule",
    "train.optimizer",
    "train.kl",
    "train.entropy",
    "train.sampler_correction",
    "train.lora",
    "policy",
    "log",
];

struct TrlSetting {
    key: &'static str,
    value: Value,
    comment: String,
}

/// Keys that a conversion sets, and notes about everything else.
#[derive(Default)]
pub(super) struct TrlSettings {
    settings: Vec<TrlSetting>,
    /// Names of options, and what to say about them.
    notes: Vec<(Vec<String>, String)>,
    /// Names of reward functions, with their weights.
    pub(super) rewards: Vec<(String, Option<f64>)>,
}

impl TrlSettings {
    /// Sets a key of a section in [`SECTIONS`]. `comment` begins with the name of the option. The first
    /// option that sets a key wins.
    pub(super) fn set(
        &mut self,
        key: &'static str,
        value: impl Into<Value>,
        comment: impl Into<String>,
    ) {
        let comment = comment.into();
        if self.has(key) {
            return self.note(&comment, format!("another option sets {key}"));
        }
        self.settings.push(TrlSetting { key, value: value.into(), comment });
    }

    /// Whether a key is set.
    pub(super) fn has(&self, key: &str) -> bool {
        self.settings.iter().any(|setting| setting.key == key)
    }

    /// Whether a key with this beginning is set.
    pub(super) fn has_any(&self, prefix: &str) -> bool {
        self.settings.iter().any(|setting| setting.key.starts_with(prefix))
    }

    /// [`Self::set`] for a count.
    pub(super) fn set_count(&mut self, key: &'static str, count: u64, comment: impl Into<String>) {
        self.set(key, count_value(count), comment);
    }

    /// Adds a note about an option. Options with the same note share a line.
    pub(super) fn note(&mut self, name: &str, text: impl Into<String>) {
        let text = text.into();
        match self.notes.iter_mut().find(|(_, known)| *known == text) {
            Some((names, _)) => names.push(name.to_owned()),
            None => self.notes.push((vec![name.to_owned()], text)),
        }
    }

    /// The notes, each on a line.
    pub(super) fn notes(&self) -> Vec<String> {
        let lines = self.notes.iter().map(|(names, text)| format!("{}: {text}", names.join(", ")));
        lines.map(|line| printable(&line)).collect()
    }

    /// The configuration as TOML, with the notes as comments at its end. `source` is the file.
    pub(super) fn toml(&self, source: &str) -> String {
        let mut text = format!(
            "# {} as a configuration of Hone, by `hone import-trl`. The comment above a key names TRL's\n\
             # option.\n",
            printable(source)
        );
        for section in SECTIONS {
            let inside = |setting: &&TrlSetting| {
                setting.key.rsplit_once('.').is_some_and(|(parent, _)| parent == section)
            };
            let settings: Vec<_> = self.settings.iter().filter(inside).collect();
            if !settings.is_empty() {
                text += &format!("\n[{section}]\n");
            }
            for TrlSetting { key, value, comment } in settings {
                let name = key.rsplit('.').next().unwrap_or(key);
                text += &format!("# {}\n{name} = {}\n", printable(comment), toml_text(value));
            }
        }
        self.write_rewards(&mut text);
        let notes = self.notes();
        if !notes.is_empty() {
            text += "\n# Without a counterpart, or left to do:\n";
        }
        for note in notes {
            text += &format!("# - {note}\n");
        }
        text
    }

    fn write_rewards(&self, text: &mut String) {
        if self.rewards.is_empty() {
            return;
        }
        *text += "\n# The trainer's reward functions. Put them into a file without the rest of the script, and\n\
                  # uncomment these lines, or choose built-in kinds (`hone rewards list`).\n\
                  # [[route]]\n# name = \"default\"\n";
        for (name, weight) in &self.rewards {
            // `rewards.format` is the function `format`.
            let function = name.rsplit('.').next().unwrap_or(name);
            let quoted = toml_text(&Value::from(printable(function)));
            *text += &format!(
                "# [[route.reward]]\n# name = {quoted}\n# kind = \"python\"\n# path = \"rewards.py\"\n\
                 # function = {quoted}\n"
            );
            if let Some(weight) = weight {
                *text += &format!("# weight = {weight:?}\n");
            }
        }
    }
}

/// A count as TOML, which has signed integers.
pub(super) fn count_value(count: u64) -> Value {
    Value::Integer(i64::try_from(count).unwrap_or(i64::MAX))
}

/// A value as TOML. Small numbers have an exponent.
fn toml_text(value: &Value) -> String {
    match value {
        Value::Float(number) => format!("{number:?}"),
        other => other.to_string(),
    }
}

/// A text for one line of a comment.
fn printable(text: &str) -> String {
    let plain = text.replace(|c: char| c.is_control(), " ");
    plain.split_whitespace().collect::<Vec<_>>().join(" ")
}
