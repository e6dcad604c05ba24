//! The built-in reward functions: pure, linear in the completion's length, never panicking.
//!
//! Patterns are compiled by the `regex` crate, whose matching time is linear in the text, so no
//! completion can stall scoring.

use async_trait::async_trait;
use regex::Regex;
use serde::Serialize;

use super::{RewardFn, ScoreInput};

/// What `hone rewards list` says of a built-in part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct BuiltinKind {
    /// The `kind` in a route's reward.
    pub kind: &'static str,
    /// What it computes.
    pub formula: &'static str,
    /// Its least and greatest value.
    pub range: &'static str,
    /// Its parameters with their defaults.
    pub parameters: &'static str,
    /// A weight to start from.
    pub typical_weight: &'static str,
}

/// Every kind of reward part, for `hone rewards list`.
pub fn builtin_kinds() -> &'static [BuiltinKind] {
    &[
        BuiltinKind {
            kind: "feedback",
            formula: "the value that clients post to /v1/feedback under the part's name",
            range: "any finite number; true is 1, false is 0",
            parameters: "none",
            typical_weight: "1.0",
        },
        BuiltinKind {
            kind: "exact_match",
            formula: "1 if the extracted answer equals metadata[reference], white space at both \
                      ends trimmed, else 0; missing without a reference",
            range: "0 or 1",
            parameters: "reference = \"answer\", ignore_case = false, \
                         extract = \"(?s)<answer>(.*?)</answer>\"",
            typical_weight: "2.0",
        },
        BuiltinKind {
            kind: "numeric_match",
            formula: "1 if |number in the extracted answer - number in metadata[reference]| <= \
                      tolerance, else 0; missing without a numeric reference",
            range: "0 or 1",
            parameters: "reference = \"answer\", tolerance = 1e-6, \
                         extract = \"(?s)<answer>(.*?)</answer>\"",
            typical_weight: "2.0",
        },
        BuiltinKind {
            kind: "regex",
            formula: "1 if the pattern matches anywhere in the completion, else 0",
            range: "0 or 1",
            parameters: "pattern",
            typical_weight: "0.5",
        },
        BuiltinKind {
            kind: "format_strict",
            formula: "1 if the completion is <reasoning>...</reasoning><answer>...</answer> and \
                      nothing else but white space, each tag exactly once, else 0",
            range: "0 or 1",
            parameters: "none",
            typical_weight: "0.5 to 1.0",
        },
        BuiltinKind {
            kind: "format_incremental",
            formula: "max(0, 0.25 x (how many of the four tags stand exactly once) - 0.001 x \
                      (characters after the last </answer>))",
            range: "0 to 1",
            parameters: "none",
            typical_weight: "0.5 to 1.0",
        },
        BuiltinKind {
            kind: "length",
            formula: "max(0, 1 - |completion tokens - ideal| / spread), the stop token counted",
            range: "0 to 1",
            parameters: "ideal, spread",
            typical_weight: "0.1 to 0.5",
        },
    ]
}

/// A reward function that looks at one sample at a time.
pub(super) struct Each<F>(pub(super) F);

#[async_trait]
impl<F> RewardFn for Each<F>
where
    F: Fn(&ScoreInput) -> Option<f64> + Send + Sync,
{
    async fn score(&self, samples: &[ScoreInput]) -> Vec<Option<f64>> {
        samples.iter().map(&self.0).collect()
    }
}

/// The answer within a completion: the first group of `extract`'s first match, or all of it where
/// there is no pattern. `None` when the completion has no answer.
fn answer<'t>(text: &'t str, extract: Option<&Regex>) -> Option<&'t str> {
    match extract {
        None => Some(text.trim()),
        Some(pattern) => {
            Some(pattern.captures(text)?.get(1).map_or("", |group| group.as_str()).trim())
        }
    }
}

/// `exact_match`: `[trim(answer) = trim(metadata[reference])]`, in {0, 1}; typical weight 2.
///
/// A completion without an answer earns 0; without a reference the part is missing.
pub fn exact_match(
    input: &ScoreInput,
    reference: &str,
    ignore_case: bool,
    extract: Option<&Regex>,
) -> Option<f64> {
    let wanted = input.metadata.get(reference)?.trim();
    let Some(given) = answer(&input.text, extract) else { return Some(0.0) };
    let equal =
        if ignore_case { given.to_lowercase() == wanted.to_lowercase() } else { given == wanted };
    Some(f64::from(u8::from(equal)))
}

