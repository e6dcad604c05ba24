//! The gate: what a candidate must pass before all traffic gets it.
//!
//! The checks run in this order, and the first that fails ends them:
//!
//! 1. `parity/ENGINE` ([`check_parity`]): each engine that answers clients or makes training data gives
//!    sampled tokens the log-probabilities that the trainer computes.
//! 2. `drift/...` ([`check_drift`]): the candidate completes prompts like the active version, within bounds.
//! 3. `exam/ROUTE` ([`check_rewards`]): on held-out prompts, the route's rewards are not worse.
//!
//! Candidate and active version complete the same prompts with the same seeds ([`comparison`]), so that
//! differences between prompts cancel. A difference counts once its confidence interval excludes the
//! bound, so that a small sample rejects only what is clearly worse. NaN fails the checks of parity, KL and rewards.

mod comparison;
mod paired;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hone_core::types::{
    FinishReason, PolicyCheck, PolicyRecord, PolicyVersion, SamplingParams, TokenId, VersionProbe,
};
use hone_engine::{Completion, GenerateRequest, Publisher};
use hone_model::kernels::compute::Compute;
use hone_reward::Route;

use super::config::GateConfig;
use super::{Candidate, PolicyError, ScoredBy};
use comparison::ComparedPrompt;
use paired::{BOUND_ERROR, MeanBounds};

pub use comparison::{ExamPrompt, Examiner};

/// Mean absolute difference, in nats, of sampled and trained log-probabilities above which a version is rejected.
pub const PARITY_TOLERANCE: f64 = 1e-3;

/// The same if the engine, or the trainer's products (`train.compute`), are in 16 bits.
pub(super) const PARITY_TOLERANCE_HALF: f64 = 5e-2;

/// Few, because each takes an iteration of an engine that may be busy, and a publication waits for them.
const PROBE_TOKENS: u32 = 8;

/// Smallest entropy, as a share of the active version's.
const MIN_ENTROPY_SHARE: f64 = 0.3;

/// Largest mean length of completions, as a multiple of the active version's.
const MAX_LENGTH_RATIO: f64 = 2.0;

/// Largest rise of the share of completions that end at the token limit.
const MAX_TRUNCATED_RISE: f64 = 0.2;

/// Largest fall of the mean of a part that rewards a format.
const MAX_FORMAT_DROP: f64 = 0.1;

/// Share of a bound of the KL from which on the log warns.
const NEARLY: f64 = 0.8;

const ENTROPY: &str = "drift/entropy";

/// What an operator can do where only the anchor's bound is exceeded.
const PIN: &str = "; if the active version is good, pin it, and the drift is measured from it";

/// The check of the KL to the anchor.
pub(super) const KL_TO_ANCHOR: &str = "drift/kl_base";

/// Start of the names of an anchor's own rewards among its checks.
const OF_ANCHOR: &str = "anchor";

/// The check of an anchor that has its ratings.
const RATINGS_OF_ANCHOR: &str = "anchor/ratings";

/// Prompts on which the KL is measured, which needs forward passes. An exploded KL shows on any prompt.
const KL_PROMPTS: usize = 8;

/// Bound on one token's estimate of the KL, so that one token that became unlikely does not decide.
const MAX_TOKEN_KL: f64 = 10.0;

/// Tokens by which the mean length may always differ, because short answers vary by a few tokens.
const LENGTH_SLACK: f64 = 8.0;

pub(super) struct Examination<'a> {
    pub publisher: &'a dyn Publisher,
    pub candidate: &'a dyn Candidate,
    /// The candidate's version, which also seeds the sampling.
    pub version: PolicyVersion,
    /// The active version's PEFT directory; `None` is the base.
    pub active_adapter: Option<&'a Path>,
    /// That of the anchor, which the whole run must stay near.
    pub anchor_adapter: Option<&'a Path>,
    pub gate: &'a GateConfig,
}

