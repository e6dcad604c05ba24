//! METEOR with exact and stem matching.

use std::borrow::Cow;
use std::collections::HashMap;

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

// Porter's stemmer with nltk's extensions (`PorterStemmer()` of nltk 3.10, its default mode).
//
// M. F. Porter, "An algorithm for suffix stripping", Program 14.3 (1980). Snowball's stemmers (the
// crate rust-stemmers) differ: they lack the irregular forms and the rules that nltk adds.

/// Words with an irregular stem.
#[rustfmt::skip]
const IRREGULAR: [(&str, &str); 16] = [
    ("sky", "sky"), ("skies", "sky"), ("dying", "die"), ("lying", "lie"), ("tying", "tie"),
    ("news", "news"), ("innings", "inning"), ("inning", "inning"), ("outings", "outing"),
    ("outing", "outing"), ("cannings", "canning"), ("canning", "canning"), ("howe", "howe"),
    ("proceed", "proceed"), ("exceed", "exceed"), ("succeed", "succeed"),
];

/// Step 2: suffixes and their replacements after a stem with measure above 0.
#[rustfmt::skip]
const STEP_2: [(&str, &str); 22] = [
    ("ational", "ate"), ("tional", "tion"), ("enci", "ence"), ("anci", "ance"), ("izer", "ize"),
    ("bli", "ble"), ("alli", "al"), ("entli", "ent"), ("eli", "e"), ("ousli", "ous"),
    ("ization", "ize"), ("ation", "ate"), ("ator", "ate"), ("alism", "al"), ("iveness", "ive"),
    ("fulness", "ful"), ("ousness", "ous"), ("aliti", "al"), ("iviti", "ive"), ("biliti", "ble"),
    ("fulli", "ful"), ("logi", "log"),
];

/// Step 3: as step 2.
#[rustfmt::skip]
const STEP_3: [(&str, &str); 7] = [
    ("icate", "ic"), ("ative", ""), ("alize", "al"), ("iciti", "ic"), ("ical", "ic"), ("ful", ""),
    ("ness", ""),
];

/// Step 4: suffixes dropped after a stem with measure above 1.
const STEP_4: [&str; 19] = [
    "al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion", "ou",
    "ism", "ate", "iti", "ous", "ive", "ize",
];

/// The stem of a lower-case word.
pub(super) fn stem(word: &str) -> String {
    if let Some((_, stem)) = IRREGULAR.iter().find(|(form, _)| *form == word) {
        return (*stem).to_owned();
    }
    let mut word: Vec<char> = word.chars().collect();
    if word.len() > 2 {
        plurals(&mut word);
        past_and_gerund(&mut word);
        final_y(&mut word);
        suffixes(&mut word);
        final_e_and_l(&mut word);
    }
    word.into_iter().collect()
}

/// Step 1a.
fn plurals(word: &mut Vec<char>) {
    if ends(word, "ies") {
        let cut = if word.len() == 4 { 1 } else { 2 };
        word.truncate(word.len() - cut);
    } else if ends(word, "sses") {
        word.truncate(word.len() - 2);
    } else if ends(word, "s") && !ends(word, "ss") {
        word.pop();
    }
}

/// Step 1b.
fn past_and_gerund(word: &mut Vec<char>) {
    if ends(word, "ied") {
        let cut = if word.len() == 4 { 1 } else { 2 };
        word.truncate(word.len() - cut);
        return;
    }
    if ends(word, "eed") {
        if measure(&word[..word.len() - 3]) > 0 {
            word.pop();
        }
        return;
    }
    let suffix = ["ed", "ing"].into_iter().find(|suffix| {
        ends(word, suffix) && vowels_and_consonants(&word[..word.len() - suffix.len()]).any(|c| !c)
    });
    let Some(suffix) = suffix else { return };
    word.truncate(word.len() - suffix.len());
    if ["at", "bl", "iz"].into_iter().any(|suffix| ends(word, suffix)) {
        word.push('e');
    } else if ends_double_consonant(word) {
        if !matches!(word.last(), Some('l' | 's' | 'z')) {
            word.pop();
        }
    } else if measure(word) == 1 && ends_short(word) {
        word.push('e');
    }
}

