//! Functions made of functions.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use async_trait::async_trait;
use futures::FutureExt;

use crate::config::{EnsembleHow, Shaping};
use crate::{RewardFn, ScoreInput};

/// A function whose values are shaped: `clip(scale * value + offset)`, missing ones left missing.
pub struct Shaped {
    /// The function.
    pub inner: Arc<dyn RewardFn>,
    /// What is done to its values.
    pub shape: Shaping,
}

#[async_trait]
impl RewardFn for Shaped {
    async fn score(&self, samples: &[ScoreInput]) -> Vec<Option<f64>> {
        let mut values = self.inner.score(samples).await;
        values.iter_mut().for_each(|value| *value = value.map(|v| self.shape.apply(v)));
        values
    }
}

/// `ensemble`: the mean, least, middle or greatest of the members' values; those missing are left
/// out, and where all are, so is the ensemble.
pub struct Ensemble {
    /// The functions.
    pub members: Vec<Arc<dyn RewardFn>>,
    /// How their values become one.
    pub how: EnsembleHow,
}

#[async_trait]
impl RewardFn for Ensemble {
    async fn score(&self, samples: &[ScoreInput]) -> Vec<Option<f64>> {
        let scored =
            self.members.iter().map(|member| guarded(member.as_ref(), samples, "", "ensemble"));
        let scored = futures::future::join_all(scored).await;
        let of_sample = |i: usize| {
            let values = scored.iter().filter_map(|values| values.get(i).copied().flatten());
            combine(self.how, values.collect())
        };
        (0..samples.len()).map(of_sample).collect()
    }
}

/// One value of several finite ones; `None` of none.
pub fn combine(how: EnsembleHow, mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let (first, last) = (*values.first()?, *values.last()?);
    let middle = values.len() / 2;
    Some(match how {
        EnsembleHow::Min => first,
        EnsembleHow::Max => last,
        // Bounded by the members, which a rounded sum might not be.
        EnsembleHow::Mean => (values.iter().sum::<f64>() / values.len() as f64).clamp(first, last),
        EnsembleHow::Median if values.len() % 2 == 1 => values[middle],
        EnsembleHow::Median => values[middle - 1] / 2.0 + values[middle] / 2.0,
    })
}

/// Runs a function: as many values as samples, finite ones only. One that panics, that answers NaN
/// or too little, leaves `None` where its values should be. `route` and `part` are for the log.
pub async fn guarded(
    function: &dyn RewardFn,
    samples: &[ScoreInput],
    route: &str,
    part: &str,
) -> Vec<Option<f64>> {
    let scored = AssertUnwindSafe(async { function.score(samples).await }).catch_unwind().await;
    let mut values = scored.unwrap_or_else(|_| {
        tracing::error!(route, part, "a grader panicked; its values are missing");
        Vec::new()
    });
    values.resize(samples.len(), None);
    values.into_iter().map(|value| value.filter(|v| v.is_finite())).collect()
}
