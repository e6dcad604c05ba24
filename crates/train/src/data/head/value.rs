//! The value baseline (`train.baseline = "value"`): the expected rating of a prompt's answer, from the prompt alone.
//!
//! The head predicts the difference of a rating from the running mean. Each rating is predicted before it is learned
//! (Dawid 1984, prequential analysis), so that the errors of head and mean are those on unseen ratings. They decide whether
//! the head is used, and by how much its predictions are shrunk: by the slope of the regression of the differences on them.

use serde::{Deserialize, Serialize};

use super::{Observation, Posterior, Regression};
use crate::learning::float_bits;

/// Effective number of ratings that the head remembers. Which prompts are hard changes more slowly than how hard they are,
/// which the running mean follows.
const WINDOW: f64 = 1024.0;

/// Least number of predicted ratings before the head is used.
const LEAST_RATINGS: f64 = 64.0;

/// The head of one part on one route; a part of the checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct ValueHead {
    regression: Regression,
    errors: Errors,
}

/// Sums over past ratings: d is the difference of a rating from the mean, p its prediction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Errors {
    #[serde(with = "float_bits")]
    count: f64,
    /// Of d^2, the squared error of the mean.
    #[serde(with = "float_bits")]
    mean: f64,
    /// Of (d - slope p)^2, the squared error of the head.
    #[serde(with = "float_bits")]
    head: f64,
    /// Of p d.
    #[serde(with = "float_bits")]
    product: f64,
    /// Of p^2.
    #[serde(with = "float_bits")]
    squares: f64,
}

impl Errors {
    /// The factor of predictions with the least squared error in the past, from 0 to 1.
    fn slope(&self) -> f64 {
        if self.squares > 0.0 { (self.product / self.squares).clamp(0.0, 1.0) } else { 0.0 }
    }
}

/// A rating with what was known before it.
pub(crate) struct PredictedRating<'a> {
    /// Features of its prompt.
    pub prompt: &'a [f64],
    /// Its difference from the mean that it would be compared with without a head.
    pub difference: f64,
    /// The head's prediction of that, unshrunk.
    pub predicted: f64,
    pub weight: f64,
}

/// A head as it is before the ratings of a batch.
#[derive(Debug)]
pub(crate) struct ValuePredictor {
    posterior: Posterior,
    slope: f64,
    is_used: bool,
}

impl ValuePredictor {
    /// The unshrunk prediction of a rating's difference from the mean; 0 without features.
    pub fn predict(&self, prompt: &[f64]) -> f64 {
        self.posterior.predict(prompt).map_or(0.0, |(mean, _)| mean)
    }

    /// The change of the mean by such a prediction; `None` while the mean alone is better.
    pub fn change(&self, predicted: f64) -> Option<f64> {
        self.is_used.then_some(self.slope * predicted)
    }
}

impl ValueHead {
    pub fn predictor(&self) -> Option<ValuePredictor> {
        let Errors { count, mean, head, .. } = self.errors;
        let is_used = count >= LEAST_RATINGS && head < mean;
        let posterior = self.regression.posterior()?;
        Some(ValuePredictor { posterior, slope: self.errors.slope(), is_used })
    }

    /// Mean squared errors of the running mean and of the head on ratings that they had not seen; `None` without any.
    pub fn errors(&self) -> Option<[f64; 2]> {
        let Errors { count, mean, head, .. } = self.errors;
        (count > 0.0).then(|| [mean / count, head / count])
    }

    /// Learns the ratings of a batch.
    pub fn learn(&mut self, ratings: &[PredictedRating<'_>]) {
        let slope = self.errors.slope();
        let decay = 1.0 - 1.0 / WINDOW;
        let factor = decay.powf(ratings.iter().map(|rating| rating.weight).sum());
        let Errors { count, mean, head, product, squares } = &mut self.errors;
        for sum in [&mut *count, mean, head, product, squares] {
            *sum *= factor;
        }
        for PredictedRating { difference, predicted, weight, .. } in ratings {
            *count += weight;
            *mean += weight * difference * difference;
            *head += weight * (difference - slope * predicted).powi(2);
            *product += weight * predicted * difference;
            *squares += weight * predicted * predicted;
        }
        let observation = |rating: &PredictedRating<'_>| Observation {
            features: rating.prompt.to_vec(),
            target: rating.difference,
            weight: rating.weight,
        };
        self.regression.observe(&ratings.iter().map(observation).collect::<Vec<_>>(), decay);
    }
}
