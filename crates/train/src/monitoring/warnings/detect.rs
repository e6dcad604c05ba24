//! The conditions: what the last steps say about each kind of trouble.

use hone_core::types::StepRecord;

use super::watch::WatchState;
use super::{Roles, WarningConfig, WarningKind};
use crate::monitoring::metric_names;

/// What a step says about one kind of trouble.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Signal {
    /// The condition holds; what was seen.
    Bad(String),
    /// The condition holds beyond doubt: it is told at once.
    Certain(String),
    /// Well within the limit.
    Good,
    /// Within the limit, but not by enough to end an episode.
    Near,
    /// The figures it needs are missing.
    Unknown,
}

/// Everything a condition looks at.
pub(super) struct Scene<'a> {
    pub config: &'a WarningConfig,
    pub roles: &'a Roles,
    pub state: &'a WatchState,
    pub record: &'a StepRecord,
}

impl Scene<'_> {
    pub fn signal(&self, kind: WarningKind) -> Signal {
        match kind {
            WarningKind::Collapse => self.collapse(),
            WarningKind::KlExplosion => self.kl(),
            WarningKind::FlatReward => self.flat(),
            WarningKind::FormatIgnored => self.format(),
            WarningKind::LengthHacking => self.length(),
            WarningKind::EntropyCollapse => self.entropy(),
            WarningKind::ClipRatioHigh => self.clipping(),
        }
    }

    fn figure(&self, name: &str) -> Option<f64> {
        metric_names::finite(self.record, name)
    }

    fn above(&self, value: f64, limit: f64, say: impl FnOnce() -> String) -> Signal {
        if value > limit {
            Signal::Bad(say())
        } else if value <= limit * (1.0 - self.config.hysteresis) {
            Signal::Good
        } else {
            Signal::Near
        }
    }

    fn below(&self, value: f64, limit: f64, say: impl FnOnce() -> String) -> Signal {
        if value < limit {
            Signal::Bad(say())
        } else if value >= limit * (1.0 + self.config.hysteresis) {
            Signal::Good
        } else {
            Signal::Near
        }
    }

    fn collapse(&self) -> Signal {
        let std = self.figure(metric_names::REWARD_STD).map(|std| {
            self.below(std, self.config.min_reward_std, || {
                format!("the reward's standard deviation within groups fell to {std:.3}")
            })
        });
        let zero = self.figure(metric_names::ZERO_STD_GROUPS).map(|share| {
            self.above(share, self.config.max_zero_std_groups, || {
                format!("in {:.0} % of groups every completion earned the same", share * 100.0)
            })
        });
        worst([std, zero])
    }

    fn kl(&self) -> Signal {
        let limit = self.config.max_kl;
        match self.record.metrics.get(metric_names::KL) {
            Some(kl) if !kl.is_finite() => Signal::Certain(format!("KL to the reference is {kl}")),
            Some(&kl) => self.above(kl, limit, || {
                format!("KL to the reference reached {kl:.3} nats a token, above {limit}")
            }),
            None => Signal::Unknown,
        }
    }

    fn flat(&self) -> Signal {
        let (Some(rise), Some(std), Some(mean)) = (
            trend(&self.state.rewards, self.config.window),
            mean(&self.state.stds),
            mean(&self.state.rewards),
        ) else {
            return Signal::Unknown;
        };
        // Without deviation there is nothing to learn from: that is a collapse, not a plateau.
        let learnable = std >= self.config.min_reward_std;
        // Where the line through the window ends.
        let now = mean + rise / 2.0;
        let done = self.config.reward_max.is_some_and(|max| now >= max - 0.1 * max.abs());
        if !learnable || done {
            return Signal::Good;
        }
        self.below(rise / std, self.config.min_rise, || {
            format!(
                "the reward went by {rise:+.3} in {} steps, from completions that differ by {std:.3}",
                self.config.window
            )
        })
    }

    fn format(&self) -> Signal {
        // A step without any part's mean says nothing about the parts.
        if metric_names::parts(self.record).next().is_none() {
            return Signal::Unknown;
        }
        worst(self.roles.format.iter().map(|part| {
            Some(match metric_names::part(self.record, part) {
                Some(mean) => self.below(mean, self.config.min_format, || {
                    let steps = self.config.format_patience;
                    format!("the part \"{part}\" stayed near 0 for {steps} steps ({mean:.3})")
                }),
                None => Signal::Bad(format!("the part \"{part}\" has had no value for long")),
            })
        }))
    }

    fn length(&self) -> Signal {
        let cut = self.figure(metric_names::TRUNCATED).map(|share| {
            self.above(share, self.config.max_truncated, || {
                format!("{:.0} % of completions were cut at the token limit", share * 100.0)
            })
        });
        worst([cut, self.growth()])
    }

    /// Longer completions earn more, but not for being right.
    fn growth(&self) -> Option<Signal> {
        let (state, window) = (self.state, self.config.window);
        let grown = trend(&state.lengths, window)?;
        let right = trend(&state.correctness, window)?;
        let reward = trend(&state.rewards, window)?;
        let (length, std) = (mean(&state.lengths)?, mean(&state.stds)?);
        let share = if length > 0.0 { grown / (length - grown / 2.0).max(1.0) } else { 0.0 };
        let margin = self.config.min_rise * std;
        if reward <= margin || right > margin {
            return Some(Signal::Good);
        }
        Some(self.above(share, self.config.max_length_growth, || {
            format!(
                "completions grew by {grown:.0} tokens in {window} steps and the reward by \
                 {reward:.3}, but right answers by {right:+.3}"
            )
        }))
    }

    fn entropy(&self) -> Signal {
        let (Some(now), Some(first)) =
            (self.figure(metric_names::ENTROPY), self.state.first_entropy())
        else {
            return Signal::Unknown;
        };
        self.below(now, first * self.config.min_entropy_share, || {
            format!("the entropy fell from {first:.3} to {now:.3} nats a token")
        })
    }

    fn clipping(&self) -> Signal {
        let (low, high) =
            (self.figure(metric_names::CLIP_LOW), self.figure(metric_names::CLIP_HIGH));
        let (None, None) = (low, high) else {
            let share = low.unwrap_or(0.0) + high.unwrap_or(0.0);
            return self.above(share, self.config.max_clip_ratio, || {
                format!("the ratio of {:.0} % of tokens was clipped", share * 100.0)
            });
        };
        Signal::Unknown
    }
}

/// Bad if any is, good only if all that are known are.
fn worst(signals: impl IntoIterator<Item = Option<Signal>>) -> Signal {
    let mut all = Signal::Unknown;
    for signal in signals.into_iter().flatten() {
        all = match (all, signal) {
            (bad @ Signal::Certain(_), _) | (_, bad @ Signal::Certain(_)) => bad,
            (bad @ Signal::Bad(_), _) | (_, bad @ Signal::Bad(_)) => bad,
            (Signal::Near, _) | (_, Signal::Near) => Signal::Near,
            (Signal::Good, _) | (_, Signal::Good) => Signal::Good,
            _ => Signal::Unknown,
        };
    }
    all
}

fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// How much the least-squares line through the values rises from the first to the last of them;
/// `None` until there are `window` values.
pub(super) fn trend(values: &[f64], window: usize) -> Option<f64> {
    let n = values.len();
    if n < window.max(2) {
        return None;
    }
    let centre = (n - 1) as f64 / 2.0;
    let mean = mean(values)?;
    let (mut up, mut across) = (0.0, 0.0);
    for (i, value) in values.iter().enumerate() {
        let x = i as f64 - centre;
        up += x * (value - mean);
        across += x * x;
    }
    Some(up / across * (n - 1) as f64)
}
