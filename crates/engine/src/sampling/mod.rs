//! Draws tokens from logits: a pure core that knows no engine.
//!
//! The behaviour policy is `softmax(logits / temperature)` truncated by `top_k`, then `top_p` of
//! what is left, then `min_p`, renormalised over what is left then. Penalties and biases change
//! the logits before that. Work is O(vocabulary) a token: candidates are partially selected, and
//! only those that survive truncation are ever sorted.

mod plain;

use std::cmp::Ordering;
use std::collections::HashMap;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use hone_core::types::{SamplingParams, TokenId};

use super::EngineError;

/// Most alternatives that can be reported per token.
pub const MAX_TOP_LOGPROBS: u8 = 20;

/// Candidates sorted first when `top_p` looks for its nucleus; eight times more each round.
const FIRST_NUCLEUS: usize = 64;

/// Why no token can be drawn.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum SampleError {
    /// The model computed something that is no logit.
    #[error("the logit of token {id} is {value}")]
    NotFinite {
        /// The first such token.
        id: TokenId,
        /// NaN or +inf.
        value: f32,
    },
    /// Every logit is -inf, or there are none.
    #[error("no token has any probability")]
    NoMass,
    /// A bias for a token that does not exist.
    #[error("logit_bias names token {id}; the vocabulary holds {vocab}")]
    UnknownToken {
        /// The token.
        id: TokenId,
        /// Logits per position.
        vocab: usize,
    },
}

/// One drawn token.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawn {
    /// Its id.
    pub id: TokenId,
    /// Natural-log probability under the behaviour policy; at temperature 0, where that would
    /// always be 0, under `softmax` of the raw logits.
    pub logprob: f32,
    /// Probability mass that the truncation kept; 1 without truncation.
    pub kept_mass: f32,
    /// The most probable alternatives `(id, ln p)`, best first, at most as many as were kept.
    pub top: Vec<(TokenId, f32)>,
}

/// A token and its weight, `exp((logit - greatest logit) / temperature)`.
type Candidate = (TokenId, f64);

/// Best first; equal weights by id, so that every choice is reproducible.
fn best_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Says what is wrong with sampling parameters.
///
/// # Errors
/// [`EngineError::Invalid`] naming the parameter and its value.
pub fn check(params: &SamplingParams) -> Result<(), EngineError> {
    let invalid = |key: &str, value: &dyn std::fmt::Display, wanted: &str| {
        Err(EngineError::Invalid(format!("{key} is {value}; {wanted}")))
    };
    if !(params.temperature.is_finite() && params.temperature >= 0.0) {
        return invalid("temperature", &params.temperature, "0 or more was expected");
    }
    if !(params.top_p > 0.0 && params.top_p <= 1.0) {
        return invalid("top_p", &params.top_p, "more than 0 and at most 1 was expected");
    }
    if !(0.0..=1.0).contains(&params.min_p) {
        return invalid("min_p", &params.min_p, "0 to 1 was expected");
    }
    for (key, value) in [
        ("presence_penalty", params.presence_penalty),
        ("frequency_penalty", params.frequency_penalty),
    ] {
        if !value.is_finite() {
            return invalid(key, &value, "a finite number was expected");
        }
    }
    if let Some((id, bias)) = params.logit_bias.iter().find(|(_, bias)| !bias.is_finite()) {
        return invalid(&format!("logit_bias[{id}]"), bias, "a finite number was expected");
    }
    if params.max_tokens == 0 {
        return invalid("max_tokens", &0, "at least 1 was expected");
    }
    Ok(())
}

/// Draws the tokens of one request, in order.
#[derive(Debug)]
pub struct TokenSampler {
    params: SamplingParams,
    top: usize,
    random: ChaCha8Rng,
    /// How often each token was drawn.
    counts: HashMap<TokenId, u32>,
    /// Kept between tokens for their memory.
    logits: Vec<f32>,
    candidates: Vec<Candidate>,
    weights: plain::Exponentials,
}

impl TokenSampler {
    /// A sampler that reports `top_logprobs` alternatives (at most [`MAX_TOP_LOGPROBS`]).
    ///
    /// # Errors
    /// See [`check`].
    pub fn new(params: &SamplingParams, top_logprobs: u8) -> Result<Self, EngineError> {
        check(params)?;
        if top_logprobs > MAX_TOP_LOGPROBS {
            return Err(EngineError::Invalid(format!(
                "top_logprobs is {top_logprobs}; at most {MAX_TOP_LOGPROBS} was expected"
            )));
        }
        Ok(Self {
            params: params.clone(),
            top: usize::from(top_logprobs),
            random: ChaCha8Rng::seed_from_u64(params.seed),
            counts: HashMap::new(),
            logits: Vec::new(),
            candidates: Vec::new(),
            weights: plain::Exponentials::default(),
        })
    }

