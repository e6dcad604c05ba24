//! What a token counts within the whole optimiser step.

use crate::config::LossKind;

/// The weight of every token of each sequence, from the completion lengths of the *whole*
/// optimiser step (n sequences):
///
/// - `grpo`, `sapo`, `gspo`: `1 / (n * length_i)`, the mean over tokens, then over sequences (Shao et
///   al. 2024)
/// - `dr_grpo`: `1 / (n * max_completion_tokens)`, free of length bias (Liu et al. 2025)
/// - `bnpo`, `dapo`, `cispo`, `reinforce`, `vespo`: `1 / sum of lengths` (Yu et al. 2025). The local batch that
///   `bnpo` is normalised by is the optimiser step, as in TRL without gradient accumulation: it is
///   the only choice that micro-batches don't change
/// - `luspo`: `1 / n`, the sum over tokens (Tang et al. 2025)
///
/// A sequence of length 0 gets 0 and does not count: one that is not trained on, as a masked
/// truncated completion, is given as 0. (TRL zeroes its loss but lets it count in n for `grpo`,
/// `sapo`, `luspo` and `dr_grpo`, which makes the rest of the step weigh less.)
pub fn sequence_weights(
    kind: LossKind,
    lengths: &[usize],
    max_completion_tokens: usize,
) -> Vec<f64> {
    let sequences = lengths.iter().filter(|l| **l > 0).count() as f64;
    let tokens = lengths.iter().sum::<usize>() as f64;
    let weight = |length: usize| match kind {
        LossKind::Grpo | LossKind::Sapo | LossKind::Gspo => 1.0 / (sequences * length as f64),
        LossKind::DrGrpo => 1.0 / (sequences * max_completion_tokens.max(1) as f64),
        LossKind::Luspo => 1.0 / sequences,
        LossKind::Bnpo
        | LossKind::Dapo
        | LossKind::Cispo
        | LossKind::Reinforce
        | LossKind::Vespo => 1.0 / tokens,
    };
    lengths.iter().map(|length| if *length == 0 { 0.0 } else { weight(*length) }).collect()
}
