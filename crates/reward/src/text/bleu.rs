//! BLEU and Google's GLEU.

use super::ngrams::{Overlap, overlaps};
use super::tokens::{number, tokenize_13a, words};

/// Sentence BLEU as `sacrebleu.sentence_bleu(candidate, [reference]).score / 100`: 13a tokens, case
/// kept, orders 1 to 4 up to the candidate's length (effective order), an order without a match
/// smoothed to `1 / (2^k x its n-grams)` for the k-th such order (`exp`, Chen and Cherry 2014,
/// method 3).
///
/// `min(1, exp(1 - |reference| / |candidate|)) x (geometric mean of the precisions)`, in 0..1;
/// 0 where no word matches or either text is empty. Source: Papineni et al. 2002; sacrebleu 2.6.
pub fn bleu(candidate: &str, reference: &str) -> f64 {
    let orders = all_orders(candidate, reference);
    if orders[0].matched == 0 {
        return 0.0;
    }
    let (mut unmatched, mut logs, mut effective) = (1.0, 0.0, 0.0);
    for order in orders.iter().take_while(|order| order.candidate > 0) {
        effective += 1.0;
        let all = order.candidate as f64;
        if order.matched == 0 {
            unmatched *= 2.0;
            logs += (1.0 / (unmatched * all)).ln();
        } else {
            logs += (order.matched as f64 / all).ln();
        }
    }
    let (given, wanted) = (orders[0].candidate as f64, orders[0].reference as f64);
    let brevity = if given < wanted { (1.0 - wanted / given).exp() } else { 1.0 };
    (brevity * (logs / effective).exp()).clamp(0.0, 1.0)
}

/// Overlaps of 13a tokens, orders 1 to 4.
fn all_orders(candidate: &str, reference: &str) -> [Overlap; 4] {
    let (given, wanted) = (tokenize_13a(candidate), tokenize_13a(reference));
    overlaps(&number(&words(&given), &words(&wanted)))
}

/// Google's GLEU as `nltk.translate.gleu_score.sentence_gleu` over 13a tokens, case kept:
/// `(shared n-grams of orders 1 to 4) / max(the candidate's, the reference's)`, in 0..1; 0 where
/// both texts are empty. Symmetric. Source: Wu et al. 2016; nltk 3.10.
pub fn gleu(candidate: &str, reference: &str) -> f64 {
    let orders = all_orders(candidate, reference);
    let matched: usize = orders.iter().map(|order| order.matched).sum();
    let given: usize = orders.iter().map(|order| order.candidate).sum();
    let wanted: usize = orders.iter().map(|order| order.reference).sum();
    match given.max(wanted) {
        0 => 0.0,
        all => matched as f64 / all as f64,
    }
}
