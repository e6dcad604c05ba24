//! A candidate, what it is compared with, and results of checks.

use std::path::Path;

use hone_core::types::{PolicyCheck, PolicyVersion};
use hone_engine::Publisher;

use crate::policy::Candidate;
use crate::policy::config::PolicyConfig;

/// A candidate and what it is compared with.
pub(in crate::policy) struct Examination<'a> {
    pub publisher: &'a dyn Publisher,
    pub candidate: &'a dyn Candidate,
    /// The candidate's version, which also seeds the sampling.
    pub version: PolicyVersion,
    /// The active version's PEFT directory; `None` is the base.
    pub active_adapter: Option<&'a Path>,
    pub config: &'a PolicyConfig,
}

/// Whether every check so far has passed.
pub(in crate::policy) fn all_passed(checks: &[PolicyCheck]) -> bool {
    checks.iter().all(|check| check.passed)
}

pub(super) fn passed(
    name: &str,
    value: Option<f64>,
    bound: Option<f64>,
    detail: String,
) -> PolicyCheck {
    PolicyCheck { name: name.to_owned(), passed: true, value, bound, detail }
}

pub(super) fn failed(
    name: &str,
    value: Option<f64>,
    bound: Option<f64>,
    detail: String,
) -> PolicyCheck {
    PolicyCheck { passed: false, ..passed(name, value, bound, detail) }
}

/// The mean; 0 of no values.
#[expect(clippy::cast_precision_loss, reason = "a gate has a few thousand values")]
pub(super) fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0_usize), |(sum, count), value| (sum + value, count + 1));
    sum / count.max(1) as f64
}
