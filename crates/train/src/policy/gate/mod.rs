//! The gate: what a candidate must pass before all traffic gets it.
//!
//! The checks run in this order, and the first that fails ends them:
//!
//! 1. `parity/ENGINE` ([`parity`]): each engine that answers clients or makes training data gives
//!    sampled tokens the log-probabilities that the trainer computes.
//! 2. `drift/...` ([`drift`]): the candidate completes prompts like the active version, within bounds.
//! 3. `exam/ROUTE` ([`exam`]): on held-out prompts, the route's rewards are not worse.
//!
//! Candidate and active version complete the same prompts with the same seeds ([`comparison`]), so that
//! differences between prompts cancel. A difference counts once its confidence interval excludes the
//! bound, so that a small sample rejects only what is clearly worse.

pub(super) mod comparison;
mod drift;
mod exam;
mod parity;

use std::path::Path;

use hone_core::types::{PolicyCheck, PolicyVersion, TokenId};
use hone_engine::Publisher;

use super::candidate::Candidate;
use super::config::PolicyConfig;
use super::error::PolicyError;

pub use comparison::{ExamPrompt, Examiner};

/// A candidate and what it is compared with.
pub(super) struct Examination<'a> {
    pub publisher: &'a dyn Publisher,
    pub candidate: &'a dyn Candidate,
    /// The candidate's version, which also seeds the sampling.
    pub version: PolicyVersion,
    /// The active version's PEFT directory; `None` is the base.
    pub active_adapter: Option<&'a Path>,
    pub config: &'a PolicyConfig,
}

impl Examination<'_> {
    /// Compares the log-probabilities of sampled tokens with the trainer's.
    pub async fn parity(
        &self,
        probe_prompt: &[TokenId],
        checks: &mut Vec<PolicyCheck>,
    ) -> Result<(), PolicyError> {
        parity::check(self, probe_prompt, checks).await
    }

    /// Compares the candidate's completions with the active version's.
    pub async fn compare(
        &self,
        examiner: &Examiner,
        checks: &mut Vec<PolicyCheck>,
    ) -> Result<(), PolicyError> {
        let prompts = examiner.prompts(self.config.gate.prompts, self.version)?;
        if prompts.is_empty() {
            let detail = "skipped: there are no prompts yet".to_owned();
            checks.push(passed("drift", None, None, detail));
            return Ok(());
        }
        let compared = match examiner.complete(self, &prompts).await {
            Ok(compared) => compared,
            Err(error) => {
                checks.push(failed("drift/samples", None, None, error.to_string()));
                return Ok(());
            }
        };
        drift::check(self, &compared, checks)?;
        if all_passed(checks) {
            exam::check(examiner, &self.config.gate, &compared, checks).await;
        }
        Ok(())
    }
}

/// Whether every check so far has passed.
pub(super) fn all_passed(checks: &[PolicyCheck]) -> bool {
    checks.iter().all(|check| check.passed)
}

fn passed(name: &str, value: Option<f64>, bound: Option<f64>, detail: String) -> PolicyCheck {
    PolicyCheck { name: name.to_owned(), passed: true, value, bound, detail }
}

fn failed(name: &str, value: Option<f64>, bound: Option<f64>, detail: String) -> PolicyCheck {
    PolicyCheck { passed: false, ..passed(name, value, bound, detail) }
}

/// The mean; 0 of no values.
#[expect(clippy::cast_precision_loss, reason = "a gate has a few thousand values")]
fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0_usize), |(sum, count), value| (sum + value, count + 1));
    sum / count.max(1) as f64
}

#[cfg(test)]
mod tests;
