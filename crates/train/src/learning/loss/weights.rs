//! The weight of each token within the optimizer step.

use std::collections::BTreeMap;

use crate::config::LossKind;

/// The weight of every token of each completion, from the completion lengths (in tokens) of the
/// *whole* optimizer step of n sequences:
///
/// - `grpo`, `sapo`, `gspo`: `1 / (n * length_i)`, the mean over tokens, then over sequences (Shao et
///   al. 2024)
/// - `dr_grpo`: `1 / (n * max_completion_tokens)`, free of length bias (Liu et al. 2025); here n is the
///   number of completions, to each of which the token limit applies
/// - `bnpo`, `dapo`, `cispo`, `reinforce`, `vespo`: `1 / sum of lengths` (Yu et al. 2025). The local
///   batch that normalizes `bnpo` is the optimizer step, as in TRL without gradient accumulation;
///   any other choice would depend on the micro-batches
/// - `luspo`: `1 / n`, the sum over tokens (Tang et al. 2025)
///
/// `sequences` has the sequence of each completion, as any number. A conversation is one sequence of several
/// completions, whose length is the sum of theirs.
///
/// Completions that are not trained on, such as masked truncated completions, have length 0 here.
/// Their weight is 0 and n does not count them. (TRL zeroes their loss but counts them in n for
/// `grpo`, `sapo`, `luspo` and `dr_grpo`, which reduces the weight of the other sequences.)
pub(crate) fn sequence_weights(
    kind: LossKind,
    lengths: &[usize],
    sequences: &[usize],
    max_completion_tokens: usize,
) -> Vec<f64> {
    let trained = || lengths.iter().zip(sequences).filter(|(length, _)| **length > 0);
    let mut whole = BTreeMap::new();
    for (length, sequence) in trained() {
        *whole.entry(sequence).or_insert(0) += length;
    }
    let (n, completions) = (whole.len() as f64, trained().count() as f64);
    let tokens = lengths.iter().sum::<usize>() as f64;
    let weight = |sequence: &usize| match kind {
        LossKind::Grpo | LossKind::Sapo | LossKind::Gspo => {
            1.0 / (n * whole.get(sequence).copied().unwrap_or(1) as f64)
        }
        LossKind::DrGrpo => 1.0 / (completions * max_completion_tokens.max(1) as f64),
        LossKind::Luspo => 1.0 / n,
        LossKind::Bnpo
        | LossKind::Dapo
        | LossKind::Cispo
        | LossKind::Reinforce
        | LossKind::Vespo => 1.0 / tokens,
    };
    let own =
        |(length, sequence): (&usize, &usize)| if *length == 0 { 0.0 } else { weight(sequence) };
    lengths.iter().zip(sequences).map(own).collect()
}
