//! Parameters of the functions that look at a completion's length, in tokens.

use serde::{Deserialize, Serialize};

use hone_core::config::range::{Checked, at_least, between, ordered};

use super::{Problem, answer_key, answer_pattern};

/// Most tokens that any of these keys may name.
const MOST: u32 = 1 << 20;

/// `max(0, 1 - |tokens - ideal| / spread)`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Length {
    /// Tokens that earn 1.
    pub ideal: u32,
    /// Tokens from there to 0, on both sides.
    pub spread: u32,
}

impl Length {
    pub(super) fn check(&self) -> Checked {
        between("ideal", self.ideal, 0, MOST)?;
        between("spread", self.spread, 1, MOST)
    }
}

/// 1 from `min` to `max` tokens, outside falling to 0 over `fade` tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LengthRange {
    /// Fewest tokens that earn 1.
    #[serde(default)]
    pub min: u32,
    /// Most tokens that earn 1.
    pub max: u32,
    /// Tokens from either end to 0, in a line; 0 falls at once.
    #[serde(default)]
    pub fade: u32,
}

impl LengthRange {
    pub(super) fn check(&self) -> Checked {
        between("max", self.max, 1, MOST)?;
        between("min", self.min, 0, self.max)?;
        between("fade", self.fade, 0, MOST)
    }
}

/// `math_equal`'s verdict scaled by length: short and right earns most, short and wrong least.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CosineScaled {
    /// Tokens at which the curve ends; longer completions stay at its end.
    pub max_tokens: u32,
    /// Value of a right answer at `max_tokens`.
    #[serde(default = "half")]
    pub min_correct: f64,
    /// Value of a right answer of no length.
    #[serde(default = "one")]
    pub max_correct: f64,
    /// Value of a wrong answer of no length.
    #[serde(default = "minus_one")]
    pub min_wrong: f64,
    /// Value of a wrong answer at `max_tokens`.
    #[serde(default = "minus_half")]
    pub max_wrong: f64,
    /// Metadata key of the reference.
    #[serde(default = "answer_key")]
    pub reference: String,
    /// As `math_equal`'s.
    #[serde(default = "tolerance")]
    pub tolerance: f64,
    /// As `math_equal`'s.
    #[serde(default = "answer_pattern")]
    pub extract: String,
}

fn half() -> f64 {
    0.5
}

fn one() -> f64 {
    1.0
}

fn minus_one() -> f64 {
    -1.0
}

fn minus_half() -> f64 {
    -0.5
}

fn tolerance() -> f64 {
    1e-6
}

impl CosineScaled {
    pub(super) fn check(&self) -> Checked {
        between("max_tokens", self.max_tokens, 1, MOST)?;
        ordered(["min_correct", "max_correct"], self.min_correct, self.max_correct)?;
        ordered(["min_wrong", "max_wrong"], self.min_wrong, self.max_wrong)?;
        at_least("tolerance", self.tolerance, 0.0)
    }
}

/// 0 up to `max_tokens - cache`, then in a line to -1 at `max_tokens`, -1 beyond (DAPO, eq. 13).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SoftOverlong {
    /// Longest length that is not punished in full.
    pub max_tokens: u32,
    /// Width of the zone before it; 0 punishes at once.
    pub cache: u32,
}

impl SoftOverlong {
    pub(super) fn check(&self) -> Result<(), Problem> {
        between("max_tokens", self.max_tokens, 1, MOST)?;
        between("cache", self.cache, 0, self.max_tokens)
    }
}
