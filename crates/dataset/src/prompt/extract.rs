//! Finds the answer within the text of the answer column (`dataset.extract_answer`).

use regex::Regex;

use hone_core::text::{boxed, trim};

use crate::error::DatasetError;

/// The configuration key.
pub(super) const EXTRACT: &str = "dataset.extract_answer";
const BOXED: &str = r"\boxed{}";

/// Where the answer is within the answer column.
pub(super) enum AnswerExtractor {
    /// The whole column.
    Whole,
    /// After this text, up to its next occurrence or the end, as Python's `split(marker)[1]`.
    Marker(String),
    /// In the last `\boxed{…}`.
    Boxed,
    /// In the first group of the first match.
    Pattern(Regex),
}

impl AnswerExtractor {
    /// Reads the key's value. A text with a parenthesis is a pattern, because only that needs a
    /// group; any other text is a marker.
    pub(super) fn new(rule: &str) -> Result<Self, DatasetError> {
        if rule.is_empty() {
            return Ok(Self::Whole);
        }
        if rule == BOXED {
            return Ok(Self::Boxed);
        }
        if !rule.contains('(') {
            return Ok(Self::Marker(rule.to_owned()));
        }
        let error = |reason: String| DatasetError::Config {
            key: EXTRACT.to_owned(),
            value: rule.to_owned(),
            reason,
        };
        let pattern = Regex::new(rule).map_err(|cause| {
            let cause = cause.to_string();
            let last = cause.lines().last().unwrap_or_default().trim();
            error(format!("not a regular expression: {}", last.trim_start_matches("error: ")))
        })?;
        if pattern.captures_len() < 2 {
            return Err(error("it needs a group, in parentheses, around the answer".to_owned()));
        }
        Ok(Self::Pattern(pattern))
    }

    /// Whether the answer is a part of the column.
    pub(super) fn is_partial(&self) -> bool {
        !matches!(self, Self::Whole)
    }

    /// The answer, trimmed unless it is the whole text; `None` if there is none or it is blank.
    pub(super) fn find<'t>(&self, text: &'t str) -> Option<&'t str> {
        let found = match self {
            Self::Whole => return Some(text),
            Self::Marker(marker) => text.split(marker.as_str()).nth(1)?,
            Self::Boxed => boxed(text)?,
            Self::Pattern(pattern) => pattern.captures(text)?.get(1)?.as_str(),
        };
        Some(trim(found)).filter(|found| !found.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;

    fn find<'t>(rule: &str, text: &'t str) -> Option<&'t str> {
        AnswerExtractor::new(rule).unwrap().find(text)
    }

    #[test]
    fn a_marker_precedes_the_answer() {
        assert_eq!(find("####", "48/2 = <<48/2=24>>24\n#### 1,234\r\n"), Some("1,234"));
        assert_eq!(find("####", "#### -5 #### 6"), Some("-5"), "up to the next marker");
        assert_eq!(find("####", "####5"), Some("5"));
        for none in ["", "no marker", "at the end ####", "#### \n", "### 4", "#### #### 4"] {
            assert_eq!(find("####", none), None, "{none:?}");
        }
        assert_eq!(find(r"A\d:", r"A1: 3 A\d: 4"), Some("4"), "not a pattern without a group");
        assert_eq!(find("", " x "), Some(" x "), "no rule, no change");
    }

    /// An empty answer is none, so that its row is refused. The guides keep the row.
    #[test]
    fn a_marker_finds_what_the_guides_find() {
        let path =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/reference/guides/guide_cases.json");
        let json = std::fs::read_to_string(path).unwrap();
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        let cases = json["functions"]["dataset_answer"]["cases"].as_array().unwrap();
        assert!(cases.len() >= 20, "{} cases", cases.len());
        for case in cases {
            let expected = case[1].as_str().filter(|answer| !answer.is_empty());
            assert_eq!(find("####", case[0].as_str().unwrap()), expected, "{case}");
        }
    }

    #[test]
    fn a_box_contains_the_answer() {
        let boxed = |text| find(r"\boxed{}", text);
        assert_eq!(boxed(r"\boxed{1}, so \boxed{\frac{1}{2}}."), Some(r"\frac{1}{2}"));
        for none in ["1", r"\boxed{1", r"\boxed{ }", r"\boxed"] {
            assert_eq!(boxed(none), None, "{none:?}");
        }
    }

    #[test]
    fn a_pattern_contains_the_answer_in_its_first_group() {
        assert_eq!(find(r"answer is (\S+)", "The answer is 12 or the answer is 13"), Some("12"));
        assert_eq!(find(r"(?s)<a>(.*?)</a>", "<a>\n 7 </a>"), Some("7"));
        assert_eq!(find("a(b)?", "ac"), None, "the group takes no part");
        assert_eq!(find("a( *)", "a  "), None, "the group is blank");
    }

    #[test]
    fn a_wrong_pattern_is_refused() {
        let error = |rule| AnswerExtractor::new(rule).err().unwrap().to_string();
        assert_snapshot!(error(r"answer is (\S+"), @r#"dataset.extract_answer = "answer is (\\S+": not a regular expression: unclosed group"#);
        assert_snapshot!(error(r"\(\d+\)"), @r#"dataset.extract_answer = "\\(\\d+\\)": it needs a group, in parentheses, around the answer"#);
        assert_snapshot!(error("(?:a)"), @r#"dataset.extract_answer = "(?:a)": it needs a group, in parentheses, around the answer"#);
    }
}
