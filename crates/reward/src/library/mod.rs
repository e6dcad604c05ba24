//! The reward functions: pure, near linear in the completion's length, never panicking.
//!
//! Patterns are compiled by the `regex` crate, whose matching time is linear in the text, so no
//! completion can stall scoring. [`catalogue`](mod@super::catalogue) lists them with formula, range and typical
//! weight.

pub mod answer;
pub mod choice;
pub mod compose;
pub mod format;
pub mod json;
pub mod language;
pub mod length;
pub mod math;
pub mod number;
pub mod style;

use std::collections::BTreeSet;

use async_trait::async_trait;

use super::{RewardFn, ScoreInput};

/// A reward function that looks at one sample at a time.
pub(super) struct Each<F>(pub(super) F);

#[async_trait]
impl<F> RewardFn for Each<F>
where
    F: Fn(&ScoreInput) -> Option<f64> + Send + Sync,
{
    async fn score(&self, samples: &[ScoreInput]) -> Vec<Option<f64>> {
        samples.iter().map(&self.0).collect()
    }
}

/// 1 for true, 0 for false.
fn indicator(holds: bool) -> f64 {
    f64::from(u8::from(holds))
}

/// `min(1, found / target)`.
fn share_of_target(found: usize, target: u32) -> f64 {
    (found as f64 / f64::from(target.max(1))).min(1.0)
}

/// Most texts that are read from a sample's metadata.
const MOST_TEXTS: usize = 64;

/// The texts of a metadata value: the strings of a JSON list, else `otherwise`'s. Blank ones are
/// left out, and what is beyond the first 64.
fn texts_of<'v>(value: &'v str, otherwise: impl FnOnce(&'v str) -> Vec<String>) -> Vec<String> {
    let listed = serde_json::from_str::<Vec<String>>(value);
    let texts = listed.unwrap_or_else(|_| otherwise(value));
    let texts = texts.into_iter().map(|text| text.trim().to_owned());
    texts.filter(|text| !text.is_empty()).take(MOST_TEXTS).collect()
}

/// Whether `word` stands in `text` with no letter or digit right before or after it.
fn has_word(text: &str, word: &str) -> bool {
    text.match_indices(word).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let after = text[at + word.len()..].chars().next();
        !before.is_some_and(char::is_alphanumeric) && !after.is_some_and(char::is_alphanumeric)
    })
}

/// How many different items there are.
fn distinct<T: Ord>(items: impl Iterator<Item = T>) -> usize {
    items.collect::<BTreeSet<T>>().len()
}

#[cfg(test)]
mod tests;
