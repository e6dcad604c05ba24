//! What may be said of any part: how its values are shaped, and whether its weight adapts.

use serde::{Deserialize, Serialize};

use hone_core::config::range::{Checked, above, between, finite};

use super::Problem;

/// `clip(scale * value + offset)`; the keys stand beside `name`, `kind` and `weight`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Shaping {
    /// Least and greatest value, applied last; absent leaves values alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip: Option<[f64; 2]>,
    /// Factor, applied first.
    pub scale: f64,
    /// Added after the factor.
    pub offset: f64,
}

impl Default for Shaping {
    fn default() -> Self {
        Self { clip: None, scale: 1.0, offset: 0.0 }
    }
}

impl Shaping {
    /// The keys in TOML, which no kind may use for a parameter.
    pub const KEYS: [&str; 3] = ["clip", "scale", "offset"];

    /// Whether values stay as they are.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// `min(high, max(low, scale * value + offset))`.
    pub fn apply(&self, value: f64) -> f64 {
        let value = self.scale * value + self.offset;
        // Not `clamp`, which panics on bounds that `check` has not seen.
        self.clip.map_or(value, |[low, high]| value.max(low).min(high))
    }

    pub(super) fn check(&self, prefix: &str) -> Checked {
        finite(&format!("{prefix}scale"), self.scale)?;
        finite(&format!("{prefix}offset"), self.offset)?;
        match self.clip {
            Some([low, high]) if !(low.is_finite() && high.is_finite() && low <= high) => {
                let allowed = "two finite numbers, the lower first";
                Err(Problem::value(&format!("{prefix}clip"), format!("[{low}, {high}]"), allowed))
            }
            _ => Ok(()),
        }
    }
}

/// A weight that follows the part's success rate: seldom reached, it grows; nearly always reached,
/// it shrinks (`reward::AdaptiveWeight`).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdaptiveConfig {
    /// A value of at least this is a success.
    pub success_at: f64,
    /// Below this success rate the weight is multiplied by `up`.
    pub low: f64,
    /// Above this success rate the weight is multiplied by `down`.
    pub high: f64,
    /// Factor of growth.
    pub up: f64,
    /// Factor of shrinking.
    pub down: f64,
    /// Least weight; absent: a quarter of the part's weight.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min: Option<f64>,
    /// Greatest weight; absent: four times the part's weight.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<f64>,
    /// Scored completions from one change of the weight to the next.
    pub every: u32,
}

impl Default for AdaptiveConfig {
    fn default() -> Self {
        Self {
            success_at: 1.0,
            low: 0.3,
            high: 0.8,
            up: 1.2,
            down: 0.9,
            min: None,
            max: None,
            every: 64,
        }
    }
}

impl AdaptiveConfig {
    /// Least and greatest weight of a part of this weight.
    pub fn bounds(&self, weight: f64) -> (f64, f64) {
        (self.min.unwrap_or(weight / 4.0), self.max.unwrap_or(weight * 4.0))
    }

    pub(super) fn check(&self, weight: f64) -> Checked {
        above("weight", weight, 0.0)?;
        finite("adaptive.success_at", self.success_at)?;
        between("adaptive.high", self.high, 0.0, 1.0)?;
        between("adaptive.low", self.low, 0.0, self.high)?;
        between("adaptive.up", self.up, 1.0, 1000.0)?;
        above("adaptive.down", self.down, 0.0)?;
        between("adaptive.down", self.down, 0.0, 1.0)?;
        between("adaptive.every", self.every, 1, 1 << 20)?;
        let (min, max) = self.bounds(weight);
        above("adaptive.min", min, 0.0)?;
        between("adaptive.min", min, 0.0, weight)?;
        between("adaptive.max", max, weight, f64::MAX)
    }
}
