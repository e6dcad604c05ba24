//! Numbers in text, and mathematical equality of an answer with a reference.
//!
//! Values are exact fractions while they fit, else floats within a tolerance. The parser reads
//! numbers, thousands separators, percent, currency signs, mixed numbers, `\boxed{}`, `\frac`,
//! `\dfrac`, `\sqrt`, `\cdot`, `\times`, `\div`, `^`, `$…$`, pi, brackets and `+ - * /`. Tuples and
//! lists are compared member by member, and answers that are not numbers (`x+1`, `\text{east}`) as
//! tidied text. There is no algebra: `2x+x` is not `3x`.

mod number;
mod parse;
mod rational;
mod tidy;

use rational::Number;

pub use hone_core::text::boxed;
pub use number::{is_integer, parse_number};
pub use tidy::tidy;

/// Longest answer that is compared, in bytes; a longer one equals nothing.
const LONGEST: usize = 4096;
/// Most members of a tuple or list.
const MOST_MEMBERS: usize = 64;

/// Whether an answer has no content after [`tidy`].
pub fn is_blank(text: &str) -> bool {
    text.len() <= LONGEST && tidy(text).is_empty()
}

/// Whether two answers have the same value, or the same text where they have no value.
///
/// If only one of the two is a percentage, `50%` equals both `0.5` and `50`: in references the sign
/// is often part of the question.
pub fn same(answer: &str, wanted: &str, tolerance: f64) -> bool {
    if answer.len() > LONGEST || wanted.len() > LONGEST {
        return false;
    }
    let (answer, wanted) = (tidy(answer), tidy(wanted));
    if answer == wanted {
        return true;
    }
    match (members(&answer), members(&wanted)) {
        (Some((a, x)), Some((b, y))) => {
            a == b
                && x.len() == y.len()
                && x.iter().zip(&y).all(|(x, y)| same_value(x, y, tolerance))
        }
        (None, None) => same_value(&answer, &wanted, tolerance),
        _ => false,
    }
}

fn same_value(answer: &str, wanted: &str, tolerance: f64) -> bool {
    let (a, b) = match (value(answer), value(wanted)) {
        (Some(a), Some(b)) => (a, b),
        (None, None) => return compact(answer) == compact(wanted),
        _ => return false,
    };
    if a.equals(b, tolerance) {
        return true;
    }
    let percent = |text: &str| text.trim_end().strip_suffix('%').and_then(value);
    match (percent(answer), percent(wanted)) {
        (Some(bare), None) => bare.equals(b, tolerance),
        (None, Some(bare)) => a.equals(bare, tolerance),
        _ => false,
    }
}

/// The value of an expression, or of `x = expression` for a name of one letter.
fn value(text: &str) -> Option<Number> {
    let Some((name, value)) = text.rsplit_once('=') else { return parse::value(text.trim()) };
    let mut name = name.trim().chars();
    let is_letter = name.next().is_some_and(char::is_alphabetic) && name.next().is_none();
    if is_letter { parse::value(value.trim_end()) } else { None }
}

fn compact(text: &str) -> String {
    let letters = text.chars().filter(|c| !c.is_whitespace());
    letters.flat_map(char::to_lowercase).collect()
}

/// The brackets and the members of a tuple, an interval, a set or a bare list; `None` for a text
/// without a comma outside inner brackets, and for a number with thousands separators.
fn members(text: &str) -> Option<((char, char), Vec<&str>)> {
    let text = text.trim();
    let mut ends = (text.chars().next()?, text.chars().next_back()?);
    let is_bracketed = matches!(ends.0, '(' | '[' | '{') && matches!(ends.1, ')' | ']' | '}');
    let inner = if is_bracketed && text.len() >= 2 { &text[1..text.len() - 1] } else { text };
    if inner.len() == text.len() {
        ends = (' ', ' ');
        if parse::value(text).is_some() {
            return None;
        }
    }
    let mut parts = Vec::new();
    let (mut depth, mut from) = (0_i32, 0);
    for (i, c) in inner.char_indices() {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(inner[from..i].trim());
                from = i + 1;
            }
            _ => {}
        }
        // The outer brackets of `(1)+(2)` are not a pair.
        if depth < 0 {
            return None;
        }
    }
    parts.push(inner[from..].trim());
    (depth == 0 && (2..=MOST_MEMBERS).contains(&parts.len())).then_some((ends, parts))
}

#[cfg(test)]
mod tests;
