//! Fuzzy matching of characters.

use rapidfuzz::fuzz;

/// Characters of each text that [`fuzzy_match`] looks at: the rest would cost quadratic time.
pub const FUZZY_CHARS: usize = 8_192;

/// rapidfuzz's `fuzz.ratio / 100` without a processor (case and punctuation count):
/// `1 - (insertions + deletions) / (|candidate| + |reference|)` in characters, in 0..1; 1 for two
/// empty texts. Looks at the first [`FUZZY_CHARS`] characters of each text.
///
/// OpenAI's guide says that `fuzzy_match` uses rapidfuzz and not which of its ratios; the plain one
/// is taken, as the others reward a short completion for being a part of the reference.
pub fn fuzzy_match(candidate: &str, reference: &str) -> f64 {
    let first = |text: &str| text.chars().take(FUZZY_CHARS).collect::<Vec<char>>();
    fuzz::ratio(first(candidate), first(reference)).clamp(0.0, 1.0)
}
