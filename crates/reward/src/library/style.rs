//! Functions that look at how a completion is written.

use std::collections::HashSet;
use std::hash::Hash;

use regex::Regex;

use super::{distinct, share_of_target};
use crate::ScoreInput;
use crate::config::{ForbiddenPhrases, RepetitionPenalty, RepetitionUnit};

/// Words that order steps, with the comma that makes them more than an adverb.
const ORDER: [&str; 7] = ["First,", "Second,", "Third,", "Next,", "Then,", "Lastly,", "Finally,"];

/// `reasoning_steps`: `min(1, markers / target)`, from 0 to 1; typical weight 0.1 to 0.5.
///
/// Markers are `Step 3:` anywhere, `3.`, `3)`, `- ` or `* ` at the beginning of a line, and
/// `First,` `Second,` `Third,` `Next,` `Then,` `Lastly,` `Finally,` anywhere (after Open R1's
/// `reasoning_steps_reward`).
pub fn reasoning_steps(text: &str, target: u32) -> f64 {
    let lines = text.lines().filter(|line| begins_step(line)).count();
    let steps = text.match_indices("Step ").filter(|(at, word)| {
        let rest = &text[at + word.len()..];
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        digits > 0 && rest[digits..].starts_with(':')
    });
    let ordered = ORDER.iter().map(|word| text.matches(word).count()).sum::<usize>();
    share_of_target(lines + steps.count() + ordered, target)
}

fn begins_step(line: &str) -> bool {
    let line = line.trim_start();
    let digits = line.bytes().take_while(u8::is_ascii_digit).count();
    let numbered = (1..=3).contains(&digits) && {
        let rest = &line[digits..];
        // `3.5` is a number, not a step.
        let point = rest.strip_prefix(['.', ')']);
        point.is_some_and(|after| after.is_empty() || after.starts_with(char::is_whitespace))
    };
    numbered || line.starts_with("- ") || line.starts_with("* ")
}

/// `citations`: `min(1, different citations / target)`, from 0 to 1; typical weight 0.1 to 0.5.
///
/// Citations are `[1]`, `(Smith, 2020)`, `(Smith et al., 2020a; Jones, 1999)` and addresses that
/// begin with `http://` or `https://`; the same one again does not count again.
pub fn citations(text: &str, target: u32) -> f64 {
    let bracketed = text.match_indices('[').filter_map(|(at, _)| numbered(&text[at + 1..]));
    let named = text.match_indices('(').filter_map(|(at, _)| within(&text[at + 1..]));
    let named = named.flat_map(|inside| inside.split(';').map(str::trim)).filter(|c| is_named(c));
    let ends = |c: char| c.is_whitespace() || matches!(c, '(' | ')' | '[' | ']' | '<' | '>' | '"');
    let links = text.split(ends).filter_map(address);
    share_of_target(distinct(bracketed.chain(named).chain(links)), target)
}

/// The digits of `12]`.
fn numbered(rest: &str) -> Option<&str> {
    let digits = rest.bytes().take_while(u8::is_ascii_digit).take(4).count();
    let fits = (1..=3).contains(&digits) && rest[digits..].starts_with(']');
    fits.then(|| &rest[..digits])
}

/// What stands before the next bracket, if that closes.
fn within(rest: &str) -> Option<&str> {
    let end = rest.find(['(', ')'])?;
    rest[end..].starts_with(')').then(|| &rest[..end])
}

/// A name in capitals, then `, ` and a year.
fn is_named(inside: &str) -> bool {
    let Some((name, year)) = inside.rsplit_once(", ") else { return false };
    let digits = year.bytes().take_while(u8::is_ascii_digit).count();
    let letter = &year[digits..];
    let is_year = digits == 4 && (letter.is_empty() || matches!(letter.as_bytes(), [b'a'..=b'z']));
    is_year && name.starts_with(char::is_uppercase)
}

/// The address in a word, without the punctuation that ends its sentence.
fn address(word: &str) -> Option<&str> {
    let found = &word[word.find("http")?..];
    let host = found.strip_prefix("http://").or_else(|| found.strip_prefix("https://"))?;
    let is_host = host.starts_with(char::is_alphanumeric);
    is_host.then(|| found.trim_end_matches(['.', ',', ';', ':']))
}

/// `repetition_penalty`: `(1 - different n-grams / all n-grams) max_penalty`, from `max_penalty`
/// to 0; typical weight 0.2 to 1. A completion of fewer than `ngram` words (or tokens) earns 0.
///
/// Yeo et al. 2025 (arXiv 2502.03373, C.2): over words in lower case as Open R1 has it, or over
/// token ids as TRL's `get_repetition_penalty_reward`.
pub fn repetition_penalty(input: &ScoreInput, p: &RepetitionPenalty) -> f64 {
    match p.unit {
        RepetitionUnit::Tokens => repeated(&input.ids, p.ngram) * p.max_penalty,
        RepetitionUnit::Words => {
            let lower = input.text.to_lowercase();
            let words: Vec<&str> = lower.split_whitespace().collect();
            repeated(&words, p.ngram) * p.max_penalty
        }
    }
}

/// Share of n-grams that stood before.
fn repeated<T: Eq + Hash>(items: &[T], n: usize) -> f64 {
    let n = n.max(1);
    if items.len() < n {
        return 0.0;
    }
    let all = items.len() + 1 - n;
    let different = items.windows(n).collect::<HashSet<&[T]>>().len();
    1.0 - different as f64 / all as f64
}

/// `forbidden_phrases`: `max(floor, -penalty hits)`, from `floor` to 0; typical weight 0.2 to 1.
/// Hits are whole words or phrases ([`phrase_pattern`]), overlapping ones counted once.
pub fn forbidden_phrases(text: &str, p: &ForbiddenPhrases, pattern: &Regex) -> f64 {
    let hits = pattern.find_iter(text).count();
    if hits == 0 { 0.0 } else { (-p.penalty * hits as f64).max(p.floor) }
}

/// One pattern for all phrases. A phrase's end that is a letter or a digit must end a word there.
///
/// # Errors
/// The phrases are too long together.
pub fn phrase_pattern(phrases: &[String], ignore_case: bool) -> Result<Regex, regex::Error> {
    let is_word = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    let one = |phrase: &String| {
        let phrase = phrase.trim();
        let before = if is_word(phrase.chars().next()) { r"\b" } else { "" };
        let after = if is_word(phrase.chars().next_back()) { r"\b" } else { "" };
        format!("{before}{}{after}", regex::escape(phrase))
    };
    let all: Vec<String> = phrases.iter().map(one).collect();
    regex::RegexBuilder::new(&all.join("|")).case_insensitive(ignore_case).build()
}
