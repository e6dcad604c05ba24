//! Numbers as people write them.

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

/// Whether a text is a whole number: optional sign, digits with or without thousands separators.
pub fn is_integer(text: &str) -> bool {
    parse_number(text).is_some() && !text.contains(['.', 'e', 'E'])
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
