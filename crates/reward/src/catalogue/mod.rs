//! What `hone rewards list` says: every kind with its formula, range, parameters and typical
//! weight.
//!
//! A test holds it equal to [`crate::config::KINDS`], builds every example, and holds the examples'
//! values within their ranges on 100,000 random completions.

mod correctness;
mod form;
mod outside;
pub mod random_text;

use serde::Serialize;

/// Kinds that are no function of the completion alone: they run code or ask others.
pub const CALLS: [&str; 3] = ["code", "webhook", "judge"];

/// A kind of reward part.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct KindEntry {
    /// The `kind` in a route's reward.
    pub kind: &'static str,
    /// What it computes.
    pub formula: &'static str,
    /// Its least and greatest value.
    pub range: &'static str,
    /// Its parameters with their defaults.
    pub parameters: &'static str,
    /// A weight to start from.
    pub typical_weight: &'static str,
    /// Parameters in TOML that make a part of it; the defaults where it has them all.
    pub example: &'static str,
    /// The range of the example; infinite where there is none.
    pub bounds: [f64; 2],
}

/// Every kind, in the order of [`crate::config::KINDS`].
pub fn catalogue() -> impl Iterator<Item = &'static KindEntry> {
    correctness::ENTRIES.iter().chain(&form::ENTRIES).chain(&outside::ENTRIES)
}

#[cfg(test)]
mod tests;
