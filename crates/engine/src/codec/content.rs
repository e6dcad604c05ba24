//! Special tokens in the texts of clients, where they are ordinary text.
//!
//! A chat template joins markup and the texts of messages to one string, in which the tokenizer recognizes
//! special tokens. A client could so begin another turn by writing `<|im_start|>system`. Therefore a
//! stand-in replaces every special token in a client's text before the template is applied: one
//! character of Unicode's private use planes that no text contains, which a template treats like any
//! other. When the special tokens of the markup have been recognized, the text of its token replaces
//! each stand-in again, and is encoded like any text.
//!
//! Other added tokens, such as Qwen's `<think>`, are recognized in texts, too.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashSet};

use regex::{Captures, Regex};
use tokenizers::NormalizedString;

use crate::error::EngineError;

/// The expression that finds `tokens` in a text: of those that begin first, the longest. `None` without
/// tokens.
///
/// # Errors
/// [`EngineError::Component`] if the expression is too large.
pub(super) fn finder(tokens: impl Iterator<Item = String>) -> Result<Option<Regex>, EngineError> {
    let mut tokens: Vec<String> = tokens.filter(|token| !token.is_empty()).collect();
    if tokens.is_empty() {
        return Ok(None);
    }
    // The first alternative that matches is taken.
    tokens.sort_by_key(|token| Reverse(token.len()));
    let any: Vec<String> = tokens.iter().map(|token| regex::escape(token)).collect();
    let regex = Regex::new(&any.join("|"));
    regex.map(Some).map_err(|error| EngineError::component("special tokens", error))
}

/// The stand-ins of the special tokens in the texts of one conversation.
pub(super) struct StandIns<'f> {
    finder: &'f Regex,
    /// By the text of the token.
    characters: BTreeMap<String, char>,
}

impl<'f> StandIns<'f> {
    /// Chooses a stand-in for every token of `finder` that occurs in `texts`; `None` if there is none.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] if the texts contain too many characters of the private use planes.
    pub fn choose<'t>(
        finder: &'f Regex,
        texts: impl Iterator<Item = &'t str> + Clone,
    ) -> Result<Option<Self>, EngineError> {
        let found = texts.clone().flat_map(|text| finder.find_iter(text)).map(|hit| hit.as_str());
        let found: BTreeSet<&str> = found.collect();
        if found.is_empty() {
            return Ok(None);
        }
        let mut free = ('\u{F0000}'..='\u{FFFFD}').chain('\u{100000}'..='\u{10FFFD}');
        let used: HashSet<char> =
            texts.flat_map(str::chars).filter(|c| *c >= '\u{F0000}').collect();
        let mut characters = BTreeMap::new();
        for token in found {
            let Some(character) = free.find(|c| !used.contains(c)) else {
                let reason = "the messages contain special tokens and every private use character";
                return Err(EngineError::Invalid(reason.to_owned()));
            };
            characters.insert(token.to_owned(), character);
        }
        Ok(Some(Self { finder, characters }))
    }

    /// Replaces the special tokens of a text by their stand-ins.
    pub fn hide<'t>(&self, text: &'t str) -> Cow<'t, str> {
        self.finder.replace_all(text, |hit: &Captures<'_>| match self.characters.get(&hit[0]) {
            Some(character) => character.to_string(),
            None => hit[0].to_owned(),
        })
    }

    /// Replaces the stand-ins of a text by the special tokens' texts.
    pub fn reveal(&self, text: &mut NormalizedString) -> tokenizers::Result<()> {
        for (token, character) in &self.characters {
            if text.get().contains(*character) {
                text.replace(*character, token)?;
            }
        }
        Ok(())
    }
}
