//! Functions that compare an answer with a reference.

use regex::Regex;

use super::number::{is_integer, parse_number};
use super::{has_word, indicator, math, texts_of};
use crate::ScoreInput;
use crate::config::{
    Contains, ContainsMode, ExactMatch, FuzzyMatch, Keywords, MathEqual, NumericMatch,
    ReasoningAccuracy,
};

/// Most characters of either text that `fuzzy_match` compares: its time is their product.
pub const FUZZY_CHARS: usize = 4096;

/// The first group of the pattern's first match, trimmed; `None` where it does not match.
pub fn extracted<'t>(text: &'t str, pattern: &Regex) -> Option<&'t str> {
    Some(pattern.captures(text)?.get(1).map_or("", |group| group.as_str()).trim())
}

/// The answer within a completion: what `extract` finds, or all of it where there is no pattern.
/// `None` when the completion has no answer.
pub fn answer<'t>(text: &'t str, extract: Option<&Regex>) -> Option<&'t str> {
    extract.map_or_else(|| Some(text.trim()), |pattern| extracted(text, pattern))
}

/// `exact_match`: `[trim(answer) = trim(metadata[reference])]`, in {0, 1}; typical weight 2.
///
/// A completion without an answer earns 0; without a reference the part is missing.
pub fn exact_match(input: &ScoreInput, p: &ExactMatch, extract: Option<&Regex>) -> Option<f64> {
    let wanted = input.metadata.get(&p.reference)?.trim();
    let Some(given) = answer(&input.text, extract) else { return Some(0.0) };
    let equal =
        if p.ignore_case { given.to_lowercase() == wanted.to_lowercase() } else { given == wanted };
    Some(indicator(equal))
}

/// `fuzzy_match`: `1 - indel(answer, reference) / (|answer| + |reference|)`, in [0, 1], 0 where
/// that is below `threshold`; typical weight 1. `indel` is the least number of insertions and
/// deletions: rapidfuzz's `fuzz.ratio` divided by 100, with `threshold` as its `score_cutoff`.
///
/// The first 4,096 characters of each are compared. A completion without an answer earns 0;
/// without a reference the part is missing.
pub fn fuzzy_match(input: &ScoreInput, p: &FuzzyMatch, extract: Option<&Regex>) -> Option<f64> {
    let wanted = input.metadata.get(&p.reference)?.trim();
    let Some(given) = answer(&input.text, extract) else { return Some(0.0) };
    let ratio = if p.ignore_case {
        similarity(&given.to_lowercase(), &wanted.to_lowercase())
    } else {
        similarity(given, wanted)
    };
    Some(if ratio < p.threshold { 0.0 } else { ratio })
}

/// rapidfuzz's ratio, 0 to 1, of the first 4,096 characters of each; two empty texts are equal.
pub fn similarity(a: &str, b: &str) -> f64 {
    let head = |text: &str| text.chars().take(FUZZY_CHARS).collect::<Vec<char>>();
    rapidfuzz::fuzz::ratio(head(a), head(b)).clamp(0.0, 1.0)
}

/// `numeric_match`: `[|number(answer) - wanted| <= max(tolerance, relative_tolerance |wanted|)]`
/// with `wanted = number(metadata[reference])`, in {0, 1}; typical weight 2. Numbers are read by
/// [`parse_number`].
///
/// A completion without a number for an answer earns 0; without a numeric reference the part is
/// missing.
pub fn numeric_match(input: &ScoreInput, p: &NumericMatch, extract: Option<&Regex>) -> Option<f64> {
    let wanted = parse_number(input.metadata.get(&p.reference)?)?;
    let given = answer(&input.text, extract).and_then(parse_number);
    let allowed = p.tolerance.max(p.relative_tolerance * wanted.abs());
    Some(indicator(given.is_some_and(|given| (given - wanted).abs() <= allowed)))
}

/// `math_equal` with `metadata[reference]`: [`math::math_equal`].
pub fn math_equal(input: &ScoreInput, p: &MathEqual, extract: Option<&Regex>) -> Option<f64> {
    let wanted = input.metadata.get(&p.reference)?;
    math::math_equal(&input.text, wanted, p.tolerance, extract)
}

/// `reasoning_accuracy` with `metadata[reference]`: [`math::reasoning_accuracy`].
pub fn reasoning_accuracy(
    input: &ScoreInput,
    p: &ReasoningAccuracy,
    extract: Option<&Regex>,
) -> Option<f64> {
    let wanted = input.metadata.get(&p.reference)?;
    math::reasoning_accuracy(&input.text, wanted, &p.delimiters, p.tolerance, extract)
}

/// `integer_answer`: `[answer is a whole number]`, in {0, 1}; typical weight 0.5. A sign and
/// thousands separators are allowed, a decimal point is not.
pub fn integer_answer(text: &str, extract: Option<&Regex>) -> f64 {
    indicator(answer(text, extract).is_some_and(is_integer))
}

/// `contains`: whether all (or any) of the phrases occur, in {0, 1}; typical weight 1.
///
/// Without phrases of its own it takes `metadata[reference]`, one phrase or a JSON list of them;
/// without that either, or with a blank one, the part is missing.
pub fn contains(input: &ScoreInput, p: &Contains, extract: Option<&Regex>) -> Option<f64> {
    let own;
    let phrases = if p.phrases.is_empty() {
        own = texts_of(input.metadata.get(&p.reference)?, |value| vec![value.to_owned()]);
        &own
    } else {
        &p.phrases
    };
    if phrases.is_empty() {
        return None;
    }
    let Some(text) = answer(&input.text, extract) else { return Some(0.0) };
    let lower = p.ignore_case.then(|| text.to_lowercase());
    let text = lower.as_deref().unwrap_or(text);
    let has = |phrase: &String| match p.ignore_case {
        true => text.contains(&phrase.to_lowercase()),
        false => text.contains(phrase.as_str()),
    };
    Some(indicator(match p.mode {
        ContainsMode::All => phrases.iter().all(has),
        ContainsMode::Any => phrases.iter().any(has),
    }))
}

/// `keywords`: share of the keywords that stand in the completion as whole words, letter case
/// ignored, in [0, 1]; typical weight 0.5 to 1.
///
/// Without keywords of its own it takes `metadata[reference]`, a JSON list or a text with commas;
/// without that either the part is missing.
pub fn keywords(input: &ScoreInput, p: &Keywords) -> Option<f64> {
    let own;
    let words = if p.keywords.is_empty() {
        let commas = |value: &str| value.split(',').map(str::to_owned).collect();
        own = texts_of(input.metadata.get(&p.reference)?, commas);
        &own
    } else {
        &p.keywords
    };
    if words.is_empty() {
        return None;
    }
    let text = input.text.to_lowercase();
    let found = words.iter().filter(|word| has_word(&text, &word.to_lowercase())).count();
    Some(found as f64 / words.len() as f64)
}