pub(super) fn all_passed(checks: &[PolicyCheck]) -> bool {
    checks.iter().all(|check| check.passed)
}

pub(super) fn checked(
    name: &str,
    passed: bool,
    value: Option<f64>,
    bound: Option<f64>,
    detail: String,
) -> PolicyCheck {
    PolicyCheck { name: name.to_owned(), passed, value, bound, detail }
}

#[expect(clippy::cast_precision_loss, reason = "a gate has a few thousand values")]
fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0_usize), |(sum, count), value| (sum + value, count + 1));
    sum / count.max(1) as f64
}

/// Adds `parity/ENGINE` for each engine: the mean absolute difference, in nats, of its log-probabilities
/// and the trainer's on tokens that it samples. Training and serving must agree on what the policy is,
/// and the importance ratio needs the sampler's recorded log-probabilities. Returns what the servers of a fleet compare
/// themselves with.
pub(super) async fn check_parity(
    examination: &Examination<'_>,
    probe_prompt: &[TokenId],
    checks: &mut Vec<PolicyCheck>,
) -> Result<Option<VersionProbe>, PolicyError> {
    let candidate = examination.candidate;
    let params = SamplingParams {
        seed: examination.version.0,
        max_tokens: PROBE_TOKENS,
        ..SamplingParams::default()
    };
    let mut known = None;
    let request = GenerateRequest::probe(probe_prompt, &params);
    for probe in examination.publisher.probe(request).await? {
        let ids: Vec<TokenId> = probe.tokens.iter().map(|(id, _)| *id).collect();
        let trained =
            candidate.score(ScoredBy::Candidate, probe_prompt, &ids, params.temperature)?;
        let pairs = probe.tokens.iter().zip(&trained);
        let difference =
            mean(pairs.map(|((_, sampled), trained)| f64::from((sampled - trained).abs())));
        let in_f32 = probe.dtype == "f32" && candidate.compute() == Compute::F32;
        let bound = if in_f32 { PARITY_TOLERANCE } else { PARITY_TOLERANCE_HALF };
        let agrees = difference <= bound;
        let detail = if agrees {
            format!("nats per token in {}, {} tokens", probe.dtype, ids.len())
        } else {
            format!(
                "the mean difference of sampled and trained log-probabilities is {difference:.2e} \
                 in {}",
                probe.dtype
            )
        };
        let name = format!("parity/{}", probe.sampler);
        checks.push(checked(&name, agrees, Some(difference), Some(bound), detail));
        let prompt = probe_prompt.to_vec();
        known = Some(VersionProbe { prompt, tokens: ids, logprobs: trained, bound });
    }
    Ok(known)
}

/// The mean absolute difference, in nats, of the staged version's log-probabilities and a probe's, of the engine where
/// it is the largest.
pub(super) async fn probe_difference(
    publisher: &dyn Publisher,
    probe: &VersionProbe,
) -> Result<f64, PolicyError> {
    let request = GenerateRequest::score(&probe.prompt, &probe.tokens, 0);
    let mut most = 0.0_f64;
    for own in publisher.probe(request).await? {
        let pairs = own.tokens.iter().zip(&probe.logprobs);
        let difference = mean(pairs.map(|((_, own), known)| f64::from((own - known).abs())));
        most = if difference.is_nan() { f64::INFINITY } else { most.max(difference) };
    }
    Ok(most)
}

