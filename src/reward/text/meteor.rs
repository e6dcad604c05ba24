//! METEOR with exact and stem matching.

use std::collections::HashMap;

use super::porter::stem;
use super::tokens::tokenize_13a;

/// Weight of the precision in the harmonic mean.
const ALPHA: f64 = 0.9;
/// Exponent of the fragmentation.
const BETA: i32 = 3;
/// Greatest penalty for fragmentation.
const GAMMA: f64 = 0.5;

/// METEOR as `nltk.translate.meteor_score.single_meteor_score` over 13a tokens in lower case, with
/// a WordNet that knows no word: exact matches first, then matches of nltk's Porter stems.
///
/// `(1 - 0.5 (chunks / matches)^3) x pr / (0.9 p + 0.1 r)`, where a chunk is a run of matches that
/// are neighbours in both texts; in 0..1 (below 1 even for equal texts: 0.5 for one word), 0 where
/// nothing matches. Source: Lavie and Agarwal 2007; nltk 3.10.
///
/// A deviation from METEOR in full: no synonyms, as WordNet is not shipped.
pub fn meteor(candidate: &str, reference: &str) -> f64 {
    let lower = |text: &str| -> Vec<(usize, String)> {
        tokenize_13a(text).iter().map(|word| word.to_lowercase()).enumerate().collect()
    };
    let (mut given, mut wanted) = (lower(candidate), lower(reference));
    let lengths = (given.len() as f64, wanted.len() as f64);
    let mut matches = align(&mut given, &mut wanted);
    for (_, word) in given.iter_mut().chain(&mut wanted) {
        *word = stem(word);
    }
    matches.extend(align(&mut given, &mut wanted));
    if matches.is_empty() {
        return 0.0;
    }
    matches.sort_unstable();
    let joined = |pair: &&[(usize, usize)]| pair[1] == (pair[0].0 + 1, pair[0].1 + 1);
    let chunks = matches.len() - matches.windows(2).filter(joined).count();
    let matched = matches.len() as f64;
    let (precision, recall) = (matched / lengths.0, matched / lengths.1);
    let mean = precision * recall / (ALPHA * precision + (1.0 - ALPHA) * recall);
    ((1.0 - GAMMA * (chunks as f64 / matched).powi(BETA)) * mean).clamp(0.0, 1.0)
}

/// Matches equal words, the candidate's last with the reference's last first, and leaves those
/// without a match: (place in the candidate, place in the reference).
fn align(
    given: &mut Vec<(usize, String)>,
    wanted: &mut Vec<(usize, String)>,
) -> Vec<(usize, usize)> {
    let mut places: HashMap<&str, Vec<usize>> = HashMap::with_capacity(wanted.len());
    for (place, word) in wanted.iter() {
        places.entry(word).or_default().push(*place);
    }
    let found = given.iter().rev().filter_map(|(place, word)| {
        let other = places.get_mut(word.as_str())?.pop()?;
        Some((*place, other))
    });
    let matches: Vec<(usize, usize)> = found.collect();
    let mut taken: Vec<usize> = matches.iter().map(|(_, other)| *other).collect();
    taken.sort_unstable();
    wanted.retain(|(place, _)| taken.binary_search(place).is_err());
    // The matches are in the candidate's order, backwards.
    let ours = |place: &usize| matches.binary_search_by(|(own, _)| place.cmp(own));
    given.retain(|(place, _)| ours(place).is_err());
    matches
}
