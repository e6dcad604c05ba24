//! Which letter of a multiple choice a text chooses.

use regex::Regex;

use super::answer::extracted;
use super::indicator;
use super::math::{boxed, tidy};
use crate::ScoreInput;
use crate::config::MultipleChoice;

/// `multiple_choice`: `[letter(completion) = letter(metadata[reference])]`, in {0, 1}; typical
/// weight 2.
///
/// The letter is looked for in what `extract` finds, else in the whole completion ([`letter`]). A
/// completion without one earns 0; without a letter for a reference the part is missing.
pub fn multiple_choice(
    input: &ScoreInput,
    p: &MultipleChoice,
    extract: Option<&Regex>,
) -> Option<f64> {
    let wanted = letter(input.metadata.get(&p.reference)?, p.choices)?;
    let within = extract.and_then(|pattern| extracted(&input.text, pattern));
    let given = letter(within.unwrap_or(&input.text), p.choices);
    Some(indicator(given == Some(wanted)))
}

/// The letter (in capitals, among the first `choices` of the alphabet) that a text chooses. The
/// first of these forms that it has, each taken where it stands last:
/// `\boxed{B}`; `answer is B`, `Answer: (B)`, `choice B`, `option B`; a text that is a letter (`b`,
/// `**B**`) or begins with one as a label (`B. Paris`, `(B) Paris`, `B: Paris`); `(B)`.
pub fn letter(text: &str, choices: u8) -> Option<char> {
    if let Some(inside) = boxed(text) {
        let inside = tidy(inside);
        return labelled(&inside, choices);
    }
    announced(text, choices)
        .or_else(|| labelled(text, choices))
        .or_else(|| bracketed(text, choices))
}

fn among(c: char, choices: u8) -> Option<char> {
    let upper = c.to_ascii_uppercase();
    let place = u32::from(upper).checked_sub(u32::from('A'))?;
    (place < u32::from(choices)).then_some(upper)
}

/// What may stand around a letter.
fn is_wrapping(c: char) -> bool {
    c.is_whitespace() || matches!(c, '(' | '[' | '*' | '_' | '"' | '\'' | '`' | ':' | '$')
}

/// The letter after the last "answer", "choice" or "option".
fn announced(text: &str, choices: u8) -> Option<char> {
    let lower = text.to_ascii_lowercase();
    let after = |word: &str| {
        let places = lower.match_indices(word).filter_map(|(at, _)| {
            let rest = &text[at + word.len()..];
            let opened = rest.trim_start_matches(is_wrapping);
            let said = opened.get(..2).is_some_and(|is| is.eq_ignore_ascii_case("is"));
            let sure = said || rest[..rest.len() - opened.len()].contains([':', '(']);
            let opened = if said { opened[2..].trim_start_matches(is_wrapping) } else { opened };
            Some((at, alone(opened, sure, choices)?))
        });
        places.last()
    };
    let found = ["answer", "choice", "option"].into_iter().filter_map(after);
    found.max_by_key(|(at, _)| *at).map(|(_, letter)| letter)
}

/// A letter that no letter, digit or apostrophe follows. Where the text does not announce it
/// surely, a capital that no word follows ("an answer A dog would give"); a small one needs both
/// surety and an end ("answer: b.").
fn alone(rest: &str, sure: bool, choices: u8) -> Option<char> {
    let mut chars = rest.chars();
    let letter = chars.next().filter(char::is_ascii_alphabetic)?;
    let after = chars.as_str();
    let next = after.chars().next();
    if next.is_some_and(|c| c.is_alphanumeric() || matches!(c, '\'' | '’')) {
        return None;
    }
    let ends = next.is_none_or(|c| matches!(c, ')' | ']' | '.' | ',' | '*' | '\n' | '`' | '"'));
    let word_follows = after.trim_start_matches(' ').starts_with(char::is_alphanumeric);
    let chosen = match letter.is_ascii_uppercase() {
        true => sure || !word_follows,
        false => sure && ends,
    };
    if chosen { among(letter, choices) } else { None }
}

/// The letter that a text is or begins with as a label.
fn labelled(text: &str, choices: u8) -> Option<char> {
    let opened = text.trim_start_matches(is_wrapping);
    let mut chars = opened.chars();
    let letter = chars.next().filter(char::is_ascii_alphabetic)?;
    let rest = chars.as_str();
    let closed = rest.trim_start_matches(['*', '_', '"', '\'', '`', '$']);
    let is_label = closed.trim().is_empty()
        || (letter.is_ascii_uppercase() && closed.starts_with([')', ']', '.', ':', ',']))
        || closed.trim() == ")"
        || closed.trim() == ".";
    if is_label { among(letter, choices) } else { None }
}

/// The last `(B)`.
fn bracketed(text: &str, choices: u8) -> Option<char> {
    let mut places = text.match_indices('(').filter_map(|(at, _)| {
        let mut chars = text[at + 1..].chars();
        let letter = chars.next().filter(char::is_ascii_uppercase)?;
        if chars.next() == Some(')') { among(letter, choices) } else { None }
    });
    places.next_back()
}