/// Compares completions with the active version's: `drift/...` and `exam/...`, until one fails. The checks of `anchor`, its
/// own measurements, get those that are missing and that the active version's completions give, and its `ratings`, the
/// newest ones by users, each from 0 to 1.
pub(super) async fn compare(
    examination: &Examination<'_>,
    examiner: &Examiner,
    ratings: &[f64],
    anchor: &mut Anchor,
    checks: &mut Vec<PolicyCheck>,
) -> Result<(), PolicyError> {
    let gate = examination.gate;
    let prompts = examiner.prompts(gate.prompts, examination.version)?;
    if prompts.is_empty() {
        let detail = "skipped: there are no prompts yet".to_owned();
        checks.push(checked("drift", true, None, None, detail));
        return Ok(());
    }
    let Examination { publisher, version, .. } = *examination;
    match examiner.complete(publisher, version, &prompts).await {
        Err(error) => {
            checks.push(checked("drift/samples", false, None, None, error.to_string()));
        }
        Ok(compared) => {
            let less_entropy = check_drift(examination, &compared, anchor, checks)?;
            let ratings = MeanBounds::of(ratings, BOUND_ERROR);
            let mut is_better = anchor.is_below(RATINGS_OF_ANCHOR, ratings);
            if all_passed(checks) {
                is_better |= check_rewards(examiner, &compared, anchor, checks).await;
            }
            if let Some(check) = less_entropy.filter(|_| all_passed(checks)) {
                let than = "held-out rewards of the active version are above that version's";
                let reason = match is_better {
                    true => format!("; ratings or {than}"),
                    false => format!("; neither ratings nor {than}{PIN}"),
                };
                checks.push(PolicyCheck {
                    passed: is_better,
                    detail: check.detail + &reason,
                    ..check
                });
            }
        }
    }
    Ok(())
}

// How far the candidate's completions are from the active version's.

/// The version from which a run's whole drift is measured: the newest pinned ancestor of the active version, or else the
/// initial adapter, or else the base. Without it, bounds against the active version would compound.
pub(super) struct Anchor {
    pub record: PolicyRecord,
    /// Its PEFT directory; `None` is the base.
    pub adapter: Option<PathBuf>,
    pub is_active: bool,
}

impl Anchor {
    fn check(&self, name: &str) -> Option<&PolicyCheck> {
        self.record.checks.iter().find(|check| check.name == name)
    }

    fn measured(&self, name: &str) -> Option<f64> {
        self.check(name)?.value
    }

    /// Whether a later version's rewards are above this version's, whose bounds the check has. The active version measures
    /// them if it is the anchor and the check is missing.
    fn is_below(&mut self, name: &str, active: Option<MeanBounds>) -> bool {
        let Some(active) = active else { return false };
        match self.check(name) {
            Some(check) => check.bound.is_some_and(|upper| active.lower > upper),
            None if self.is_active => {
                let detail = "bounds, measured with the first version after it".to_owned();
                let (lower, upper) = (Some(active.lower), Some(active.upper));
                self.record.checks.push(checked(name, true, lower, upper, detail));
                false
            }
            None => false,
        }
    }
}

/// A property of a completion, and how far the candidate's exceeds the active version's.
type Measure<'a> = (fn(&Completion) -> f64, &'a dyn Fn(f64, f64) -> f64);

