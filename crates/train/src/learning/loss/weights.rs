//! The weight of each token within the optimizer step.

use crate::config::LossKind;

/// The weight of every token of each sequence, from the completion lengths (in tokens) of the
/// *whole* optimizer step of n sequences:
///
/// - `grpo`, `sapo`, `gspo`: `1 / (n * length_i)`, the mean over tokens, then over sequences (Shao et
///   al. 2024)
/// - `dr_grpo`: `1 / (n * max_completion_tokens)`, free of length bias (Liu et al. 2025)
/// - `bnpo`, `dapo`, `cispo`, `reinforce`, `vespo`: `1 / sum of lengths` (Yu et al. 2025). The local
///   batch that normalizes `bnpo` is the optimizer step, as in TRL without gradient accumulation;
///   any other choice would depend on the micro-batches
/// - `luspo`: `1 / n`, the sum over tokens (Tang et al. 2025)
///
/// Sequences that are not trained on, such as masked truncated completions, have length 0 here.
/// Their weight is 0 and n does not count them. (TRL zeroes their loss but counts them in n for
/// `grpo`, `sapo`, `luspo` and `dr_grpo`, which reduces the weight of the other sequences.)
pub(crate) fn sequence_weights(
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
