//! The answer within a completion, and the reference that it is compared with.

use regex::Regex;

use hone_core::config::Problem;
use hone_core::text::trim;

/// Most texts that are read from one metadata value.
const MOST_TEXTS: usize = 64;

/// The default metadata key of a reference.
pub fn answer_key() -> String {
    "answer".to_owned()
}

/// The default pattern of an answer.
pub fn answer_pattern() -> String {
    r"(?s)<answer>(.*?)</answer>".to_owned()
}

/// Finds the answer within a completion.
pub struct AnswerFinder(Option<Regex>);

impl AnswerFinder {
    /// Compiles the parameter `extract`, which must have a group; an empty one takes the whole
    /// completion.
    pub fn new(pattern: &str) -> Result<Self, Problem> {
        if pattern.is_empty() {
            return Ok(Self(None));
        }
        let regex = compile("extract", pattern)?;
        if regex.captures_len() < 2 {
            let allowed = "a pattern with a group, in parentheses, around the answer";
            return Err(Problem::value("extract", format!("`{pattern}`"), allowed));
        }
        Ok(Self(Some(regex)))
    }

    /// Whether the whole completion is the answer.
    pub fn takes_all(&self) -> bool {
        self.0.is_none()
    }

    /// The first group of the pattern's first match, trimmed; `None` without a match or a pattern.
    pub fn extracted<'t>(&self, text: &'t str) -> Option<&'t str> {
        let captures = self.0.as_ref()?.captures(text)?;
        Some(captures.get(1).map_or("", |group| trim(group.as_str())))
    }

    /// The answer, trimmed; `None` where the completion has none.
    pub fn find<'t>(&self, text: &'t str) -> Option<&'t str> {
        if self.takes_all() { Some(trim(text)) } else { self.extracted(text) }
    }
}

/// Compiles the pattern of a key.
pub fn compile(key: &str, pattern: &str) -> Result<Regex, Problem> {
    Regex::new(pattern).map_err(|error| {
        let allowed = format!("a regular expression ({})", reason(&error));
        Problem::value(key, format!("`{pattern}`"), &allowed)
    })
}

/// The last line of a pattern's error, which names the reason; the lines before it show the place.
pub fn reason(error: &regex::Error) -> String {
    let text = error.to_string();
    let last = text.lines().last().unwrap_or_default().trim();
    last.strip_prefix("error: ").unwrap_or(last).to_owned()
}

/// The texts of a metadata value: the strings of a JSON list, else those that `otherwise` returns.
/// Blank texts and those after the first 64 are left out.
pub fn texts_of<'v>(value: &'v str, otherwise: impl FnOnce(&'v str) -> Vec<String>) -> Vec<String> {
    let listed = serde_json::from_str::<Vec<String>>(value);
    let texts = listed.unwrap_or_else(|_| otherwise(value));
    let texts = texts.into_iter().map(|text| text.trim().to_owned());
    texts.filter(|text| !text.is_empty()).take(MOST_TEXTS).collect()
}

/// Whether `word` occurs without a letter or digit right before or after it.
pub fn has_word(text: &str, word: &str) -> bool {
    text.match_indices(word).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let after = text[at + word.len()..].chars().next();
        !before.is_some_and(char::is_alphanumeric) && !after.is_some_and(char::is_alphanumeric)
    })
}