/// Adds the checks `drift/...`, until one fails. Returns that of the entropy if it is too small in comparison with the
/// anchor's alone: a policy that has solved its task answers with little entropy, so that rewards decide.
fn check_drift(
    examination: &Examination<'_>,
    compared: &[ComparedPrompt],
    anchor: &mut Anchor,
    checks: &mut Vec<PolicyCheck>,
) -> Result<Option<PolicyCheck>, PolicyError> {
    let gate = examination.gate;
    let mut less_entropy = None;
    let scored_by = |adapter: Option<_>| adapter.map_or(ScoredBy::Base, ScoredBy::Adapter);
    for (name, bound, policy) in [
        (KL_TO_ANCHOR, gate.max_kl, scored_by(examination.anchor_adapter)),
        ("drift/kl_active", 0.5 * gate.max_kl, scored_by(examination.active_adapter)),
    ] {
        if bound == 0.0 {
            continue;
        }
        let kl = divergence(examination, compared, policy)?;
        let detail = format!("nats per token on {} prompts", compared.len().min(KL_PROMPTS));
        checks.push(checked(name, kl <= bound, Some(kl), Some(bound), detail));
        if !all_passed(checks) {
            return Ok(None);
        }
        if kl > NEARLY * bound {
            tracing::warn!(
                check = name, kl, bound, anchor = %anchor.record.version,
                "the bound is nearly reached, after which every version is rejected: pin a version that you have \
                 evaluated, from which the drift is then measured"
            );
        }
    }
    // The mean of each surplus must not be above its limit.
    let conditions: [(&str, Measure<'_>, f64); 3] = [
        (ENTROPY, (entropy, &|own, active| MIN_ENTROPY_SHARE * active - own), 0.0),
        ("drift/length", (length, &|own, active| own - MAX_LENGTH_RATIO * active), LENGTH_SLACK),
        ("drift/truncated", (truncated, &|own, active| own - active), MAX_TRUNCATED_RISE),
    ];
    for (name, (of, surplus_of), limit) in conditions {
        let measured: Vec<(f64, f64)> =
            compared.iter().map(|c| (of(&c.candidate), of(&c.active))).collect();
        let surplus: Vec<f64> =
            measured.iter().map(|(own, active)| surplus_of(*own, *active)).collect();
        let is_above = |surplus: &[f64]| {
            MeanBounds::of(surplus, BOUND_ERROR).is_some_and(|bounds| bounds.lower > limit)
        };
        let own = mean(measured.iter().map(|(own, _)| *own));
        let active = mean(measured.iter().map(|(_, active)| *active));
        let mut detail = format!("{own:.3}, of the active version {active:.3}");
        let mut exceeds = is_above(&surplus);
        match anchor.measured(name) {
            Some(first) => {
                let from_anchor: Vec<f64> =
                    measured.iter().map(|(own, _)| surplus_of(*own, first)).collect();
                detail += &format!(", of version {} {first:.3}", anchor.record.version);
                if !exceeds && is_above(&from_anchor) {
                    if name == ENTROPY {
                        less_entropy = Some(checked(name, false, Some(own), None, detail));
                        continue;
                    }
                    exceeds = true;
                    detail += PIN;
                }
            }
            None if anchor.is_active => {
                let detail = "measured with the first version after it".to_owned();
                anchor.record.checks.push(checked(name, true, Some(active), None, detail));
            }
            None => {}
        }
        checks.push(checked(name, !exceeds, Some(own), None, detail));
        if exceeds {
            break;
        }
    }
    Ok(less_entropy)
}

/// Mean negative log-probability of the sampled tokens, which estimates the entropy in nats per token.
fn entropy(completion: &Completion) -> f64 {
    mean(completion.tokens.iter().map(|token| -f64::from(token.logprob)))
}

#[expect(clippy::cast_precision_loss, reason = "lengths far below 2^52")]
fn length(completion: &Completion) -> f64 {
    completion.tokens.len() as f64
}

fn truncated(completion: &Completion) -> f64 {
    f64::from(u8::from(completion.finish == FinishReason::Length))
}

/// KL(candidate || policy) in nats per token by Schulman's estimator k3 on the candidate's tokens,
/// each at most [`MAX_TOKEN_KL`]. Tokens that a grammar forced are no samples of the candidate.
fn divergence(
    examination: &Examination<'_>,
    compared: &[ComparedPrompt],
    policy: ScoredBy<'_>,
) -> Result<f64, PolicyError> {
    let mut values = Vec::new();
    for compared in compared.iter().step_by(compared.len().div_ceil(KL_PROMPTS).max(1)) {
        let sampled = compared.candidate.token_logprobs();
        let ids: Vec<_> = sampled.iter().map(|(id, _)| *id).collect();
        if ids.is_empty() {
            continue;
        }
        let prompt = &compared.prompt.interaction.prompt_ids;
        let others = examination.candidate.score(policy, prompt, &ids, compared.temperature)?;
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

// Rewards of the candidate's and the active version's completions of held-out prompts.

/// Rewards of candidate and active version, one pair per prompt.
#[derive(Default)]
struct RouteScores {
    totals: Vec<[f64; 2]>,
    /// Of each part that rewards a format.
    formats: BTreeMap<String, Vec<[f64; 2]>>,
}

/// Adds `drift/format/PART` and `exam/ROUTE`, until one fails. Prompts to train on count for the format only. Returns
/// whether the rewards of a route are above the anchor's.
async fn check_rewards(
    examiner: &Examiner,
    compared: &[ComparedPrompt],
    anchor: &mut Anchor,
    checks: &mut Vec<PolicyCheck>,
) -> bool {
    let mut routes: BTreeMap<String, RouteScores> = BTreeMap::new();
    for prompt in compared {
        let Some(route) = prompt.prompt.route.as_ref().filter(|route| route.has_graders()) else {
            continue;
        };
        let scores = routes.entry(route.name.clone()).or_default();
        add_scores(scores, examiner, route, prompt).await;
    }
    if routes.values().all(|scores| scores.totals.is_empty()) {
        let detail = "skipped: no held-out prompt has a grader".to_owned();
        checks.push(checked("exam", true, None, None, detail));
    }
    let count: usize = routes.values().map(|scores| scores.formats.len() + 1).sum();
    // Together the checks reject an equal candidate as rarely as one would.
    #[expect(clippy::cast_precision_loss, reason = "a small number")]
    let error = BOUND_ERROR / count.max(1) as f64;
    let mut is_better = false;
    for (route, scores) in routes {
        for (part, pairs) in &scores.formats {
            let name = format!("drift/format/{part}");
            if !not_below(checks, anchor, &name, pairs, -MAX_FORMAT_DROP, error).0 {
                return false;
            }
        }
        let name = format!("exam/{route}");
        let (passed, is_above) = not_below(checks, anchor, &name, &scores.totals, 0.0, error);
        if !passed {
            return false;
        }
        is_better |= is_above;
    }
    is_better
}

async fn add_scores(
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
            scores.formats.entry(part).or_default().push([own, active]);
        }
    }
    if let [Some(own), Some(active)] = totals
        && prompt.prompt.held_out
    {
        scores.totals.push([own, active]);
    }
}

/// Adds a check that fails if the candidate's rewards are lower than the active version's, or than the anchor's were, by
/// more than `least`, except with the probability `error`. The anchor answered other prompts, so that its rewards count as
/// the lower bound of their mean. Returns whether the check passed, and whether the active version's rewards are above the
/// anchor's.
fn not_below(
    checks: &mut Vec<PolicyCheck>,
    anchor: &mut Anchor,
    name: &str,
    pairs: &[[f64; 2]],
    least: f64,
    error: f64,
) -> (bool, bool) {
    let of = |value: fn(&[f64; 2]) -> f64| {
        MeanBounds::of(&pairs.iter().map(value).collect::<Vec<_>>(), error)
    };
    let bounds = (of(|[own, active]| own - active), of(|[own, _]| *own), of(|[_, active]| *active));
    let (Some(difference), Some(own), Some(active)) = bounds else { return (true, false) };
    let mut detail = format!(
        "difference to the active version, {:+.3} to {:+.3} on {} prompts; its mean reward is {:.3}",
        difference.lower,
        difference.upper,
        pairs.len(),
        own.mean
    );
    let mut passed = difference.upper >= least;
    let known = format!("{OF_ANCHOR}/{name}");
    if let Some(first) = anchor.measured(&known) {
        passed &= own.upper - first >= least;
        detail += &format!(", of version {} at least {first:.3}", anchor.record.version);
    }
    checks.push(checked(name, passed, Some(difference.mean), Some(least), detail));
    (passed, anchor.is_below(&known, Some(active)))
}
