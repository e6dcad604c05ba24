//! The gate: what a candidate must pass before all traffic gets it.
//!
//! The checks run in this order, and the first that fails ends them:
//!
//! 1. `parity/ENGINE` ([`parity`]): each engine that answers clients or makes training data gives
//!    sampled tokens the log-probabilities that the trainer computes.
//! 2. `drift/...` ([`drift`]): the candidate completes prompts like the active version, within bounds.
//! 3. `exam/ROUTE`: on held-out prompts, the route's rewards are not worse.
//!
//! Candidate and active version complete the same prompts with the same seeds ([`comparison`]), so that
//! differences between prompts cancel. A difference counts once its confidence interval excludes the
//! bound, so that a small sample rejects only what is clearly worse.

mod comparison;
mod drift;
mod examination;
mod paired;
mod parity;

use std::collections::BTreeMap;
use std::sync::Arc;

use hone_core::types::PolicyCheck;
use hone_reward::Route;

use super::PolicyError;
use crate::policy::config::GateConfig;
use comparison::ComparedPrompt;
use examination::{failed, passed};
use paired::MeanBounds;

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
        check(examiner, gate, &compared, checks).await;
    }
    Ok(())
}

// Rewards of the candidate's and the active version's completions of held-out prompts.

/// Differences of candidate and active version, one per prompt.
#[derive(Default)]
struct RouteScores {
    /// Of the weighted sums of the parts.
    totals: Vec<f64>,
    /// The candidate's sums.
    own: Vec<f64>,
    /// Of each part that rewards a format.
    formats: BTreeMap<String, Vec<f64>>,
}

/// Adds `drift/format/PART` and `exam/ROUTE` for each route, until one fails. Prompts that may be
/// trained on count for the format only.
async fn check(
    examiner: &Examiner,
    config: &GateConfig,
    compared: &[ComparedPrompt],
    checks: &mut Vec<PolicyCheck>,
) {
    let mut routes: BTreeMap<String, RouteScores> = BTreeMap::new();
    for prompt in compared {
        let Some(route) = prompt.prompt.route.as_ref().filter(|route| route.has_graders()) else {
            continue;
        };
        let scores = routes.entry(route.name.clone()).or_default();
        add(scores, examiner, route, prompt).await;
    }
    if routes.values().all(|scores| scores.totals.is_empty()) {
        let detail = "skipped: no held-out prompt has a grader".to_owned();
        checks.push(passed("exam", None, None, detail));
    }
    for (route, scores) in routes {
        for (part, differences) in &scores.formats {
            let name = format!("drift/format/{part}");
            if !not_below(checks, &name, differences, -config.max_format_drop, config.confidence) {
                return;
            }
        }
        let name = format!("exam/{route}");
        if !not_below(checks, &name, &scores.totals, -config.exam_margin, config.confidence) {
            return;
        }
        let mean = MeanBounds::of(&scores.own, config.confidence).map(|bounds| bounds.mean);
        if let (Some(check), Some(mean)) = (checks.last_mut(), mean) {
            check.detail += &format!("; its mean reward is {mean:.3}");
        }
    }
}

async fn add(
    scores: &mut RouteScores,
    examiner: &Examiner,
    route: &Arc<Route>,
    prompt: &ComparedPrompt,
) {
    let mut totals = [Some(0.0), Some(0.0)];
    for (part, values) in route.grade(&prompt.score_inputs()).await {
        let [own, active] = values[..] else { return };
        let weight = route.weight(&part).unwrap_or_default();
        for (total, value) in totals.iter_mut().zip([own, active]) {
            *total = total.zip(value).map(|(total, value)| total + weight * value);
        }
        if let (Some(own), Some(active)) = (own, active)
            && examiner.format_parts.contains(&part)
        {
            scores.formats.entry(part).or_default().push(own - active);
        }
    }
    if let [Some(own), Some(active)] = totals
        && prompt.prompt.held_out
    {
        scores.totals.push(own - active);
        scores.own.push(own);
    }
}

/// Adds a check that fails if the mean difference is below `least` with confidence. Returns whether it
/// passed.
fn not_below(
    checks: &mut Vec<PolicyCheck>,
    name: &str,
    differences: &[f64],
    least: f64,
    confidence: f64,
) -> bool {
    let Some(bounds) = MeanBounds::of(differences, confidence) else {
        return true;
    };
    let (low, high) = (bounds.lower, bounds.upper);
    let detail = format!(
        "difference to the active version, {low:+.3} to {high:+.3} on {} prompts",
        differences.len()
    );
    let (value, bound) = (Some(bounds.mean), Some(least));
    // NaN fails too.
    let ok = high >= least;
    checks.push(if ok {
        passed(name, value, bound, detail)
    } else {
        failed(name, value, bound, detail)
    });
    ok
}
