//! The answer within a completion, and the reference that it is compared with.

use regex::Regex;

use hone_core::config::Problem;
use hone_core::text::trim;

use crate::text::is_unspaced;

/// Most texts that are read from one metadata value.
const MOST_TEXTS: usize = 64;

/// The default metadata key of a reference.
pub fn answer_key() -> String {
    "answer".to_owned()
}

/// The default pattern of an answer. It differs from a configured one in what a completion without tags is: with
/// the default, all of it is the answer, because references have no tags either.
const DEFAULT_PATTERN: &str = r"(?s:<answer>(.*?)</answer>)";

/// The default pattern of an answer.
pub fn answer_pattern() -> String {
    DEFAULT_PATTERN.to_owned()
}

/// Finds the answer within a completion.
pub struct AnswerFinder {
    pattern: Option<Regex>,
    /// Whether a completion without a match is the answer.
    takes_all: bool,
}

impl AnswerFinder {
    /// Compiles the parameter `extract`, which must have a group; an empty one takes the whole
    /// completion.
    pub fn new(pattern: &str) -> Result<Self, Problem> {
        if pattern.is_empty() {
            return Ok(Self { pattern: None, takes_all: true });
        }
        let regex = compile("extract", pattern)?;
        if regex.captures_len() < 2 {
            let allowed = "a pattern with a group, in parentheses, around the answer";
            return Err(Problem::value("extract", format!("`{pattern}`"), allowed));
        }
        Ok(Self { pattern: Some(regex), takes_all: pattern == DEFAULT_PATTERN })
    }

    /// Whether there is no pattern.
    pub fn is_empty(&self) -> bool {
        self.pattern.is_none()
    }

    /// Whether a whole completion without a match is the answer.
    pub fn takes_all(&self) -> bool {
        self.takes_all
    }

    /// The first group of the pattern's last match, trimmed; `None` without a match or a pattern. Earlier
    /// matches are thoughts that the completion gave up.
    pub fn extracted<'t>(&self, text: &'t str) -> Option<&'t str> {
        let captures = self.pattern.as_ref()?.captures_iter(text).last()?;
        Some(captures.get(1).map_or("", |group| trim(group.as_str())))
    }

    /// The answer, trimmed; `None` where the completion has none.
    pub fn find<'t>(&self, text: &'t str) -> Option<&'t str> {
        self.extracted(text).or_else(|| self.takes_all.then(|| after_thoughts(text)))
    }
}

/// What follows the last `</think>`, trimmed; the whole text without one.
pub fn after_thoughts(text: &str) -> &str {
    const END: &str = "</think>";
    trim(text.rfind(END).map_or(text, |at| &text[at + END.len()..]))
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

/// Whether `word` occurs without a letter or digit right before or after it. Characters of a script without spaces
/// end every word.
pub fn has_word(text: &str, word: &str) -> bool {
    text.match_indices(word).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let after = text[at + word.len()..].chars().next();
        let goes_on = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() && !is_unspaced(c));
        !goes_on(before) && !goes_on(after)
    })
}
