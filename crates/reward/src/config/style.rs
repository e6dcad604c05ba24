//! Parameters of the functions that look at how a completion is written.

use serde::{Deserialize, Serialize};

use hone_core::config::range::{Checked, at_least, between, texts};

use super::Problem;

/// `min(1, markers / target)`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ReasoningSteps {
    /// Markers that earn 1.
    pub target: u32,
}

impl Default for ReasoningSteps {
    fn default() -> Self {
        Self { target: 3 }
    }
}

impl ReasoningSteps {
    pub(super) fn check(&self) -> Checked {
        between("target", self.target, 1, 1000)
    }
}

/// `min(1, different citations / target)`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Citations {
    /// Different citations that earn 1.
    pub target: u32,
}

impl Default for Citations {
    fn default() -> Self {
        Self { target: 3 }
    }
}

impl Citations {
    pub(super) fn check(&self) -> Checked {
        between("target", self.target, 1, 1000)
    }
}

/// What `repetition_penalty` counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RepetitionUnit {
    /// Words, their letter case ignored (as in Open R1).
    #[default]
    Words,
    /// Token ids (as in TRL).
    Tokens,
}

/// `(1 - different n-grams / all n-grams) * max_penalty`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RepetitionPenalty {
    /// Words or tokens of an n-gram.
    pub ngram: usize,
    /// The value that endless repetition approaches; not above 0.
    pub max_penalty: f64,
    /// What n-grams are made of.
    pub unit: RepetitionUnit,
}

impl Default for RepetitionPenalty {
    fn default() -> Self {
        Self { ngram: 3, max_penalty: -1.0, unit: RepetitionUnit::Words }
    }
}

impl RepetitionPenalty {
    pub(super) fn check(&self) -> Checked {
        between("ngram", self.ngram, 1, 16)?;
        not_above_zero("max_penalty", self.max_penalty)
    }
}

fn not_above_zero(key: &str, value: f64) -> Checked {
    if value.is_finite() && value <= 0.0 {
        return Ok(());
    }
    Err(Problem::value(key, value, "a finite number, 0 or less"))
}

/// `max(floor, -penalty * hits)`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ForbiddenPhrases {
    /// The phrases.
    pub phrases: Vec<String>,
    /// What each occurrence costs.
    #[serde(default = "half")]
    pub penalty: f64,
    /// The least value.
    #[serde(default = "minus_one")]
    pub floor: f64,
    /// Whether letter case is ignored.
    #[serde(default = "yes")]
    pub ignore_case: bool,
}

fn half() -> f64 {
    0.5
}

fn minus_one() -> f64 {
    -1.0
}

fn yes() -> bool {
    true
}

impl ForbiddenPhrases {
    pub(super) fn check(&self) -> Checked {
        texts("phrases", &self.phrases, 1000)?;
        at_least("penalty", self.penalty, 0.0)?;
        not_above_zero("floor", self.floor)
    }
}

/// Whether the completion is in a language, 0 or 1; missing where none can be told.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Language {
    /// ISO 639-3 code of the wanted language, such as `eng`.
    pub language: String,
    /// Least confidence, 0 to 1, for the wanted language to count.
    #[serde(default)]
    pub confidence: f64,
}

impl Language {
    pub(super) fn check(&self) -> Checked {
        between("confidence", self.confidence, 0.0, 1.0)
    }
}

/// Share of the keywords that occur as whole words, letter case ignored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Keywords {
    /// The keywords; empty takes the reference.
    pub keywords: Vec<String>,
    /// Metadata key of the keywords where none are listed: a JSON list, or separated by commas.
    pub reference: String,
}

impl Default for Keywords {
    fn default() -> Self {
        Self { keywords: Vec::new(), reference: "keywords".to_owned() }
    }
}

impl Keywords {
    pub(super) fn check(&self) -> Checked {
        if self.keywords.is_empty() { Ok(()) } else { texts("keywords", &self.keywords, 64) }
    }
}
