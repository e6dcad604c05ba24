//! METEOR with exact and stem matching.

use std::borrow::Cow;
use std::collections::HashMap;

use super::porter::stem;
use super::tokens::{tokenize_13a, words};

/// Weight of the precision in the harmonic mean.
const ALPHA: f64 = 0.9;
/// Exponent of the fragmentation.
const BETA: i32 = 3;
/// Greatest penalty for fragmentation.
const GAMMA: f64 = 0.5;

/// METEOR as `nltk.translate.meteor_score.single_meteor_score` over 13a tokens in lower case, with
/// an empty WordNet: exact matches first, then matches of nltk's Porter stems.
///
/// `(1 - 0.5 (chunks / matches)^3) x pr / (0.9 p + 0.1 r)`, where a chunk is a run of matches that
/// are neighbors in both texts; in 0..1 (below 1 even for equal texts: 0.5 for one word), 0 where
/// nothing matches. Unlike the full METEOR it matches no synonyms, which would need WordNet. Source:
/// Lavie and Agarwal 2007; nltk 3.10.
pub fn meteor(candidate: &str, reference: &str) -> f64 {
    let (given, wanted) = (tokenize_13a(candidate), tokenize_13a(reference));
    let (given, wanted) = (lower(&given), lower(&wanted));
    let lengths = (given.len() as f64, wanted.len() as f64);
    // Words and stems as numbers, so that each different word is stemmed once.
    let (mut known, mut stems, mut stem_of) = (HashMap::new(), HashMap::new(), Vec::new());
    let numbers: Vec<usize> = given
        .iter()
        .chain(&wanted)
        .map(|word| {
            *known.entry(word.as_ref()).or_insert_with(|| {
                let next = stems.len();
                stem_of.push(*stems.entry(stem(word)).or_insert(next));
                stem_of.len() - 1
            })
        })
        .collect();
    let stemmed: Vec<usize> = numbers.iter().map(|word| stem_of[*word]).collect();
    let mut matches = Matches::none(given.len(), wanted.len());
    for (numbers, different) in [(&numbers, known.len()), (&stemmed, stems.len())] {
        let (given, wanted) = numbers.split_at(given.len());
        matches.align(given, wanted, different);
    }
    let pairs: Vec<(usize, usize)> = matches.pairs().collect();
    if pairs.is_empty() {
        return 0.0;
    }
    let joined = |pair: &&[(usize, usize)]| pair[1] == (pair[0].0 + 1, pair[0].1 + 1);
    let chunks = pairs.len() - pairs.windows(2).filter(joined).count();
    let matched = pairs.len() as f64;
    let (precision, recall) = (matched / lengths.0, matched / lengths.1);
    let mean = precision * recall / (ALPHA * precision + (1.0 - ALPHA) * recall);
    ((1.0 - GAMMA * (chunks as f64 / matched).powi(BETA)) * mean).clamp(0.0, 1.0)
}

/// The words of a line in lower case.
fn lower(line: &str) -> Vec<Cow<'_, str>> {
    let is_lower = |word: &str| word.bytes().all(|b| b.is_ascii() && !b.is_ascii_uppercase());
    let lower =
        |word| if is_lower(word) { Cow::Borrowed(word) } else { word.to_lowercase().into() };
    words(line).into_iter().map(lower).collect()
}

/// The alignment of the words of two texts.
struct Matches {
    /// The position in the reference for each position in the candidate.
    given: Vec<Option<usize>>,
    /// Whether the reference's word is matched.
    wanted: Vec<bool>,
}

impl Matches {
    /// No matches yet.
    fn none(given: usize, wanted: usize) -> Self {
        Self { given: vec![None; given], wanted: vec![false; wanted] }
    }

    /// Matches equal words (numbers below `count`) that have no match yet, from the last word of
    /// either text to the first.
    fn align(&mut self, given: &[usize], wanted: &[usize], count: usize) {
        // For each word its last free position, and for each position the one before it.
        let mut last = vec![None; count];
        let mut before = vec![None; wanted.len()];
        for (place, word) in wanted.iter().enumerate().filter(|(place, _)| !self.wanted[*place]) {
            before[place] = last[*word].replace(place);
        }
        let free = self.given.iter_mut().zip(given).rev().filter(|(found, _)| found.is_none());
        for (found, word) in free {
            let Some(place) = last[*word] else { continue };
            last[*word] = before[place];
            self.wanted[place] = true;
            *found = Some(place);
        }
    }

    /// `(position in the candidate, position in the reference)`, in the candidate's order.
    fn pairs(&self) -> impl Iterator<Item = (usize, usize)> {
        self.given.iter().enumerate().filter_map(|(place, found)| Some((place, (*found)?)))
    }
}
