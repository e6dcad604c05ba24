//! Parts of texts, and white space as Python defines it.

use std::borrow::Cow;

use serde_json::Value;

/// A number of a JSON value that is not exact, because it has more than 64 bits: JSON readers keep only the nearest
/// float, so that others would equal it.
pub fn inexact_number(value: &Value) -> Option<f64> {
    match value {
        Value::Number(number) if number.is_f64() => {
            number.as_f64().filter(|number| number.abs() >= 2_f64.powi(63))
        }
        Value::Array(items) => items.iter().find_map(inexact_number),
        Value::Object(fields) => fields.values().find_map(inexact_number),
        _ => None,
    }
}

/// The first `limit` characters of `text`, followed by `…` if there are more.
pub fn shortened(text: &str, limit: usize) -> Cow<'_, str> {
    match text.char_indices().nth(limit) {
        Some((end, _)) => Cow::Owned(format!("{}…", &text[..end])),
        None => Cow::Borrowed(text),
    }
}

/// Whether Python treats a character as white space (`str.strip`, `str.split` and `\s`): that is
/// Rust's white space and the separators U+001C to U+001F. Rewards use this definition, so that
/// values equal those of functions written in Python.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// The text without white space at both ends, as Python's `str.strip`.
pub fn trim(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// The words that white space separates, as Python's `str.split`.
pub fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(is_space).filter(|word| !word.is_empty())
}

/// The content of the last `\boxed{…}` of a text; `None` without one, or if it is never closed.
pub fn boxed(text: &str) -> Option<&str> {
    let start = text.rfind("\\boxed")?;
    let rest = text[start + "\\boxed".len()..].trim_start().strip_prefix('{')?;
    let mut depth = 1_u32;
    for (i, c) in rest.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(&rest[..i]);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn white_space_is_that_of_python() {
        // Every character for which Python's `str.isspace` is true.
        let spaces = "\t\n\u{b}\u{c}\r\u{1c}\u{1d}\u{1e}\u{1f} \u{85}\u{a0}\u{1680}\u{2000}\u{2001}\
                      \u{2002}\u{2003}\u{2004}\u{2005}\u{2006}\u{2007}\u{2008}\u{2009}\u{200a}\u{2028}\
                      \u{2029}\u{202f}\u{205f}\u{3000}";
        let found: String = ('\0'..=char::MAX).filter(|c| is_space(*c)).collect();
        assert_eq!(found, spaces);
        assert_eq!(trim(&format!("{spaces}a b{spaces}")), "a b");
        assert_eq!(words("\u{1c}a\u{1f}\u{a0}b\u{200b} ").collect::<Vec<_>>(), ["a", "b\u{200b}"]);
    }
}
