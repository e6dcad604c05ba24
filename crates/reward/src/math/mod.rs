//! Numbers in text, and mathematical equality of an answer with a reference.
//!
//! Values are exact fractions while they fit, else floats. The parser reads numbers, thousands separators,
//! percent, currency signs, units after a value, mixed numbers, `\boxed{}`, `\frac`, `\dfrac`, `\sqrt`,
//! `\cdot`, `\times`, `\div`, `^`, `$…$`, `\(…\)`, `\[…\]`, pi, brackets, `+ - * /` and variables of one letter.
//! Tuples, intervals, sets and lists are compared member by member, and words as text. Other texts are equal to
//! themselves; nothing else is said of them.

mod parse;
mod rational;
mod tidy;

use std::iter;

use rational::Number;

pub use hone_core::text::boxed;
pub use tidy::tidy;

/// Longest answer that is compared, in bytes; a longer one equals nothing.
const LONGEST: usize = 4096;
/// Most members of a tuple or list.
const MOST_MEMBERS: usize = 64;

/// Whether an answer has no content after [`tidy`].
pub fn is_blank(text: &str) -> bool {
    text.len() <= LONGEST && tidy(text).is_empty()
}

/// Whether two answers have the same value, or the same text where they have no value; `None` if that cannot be
/// decided, because one of them cannot be read and the texts differ.
///
/// - A decimal equals a fraction that it approximates within `tolerance`, relative to the greater value, as do
///   roots and pi. Fractions, whole numbers and two decimals are compared exactly.
/// - If only one of the two is a percentage, `50%` equals both `0.5` and `50`: in references the sign is often
///   part of the question. Likewise a unit counts if both have one.
/// - Expressions with variables are compared at four points, of which two have negative numbers.
/// - Sets and bare lists have no order. A bare list equals the tuple and the set of its members.
pub fn same(answer: &str, wanted: &str, tolerance: f64) -> Option<bool> {
    if answer.len() > LONGEST || wanted.len() > LONGEST {
        return Some(false);
    }
    let (answer, wanted) = (tidy(answer), tidy(wanted));
    if answer == wanted {
        return Some(true);
    }
    if answer.is_empty() || wanted.is_empty() {
        return Some(false);
    }
    match (members(&answer), members(&wanted)) {
        (Some(a), Some(b)) => same_members(a, b, tolerance),
        (None, None) => same_value(&answer, &wanted, tolerance),
        (Some(_), None) => is_read(&wanted).then_some(false),
        (None, Some(_)) => is_read(&answer).then_some(false),
    }
}

type Members<'a> = ((char, char), Vec<&'a str>);

fn same_members((a, x): Members<'_>, (b, y): Members<'_>, tolerance: f64) -> Option<bool> {
    let (is_bare, is_set) = (|ends| ends == (' ', ' '), |ends| ends == ('{', '}'));
    let fits = a == b || (is_bare(a) && !b.0.eq(&'[')) || (is_bare(b) && !a.0.eq(&'['));
    if !fits || x.len() != y.len() {
        return Some(false);
    }
    if is_set(a) || is_set(b) || (is_bare(a) && is_bare(b)) {
        return same_in_any_order(&x, y, tolerance);
    }
    let mut all_read = true;
    for (member, other) in x.into_iter().zip(y) {
        match same(member, other, tolerance) {
            Some(true) => {}
            Some(false) => return Some(false),
            None => all_read = false,
        }
    }
    all_read.then_some(true)
}

fn same_in_any_order(x: &[&str], y: Vec<&str>, tolerance: f64) -> Option<bool> {
    let all_read = || x.iter().chain(&y).all(|member| is_read(member));
    let mut left = y.clone();
    for member in x {
        match left.iter().position(|other| same(member, other, tolerance) == Some(true)) {
            Some(place) => drop(left.remove(place)),
            None => return all_read().then_some(false),
        }
    }
    Some(true)
}

