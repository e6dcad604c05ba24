//! Whether each engine samples from the policy that was trained.

use hone_core::types::{PolicyCheck, SamplingParams, TokenId};

use super::examination::{Examination, failed, mean, passed};
use crate::policy::PolicyError;
use crate::policy::ScoredBy;

/// Adds `parity/ENGINE` for each engine: the mean absolute difference, in nats, of its log-probabilities
/// and the trainer's on tokens that it samples. Training and serving must agree on what the policy is,
/// and the importance ratio needs the sampler's recorded log-probabilities.
pub(in crate::policy) async fn check(
    examination: &Examination<'_>,
    probe_prompt: &[TokenId],
    checks: &mut Vec<PolicyCheck>,
) -> Result<(), PolicyError> {
    let config = examination.config;
    let params = SamplingParams {
        seed: examination.version.0,
        max_tokens: config.probe_tokens,
        ..SamplingParams::default()
    };
    for probe in examination.publisher.probe(probe_prompt, &params).await? {
        let ids: Vec<TokenId> = probe.tokens.iter().map(|(id, _)| *id).collect();
        let trained = examination.candidate.score(
            ScoredBy::Candidate,
            probe_prompt,
            &ids,
            params.temperature,
        )?;
        let pairs = probe.tokens.iter().zip(&trained);
        let difference =
            mean(pairs.map(|((_, sampled), trained)| f64::from((sampled - trained).abs())));
        let bound = config.parity_bound(probe.dtype, examination.candidate.compute());
        let name = format!("parity/{}", probe.sampler);
        let (value, bound) = (Some(difference), Some(bound));
        // NaN fails too.
        let agrees = bound.is_some_and(|bound| difference <= bound);
        checks.push(if agrees {
            let detail = format!("nats per token in {}, {} tokens", probe.dtype, ids.len());
            passed(&name, value, bound, detail)
        } else {
            let detail = format!(
                "the mean difference of sampled and trained log-probabilities is {difference:.2e} \
                 in {}",
                probe.dtype
            );
            failed(&name, value, bound, detail)
        });
    }
    Ok(())
}
