//! Decimal numbers as people write them.

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
pub(super) const SCALES: [&str; 6] =
    ["hundred", "thousand", "million", "billion", "trillion", "dozen"];
const CURRENCIES: [char; 6] = ['$', '€', '£', '¥', '₹', '₩'];

/// Whether a text is a whole number: optional sign, digits with or without thousands separators.
pub fn is_integer(text: &str) -> bool {
    parse_number(text).is_some() && !text.contains(['.', 'e', 'E'])
}

/// The digits of a whole part; `None` unless it is digits, or groups of three digits after commas.
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

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    #[test]
    fn numbers_are_read_as_people_write_them() {
        for (text, number) in [
            ("42", 42.0),
            (" +42\n", 42.0),
            ("-7", -7.0),
            ("\u{2212}7", -7.0),
            ("1,234", 1234.0),
            ("12,345,678.5", 12_345_678.5),
            ("0.25", 0.25),
            (".5", 0.5),
            ("5.", 5.0),
            ("1e3", 1000.0),
            ("2.5E-1", 0.25),
            ("007", 7.0),
        ] {
            assert_eq!(parse_number(text), Some(number), "{text:?}");
        }
    }

    #[test]
    fn texts_that_are_not_numbers_are_refused() {
        for text in [
            "", " ", "-", ".", "e3", "1e", "1e+", "1e1.5", "abc", "4 2", "1,23", "1,2345", ",123",
            "1234,567", "1.5.2", "1.2,345", "--1", "+-1", "inf", "NaN", "1e999", "٣", "0x10",
            "12px",
        ] {
            assert_eq!(parse_number(text), None, "{text:?}");
        }
    }

    #[test]
    fn every_finite_number_that_rust_prints_is_read_back() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        for _ in 0..10_000 {
            let number = f64::from_bits(rng.random());
            if number.is_finite() {
                assert_eq!(parse_number(&format!("{number:e}")), Some(number));
            }
        }
    }
}
