//! Scaling, shifting and clipping of a part's values.

use std::sync::Arc;

use async_trait::async_trait;

use hone_core::config::section::Parameters;
use hone_core::config::{Checked, Problem};

use crate::{RewardFn, ScoreInput};

hone_core::parameters! {
    /// `clip(scale * value + offset)`; in TOML the keys are beside `name`, `kind` and `weight`.
    #[derive(Copy)]
    pub struct Shaping {
        /// Least and greatest value, applied last; absent: no bounds.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub clip: Option<[f64; 2]> = None,
        /// Factor, applied first.
        pub scale: f64 = 1.0 => finite(),
        /// Summand, applied after the factor.
        pub offset: f64 = 0.0 => finite(),
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
        // `clamp` would panic on bounds that have not been checked.
        self.clip.map_or(value, |[low, high]| value.max(low).min(high))
    }

    pub(crate) fn check(&self) -> Checked {
        self.check_ranges()?;
        match self.clip {
            Some([low, high]) if !(low.is_finite() && high.is_finite() && low <= high) => {
                let allowed = "two finite numbers, the lower first";
                Err(Problem::value("clip", format!("[{low}, {high}]"), allowed))
            }
            _ => Ok(()),
        }
    }

    /// The function with its values shaped; missing values stay missing.
    pub(crate) fn wrap(self, inner: Arc<dyn RewardFn>) -> Arc<dyn RewardFn> {
        if self.is_default() { inner } else { Arc::new(Shaped { inner, shape: self }) }
    }
}

struct Shaped {
    inner: Arc<dyn RewardFn>,
    shape: Shaping,
}

#[async_trait]
impl RewardFn for Shaped {
    async fn score(&self, samples: &[ScoreInput]) -> Vec<Option<f64>> {
        let mut values = self.inner.score(samples).await;
        values.iter_mut().for_each(|value| *value = value.map(|v| self.shape.apply(v)));
        values
    }

    async fn probe(&self) -> Checked {
        self.inner.probe().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shaping_scales_shifts_then_clips() {
        let shape = Shaping { clip: Some([-1.0, 1.0]), scale: 2.0, offset: -0.5 };
        assert_eq!([-3.0, 0.0, 0.5, 3.0].map(|v| shape.apply(v)), [-1.0, -0.5, 0.5, 1.0]);
        assert_eq!(Shaping::default().apply(0.3), 0.3);
    }
}
