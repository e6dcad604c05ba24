//! Pieces of grammars in llguidance's variant of Lark.

use serde_json::Value;

use hone_core::types::TokenId;

use super::error::GrammarError;
use super::schema;

/// A terminal that matches exactly `text`.
pub(super) fn literal(text: &str) -> String {
    // A string always serializes. Lark also requires an escape for the delete character.
    serde_json::to_string(text).unwrap_or_default().replace('\u{7f}', "\\u007f")
}

/// A terminal of a regular expression.
pub(super) fn pattern(regex: &str) -> String {
    format!("/{}/", llguidance::regex_to_lark(regex, ""))
}

/// A token, which may be a special one.
pub(super) fn token(id: TokenId) -> String {
    format!("<[{id}]>")
}

/// A JSON value that a schema accepts.
///
/// # Errors
/// [`GrammarError::Schema`] with the place of a keyword that cannot be enforced, or
/// [`GrammarError::Refused`] if the schema is too long.
pub(super) fn json(schema: &Value) -> Result<String, GrammarError> {
    Ok(format!("%json {}", schema::prepared_text(&schema.to_string())?))
}

/// The grammar of one of several texts.
pub(super) fn choice(texts: &[String]) -> String {
    let texts: Vec<String> = texts.iter().map(|text| literal(text)).collect();
    format!("start: CHOICE\nCHOICE: {}\n", texts.join(" | "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_are_escaped() {
        assert_eq!(literal("a\"\\\n\u{7f}é"), r#""a\"\\\n\u007fé""#);
        assert_eq!(pattern("a/b"), r"/a\/b/");
        assert_eq!(token(7), "<[7]>");
        assert_eq!(
            choice(&["a".to_owned(), "b".to_owned()]),
            "start: CHOICE\nCHOICE: \"a\" | \"b\"\n"
        );
    }
}
