//! Cosine similarity of word counts.

use super::tokens::{ABSENT, number, tokenize_13a, words};

/// The cosine of the two texts' word counts, `a.b / (|a| |b|)`, over lower-case 13a tokens, in
/// 0..1; 0 where either text is empty. Equals scikit-learn's `CountVectorizer` with that tokenizer
/// and `cosine_similarity`.
///
/// OpenAI's `cosine` compares embeddings (`text-embedding-3-large`) and so recognizes synonyms; this
/// one does not, as it needs no embedding model.
pub fn cosine(candidate: &str, reference: &str) -> f64 {
    let lower = |text: &str| tokenize_13a(&text.to_lowercase());
    let (given, wanted) = (lower(candidate), lower(reference));
    let (given, wanted) = (words(&given), words(&wanted));
    let words = number(&given, &wanted);
    let mut counts = vec![(0.0, 0.0); words.distinct];
    for word in &words.reference {
        if let Some((_, count)) = counts.get_mut(*word as usize) {
            *count += 1.0;
        }
    }
    for word in &words.candidate {
        if let Some((count, _)) = counts.get_mut(*word as usize) {
            *count += 1.0;
        }
    }
    let shared: f64 = counts.iter().map(|(a, b)| a * b).sum();
    if shared == 0.0 {
        return 0.0;
    }
    let of_reference: f64 = counts.iter().map(|(_, b): &(f64, f64)| b * b).sum();
    let strange = given.iter().zip(&words.candidate).filter(|(_, number)| **number == ABSENT);
    let mut strange: Vec<&str> = strange.map(|(word, _)| *word).collect();
    strange.sort_unstable();
    let repeats = strange.chunk_by(|a, b| a == b).map(|same| (same.len() as f64).powi(2));
    let of_candidate: f64 = counts.iter().map(|(a, _)| a * a).sum::<f64>() + repeats.sum::<f64>();
    (shared / (of_candidate * of_reference).sqrt()).clamp(0.0, 1.0)
}
