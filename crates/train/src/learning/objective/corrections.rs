//! The loss of corrections: texts that clients wrote in place of a completion.

use super::{Objective, StepTotals};

impl Objective<'_> {
    /// The same objective for a step with this number of corrections' tokens. It adds
    ///
    /// ```text
    /// train.correction_weight * mean over all tokens of the step's corrections of -l
    /// ```
    ///
    /// to the loss, where `l` is the policy's log-probability at temperature 1. The mean over tokens is
    /// that of supervised fine-tuning (TRL's `SFTTrainer`); InstructGPT adds a weighted log-likelihood
    /// to its reinforcement learning objective in the same way (Ouyang et al. 2022, eq. 2). There is no
    /// importance ratio, because no policy sampled the text, and no KL and no entropy bonus.
    pub fn with_corrections(self, tokens: usize) -> Self {
        let correction = self.config.correction_weight / tokens.max(1) as f64;
        Self { correction, ..self }
    }

    /// Appends `[dloss/dlogp, dloss/dentropy]` of every token of a correction to `gradients`, and adds
    /// the correction to `totals`. `logprobs` are the policy's.
    pub fn add_correction(
        &self,
        logprobs: &[f64],
        gradients: &mut Vec<[f64; 2]>,
        totals: &mut StepTotals,
    ) {
        let nll = -logprobs.iter().sum::<f64>();
        totals.loss += self.correction * nll;
        totals.add_correction(logprobs.len(), nll);
        gradients.extend(logprobs.iter().map(|_| [-self.correction, 0.0]));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::config::TrainConfig;
    use crate::learning::loss::LossSequence;
    use crate::learning::objective::AdaptiveCoefficients;

    #[test]
    fn corrections_add_their_mean_negative_log_likelihood() {
        let config = TrainConfig { beta: 0.0, correction_weight: 0.5, ..TrainConfig::default() };
        let adaptive = AdaptiveCoefficients::new(&config);
        // One sampled completion of two tokens; corrections of one and three tokens.
        let objective =
            Objective::new(&config, &adaptive, &[2, 0, 0], &[0, 1, 2], 8, &[]).with_corrections(4);
        let (mut gradients, mut totals) = (Vec::new(), StepTotals::of_one_pass());
        let sampled = [-1.0, -2.0];
        let sequence = LossSequence {
            logprobs: &sampled,
            entropies: &[0.7, 0.9],
            recorded: &sampled,
            old: None,
            reference: None,
            advantage: 1.0,
        };
        objective.add_sequence(0, &sequence, &mut gradients, &mut totals);
        objective.add_correction(&[-3.0], &mut gradients, &mut totals);
        objective.add_correction(&[-0.5, -1.0, -1.5], &mut gradients, &mut totals);
        assert_eq!(gradients[..2], [[-0.5, 0.0]; 2], "corrections do not count in the mean");
        assert_eq!(gradients[2..], [[-0.125, 0.0]; 4]);
        // -A r in the mean over two tokens, and half of the mean of 3, 0.5, 1 and 1.5.
        assert!((totals.loss - (-1.0 + 0.5 * 1.5)).abs() < 1e-12);
        let mut metrics = BTreeMap::new();
        totals.computed_tokens = 12.0;
        totals.insert_metrics(&config, &mut metrics);
        assert_eq!((metrics["correction/nll"], metrics["correction/samples"]), (1.5, 2.0));
        assert_eq!((metrics["samples"], metrics["tokens"]), (1.0, 2.0));
        assert_eq!(metrics["loss_token_fraction"], 0.5);
    }

    #[test]
    fn a_step_of_corrections_alone_has_a_loss_and_no_metric_of_samples() {
        let config = TrainConfig { correction_weight: 2.0, ..TrainConfig::default() };
        let adaptive = AdaptiveCoefficients::new(&config);
        let objective = Objective::new(&config, &adaptive, &[0], &[0], 8, &[]).with_corrections(2);
        let (mut gradients, mut totals) = (Vec::new(), StepTotals::of_one_pass());
        objective.add_correction(&[-1.0, -2.0], &mut gradients, &mut totals);
        // A second pass, as of another update.
        let mut both = totals.clone();
        both.add(&totals);
        let mut metrics = BTreeMap::new();
        both.insert_metrics(&config, &mut metrics);
        assert_eq!((metrics["loss"], metrics["correction/nll"]), (3.0, 1.5));
        assert_eq!(metrics["correction/samples"], 1.0);
        for name in ["samples", "tokens", "entropy", "kl", "ratio_mean"] {
            assert!(!metrics.contains_key(name), "{name}");
        }
    }
}
