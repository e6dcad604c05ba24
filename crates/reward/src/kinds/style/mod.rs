//! Kinds that score how a completion is written.

pub mod citations;
pub mod connectors;
pub mod diversity;
pub mod forbidden_phrases;
pub mod language;
pub mod reasoning_steps;
pub mod repetition_penalty;

use hone_core::config::{Checked, Problem};

/// Checks a parameter that must be finite and at most 0.
fn at_most_zero(key: &str, value: f64) -> Checked {
    if value.is_finite() && value <= 0.0 {
        return Ok(());
    }
    Err(Problem::value(key, value, "a finite number, 0 or less"))
}