/// `numeric_match`: `[|number(answer) - number(metadata[reference])| <= tolerance]`, in {0, 1};
/// typical weight 2. Numbers are read by [`parse_number`].
///
/// A completion without a number for an answer earns 0; without a numeric reference the part is
/// missing.
pub fn numeric_match(
    input: &ScoreInput,
    reference: &str,
    tolerance: f64,
    extract: Option<&Regex>,
) -> Option<f64> {
    let wanted = parse_number(input.metadata.get(reference)?)?;
    let given = answer(&input.text, extract).and_then(parse_number);
    Some(f64::from(u8::from(given.is_some_and(|given| (given - wanted).abs() <= tolerance))))
}

/// Reads a decimal number: optional sign (`-`, `+` or the typographic `−`), digits with or without
/// thousands separators (`1,234,567`), optional fraction and exponent, white space around it.
/// `None` for anything else, and for what overflows.
pub fn parse_number(text: &str) -> Option<f64> {
    let text = text.trim();
    let (sign, unsigned) = match text.strip_prefix(['-', '\u{2212}']) {
        Some(rest) => ("-", rest),
        None => ("", text.strip_prefix('+').unwrap_or(text)),
    };
    let (mantissa, exponent) = unsigned.split_once(['e', 'E']).unwrap_or((unsigned, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let whole = without_separators(whole)?;
    let power = exponent.strip_prefix(['-', '+']).unwrap_or(exponent);
    if (whole.is_empty() && fraction.is_empty()) || power.is_empty() {
        return None;
    }
    if !all_digits(fraction) || !all_digits(power) {
        return None;
    }
    let number: f64 = format!("{sign}{whole}.{fraction}e{exponent}").parse().ok()?;
    number.is_finite().then_some(number)
}

/// The digits of a whole part; `None` unless it is digits, or groups of three behind commas.
fn without_separators(whole: &str) -> Option<String> {
    let mut groups = whole.split(',');
    let first = groups.next()?;
    let mut digits = first.to_owned();
    let mut separated = false;
    for group in groups {
        if group.len() != 3 {
            return None;
        }
        separated = true;
        digits.push_str(group);
    }
    let first_fits = !separated || (1..=3).contains(&first.len());
    (first_fits && all_digits(&digits)).then_some(digits)
}

fn all_digits(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_digit())
}

/// `regex`: `[pattern matches somewhere in the completion]`, in {0, 1}; typical weight 0.5.
pub fn regex_match(input: &ScoreInput, pattern: &Regex) -> f64 {
    f64::from(u8::from(pattern.is_match(&input.text)))
}

/// The four tags of the reasoning format, in order.
const TAGS: [&str; 4] = ["<reasoning>", "</reasoning>", "<answer>", "</answer>"];

/// `format_strict`: 1 when the completion matches
/// `^\s*<reasoning>(.*?)</reasoning>\s*<answer>(.*?)</answer>\s*$` (`.` matching line breaks too)
/// and each tag stands exactly once, else 0; typical weight 0.5 to 1.
pub fn format_strict(text: &str) -> f64 {
    let once = TAGS.iter().all(|tag| text.matches(tag).count() == 1);
    // With every tag standing once, the four prefixes and splits below can only fit in order.
    let fits = || {
        let (_, rest) = text.trim().strip_prefix(TAGS[0])?.split_once(TAGS[1])?;
        rest.trim_start().strip_prefix(TAGS[2])?.strip_suffix(TAGS[3])
    };
    f64::from(u8::from(once && fits().is_some()))
}

/// `format_incremental`: `max(0, 0.25 k - 0.001 c)`, `k` of the four tags standing exactly once
/// and `c` characters following the last `</answer>`; from 0 to 1, typical weight 0.5 to 1.
///
/// A completion without `</answer>` has nothing after it and keeps its partial credit.
pub fn format_incremental(text: &str) -> f64 {
    let tags = TAGS.iter().filter(|tag| text.matches(*tag).count() == 1).count();
    let trailing = text.rsplit_once(TAGS[3]).map_or(0, |(_, after)| after.chars().count());
    (0.25 * tags as f64 - 0.001 * trailing as f64).max(0.0)
}

/// `length`: `max(0, 1 - |tokens - ideal| / spread)`, the stop token counted; from 0 to 1, typical
/// weight 0.1 to 0.5. `spread` is at least 1.
pub fn length(tokens: usize, ideal: u32, spread: u32) -> f64 {
    let distance = (tokens as f64 - f64::from(ideal)).abs();
    (1.0 - distance / f64::from(spread.max(1))).max(0.0)
}

#[cfg(test)]
mod tests;
