//! Pieces of grammars in llguidance's variant of Lark.

use serde_json::Value;

use hone_core::types::TokenId;

use super::GrammarError;
use super::schema::{self, MAX_COMBINED, combined_schemas};

/// Most `&` and `~` of a grammar. The time for an intersection grows exponentially with its parts.
const MAX_OPERATORS: usize = 4;

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
pub(super) fn json(schema: &Value) -> Result<String, GrammarError> {
    Ok(format!("%json {}", schema::prepared_text(&schema.to_string())?))
}

/// A grammar of a client, or of calls: with bounded intersections, complements and JSON schemas.
///
/// A schema with `x-guidance` was prepared before or chooses its own options, and stays; others are prepared.
pub(super) fn bounded(grammar: &str) -> Result<String, GrammarError> {
    let (mut out, mut rest) = (String::with_capacity(grammar.len()), grammar);
    let (mut operators, mut combined) = (0, 0_usize);
    while let Some(first) = rest.chars().next() {
        let after = &rest[first.len_utf8()..];
        let length = match first {
            '#' => line(rest),
            '/' if after.starts_with('/') => line(rest),
            '"' | '/' => 1 + quoted(after, first),
            // A special token.
            '<' => 1 + after.find(|c: char| c == '<' || c == '>' || c.is_whitespace()).unwrap_or(0),
            '%' if after.starts_with("json") => {
                let text = &after["json".len()..];
                let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
                let (schema, end) = (values.next(), values.byte_offset());
                let Some(Ok(schema)) = schema else {
                    return Err(GrammarError::Refused("%json needs a JSON schema".to_owned()));
                };
                combined = combined.saturating_add(combined_schemas(&schema)?);
                if combined > MAX_COMBINED {
                    let reason = format!("the schemas combine more than {MAX_COMBINED} schemas");
                    return Err(GrammarError::Refused(reason));
                }
                let is_prepared = schema.get("x-guidance").is_some();
                out.push_str(&if is_prepared { format!("%json {schema}") } else { json(&schema)? });
                rest = &text[end..];
                continue;
            }
            '&' | '~' => {
                // Digits say how often something is repeated.
                let repeats =
                    first == '~' && after.trim_start().starts_with(|c: char| c.is_ascii_digit());
                operators += usize::from(!repeats);
                1
            }
            _ => first.len_utf8(),
        };
        out.push_str(&rest[..length]);
        rest = &rest[length..];
    }
    if operators > MAX_OPERATORS {
        return Err(GrammarError::Refused(format!(
            "the grammar has {operators} intersections (&) and complements (~): it may have {MAX_OPERATORS}"
        )));
    }
    Ok(out)
}

/// The bytes before the next line.
fn line(text: &str) -> usize {
    text.find('\n').unwrap_or(text.len())
}

/// The bytes up to and with the closing quote.
fn quoted(text: &str, quote: char) -> usize {
    let mut escaped = false;
    let end = text.char_indices().find(|(_, c)| {
        let ends = *c == quote && !escaped;
        escaped = *c == '\\' && !escaped;
        ends
    });
    end.map_or(text.len(), |(at, _)| at + 1)
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
