//! Similarity in characters.

use rapidfuzz::fuzz;

/// Characters of each text that [`fuzzy_match`] compares: more would cost quadratic time.
pub const FUZZY_CHARS: usize = 8_192;

/// `1 - (insertions + deletions) / (|a| + |b|)` in characters, in 0..1; 1 for two empty texts. This
/// is rapidfuzz's `fuzz.ratio / 100` without a processor (case and punctuation count), of the first
/// `chars` characters of each text.
pub fn character_ratio(a: &str, b: &str, chars: usize) -> f64 {
    let first = |text: &str| text.chars().take(chars).collect::<Vec<char>>();
    fuzz::ratio(first(a), first(b)).clamp(0.0, 1.0)
}

/// [`character_ratio`] of the first [`FUZZY_CHARS`] characters of each text.
///
/// OpenAI's guide does not say which of rapidfuzz's ratios `fuzzy_match` uses. Hone uses the plain
/// one, as the others reward a short completion for being a part of the reference.
pub fn fuzzy_match(candidate: &str, reference: &str) -> f64 {
    character_ratio(candidate, reference, FUZZY_CHARS)
}
