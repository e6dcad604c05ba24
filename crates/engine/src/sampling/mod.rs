//! Draws tokens from logits. Knows no engine.
//!
//! The behavior policy is `softmax(logits / temperature)` over the tokens that the request permits
//! ([`crate::grammar`], `min_tokens`, `ignore_eos`), truncated by `top_k`, then `top_p` of the rest,
//! then `min_p`, and renormalized. Penalties and biases change the logits before that. The cost of a
//! token is O(vocabulary): candidates are partially selected, and only those that survive truncation
//! are sorted.

use std::cmp::Ordering;
use std::collections::{BTreeSet, HashMap};
use std::time::Instant;

use prometheus::Histogram;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use hone_core::metrics::Metrics;
use hone_core::simd::{SimdTask, dispatch};
use hone_core::types::{SamplingParams, TokenId};

use crate::api::{GenerateRequest, Token};
use crate::codec::Codec;
use crate::error::{EngineError, SampleError};
use crate::grammar::{AllowedTokens, GrammarError, GrammarMatcher};

/// Most alternatives that can be reported for each token.
const MAX_TOP_LOGPROBS: u8 = 20;

/// Candidates that the search for the nucleus of `top_p` sorts first. Each further round sorts
/// eight times as many.
const FIRST_NUCLEUS: usize = 64;

/// Least mass of permitted tokens that is meaningful. With less, the probabilities are differences of
/// large logits, whose rounding differs between programs, and they approach the limits of `f32`.
const LEAST_MASS: f64 = 1e-30;

/// A token and its weight, `exp((logit - max logit) / temperature)`.
type Candidate = (TokenId, f64);

/// Orders by descending weight; equal weights by id, so that every choice is reproducible.
fn best_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Checks sampling parameters.
///
/// # Errors
/// [`EngineError::Invalid`] naming the parameter and its value.
pub fn check(params: &SamplingParams) -> Result<(), EngineError> {
    let invalid = |text| Err(EngineError::Invalid(text));
    let &SamplingParams {
        temperature,
        top_p,
        min_p,
        presence_penalty,
        frequency_penalty,
        repetition_penalty: repetition,
        ..
    } = params;
    for (key, value, valid, expected) in [
        ("temperature", temperature, temperature.is_finite() && temperature >= 0.0, "0 or more"),
        ("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "more than 0 and at most 1"),
        ("min_p", min_p, (0.0..=1.0).contains(&min_p), "0 to 1"),
        ("presence_penalty", presence_penalty, presence_penalty.is_finite(), "a finite number"),
        ("frequency_penalty", frequency_penalty, frequency_penalty.is_finite(), "a finite number"),
        (
            "repetition_penalty",
            repetition,
            repetition.is_finite() && repetition > 0.0,
            "more than 0",
        ),
    ] {
        if !valid {
            return invalid(format!("{key} is {value}; {expected} was expected"));
        }
    }
    if let Some((id, bias)) = params.logit_bias.iter().find(|(_, bias)| !bias.is_finite()) {
        return invalid(format!("logit_bias[{id}] is {bias}; a finite number was expected"));
    }
    if params.max_tokens == 0 {
        return invalid("max_tokens is 0; at least 1 was expected".to_owned());
    }
    if params.min_tokens > params.max_tokens {
        let (least, most) = (params.min_tokens, params.max_tokens);
        return invalid(format!("min_tokens is {least}; at most max_tokens ({most}) was expected"));
    }
    Ok(())
}

/// Draws the tokens of one request, in order.
pub struct TokenSampler {
    params: SamplingParams,
    top_logprobs: usize,
    rng: ChaCha8Rng,
    /// How often each token was drawn, for the penalties.
    counts: HashMap<TokenId, u32>,
    /// The tokens of the prompt, each once and in order, for the repetition penalty; empty without one.
    prompt: Vec<TokenId>,
    /// The model's own stop tokens.
    own_stops: Vec<TokenId>,
    /// Further stop tokens of the request.
    further_stops: Vec<TokenId>,
    /// Tokens so far.
    drawn: u32,
    /// The state of the grammar, and how long its masks take.
    grammar: Option<(GrammarMatcher, Histogram)>,
    /// Tokens that are taken before one is drawn, in reverse order.
    scored: Vec<TokenId>,
    // Buffers that are reused for every token.
    logits: Vec<f32>,
    raw: Vec<f32>,
    candidates: Vec<Candidate>,
    weights: SoftmaxWeights,
}

/// A token is that at which the running sum of the weights `exp(logit / temperature)` passes `uniform` times their
/// total. At temperature 0 it is the first with the greatest logit, and its log-probability is that at temperature 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlainDraw {
    /// The temperature.
    pub temperature: f32,
    /// A number in [0, 1); 0 at temperature 0.
    pub uniform: f64,
}

