//! `train.epochs`: the length of a run in passes over its prompts.

use hone_train::config::TrainConfig;

use crate::config::Config;

/// The relation between optimizer steps and passes over the prompts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Epochs {
    /// Prompts to train on.
    prompts: usize,
    /// Completions per prompt.
    group_size: usize,
    /// Completions per optimizer step.
    samples_per_step: usize,
}

impl Epochs {
    /// A run that trains on `prompts` prompts.
    pub(super) fn new(config: &Config, prompts: usize) -> Self {
        let (group_size, samples_per_step) =
            (config.rollout.group_size, config.train.samples_per_step);
        Self { prompts, group_size, samples_per_step }
    }

    /// Optimizer steps of one pass.
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    fn steps_per_pass(self) -> f64 {
        (self.prompts * self.group_size) as f64 / self.samples_per_step as f64
    }

    /// The passes at the end of step `step`, if every completion is trained on once. As in TRL, it
    /// counts steps: groups that are dropped or prompts that are left out for their length do not
    /// change it.
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    pub(super) fn at(self, step: u64) -> f64 {
        step as f64 / self.steps_per_pass()
    }

    /// The steps of `epochs` passes, at least 1. A last incomplete batch counts as a step, so that
    /// each prompt is drawn; TRL leaves it out.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "from 1 to 1e6 passes over a file"
    )]
    fn steps(self, epochs: f64) -> u64 {
        let exact = epochs * self.steps_per_pass();
        // 0.07 passes of 100 steps are 7 steps, although their product is above 7 in f64.
        let rounded = exact.round();
        let steps = if (exact - rounded).abs() < 1e-9 * exact { rounded } else { exact.ceil() };
        steps.max(1.0) as u64
    }

    /// Replaces `train.epochs` by `train.max_steps`, and returns a line about it; `None` if
    /// `train.epochs` is 0.
    pub(super) fn resolve(self, train: &mut TrainConfig) -> Option<String> {
        let epochs = std::mem::take(&mut train.epochs);
        if epochs <= 0.0 {
            return None;
        }
        train.max_steps = self.steps(epochs);
        let Self { prompts, samples_per_step, .. } = self;
        let (plural, steps) = (if epochs == 1.0 { "" } else { "s" }, train.max_steps);
        Some(format!(
            "{epochs} epoch{plural} of {prompts} prompts: {steps} steps of {samples_per_step} \
             completions"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EPOCHS: Epochs = Epochs { prompts: 6725, group_size: 8, samples_per_step: 80 };

    #[test]
    fn steps_of_whole_and_partial_passes() {
        assert_eq!(EPOCHS.steps(1.0), 673, "672.5 steps");
        assert_eq!(EPOCHS.steps(2.0), 1345, "exactly 1345 steps");
        assert_eq!(EPOCHS.steps(1e-6), 1);
        let even = Epochs { prompts: 100, group_size: 8, samples_per_step: 8 };
        assert_eq!((even.steps(0.07), even.steps(0.071)), (7, 8));
        let one = Epochs { prompts: 1, group_size: 4, samples_per_step: 64 };
        assert_eq!((one.steps(1.0), one.steps(17.0)), (1, 2));
        assert_eq!((even.at(0), even.at(50), even.at(100)), (0.0, 0.5, 1.0));
    }

    #[test]
    fn the_steps_replace_the_epochs() {
        let mut train = TrainConfig { epochs: 0.5, ..TrainConfig::default() };
        let note = EPOCHS.resolve(&mut train).unwrap();
        insta::assert_snapshot!(note, @"0.5 epochs of 6725 prompts: 337 steps of 80 completions");
        assert_eq!((train.epochs, train.max_steps, train.schedule_steps()), (0.0, 337, 337));
        let mut steps = TrainConfig { max_steps: 5, ..TrainConfig::default() };
        assert_eq!((EPOCHS.resolve(&mut steps), steps.max_steps), (None, 5));
    }
}
