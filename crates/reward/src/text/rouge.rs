//! ROUGE-N and ROUGE-L.

use super::ngrams::overlaps;
use super::tokens::{Numbered, number, tokenize_rouge};

/// Words of each text that [`rouge_l`] compares: more would cost quadratic time.
pub const ROUGE_L_WORDS: usize = 8192;

/// ROUGE-`n` as rouge-score's `rougeN` F-measure without stemmer: `2pr / (p + r)` of the precision
/// and recall of the shared n-grams over lower-case runs of `a-z` and `0-9`, in 0..1; 0 where
/// nothing is shared, as for texts without such words (in another script). `n` is clamped to 1..=5.
/// Source: Lin 2004; rouge-score 0.1.2.
pub fn rouge_n(candidate: &str, reference: &str, n: usize) -> f64 {
    let words = number(&tokenize_rouge(candidate), &tokenize_rouge(reference));
    let order = overlaps::<5>(&words)[n.clamp(1, 5) - 1];
    f_measure(order.matched, order.candidate, order.reference)
}

/// ROUGE-L as rouge-score's `rougeL` F-measure without stemmer: `2pr / (p + r)` of the longest
/// common subsequence of words over each text's words, in 0..1; 0 where nothing is shared. Reads
/// the first [`ROUGE_L_WORDS`] words of each text. Source: Lin 2004; rouge-score 0.1.2.
pub fn rouge_l(candidate: &str, reference: &str) -> f64 {
    let (mut given, mut wanted) = (tokenize_rouge(candidate), tokenize_rouge(reference));
    given.truncate(ROUGE_L_WORDS);
    wanted.truncate(ROUGE_L_WORDS);
    f_measure(common(&number(&given, &wanted)), given.len(), wanted.len())
}

fn f_measure(matched: usize, candidate: usize, reference: usize) -> f64 {
    if matched == 0 {
        return 0.0;
    }
    let precision = matched as f64 / candidate as f64;
    let recall = matched as f64 / reference as f64;
    2.0 * precision * recall / (precision + recall)
}

/// Length of the longest common subsequence, 64 reference words at a time.
///
/// Bit `i` of the state is 0 where the longest subsequence with the candidate's words so far grows
/// at the reference's word `i` (Hyyrö 2004, "Bit-parallel LCS-length computation revisited").
fn common(words: &Numbered) -> usize {
    let length = words.reference.len();
    let blocks = length.div_ceil(64);
    let mut places = vec![0_u64; words.distinct * blocks];
    for (at, word) in words.reference.iter().enumerate() {
        if let Some(block) = places.get_mut(*word as usize * blocks + at / 64) {
            *block |= 1 << (at % 64);
        }
    }
    let mut state = vec![u64::MAX; blocks];
    for word in &words.candidate {
        let from = (*word as usize).saturating_mul(blocks);
        let Some(places) = places.get(from..from.saturating_add(blocks)) else { continue };
        let mut carry = false;
        for (block, place) in state.iter_mut().zip(places) {
            let grows = *block & place;
            let (sum, first) = block.overflowing_add(grows);
            let (sum, second) = sum.overflowing_add(u64::from(carry));
            carry = first || second;
            *block = sum | (*block & !place);
        }
    }
    let zeros = |(at, block): (usize, &u64)| {
        let used = (length - at * 64).min(64);
        let mask = if used == 64 { u64::MAX } else { (1 << used) - 1 };
        (!block & mask).count_ones() as usize
    };
    state.iter().enumerate().map(zeros).sum()
}