/// The weights of all tokens together.
#[derive(Clone, Copy)]
struct TotalMass {
    /// The greatest logit, whose weight is 1.
    max: f64,
    /// Their sum.
    total: f64,
    /// The natural logarithm of the sum of `exp(logit / temperature)`.
    log: f64,
}

impl TotalMass {
    /// Computes the weights of logits.
    fn of(
        weights: &mut SoftmaxWeights,
        logits: &[f32],
        temperature: f64,
    ) -> Result<Self, SampleError> {
        let max = f64::from(greatest(logits)?);
        let total = weights.fill(logits, max, temperature);
        Ok(Self { max, total, log: max / temperature + total.ln() })
    }
}

impl TokenSampler {
    /// The sampler of a request, with its grammar and its rules for stop tokens.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] naming the parameter and its value.
    pub fn for_request(
        request: &GenerateRequest,
        codec: &Codec,
        metrics: &Metrics,
    ) -> Result<Self, EngineError> {
        let params = &request.params;
        let mut sampler = Self::new(params, request.top_logprobs)?;
        if params.repetition_penalty != 1.0 {
            let prompt: BTreeSet<TokenId> = request.prompt_ids.iter().copied().collect();
            sampler.prompt = prompt.into_iter().collect();
        }
        sampler.scored = request.scored.iter().rev().copied().collect();
        sampler.own_stops = codec.stop_ids().to_vec();
        let further = params.stop_token_ids.iter().filter(|id| !sampler.own_stops.contains(id));
        let further: BTreeSet<TokenId> = further.copied().collect();
        sampler.further_stops = further.into_iter().collect();
        let grammar = request.grammar.as_deref();
        sampler.grammar = grammar.map(|own| (own.matcher(), metrics.engine_mask_duration.clone()));
        Ok(sampler)
    }

    /// A sampler without prompt, grammar and stop tokens, which reports `top_logprobs` alternatives, at
    /// most 20.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] naming the parameter and its value.
    pub fn new(params: &SamplingParams, top_logprobs: u8) -> Result<Self, EngineError> {
        check(params)?;
        if top_logprobs > MAX_TOP_LOGPROBS {
            return Err(EngineError::Invalid(format!(
                "top_logprobs is {top_logprobs}; at most {MAX_TOP_LOGPROBS} was expected"
            )));
        }
        Ok(Self {
            params: params.clone(),
            top_logprobs: usize::from(top_logprobs),
            rng: ChaCha8Rng::seed_from_u64(params.seed),
            counts: HashMap::new(),
            prompt: Vec::new(),
            own_stops: Vec::new(),
            further_stops: Vec::new(),
            drawn: 0,
            grammar: None,
            scored: Vec::new(),
            logits: Vec::new(),
            raw: Vec::new(),
            candidates: Vec::new(),
            weights: SoftmaxWeights::default(),
        })
    }

    /// Draws the next token from its logits `[vocabulary]`. Its text is empty.
    ///
    /// # Errors
    /// [`SampleError`] if the logits and biases do not make a distribution, or if the grammar permits no
    /// token.
    pub fn draw(&mut self, logits: &[f32]) -> Result<Token, SampleError> {
        check_logits(logits)?;
        self.logits.clear();
        self.logits.extend_from_slice(logits);
        adjust(&mut self.logits, &self.params, &self.counts, &self.prompt)?;
        let permitted = self.permitted(logits.len())?;
        let (mut token, permitted_mass) = if self.params.temperature == 0.0 {
            self.draw_greedily(logits, permitted.as_ref())?
        } else {
            self.draw_randomly(permitted.as_ref())?
        };
        token.forced = permitted.is_some_and(|permitted| permitted.forced);
        if permitted_mass < LEAST_MASS {
            token.forced = true;
        }
        let kept = f64::from(token.kept_mass) * permitted_mass.max(LEAST_MASS);
        // Never 0, whose logarithm is not finite.
        token.kept_mass = (kept as f32).max(f32::MIN_POSITIVE);
        self.follow(token.id)?;
        *self.counts.entry(token.id).or_insert(0) += 1;
        Ok(token)
    }

