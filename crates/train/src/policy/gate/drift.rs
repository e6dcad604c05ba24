//! How far the candidate's completions are from the active version's.

use hone_core::types::PolicyCheck;
use hone_engine::Completion;

use super::comparison::{ComparedPrompt, truncated};
use super::examination::{Examination, failed, mean, passed};
use super::paired::MeanBounds;
use crate::policy::PolicyError;
use crate::policy::ScoredBy;

/// Prompts on which the KL is measured. It needs forward passes of other policies, and is the same on
/// all prompts if it explodes.
const KL_PROMPTS: usize = 8;

/// Bound on one token's estimate of the KL, so that one token that became unlikely does not decide.
const MAX_TOKEN_KL: f64 = 10.0;

/// Tokens by which the mean length may always differ, because short answers vary by a few tokens.
const LENGTH_SLACK: f64 = 8.0;

/// Adds the checks `drift/...`, until one fails.
pub(super) fn check(
    examination: &Examination<'_>,
    compared: &[ComparedPrompt],
    checks: &mut Vec<PolicyCheck>,
) -> Result<(), PolicyError> {
    let gate = &examination.config.gate;
    let active = match examination.active_adapter {
        Some(dir) => ScoredBy::Adapter(dir),
        None => ScoredBy::Base,
    };
    for (name, bound, policy) in [
        ("drift/kl_base", gate.max_kl, ScoredBy::Base),
        ("drift/kl_active", gate.max_kl_active, active),
    ] {
        if bound == 0.0 {
            continue;
        }
        let kl = divergence(examination, compared, policy)?;
        let prompts = compared.len().min(KL_PROMPTS);
        let detail = format!("nats per token on {prompts} prompts");
        let (value, bound) = (Some(kl), Some(bound));
        if bound.is_some_and(|bound| kl <= bound) {
            checks.push(passed(name, value, bound, detail));
        } else {
            checks.push(failed(name, value, bound, detail));
            return Ok(());
        }
    }
    // Each is a value that must not be above 0 in the mean.
    let surplus = |name: &'static str, least: f64, of: &dyn Fn(&ComparedPrompt) -> f64| {
        let values: Vec<f64> = compared.iter().map(of).collect();
        (name, least, values)
    };
    let (share, ratio) = (gate.min_entropy_share, gate.max_length_ratio);
    let conditions = [
        surplus("drift/entropy", 0.0, &|c| share * entropy(&c.active) - entropy(&c.candidate)),
        surplus("drift/length", LENGTH_SLACK, &|c| {
            length(&c.candidate) - ratio * length(&c.active)
        }),
        surplus("drift/truncated", gate.max_truncated_rise, &|c| {
            truncated(&c.candidate) - truncated(&c.active)
        }),
    ];
    for (name, least, values) in conditions {
        let bounds = MeanBounds::of(&values, gate.confidence);
        let (own, other) = shown(name, compared);
        let detail = format!("{own:.3}, of the active version {other:.3}");
        let exceeds = bounds.is_some_and(|bounds| bounds.lower > least);
        let value = Some(own);
        checks.push(if exceeds {
            failed(name, value, None, detail)
        } else {
            passed(name, value, None, detail)
        });
        if exceeds {
            return Ok(());
        }
    }
    Ok(())
}

/// The mean of a check's measurement over the candidate's and the active version's completions.
fn shown(name: &str, compared: &[ComparedPrompt]) -> (f64, f64) {
    let of = match name {
        "drift/entropy" => entropy,
        "drift/length" => length,
        _ => truncated,
    };
    (mean(compared.iter().map(|c| of(&c.candidate))), mean(compared.iter().map(|c| of(&c.active))))
}

/// Mean negative log-probability of the sampled tokens, an unbiased estimate of the entropy in nats per
/// token.
fn entropy(completion: &Completion) -> f64 {
    mean(completion.tokens.iter().map(|token| -f64::from(token.logprob)))
}

#[expect(clippy::cast_precision_loss, reason = "lengths far below 2^52")]
fn length(completion: &Completion) -> f64 {
    completion.tokens.len() as f64
}

/// KL(candidate || policy) in nats per token by Schulman's estimator k3 on the candidate's tokens,
/// each at most [`MAX_TOKEN_KL`]. Tokens that a grammar forced are no samples of the candidate.
fn divergence(
    examination: &Examination<'_>,
    compared: &[ComparedPrompt],
    policy: ScoredBy<'_>,
) -> Result<f64, PolicyError> {
    let mut values = Vec::new();
    for compared in compared.iter().take(KL_PROMPTS) {
        let sampled = compared.candidate.token_logprobs();
        let ids: Vec<_> = sampled.iter().map(|(id, _)| *id).collect();
        if ids.is_empty() {
            continue;
        }
        let (prompt, temperature) = (compared.prompt_ids(), compared.temperature);
        let others = examination.candidate.score(policy, prompt, &ids, temperature)?;
        let free = compared.candidate.tokens.iter().map(|token| !token.forced);
        let tokens = sampled.iter().zip(others).zip(free).filter(|(_, is_free)| *is_free);
        values.extend(tokens.map(|(((_, own), other), _)| {
            let d = f64::from(other - own);
            // Infinite or NaN log-probabilities must fail the check.
            if d.is_nan() { f64::NAN } else { (d.exp_m1() - d).min(MAX_TOKEN_KL) }
        }));
    }
    Ok(mean(values.into_iter()))
}
