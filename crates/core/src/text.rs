//! Text: parts of it, and its form in error messages.

use std::borrow::Cow;

/// The first `limit` characters of `text`, followed by `…` if there are more.
pub fn shortened(text: &str, limit: usize) -> Cow<'_, str> {
    match text.char_indices().nth(limit) {
        Some((end, _)) => Cow::Owned(format!("{}…", &text[..end])),
        None => Cow::Borrowed(text),
    }
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