    /// What a program other than this one needs to draw the next token from `vocab` logits, if these and the temperature
    /// are all that it depends on; else [`Self::draw`] has to. The token belongs to [`Self::accept`].
    pub fn plain_draw(&mut self, vocab: usize) -> Option<PlainDraw> {
        let SamplingParams {
            temperature,
            presence_penalty,
            frequency_penalty,
            repetition_penalty,
            min_tokens,
            ignore_eos,
            ref logit_bias,
            ..
        } = self.params;
        let is_adjusted = !logit_bias.is_empty()
            || repetition_penalty != 1.0
            || presence_penalty != 0.0
            || frequency_penalty != 0.0;
        let permits_all = self.grammar.is_none() && self.drawn >= min_tokens && !ignore_eos;
        let is_greedy = temperature == 0.0;
        // The greatest logit survives all truncation.
        let is_plain = match is_greedy {
            true => self.scored.is_empty() && self.top_logprobs == 0,
            false => self.is_untruncated(vocab),
        };
        if is_adjusted || !permits_all || !is_plain {
            return None;
        }
        let uniform = if is_greedy { 0.0 } else { self.rng.random() };
        Some(PlainDraw { temperature, uniform })
    }

    /// Adds a token that was drawn by [`Self::plain_draw`]. Returns it as [`Self::draw`] does.
    ///
    /// # Errors
    /// As [`Self::draw`].
    pub fn accept(&mut self, id: TokenId, logprob: f32) -> Result<Token, SampleError> {
        self.follow(id)?;
        *self.counts.entry(id).or_insert(0) += 1;
        Ok(token(id, logprob, 1.0, Vec::new()))
    }

    /// The next scored token, or else the permitted token with the greatest adjusted logit, and the mass of all
    /// permitted tokens. Probabilities are those of the raw logits.
    fn draw_greedily(
        &mut self,
        raw: &[f32],
        permitted: Option<&PermittedTokens>,
    ) -> Result<(Token, f64), SampleError> {
        let mut mass = TotalMass::of(&mut self.weights, raw, 1.0)?;
        let (mut reported, mut permitted_mass) = (raw, 1.0);
        if let Some(permitted) = permitted {
            permitted.tokens.mask(&mut self.logits);
            self.raw.clear();
            self.raw.extend_from_slice(raw);
            permitted.tokens.mask(&mut self.raw);
            reported = &self.raw;
            let all = mass.log;
            mass = TotalMass::of(&mut self.weights, reported, 1.0)?;
            permitted_mass = (mass.log - all).exp();
        }
        let id = match self.scored.pop() {
            Some(id) => id,
            None => argmax(&self.logits)?,
        };
        let logprob = match self.weights.values().get(id as usize) {
            Some(weight) if *weight > 0.0 => (weight / mass.total).ln(),
            // The weight underflows, or there is no such token.
            _ => {
                let logit = reported.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY);
                f64::from(logit) - mass.max - mass.total.ln()
            }
        };
        let top = if self.top_logprobs > 0 {
            self.list_candidates();
            most_probable(&mut self.candidates, self.top_logprobs, mass.total)
        } else {
            Vec::new()
        };
        Ok((token(id, logprob as f32, 1.0, top), permitted_mass))
    }

    /// A token of the behavior policy, and the mass of all permitted tokens.
    fn draw_randomly(
        &mut self,
        permitted: Option<&PermittedTokens>,
    ) -> Result<(Token, f64), SampleError> {
        let mut mass = self.weigh()?;
        let mut permitted_mass = 1.0;
        if let Some(permitted) = permitted {
            let all = mass.log;
            permitted.tokens.mask(&mut self.logits);
            mass = self.weigh()?;
            permitted_mass = (mass.log - all).exp();
        }
        let token = if self.is_untruncated(self.logits.len()) {
            self.draw_untruncated(mass.total)?
        } else {
            self.draw_truncated(mass.total)?
        };
        Ok((token, permitted_mass))
    }

    /// Whether every token may be drawn and no alternatives are requested.
    fn is_untruncated(&self, vocab: usize) -> bool {
        let SamplingParams { top_k, top_p, min_p, .. } = self.params;
        let truncated = (top_k > 0 && (top_k as usize) < vocab) || top_p < 1.0 || min_p > 0.0;
        !truncated && self.top_logprobs == 0
    }

    /// Computes the weights of the adjusted logits.
    fn weigh(&mut self) -> Result<TotalMass, SampleError> {
        let temperature = f64::from(self.params.temperature);
        TotalMass::of(&mut self.weights, &self.logits, temperature)
    }

    /// Makes every token a candidate.
    fn list_candidates(&mut self) {
        self.candidates.clear();
        self.candidates.extend((0..).zip(self.weights.values().iter().copied()));
    }

    fn draw_untruncated(&mut self, total: f64) -> Result<Token, SampleError> {
        let choice = self.weights.pick(self.rng.random::<f64>() * total);
        let (id, weight) = choice.ok_or(SampleError::NoMass)?;
        Ok(token(id as TokenId, (weight / total).ln() as f32, 1.0, Vec::new()))
    }

    fn draw_truncated(&mut self, total: f64) -> Result<Token, SampleError> {
        self.list_candidates();
        let kept = truncate(&mut self.candidates, &self.params, total);
        let (id, weight) = pick(&self.candidates, self.rng.random::<f64>() * kept)?;
        let (logprob, kept_mass) = ((weight / kept).ln() as f32, (kept / total) as f32);
        let top = most_probable(&mut self.candidates, self.top_logprobs, kept);
        Ok(token(id, logprob, kept_mass, top))
    }
}

