//! Parameters of the functions that look at a completion's form.

use serde::{Deserialize, Serialize};

use hone_core::config::range::{Checked, at_least, between};

use super::{Problem, answer_pattern};

/// Share of `count` matches found, at most 1; with a count of 1 whether there is one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Regex {
    /// The pattern.
    pub pattern: String,
    /// Whether it must match the whole completion, white space around it apart.
    #[serde(default)]
    pub full: bool,
    /// Matches that earn 1.
    #[serde(default = "once")]
    pub count: u32,
}

fn once() -> u32 {
    1
}

impl Regex {
    pub(super) fn check(&self) -> Checked {
        between("count", self.count, 1, if self.full { 1 } else { 1000 })
    }
}

fn reasoning_and_answer() -> Vec<String> {
    ["reasoning", "answer"].map(str::to_owned).to_vec()
}

/// Names of tags: 1 to 16, each once, of letters, digits, `_` and `-`.
pub(super) fn check_tags(tags: &[String]) -> Checked {
    if !(1..=16).contains(&tags.len()) {
        let shown = format!("a list of {}", tags.len());
        return Err(Problem::value("tags", shown, "a list of 1 to 16 names of tags"));
    }
    for (i, tag) in tags.iter().enumerate() {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
        let fits = (1..=64).contains(&tag.len()) && tag.bytes().all(plain);
        if !fits || tags[..i].contains(tag) {
            let allowed = "1 to 64 letters, digits, '_' or '-', each tag once";
            return Err(Problem::value(&format!("tags[{i}]"), format!("{tag:?}"), allowed));
        }
    }
    Ok(())
}

/// 1 for exactly the tags in order, white space between them, each once, else 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FormatStrict {
    /// Names of the tags, without angle brackets.
    pub tags: Vec<String>,
}

impl Default for FormatStrict {
    fn default() -> Self {
        Self { tags: reasoning_and_answer() }
    }
}

/// 1 when the tags stand in order, any text around them, else 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FormatSoft {
    /// Names of the tags, without angle brackets.
    pub tags: Vec<String>,
}

impl Default for FormatSoft {
    fn default() -> Self {
        Self { tags: reasoning_and_answer() }
    }
}

/// An equal share of 1 for each opening and closing tag that stands exactly once, less
/// `trailing_penalty` for each character after the last tag; never below 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FormatIncremental {
    /// Names of the tags, without angle brackets.
    pub tags: Vec<String>,
    /// What each character after the last tag costs.
    pub trailing_penalty: f64,
}

impl Default for FormatIncremental {
    fn default() -> Self {
        Self { tags: reasoning_and_answer(), trailing_penalty: 0.001 }
    }
}

impl FormatIncremental {
    pub(super) fn check(&self) -> Checked {
        at_least("trailing_penalty", self.trailing_penalty, 0.0)?;
        check_tags(&self.tags)
    }
}

/// 1 when the completion begins with `<think>`, which stands once, and closes it, else 0.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ThinkFormat {}

/// 1 for exactly `<think>…</think><answer>…</answer>` with an answer that is not blank, else 0.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ThinkAnswer {}

/// 1 when the completion is JSON, else 0.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct JsonValid {
    /// Whether the JSON may stand in a fenced block (the first one then counts).
    pub fenced: bool,
}

/// 1 when the completion is JSON that the schema allows, else 0.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct JsonSchema {
    /// The schema, as a table or as JSON in a text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schema: Option<serde_json::Value>,
    /// Metadata key whose value is the schema; instead of `schema`. For datasets and clients that
    /// are trusted: a schema can be written so that checking it takes very long.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schema_from: Option<String>,
    /// Whether the JSON may stand in a fenced block (the first one then counts).
    pub fenced: bool,
}

impl JsonSchema {
    pub(super) fn check(&self) -> Checked {
        match (&self.schema, &self.schema_from) {
            (Some(_), None) | (None, Some(_)) => Ok(()),
            (None, None) => Err(Problem::new("schema", " is missing: give it, or schema_from")),
            (Some(_), Some(key)) => {
                let allowed = "absent where schema is given";
                Err(Problem::value("schema_from", format!("{key:?}"), allowed))
            }
        }
    }
}

/// 1 when the answer is a whole number, else 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct IntegerAnswer {
    /// Regex whose first group is the answer within the completion; empty takes it all.
    pub extract: String,
}

impl Default for IntegerAnswer {
    fn default() -> Self {
        Self { extract: answer_pattern() }
    }
}