    /// Draws the next token from its logits `[vocabulary]`.
    ///
    /// # Errors
    /// [`SampleError`] where the logits or the biases make no distribution.
    pub fn draw(&mut self, logits: &[f32]) -> Result<Drawn, SampleError> {
        check_logits(logits)?;
        self.logits.clear();
        self.logits.extend_from_slice(logits);
        adjust(&mut self.logits, &self.params, &self.counts)?;
        let drawn =
            if self.params.temperature == 0.0 { self.greedy(logits)? } else { self.random()? };
        *self.counts.entry(drawn.id).or_insert(0) += 1;
        Ok(drawn)
    }

    /// The greatest adjusted logit; probabilities are those of the raw logits.
    fn greedy(&mut self, raw: &[f32]) -> Result<Drawn, SampleError> {
        let (id, _) = greatest(&self.logits)?;
        let total = weigh(raw, 1.0, &mut self.candidates)?;
        let weight = self.candidates.get(id as usize).map_or(0.0, |c| c.1);
        Ok(Drawn {
            id,
            logprob: log_probability(raw, id, weight, total),
            kept_mass: 1.0,
            top: most_probable(&mut self.candidates, self.top, total),
        })
    }

    /// Nothing is cut off and no alternatives are asked for.
    fn is_plain(&self) -> bool {
        let SamplingParams { top_k, top_p, min_p, .. } = self.params;
        let cut = (top_k > 0 && (top_k as usize) < self.logits.len()) || top_p < 1.0 || min_p > 0.0;
        !cut && self.top == 0
    }

    fn plain(&mut self) -> Result<Drawn, SampleError> {
        let greatest = f64::from(greatest(&self.logits)?.1);
        self.weights.fill(&self.logits, greatest, f64::from(self.params.temperature));
        let total = self.weights.total();
        let choice = self.weights.pick(self.random.random::<f64>() * total);
        let (id, weight) = choice.ok_or(SampleError::NoMass)?;
        let logprob = (weight / total).ln() as f32;
        Ok(Drawn { id: id as TokenId, logprob, kept_mass: 1.0, top: Vec::new() })
    }

    fn random(&mut self) -> Result<Drawn, SampleError> {
        if self.is_plain() {
            return self.plain();
        }
        let total = weigh(&self.logits, f64::from(self.params.temperature), &mut self.candidates)?;
        let kept = truncate(&mut self.candidates, &self.params, total);
        let (id, weight) = pick(&self.candidates, self.random.random::<f64>() * kept)?;
        Ok(Drawn {
            id,
            logprob: (weight / kept).ln() as f32,
            kept_mass: (kept / total) as f32,
            top: most_probable(&mut self.candidates, self.top, kept),
        })
    }
}

/// The behaviour distribution `(id, p)` of raw logits, best first, after tokens were drawn as often
/// as `counts` says: what [`TokenSampler::draw`] draws from at a temperature above 0.
///
/// # Errors
/// [`SampleError`] where the logits or the biases make no distribution.
pub fn behaviour(
    logits: &[f32],
    params: &SamplingParams,
    counts: &HashMap<TokenId, u32>,
) -> Result<Vec<(TokenId, f64)>, SampleError> {
    check_logits(logits)?;
    let mut adjusted = logits.to_vec();
    adjust(&mut adjusted, params, counts)?;
    let mut candidates = Vec::new();
    let total = weigh(&adjusted, f64::from(params.temperature), &mut candidates)?;
    let kept = truncate(&mut candidates, params, total);
    candidates.sort_unstable_by(best_first);
    Ok(candidates.into_iter().map(|(id, weight)| (id, weight / kept)).collect())
}

fn check_logits(logits: &[f32]) -> Result<(), SampleError> {
    // A loop without an exit can go by vectors; it is hardly ever followed by the other.
    let below = |value: &f32| *value < f32::INFINITY;
    if logits.iter().fold(true, |fine, value| fine & below(value)) {
        return Ok(());
    }
    match logits.iter().position(|value| value.is_nan() || *value == f32::INFINITY) {
        Some(at) => Err(SampleError::NotFinite {
            id: at as TokenId,
            value: logits.get(at).copied().unwrap_or(f32::NAN),
        }),
        None => Ok(()),
    }
}

/// `logit + bias - count * frequency_penalty - [count > 0] * presence_penalty` (OpenAI's formula).
fn adjust(
    logits: &mut [f32],
    params: &SamplingParams,
    counts: &HashMap<TokenId, u32>,
) -> Result<(), SampleError> {
    let vocab = logits.len();
    for (&id, &bias) in &params.logit_bias {
        let logit = logits.get_mut(id as usize);
        *logit.ok_or(SampleError::UnknownToken { id, vocab })? += bias;
    }
    if params.presence_penalty != 0.0 || params.frequency_penalty != 0.0 {
        for (&id, &count) in counts {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit -= count as f32 * params.frequency_penalty + params.presence_penalty;
            }
        }
    }
    Ok(())
}

