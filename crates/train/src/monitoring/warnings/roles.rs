//! The meaning of reward parts.

use serde::{Deserialize, Serialize};

/// Names of the reward parts that measure format and correctness.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RewardRoles {
    /// Parts that reward a format.
    pub format: Vec<String>,
    /// Parts that reward a right answer.
    pub correctness: Vec<String>,
}

impl RewardRoles {
    /// Sorts parts, given as `(name, kind)`, by words in their kind. A kind without such a word (a
    /// script, a webhook) leaves it to the name. A part may have neither role.
    pub fn of<'a>(parts: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        const FORMAT: [&str; 8] =
            ["format", "xml", "json", "schema", "think", "tags", "regex", "syntax"];
        const CORRECT: [&str; 8] =
            ["match", "math", "numeric", "choice", "code", "correct", "accuracy", "right"];
        let has = |text: &str, words: &[&str]| {
            let text = text.to_ascii_lowercase();
            words.iter().any(|word| text.contains(word))
        };
        let mut roles = Self::default();
        for (name, kind) in parts {
            match [kind, name].iter().find(|t| has(t, &FORMAT) || has(t, &CORRECT)) {
                Some(text) if has(text, &FORMAT) => roles.format.push(name.to_owned()),
                Some(_) => roles.correctness.push(name.to_owned()),
                None => {}
            }
        }
        roles
    }
}
