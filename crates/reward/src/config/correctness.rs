//! Parameters of the functions that compare an answer with a reference.

use serde::{Deserialize, Serialize};

use hone_core::config::range::{Checked, at_least, between, texts};

use super::{Problem, answer_key, answer_pattern};

/// `[trim(answer) = trim(reference)]`, 0 or 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ExactMatch {
    /// Metadata key of the reference.
    pub reference: String,
    /// Whether letter case is ignored.
    pub ignore_case: bool,
    /// Regex whose first group is the answer within the completion; empty takes it all.
    pub extract: String,
}

impl Default for ExactMatch {
    fn default() -> Self {
        Self { reference: answer_key(), ignore_case: false, extract: answer_pattern() }
    }
}

/// Similarity of answer and reference, 0 to 1, as rapidfuzz's `ratio` (there 0 to 100).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FuzzyMatch {
    /// Metadata key of the reference.
    pub reference: String,
    /// Whether letter case is ignored.
    pub ignore_case: bool,
    /// Similarities below this count as 0.
    pub threshold: f64,
    /// Regex whose first group is the answer within the completion; empty takes it all.
    pub extract: String,
}

impl Default for FuzzyMatch {
    fn default() -> Self {
        Self {
            reference: answer_key(),
            ignore_case: false,
            threshold: 0.0,
            extract: answer_pattern(),
        }
    }
}

impl FuzzyMatch {
    pub(super) fn check(&self) -> Checked {
        between("threshold", self.threshold, 0.0, 1.0)
    }
}

/// `[|answer - reference| <= max(tolerance, relative_tolerance * |reference|)]`, 0 or 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NumericMatch {
    /// Metadata key of the reference.
    pub reference: String,
    /// Largest absolute difference.
    pub tolerance: f64,
    /// Largest difference as a share of the reference.
    pub relative_tolerance: f64,
    /// Regex whose first group is the answer within the completion; empty takes it all.
    pub extract: String,
}

impl Default for NumericMatch {
    fn default() -> Self {
        Self {
            reference: answer_key(),
            tolerance: 1e-6,
            relative_tolerance: 0.0,
            extract: answer_pattern(),
        }
    }
}

impl NumericMatch {
    pub(super) fn check(&self) -> Checked {
        at_least("tolerance", self.tolerance, 0.0)?;
        at_least("relative_tolerance", self.relative_tolerance, 0.0)
    }
}

/// Whether answer and reference are the same value, 0 or 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MathEqual {
    /// Metadata key of the reference.
    pub reference: String,
    /// Largest difference of values that are not exact fractions (roots, pi), as a share of the
    /// reference where that is above 1.
    pub tolerance: f64,
    /// Regex whose first group holds the answer; where it does not match, or is empty, the answer
    /// is the completion's last `\boxed{}`.
    pub extract: String,
}

impl Default for MathEqual {
    fn default() -> Self {
        Self { reference: answer_key(), tolerance: 1e-6, extract: answer_pattern() }
    }
}

impl MathEqual {
    pub(super) fn check(&self) -> Checked {
        at_least("tolerance", self.tolerance, 0.0)
    }
}

/// `math_equal` of what stands after the reasoning; 0 where the reasoning never ends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ReasoningAccuracy {
    /// Metadata key of the reference.
    pub reference: String,
    /// Texts that end the reasoning; the first of the list that occurs counts, where it occurs
    /// last.
    pub delimiters: Vec<String>,
    /// As `math_equal`'s.
    pub tolerance: f64,
    /// As `math_equal`'s, within what stands after the reasoning.
    pub extract: String,
}

impl Default for ReasoningAccuracy {
    fn default() -> Self {
        Self {
            reference: answer_key(),
            delimiters: vec!["</think>".to_owned()],
            tolerance: 1e-6,
            extract: answer_pattern(),
        }
    }
}

impl ReasoningAccuracy {
    pub(super) fn check(&self) -> Checked {
        texts("delimiters", &self.delimiters, 16)?;
        at_least("tolerance", self.tolerance, 0.0)
    }
}

/// `[chosen letter = reference's letter]`, 0 or 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MultipleChoice {
    /// Metadata key of the reference.
    pub reference: String,
    /// How many letters there are to choose from, beginning with A.
    pub choices: u8,
    /// Regex whose first group is the answer; where it does not match, or is empty, the whole
    /// completion is read.
    pub extract: String,
}

impl Default for MultipleChoice {
    fn default() -> Self {
        Self { reference: answer_key(), choices: 10, extract: answer_pattern() }
    }
}

impl MultipleChoice {
    pub(super) fn check(&self) -> Checked {
        between("choices", self.choices, 2, 26)
    }
}

/// How many of the phrases `contains` wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ContainsMode {
    /// Every one.
    #[default]
    All,
    /// At least one.
    Any,
}

/// Whether phrases occur in the completion, 0 or 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Contains {
    /// The phrases; empty takes the reference.
    pub phrases: Vec<String>,
    /// Metadata key of the reference where there are no phrases: one phrase, or a JSON list.
    pub reference: String,
    /// Whether all or any must occur.
    pub mode: ContainsMode,
    /// Whether letter case is ignored.
    pub ignore_case: bool,
    /// Regex whose first group is searched; empty takes the whole completion.
    pub extract: String,
}

impl Default for Contains {
    fn default() -> Self {
        Self {
            phrases: Vec::new(),
            reference: answer_key(),
            mode: ContainsMode::All,
            ignore_case: false,
            extract: String::new(),
        }
    }
}

impl Contains {
    pub(super) fn check(&self) -> Result<(), Problem> {
        if self.phrases.is_empty() { Ok(()) } else { texts("phrases", &self.phrases, 64) }
    }
}