fn token(id: TokenId, logprob: f32, kept_mass: f32, top: Vec<(TokenId, f32)>) -> Token {
    Token { id, logprob, kept_mass, forced: false, top, text: String::new() }
}

fn check_logits(logits: &[f32]) -> Result<(), SampleError> {
    // False for NaN.
    let valid = |logit: &f32| *logit < f32::INFINITY;
    // A fold has no early exit, so that it vectorizes. The search runs after a failure only.
    if logits.iter().fold(true, |all, logit| all & valid(logit)) {
        return Ok(());
    }
    let invalid = logits.iter().enumerate().find(|(_, logit)| !valid(logit));
    invalid.map_or(Ok(()), |(id, &value)| Err(SampleError::NotFinite { id: id as TokenId, value }))
}

/// `logit + bias`, divided or multiplied by the repetition penalty (of `prompt` and drawn tokens, as in
/// transformers), `- count * frequency_penalty - [count > 0] * presence_penalty` (OpenAI's formula).
/// vLLM has the same order.
fn adjust(
    logits: &mut [f32],
    params: &SamplingParams,
    counts: &HashMap<TokenId, u32>,
    prompt: &[TokenId],
) -> Result<(), SampleError> {
    let vocab = logits.len();
    for (&id, &bias) in &params.logit_bias {
        let logit = logits.get_mut(id as usize);
        *logit.ok_or(SampleError::UnknownToken { id, vocab })? += bias;
    }
    let repetition = params.repetition_penalty;
    if repetition != 1.0 {
        let drawn = counts.keys().filter(|id| prompt.binary_search(id).is_err());
        for id in prompt.iter().chain(drawn) {
            if let Some(logit) = logits.get_mut(*id as usize) {
                *logit = if *logit < 0.0 { *logit * repetition } else { *logit / repetition };
            }
        }
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

/// The token with the greatest logit, the lowest id among equals.
fn argmax(logits: &[f32]) -> Result<TokenId, SampleError> {
    Ok(position_of(logits, greatest(logits)?).unwrap_or_default() as TokenId)
}

/// The greatest logit, which is finite.
fn greatest(logits: &[f32]) -> Result<f32, SampleError> {
    match max_logit(logits) {
        f32::NEG_INFINITY => Err(SampleError::NoMass),
        // The raw logits are finite, so only a bias can cause this.
        f32::INFINITY => {
            let id = position_of(logits, f32::INFINITY).unwrap_or_default() as TokenId;
            Err(SampleError::NotFinite { id, value: f32::INFINITY })
        }
        max => Ok(max),
    }
}

/// Keeps the candidates that `top_k`, then `top_p`, then `min_p` keep. Returns their total weight.
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

/// Moves the `n` best candidates to the front, in no order.
fn select_best(candidates: &mut [Candidate], n: usize) {
    if n > 0 && n < candidates.len() {
        candidates.select_nth_unstable_by(n - 1, best_first);
    }
}

/// Sorts the best candidates to the front until they weigh `wanted`. Returns their number.
fn nucleus(candidates: &mut [Candidate], wanted: f64) -> usize {
    let mut n = FIRST_NUCLEUS.min(candidates.len());
    loop {
        select_best(candidates, n);
        let front = &mut candidates[..n];
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
    // Rounding may leave the sum below the target; then pick the last candidate with weight.
    hit.or_else(|| candidates.iter().rfind(|c| c.1 > 0.0)).copied().ok_or(SampleError::NoMass)
}

/// The `n` best candidates with their log-probabilities. Reorders the candidates.
fn most_probable(candidates: &mut [Candidate], n: usize, total: f64) -> Vec<(TokenId, f32)> {
    let n = n.min(candidates.len());
    select_best(candidates, n);
    let mut best = candidates[..n].to_vec();
    best.sort_unstable_by(best_first);
    best.retain(|c| c.1 > 0.0);
    best.into_iter().map(|(id, weight)| (id, (weight / total).ln() as f32)).collect()
}

// Which tokens a request permits next: those of its grammar, and stop tokens only where it may end.

/// The tokens that may be drawn next.
struct PermittedTokens {
    tokens: AllowedTokens,
    /// Whether the grammar permits one only, or the text must end, so that it says nothing about the policy.
    forced: bool,
}

impl TokenSampler {
    fn stops(&self) -> impl Iterator<Item = TokenId> {
        self.own_stops.iter().chain(&self.further_stops).copied()
    }

    /// What may be drawn next of `vocab` tokens; `None` if everything may.
    ///
    /// A further stop token may be drawn exactly where the model's own may, also if it has text that the
    /// grammar permits elsewhere.
    fn permitted(&mut self, vocab: usize) -> Result<Option<PermittedTokens>, GrammarError> {
        if let Some((matcher, mask_duration)) = &mut self.grammar {
            let start = Instant::now();
            let mut tokens = matcher.allowed()?;
            mask_duration.observe(start.elapsed().as_secs_f64());
            let may_end = self.own_stops.iter().any(|id| tokens.contains(*id));
            self.further_stops.iter().for_each(|id| tokens.set(*id, may_end));
            let stops = self.stops().filter(|id| tokens.contains(*id)).count();
            let count = tokens.count();
            let forced = count == 1 || count == stops;
            return if count == 0 {
                Err(GrammarError::DeadEnd)
            } else {
                Ok(Some(PermittedTokens { tokens, forced }))
            };
        }
        let excludes_further = self.drawn < self.params.min_tokens;
        if !(excludes_further || self.params.ignore_eos) {
            return Ok(None);
        }
        let mut tokens = AllowedTokens::all(vocab);
        let further = self.further_stops.iter().filter(|_| excludes_further);
        self.own_stops.iter().chain(further).for_each(|id| tokens.set(*id, false));
        Ok(Some(PermittedTokens { tokens, forced: false }))
    }

    /// Adds the token that was drawn.
    fn follow(&mut self, id: TokenId) -> Result<(), GrammarError> {
        self.drawn += 1;
        let is_stop = self.stops().any(|stop| stop == id);
        match &mut self.grammar {
            // Nothing follows a stop token.
            Some((matcher, _)) if !is_stop => matcher.push(id),
            _ => Ok(()),
        }
    }
}

// Computes the weights of all tokens in one vectorized pass, and draws without truncation in another. Training samples
// are drawn without truncation.

/// Weights per partial sum.
const BLOCK: usize = 64;

/// Independent accumulators of a sum, so that it vectorizes.
const LANES: usize = 8;

/// The weights `exp((logit - max logit) / temperature)` of all tokens.
#[derive(Debug, Default)]
struct SoftmaxWeights {
    values: Vec<f64>,
    /// The sum of each [`BLOCK`] of values; [`Self::pick`] skips whole blocks.
    sums: Vec<f64>,
}

impl SoftmaxWeights {
    /// Computes the weights and returns their sum; `max` is the greatest logit.
    pub fn fill(&mut self, logits: &[f32], max: f64, temperature: f64) -> f64 {
        self.values.resize(logits.len(), 0.0);
        self.sums.resize(logits.len().div_ceil(BLOCK), 0.0);
        let (values, sums) = (&mut self.values[..], &mut self.sums[..]);
        dispatch(WeighTask { values, sums, logits, max, inverse: 1.0 / temperature });
        self.sums.iter().sum()
    }

    /// The weight of each token.
    pub fn values(&self) -> &[f64] {
        &self.values
    }

    /// The token at which the running sum of weights passes `target`, and its weight. If rounding
    /// leaves the sum below the target, it is the last token with a weight above 0.
    pub fn pick(&self, target: f64) -> Option<(usize, f64)> {
        let mut sum = 0.0;
        for (block, (values, block_sum)) in self.values.chunks(BLOCK).zip(&self.sums).enumerate() {
            if sum + block_sum <= target {
                sum += block_sum;
                continue;
            }
            let mut inner = sum;
            for (i, weight) in values.iter().enumerate() {
                inner += weight;
                if inner > target {
                    return Some((block * BLOCK + i, *weight));
                }
            }
            sum += block_sum;
        }
        let last = self.values.iter().rposition(|weight| *weight > 0.0)?;
        Some((last, self.values[last]))
    }
}

/// The weight of a token; `inverse` is the reciprocal of the temperature.
#[inline(always)]
fn weight(logit: f32, max: f64, inverse: f64) -> f64 {
    exp((f64::from(logit) - max) * inverse)
}

/// The greatest of logits without NaN; minus infinity if there are none.
fn max_logit(logits: &[f32]) -> f32 {
    dispatch(MaxTask(logits))
}

/// The position of the first logit that is equal to `value`.
fn position_of(logits: &[f32], value: f32) -> Option<usize> {
    // A search for the block has no exit within the block, so that it vectorizes.
    let has_value = |block: &&[f32]| block.iter().fold(false, |any, logit| any | (*logit == value));
    let block = logits.chunks(BLOCK).position(|block| has_value(&block))?;
    let first = block * BLOCK;
    logits[first..].iter().position(|logit| *logit == value).map(|at| first + at)
}

struct MaxTask<'a>(&'a [f32]);

impl SimdTask for MaxTask<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<const FUSED: bool>(self) -> f32 {
        let larger = |a: f32, b: f32| if b > a { b } else { a };
        let mut lanes = [f32::NEG_INFINITY; BLOCK];
        let chunks = self.0.chunks_exact(BLOCK);
        let rest = chunks.remainder().iter();
        for logits in chunks {
            for (lane, logit) in lanes.iter_mut().zip(logits) {
                *lane = larger(*lane, *logit);
            }
        }
        rest.chain(&lanes).fold(f32::NEG_INFINITY, |max, logit| larger(max, *logit))
    }
}

/// The sum of up to [`BLOCK`] weights.
#[inline(always)]
fn sum_of_block(values: &[f64]) -> f64 {
    let mut lanes = [0.0; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest: f64 = chunks.remainder().iter().sum();
    for values in chunks {
        for (lane, value) in lanes.iter_mut().zip(values) {
            *lane += value;
        }
    }
    lanes.iter().sum::<f64>() + rest
}

struct WeighTask<'a> {
    values: &'a mut [f64],
    sums: &'a mut [f64],
    logits: &'a [f32],
    max: f64,
    inverse: f64,
}

impl SimdTask for WeighTask<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let Self { values, sums, logits, max, inverse } = self;
        for (value, logit) in values.iter_mut().zip(logits) {
            *value = weight(*logit, max, inverse);
        }
        for (sum, values) in sums.iter_mut().zip(values.chunks(BLOCK)) {
            *sum = sum_of_block(values);
        }
    }
}