fn same_value(answer: &str, wanted: &str, tolerance: f64) -> Option<bool> {
    if let (Some((a, unit)), Some((b, other))) = (measure(answer), measure(wanted)) {
        if unit != other && !unit.is_empty() && !other.is_empty() {
            return Some(false);
        }
        let is_decimal = |text: &str| text.contains('.');
        let near = is_decimal(answer) != is_decimal(wanted) && a.is_near(b, tolerance);
        let percent = |text: &str| text.trim_end().strip_suffix('%').and_then(value);
        return Some(
            near || a.equals(b, tolerance)
                || match (percent(answer), percent(wanted)) {
                    (Some(bare), None) => bare.equals(b, tolerance),
                    (None, Some(bare)) => a.equals(bare, tolerance),
                    _ => false,
                },
        );
    }
    let plain = |text: &str| compact(text.trim_start_matches('+'));
    if plain(answer) == plain(wanted) {
        return Some(true);
    }
    let at = |point| Some((at_point(answer, point)?, at_point(wanted, point)?));
    match at(1) {
        // Roots of variables have no value at some points.
        Some(first) => {
            let pairs = iter::once(first).chain((2..=4).filter_map(at));
            Some(pairs.into_iter().all(|(a, b)| a.is_near(b, 1e-9)))
        }
        None => (is_read(answer) && is_read(wanted)).then_some(false),
    }
}

/// Whether an answer is understood: a value, an expression with variables, a list, or words.
fn is_read(text: &str) -> bool {
    let is_words =
        text.chars().all(|c| c.is_alphabetic() || c.is_whitespace() || "-'’()".contains(c));
    let is_infinite = text.trim_start_matches(['+', '-']).trim_start() == "\\infty";
    is_words
        || is_infinite
        || measure(text).is_some()
        || at_point(text, 1).is_some()
        || members(text).is_some()
}

/// The value of an expression, or of `x = expression` for a name of one letter.
fn value(text: &str) -> Option<Number> {
    parse::value(right_side(text)?, 0)
}

/// The value where the variables have the numbers of a point.
fn at_point(text: &str, point: u32) -> Option<Number> {
    parse::value(right_side(text)?, point)
}

/// What a name of one letter is said to be; the text itself without such a name.
fn right_side(text: &str) -> Option<&str> {
    let Some((name, value)) = text.rsplit_once('=') else { return Some(text.trim()) };
    let mut name = name.trim().chars();
    let is_letter = name.next().is_some_and(char::is_alphabetic) && name.next().is_none();
    is_letter.then(|| value.trim())
}

/// A value and its unit, which is empty without one.
fn measure(text: &str) -> Option<(Number, String)> {
    if let Some(value) = value(text) {
        return Some((value, String::new()));
    }
    let text = right_side(text)?;
    let at = text.char_indices().find(|(at, c)| {
        let before = text[..*at].trim_end();
        c.is_alphabetic() && before.ends_with(|c: char| c.is_ascii_digit() || ")}".contains(c))
    });
    let (number, unit) = text.split_at(at?.0);
    let unit = compact(unit.trim_end_matches('.'));
    let name: String = unit.chars().filter(|c| c.is_alphabetic()).collect();
    let letters = name.chars().count();
    let is_unit = unit.chars().all(|c| c.is_alphanumeric() || "/^-*".contains(c))
        && !unit.contains("sqrt")
        && (letters > 1 || UNITS.contains(&name.as_str()))
        && (letters > 2 || number.ends_with(' ') || JOINED.contains(&name.as_str()))
        && !SCALES.contains(&unit.as_str());
    // The plural is the same unit.
    let unit = if letters > 2 { unit.trim_end_matches('s').to_owned() } else { unit };
    is_unit.then(|| parse::value(number.trim(), 0)).flatten().map(|value| (value, unit))
}

/// Units of one letter; other single letters are variables.
const UNITS: [&str; 13] = ["m", "g", "s", "h", "l", "n", "j", "w", "v", "a", "k", "c", "f"];
/// Units of two letters that are also read directly after a number; others are products of variables there.
const JOINED: [&str; 16] = [
    "kg", "mg", "cm", "mm", "km", "ml", "cl", "dl", "ms", "hz", "ft", "lb", "oz", "kw", "kj", "gb",
];

/// A text for comparison: small letters without white space, and without brackets around a single letter.
fn compact(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for word in text.split_whitespace() {
        // `1 2` is not 12.
        if out.ends_with(|c: char| c.is_ascii_digit())
            && word.starts_with(|c: char| c.is_ascii_digit())
        {
            out.push(' ');
        }
        out.extend(word.chars().flat_map(char::to_lowercase));
    }
    let text = out;
    match text.strip_prefix('(').and_then(|text| text.strip_suffix(')')) {
        Some(inner) if inner.chars().count() == 1 => inner.to_owned(),
        _ => text,
    }
}