/// Step 1c: `y` after a consonant that is not the whole stem.
fn final_y(word: &mut [char]) {
    if let [stem @ .., last @ 'y'] = word
        && stem.len() > 1
        && vowels_and_consonants(stem).last() == Some(true)
    {
        *last = 'i';
    }
}

/// Steps 2, 3 and 4: the first suffix of each list that the word ends with, if its stem is long
/// enough.
fn suffixes(word: &mut Vec<char>) {
    if ends(word, "alli") && measure(&word[..word.len() - 4]) > 0 {
        word.truncate(word.len() - 2);
    }
    replace(word, &STEP_2);
    replace(word, &STEP_3);
    if let Some(suffix) = STEP_4.into_iter().find(|suffix| ends(word, suffix)) {
        let stem = &word[..word.len() - suffix.len()];
        let fits = suffix != "ion" || matches!(stem.last(), Some('s' | 't'));
        if measure(stem) > 1 && fits {
            word.truncate(stem.len());
        }
    }
}

fn replace(word: &mut Vec<char>, rules: &[(&str, &str)]) {
    let Some((suffix, with)) = rules.iter().find(|(suffix, _)| ends(word, suffix)) else { return };
    let stem = word.len() - suffix.len();
    // The l of `logi` counts as part of the stem, so that short stems like `geo` are treated alike.
    let measured = if *suffix == "logi" { stem + 1 } else { stem };
    if measure(&word[..measured]) > 0 {
        word.truncate(stem);
        word.extend(with.chars());
    }
}

/// Steps 5a and 5b.
fn final_e_and_l(word: &mut Vec<char>) {
    if let [stem @ .., 'e'] = word.as_slice() {
        let m = measure(stem);
        if m > 1 || (m == 1 && !ends_short(stem)) {
            word.pop();
        }
    }
    if ends(word, "ll") && measure(&word[..word.len() - 1]) > 1 {
        word.pop();
    }
}

fn ends(word: &[char], suffix: &str) -> bool {
    word.len() >= suffix.len()
        && suffix.bytes().rev().zip(word.iter().rev()).all(|(b, c)| char::from(b) == *c)
}

/// Whether each letter is a consonant; `y` is one unless it follows a consonant.
fn vowels_and_consonants(word: &[char]) -> impl Iterator<Item = bool> {
    word.iter().scan(false, |before, c| {
        *before = match c {
            'a' | 'e' | 'i' | 'o' | 'u' => false,
            'y' => !*before,
            _ => true,
        };
        Some(*before)
    })
}

/// Porter's m: the number of consonants that follow a vowel.
fn measure(stem: &[char]) -> usize {
    let mut vowel = false;
    let turns = vowels_and_consonants(stem)
        .filter(|consonant| std::mem::replace(&mut vowel, !consonant) && *consonant);
    turns.count()
}

fn ends_double_consonant(word: &[char]) -> bool {
    matches!(word, [.., a, b] if a == b) && vowels_and_consonants(word).last() == Some(true)
}

/// Porter's *o: the word ends with consonant, vowel, and a consonant other than w, x, y; in nltk
/// also a word of a vowel and a consonant.
fn ends_short(word: &[char]) -> bool {
    let (mut ending, mut length) = ([false; 3], 0);
    for consonant in vowels_and_consonants(word) {
        ending = [ending[1], ending[2], consonant];
        length += 1;
    }
    match length {
        0 | 1 => false,
        2 => ending == [false, false, true],
        _ => ending == [true, false, true] && !matches!(word.last(), Some('w' | 'x' | 'y')),
    }
}
