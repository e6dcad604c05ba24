//! Kinds that score a completion's length: in tokens, the stop token included, or in another unit.

pub mod cosine_scaled;
pub mod length;
pub mod length_range;
pub mod soft_overlong;

use serde::{Deserialize, Serialize};

use crate::ScoreInput;
use crate::text::words_of_any_script;

/// Greatest length that a parameter may name.
const LONGEST: u32 = 1 << 20;

/// The unit of a length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LengthUnit {
    /// Tokens, the stop token included.
    #[default]
    Tokens,
    /// Words, which white space separates; each character of a script without spaces is a word.
    Words,
    /// Unicode code points.
    Characters,
}

impl LengthUnit {
    /// The length of a completion.
    fn of(self, input: &ScoreInput) -> f64 {
        let length = match self {
            Self::Tokens => input.ids.len(),
            Self::Words => words_of_any_script(&input.text).len(),
            Self::Characters => input.text.chars().count(),
        };
        length as f64
    }
}
