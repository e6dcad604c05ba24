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

mod comparison;
mod drift;
mod exam;
mod examination;
mod paired;
mod parity;

use hone_core::types::PolicyCheck;

use super::error::PolicyError;
use examination::{failed, passed};

pub use comparison::{ExamPrompt, Examiner};
pub(super) use examination::{Examination, all_passed};
pub(super) use parity::check as check_parity;

/// Compares the candidate's completions with the active version's: the checks `drift/...` and
/// `exam/...`, until one fails.
pub(super) async fn compare(
    examination: &Examination<'_>,
    examiner: &Examiner,
    checks: &mut Vec<PolicyCheck>,
) -> Result<(), PolicyError> {
    let gate = &examination.config.gate;
    let prompts = examiner.prompts(gate.prompts, examination.version)?;
    if prompts.is_empty() {
        let detail = "skipped: there are no prompts yet".to_owned();
        checks.push(passed("drift", None, None, detail));
        return Ok(());
    }
    let compared = match examiner.complete(examination, &prompts).await {
        Ok(compared) => compared,
        Err(error) => {
            checks.push(failed("drift/samples", None, None, error.to_string()));
            return Ok(());
        }
    };
    drift::check(examination, &compared, checks)?;
    if all_passed(checks) {
        exam::check(examiner, gate, &compared, checks).await;
    }
    Ok(())
}
