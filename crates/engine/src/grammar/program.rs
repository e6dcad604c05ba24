//! Translates a grammar for the library, within bounds.

use llguidance::api::TopLevelGrammar;

use hone_core::types::GrammarSpec;

use super::error::GrammarError;
use super::{lark, schema};

/// Longest regular expression, in bytes.
const MAX_REGEX: usize = 16 << 10;
/// Most texts of a choice, and most bytes of all of them.
const MAX_CHOICES: (usize, usize) = (1000, 64 << 10);
/// Longest Lark grammar, in bytes.
const MAX_LARK: usize = 256 << 10;

/// The grammar for the library.
///
/// # Errors
/// [`GrammarError::Schema`] or [`GrammarError::Refused`] with what is wrong.
pub(super) fn program(spec: &GrammarSpec) -> Result<TopLevelGrammar, GrammarError> {
    let refuse = |reason: String| Err(GrammarError::Refused(reason));
    match spec {
        GrammarSpec::JsonObject => Ok(TopLevelGrammar::from_json_schema(schema::any_object())),
        GrammarSpec::JsonSchema(text) => {
            Ok(TopLevelGrammar::from_json_schema(schema::prepared_text(text)?))
        }
        GrammarSpec::Regex(regex) => {
            if regex.is_empty() || regex.len() > MAX_REGEX {
                let length = regex.len();
                return refuse(format!(
                    "the regular expression has {length} bytes: it must have 1 to {MAX_REGEX}"
                ));
            }
            // The library would hide what this group matches.
            if regex.contains("(?P<stop>") || regex.contains("(?<stop>") {
                return refuse("a group must not be named stop".to_owned());
            }
            Ok(TopLevelGrammar::from_regex(regex))
        }
        GrammarSpec::Choice(texts) => {
            let (most, bytes) = MAX_CHOICES;
            let total: usize = texts.iter().map(String::len).sum();
            let fits = !texts.is_empty() && texts.len() <= most && total <= bytes;
            if !fits || texts.iter().any(String::is_empty) {
                return refuse(format!(
                    "a choice has 1 to {most} texts of {bytes} bytes together, of which no text is empty"
                ));
            }
            Ok(TopLevelGrammar::from_lark(lark::choice(texts)))
        }
        GrammarSpec::Lark(text) => {
            if text.trim().is_empty() || text.len() > MAX_LARK {
                let length = text.len();
                return refuse(format!(
                    "the grammar has {length} bytes: it must have 1 to {MAX_LARK}"
                ));
            }
            Ok(TopLevelGrammar::from_lark(lark::bounded(text)?))
        }
    }
}