/// The greatest logit and its token, the lowest id among equals.
fn greatest(logits: &[f32]) -> Result<(TokenId, f32), SampleError> {
    let most = plain::most(logits);
    let id = logits.iter().position(|&logit| logit == most).unwrap_or_default() as TokenId;
    match (id, most) {
        (_, f32::NEG_INFINITY) => Err(SampleError::NoMass),
        // Only a bias can do this: the raw logits were checked.
        (id, value @ f32::INFINITY) => Err(SampleError::NotFinite { id, value }),
        best => Ok(best),
    }
}

/// Fills `candidates` with every token's weight and returns their sum.
fn weigh(
    logits: &[f32],
    temperature: f64,
    candidates: &mut Vec<Candidate>,
) -> Result<f64, SampleError> {
    let greatest = f64::from(greatest(logits)?.1);
    candidates.clear();
    candidates.extend(
        logits.iter().enumerate().map(|(id, &logit)| {
            (id as TokenId, ((f64::from(logit) - greatest) / temperature).exp())
        }),
    );
    Ok(candidates.iter().map(|c| c.1).sum())
}

/// Keeps what `top_k`, then `top_p`, then `min_p` keep; returns the weight of that.
fn truncate(candidates: &mut Vec<Candidate>, params: &SamplingParams, total: f64) -> f64 {
    let mut kept = total;
    let top_k = params.top_k as usize;
    if top_k > 0 && top_k < candidates.len() {
        select_best(candidates, top_k);
        candidates.truncate(top_k);
        kept = candidates.iter().map(|c| c.1).sum();
    }
    if params.top_p < 1.0 {
        let nucleus = nucleus(candidates, f64::from(params.top_p) * kept);
        candidates.truncate(nucleus);
        kept = candidates.iter().map(|c| c.1).sum();
    }
    if params.min_p > 0.0 {
        let best = candidates.iter().map(|c| c.1).fold(0.0, f64::max);
        candidates.retain(|c| c.1 >= f64::from(params.min_p) * best);
        kept = candidates.iter().map(|c| c.1).sum();
    }
    kept
}

/// Moves the `n` best to the front, in no order.
fn select_best(candidates: &mut [Candidate], n: usize) {
    if n > 0 && n < candidates.len() {
        candidates.select_nth_unstable_by(n - 1, best_first);
    }
}

/// Sorts the best to the front until their weights reach `wanted`; returns how many that took.
fn nucleus(candidates: &mut [Candidate], wanted: f64) -> usize {
    let mut n = FIRST_NUCLEUS.min(candidates.len());
    loop {
        select_best(candidates, n);
        let Some(front) = candidates.get_mut(..n) else { return candidates.len() };
        front.sort_unstable_by(best_first);
        let mut sum = 0.0;
        let reached = front.iter().position(|c| {
            sum += c.1;
            sum >= wanted
        });
        match reached {
            Some(at) => return at + 1,
            None if n == candidates.len() => return n,
            None => n = (n * 8).min(candidates.len()),
        }
    }
}

/// The candidate at which the running sum of weights passes `target`.
fn pick(candidates: &[Candidate], target: f64) -> Result<Candidate, SampleError> {
    let mut sum = 0.0;
    let hit = candidates.iter().find(|c| {
        sum += c.1;
        sum > target
    });
    // Rounding may leave the sum a little below the target: then it is the last one with weight.
    hit.or_else(|| candidates.iter().rfind(|c| c.1 > 0.0)).copied().ok_or(SampleError::NoMass)
}

/// ln softmax of one raw logit; computed from the logit where its weight underflows.
fn log_probability(raw: &[f32], id: TokenId, weight: f64, total: f64) -> f32 {
    if weight > 0.0 {
        return (weight / total).ln() as f32;
    }
    let at = |id: TokenId| raw.get(id as usize).map_or(f64::NEG_INFINITY, |l| f64::from(*l));
    let greatest = raw.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
    (at(id) - f64::from(greatest) - total.ln()) as f32
}

/// The `n` best with their log-probabilities. Reorders the candidates.
fn most_probable(candidates: &mut [Candidate], n: usize, total: f64) -> Vec<(TokenId, f32)> {
    let n = n.min(candidates.len());
    select_best(candidates, n);
    let mut best = candidates.get(..n).unwrap_or_default().to_vec();
    best.sort_unstable_by(best_first);
    best.retain(|c| c.1 > 0.0);
    best.into_iter().map(|(id, weight)| (id, (weight / total).ln() as f32)).collect()
}

#[cfg(test)]
mod tests;