/// `e^x` for `x <= 0`, within 2 units in the last place: `2^n e^r` with `x = n ln 2 + r`,
/// `|r| <= ln 2 / 2`, and the Taylor polynomial of `e^r` of degree 13 (its remainder is below
/// 5e-18). It has no branches, so that a loop over it vectorizes.
#[inline(always)]
fn exp(x: f64) -> f64 {
    // 1.5 * 2^52: adding it rounds to an integer, which is then in the low bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    // ln 2 in two parts. Products of the first with small integers are exact.
    const LN2_HIGH: f64 = 0.693_147_180_369_123_8;
    const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    const TERMS: [f64; 12] = [
        1.0 / 479_001_600.0,
        1.0 / 39_916_800.0,
        1.0 / 3_628_800.0,
        1.0 / 362_880.0,
        1.0 / 40_320.0,
        1.0 / 5_040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
    ];
    // The result is 0 below this bound.
    let x = if x < -746.0 { -746.0 } else { x };
    let shifted = x * std::f64::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.0 / 6_227_020_800.0;
    for term in TERMS {
        p = p * r + term;
    }
    p = p * r + 1.0;
    let n = (shifted.to_bits() as i64).wrapping_sub(ROUND.to_bits() as i64);
    // 2^n as two factors, because it may be subnormal.
    let half = n >> 1;
    let power = |n: i64| f64::from_bits((n.wrapping_add(1023) as u64) << 52);
    p * power(half) * power(n.wrapping_sub(half))
}

#[cfg(test)]
mod tests;