/// The brackets and the members of a tuple, an interval, a set or a bare list; `None` for a text
/// without a comma outside inner brackets, and for a number with thousands separators.
fn members(text: &str) -> Option<Members<'_>> {
    let text = text.trim();
    let ends = (text.chars().next()?, text.chars().next_back()?);
    let is_bracketed = matches!(ends.0, '(' | '[' | '{') && matches!(ends.1, ')' | ']' | '}');
    let inner = is_bracketed.then(|| text.get(1..text.len() - 1)).flatten();
    // The outer brackets of `(1)+(2)` and of `(1,2),(3,4)` are not a pair.
    match inner.and_then(split) {
        Some(parts) => Some((ends, parts)),
        None => Some(((' ', ' '), split(text)?)),
    }
}

/// The parts of a text between its commas outside brackets. A comma within a number separates thousands, if the
/// text is that number or has a space after its other commas.
fn split(inner: &str) -> Option<Vec<&str>> {
    if parse_number(inner).is_some() {
        return None;
    }
    let is_spaced = inner.contains(", ");
    let mut parts = Vec::new();
    let (mut depth, mut from) = (0_i32, 0);
    for (i, c) in inner.char_indices() {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            ',' if depth == 0 => {
                let is_separator = is_spaced && {
                    let end = inner[i + 1..].find(|c: char| !c.is_ascii_digit());
                    let end = end.map_or(inner.len(), |length| i + 1 + length);
                    parse_number(&inner[from..end]).is_some()
                };
                if !is_separator {
                    parts.push(inner[from..i].trim());
                    from = i + 1;
                }
            }
            _ => {}
        }
        if depth < 0 {
            return None;
        }
    }
    parts.push(inner[from..].trim());
    (depth == 0 && (2..=MOST_MEMBERS).contains(&parts.len())).then_some(parts)
}

/// Reads a decimal number: optional sign (`-`, `+` or the typographic `−`), digits with or without
/// thousands separators (`1,234,567`), optional fraction and exponent, white space at both ends.
/// `None` for anything else, and on overflow.
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

/// Reads an amount: a number as [`parse_number`], with a currency sign before or after it, a percent sign, or
/// up to three words of a unit after it. Words that multiply the number are no unit.
pub fn parse_amount(text: &str) -> Option<f64> {
    let text = text.trim().trim_end_matches('.');
    let (sign, rest) = match text.strip_prefix(['-', '\u{2212}']) {
        Some(rest) => (-1.0, rest),
        None => (1.0, text),
    };
    let rest = rest.trim_start_matches('\\').trim_start_matches(CURRENCIES).trim_start();
    let number =
        rest.trim_end_matches(|c: char| c.is_alphabetic() || c.is_whitespace() || "°/".contains(c));
    let unit = &rest[number.len()..];
    let is_unit = unit.split_whitespace().count() <= 3
        && unit.split_whitespace().all(|word| !SCALES.contains(&word.to_lowercase().as_str()));
    let number = number.trim_end_matches('%').trim_end_matches('\\').trim_end_matches(CURRENCIES);
    let is_signed = number.starts_with(['-', '+', '\u{2212}']) && sign < 0.0;
    (is_unit && !is_signed).then(|| parse_number(number)).flatten().map(|number| sign * number)
}

/// Words that multiply a number, which are no units.
const SCALES: [&str; 6] = ["hundred", "thousand", "million", "billion", "trillion", "dozen"];
const CURRENCIES: [char; 6] = ['$', '€', '£', '¥', '₹', '₩'];

/// Whether a text is a whole number: optional sign, digits with or without thousands separators.
pub fn is_integer(text: &str) -> bool {
    parse_number(text).is_some() && !text.contains(['.', 'e', 'E'])
}

/// The digits of a whole part; `None` unless it is digits, or groups of three digits after commas.
fn without_separators(whole: &str) -> Option<String> {
    let mut groups = whole.split(',').map(str::len);
    let first = groups.next()?;
    let is_plain = !whole.contains(',');
    let fits = is_plain || ((1..=3).contains(&first) && groups.all(|length| length == 3));
    let digits = whole.replace(',', "");
    (fits && all_digits(&digits)).then_some(digits)
}

fn all_digits(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_digit())
}

#[cfg(test)]
mod tests;
