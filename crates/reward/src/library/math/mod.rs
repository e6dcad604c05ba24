//! Mathematical equality of an answer with a reference.
//!
//! Values are exact fractions where they can be, else floats within a tolerance. Numbers,
//! thousands separators, percent, currency signs, mixed numbers, `\boxed{}`, `\frac`, `\dfrac`,
//! `\sqrt`, `\cdot`, `\times`, `\div`, `^`, `$…$`, pi, brackets and `+ - * /` are read; tuples and
//! lists are compared member by member; what is no number (`x+1`, `\text{east}`) is compared as
//! tidied text. There is no algebra: `2x+x` is not `3x`.

mod parse;
mod rational;
mod tidy;

use rational::Number;
use regex::Regex;

use super::answer::extracted;

pub use tidy::{boxed, tidy};

/// Longest answer that is compared, in bytes; a longer one is not equal to anything.
const LONGEST: usize = 4096;
/// Most members of a tuple or list.
const MOST_MEMBERS: usize = 64;

/// `math_equal`: `[value(answer) = value(reference)]`, 0 or 1; typical weight 2.
///
/// The answer is what `extract` finds, else the whole completion; a `\boxed{}` within it, the
/// last, is the answer alone. A completion without any is read as a whole. `None` for a reference
/// that is blank.
pub fn math_equal(
    text: &str,
    reference: &str,
    tolerance: f64,
    extract: Option<&Regex>,
) -> Option<f64> {
    let wanted = boxed(reference).unwrap_or(reference);
    if wanted.len() <= LONGEST && tidy(wanted).is_empty() {
        return None;
    }
    let within = extract.and_then(|pattern| extracted(text, pattern));
    let found = match within {
        Some(answer) => boxed(answer).unwrap_or(answer),
        None => match (boxed(text), extract) {
            (Some(answer), _) => answer,
            (None, None) => text,
            // Tags were asked for, and there is neither tag nor box.
            (None, Some(_)) => return Some(0.0),
        },
    };
    Some(f64::from(u8::from(same(found, wanted, tolerance))))
}

/// `reasoning_accuracy`: [`math_equal`] of what follows the last occurrence of the first of
/// `delimiters` that occurs; 0 where none does (TRL's `reasoning_accuracy_reward`, whose answers
/// are compared by another library). Typical weight 2.
///
/// A missing reference is missing even where the reasoning never ends; there TRL says 0.
pub fn reasoning_accuracy(
    text: &str,
    reference: &str,
    delimiters: &[String],
    tolerance: f64,
    extract: Option<&Regex>,
) -> Option<f64> {
    let closed = delimiters.iter().find_map(|d| text.rsplit_once(d.as_str()));
    let after = closed.map_or("", |(_, after)| after);
    let value = math_equal(after, reference, tolerance, extract)?;
    Some(if closed.is_some() { value } else { 0.0 })
}

/// Whether two answers are the same value, or the same text where they have none.
///
/// Where just one of the two is a percentage, `50%` equals both `0.5` and `50`: references often
/// leave the sign to the question.
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
    let (a, b) = match (number(answer), number(wanted)) {
        (Some(a), Some(b)) => (a, b),
        (None, None) => return compact(answer) == compact(wanted),
        _ => return false,
    };
    if a.equals(b, tolerance) {
        return true;
    }
    let percent = |text: &str| text.trim_end().strip_suffix('%').and_then(number);
    match (percent(answer), percent(wanted)) {
        (Some(bare), None) => bare.equals(b, tolerance),
        (None, Some(bare)) => a.equals(bare, tolerance),
        _ => false,
    }
}

/// The value of an expression, or of what `x =` says.
fn number(text: &str) -> Option<Number> {
    let text = text.trim();
    let of = match text.rsplit_once('=') {
        Some((name, value)) if name.trim().chars().count() == 1 => {
            if name.trim().chars().all(char::is_alphabetic) { value } else { return None }
        }
        Some(_) => return None,
        None => text,
    };
    parse::value(of)
}

fn compact(text: &str) -> String {
    let letters = text.chars().filter(|c| !c.is_whitespace());
    letters.flat_map(char::to_lowercase).collect()
}

/// The brackets and the members of a tuple, an interval, a set or a bare list; `None` for what has
/// no comma outside inner brackets, and for a number with thousands separators.
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
        // `(1)+(2)` begins and ends with brackets that are not each other's.
        if depth < 0 {
            return None;
        }
    }
    parts.push(inner[from..].trim());
    (depth == 0 && (2..=MOST_MEMBERS).contains(&parts.len())).then_some((ends, parts))
}

#[cfg(test)]
mod tests;
