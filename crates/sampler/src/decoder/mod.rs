//! One pass of tokens through the model: the pure part of the sampler.

mod rope;
mod scratch;
mod tokens;

use rayon::prelude::*;
use rope::Rope;
use tokens::{Steps, Stretch, Tokens};

use hone_core::simd::dispatch;
use hone_core::threads::pause_point;
use hone_model::Model;

use super::attention::Attend;
use super::weights::{AdapterWeights, BaseWeights, Layer, Stack};
use super::{SamplerError, attention};
use crate::keep_pool_hot::awake;
use crate::kv_cache::{BatchMember, CacheShape, PromptPages};
use crate::matmul::{LANES, Lanes, Rows, Start, by_outputs, product};
use crate::simd_ops::{AddTo, Gate, RmsNorm, Softcap, to_lanes, to_rows};

pub use scratch::Scratch;

type Result<T> = std::result::Result<T, SamplerError>;

/// Bytes of weights that a processor's own cache holds.
const SMALL_WEIGHTS: usize = 8 << 20;

/// Multiplications of an attention that are worth another thread.
const WORTH_A_THREAD: usize = 1 << 17;

/// Logits that are computed before they are turned into rows.
const HEAD_PART: usize = 3072;

/// The model as it decodes.
pub struct Decoder {
    weights: BaseWeights,
    shape: CacheShape,
    rope: Rope,
}

impl Decoder {
    /// Shares a model's weights.
    ///
    /// # Errors
    /// As [`BaseWeights::new`].
    pub fn new(model: &Model) -> Result<Self> {
        let weights = BaseWeights::new(model)?;
        let spec = &weights.spec;
        let shape =
            CacheShape { layers: spec.num_layers, heads: spec.num_kv_heads, dim: spec.head_dim };
        let rope = Rope::new(spec.rope.frequencies(), spec.rope.attention_factor());
        Ok(Self { weights, shape, rope })
    }

    /// What a page of its cache is like.
    pub fn shape(&self) -> CacheShape {
        self.shape
    }

    /// The weights.
    pub fn weights(&self) -> &BaseWeights {
        &self.weights
    }

    /// Logits per row.
    pub fn vocab(&self) -> usize {
        self.weights.spec.vocab_size
    }

    /// Gets ready for sequences of up to `positions` tokens. To be called before a pass has such.
    ///
    /// # Errors
    /// If the model cannot have as many (longrope).
    pub fn reach(&mut self, positions: usize) -> Result<()> {
        self.weights.spec.check_length(positions)?;
        self.rope.reach(positions);
        Ok(())
    }

    /// Computes up to `most` missing positions of a prompt, on up to `threads` threads of the current
    /// pool.
    ///
    /// # Errors
    /// If the scratch is too small or a token is outside the vocabulary.
    pub fn prefill(
        &self,
        prompt: &mut PromptPages,
        most: usize,
        factors: Option<&AdapterWeights>,
        scratch: &mut Scratch,
        threads: usize,
    ) -> Result<()> {
        let (first, count) = (prompt.len(), prompt.missing().min(most).min(scratch.rows()));
        if count > 0 {
            let mut tokens = Stretch { prompt: &mut *prompt, first, count };
            self.awake(threads, || self.pass(&mut tokens, factors, scratch, threads))?;
            prompt.advance(count);
        }
        Ok(())
    }

    /// Takes one token of each sequence in; [`Scratch::logits`] then holds what follows, row by row.
    ///
    /// # Errors
    /// If there are more rows than the scratch holds, a sequence has no room, or a token is outside
    /// the vocabulary.
    pub fn step<M: BatchMember + Send>(
        &self,
        members: &mut [M],
        factors: Option<&AdapterWeights>,
        scratch: &mut Scratch,
        threads: usize,
    ) -> Result<()> {
        self.awake(threads, || {
            self.pass(&mut Steps(&mut *members), factors, scratch, threads)?;
            let width = members.len().next_multiple_of(LANES);
            self.head(members.len(), width, scratch, threads)
        })?;
        members.iter_mut().for_each(|member| member.sequence_mut().advance());
        Ok(())
    }

    /// Keeps the pool's threads awake where they share the products.
    fn awake<R: Send>(&self, threads: usize, f: impl FnOnce() -> R + Send) -> R {
        if threads > 1 && !self.is_small() { awake(f) } else { f() }
    }

    /// Whether every thread may read all of its weights, for rows of its own.
    pub(super) fn is_small(&self) -> bool {
        self.weights.bytes() <= SMALL_WEIGHTS
    }

    /// All blocks, then the last norm, whose output is left in `scratch.normed`.
    fn pass(
        &self,
        tokens: &mut impl Tokens,
        factors: Option<&AdapterWeights>,
        scratch: &mut Scratch,
        threads: usize,
    ) -> Result<()> {
        let spec = &self.weights.spec;
        let rows = tokens.len();
        let width = rows.next_multiple_of(LANES);
        scratch.check(rows, factors.map_or(0, |f| f.rank))?;
        self.embed(tokens, scratch, width)?;
        let (hidden, q_width) = (spec.hidden_size, spec.num_heads * spec.head_dim);
        for (index, layer) in self.weights.layers.iter().enumerate() {
            let at = At { factors, layer: index, width, threads };
            self.norm(&mut scratch.normed, &scratch.x, &layer.norms[0], width);
            let outputs = layer.qkv.outputs();
            let qkv = &mut scratch.wide[..outputs * width];
            at.apply(&layer.qkv, qkv, &scratch.normed, &mut scratch.down)?;
            to_rows(&mut scratch.qkv[..rows * outputs], (0, outputs), qkv, width);
            self.write(tokens, index, layer, &mut scratch.qkv)?;
            self.attend(&*tokens, &at, scratch);
            let mixed = &scratch.mixed[..rows * q_width];
            let lanes = &mut scratch.wide[..q_width * width];
            to_lanes(lanes, width, mixed, q_width);
            let out = &mut scratch.out[..hidden * width];
            at.apply(&layer.o, out, lanes, &mut scratch.down)?;
            self.add(scratch, layer.output_norms.as_ref().map(|norms| &norms[0]), width);

            self.norm(&mut scratch.normed, &scratch.x, &layer.norms[1], width);
            let inner = spec.intermediate_size * width;
            let both = &mut scratch.wide[..2 * inner];
            at.apply(&layer.gate_up, both, &scratch.normed, &mut scratch.down)?;
            let (gate, up) = both.split_at(inner);
            let activated = &mut scratch.inner[..inner];
            spread(activated, threads, |first, out| {
                let [gate, up] = [gate, up].map(|x| &x[first..first + out.len()]);
                dispatch(Gate { out, gate, up, activation: spec.activation });
            });
            let out = &mut scratch.out[..hidden * width];
            at.apply(&layer.down, out, activated, &mut scratch.down)?;
            self.add(scratch, layer.output_norms.as_ref().map(|norms| &norms[1]), width);
        }
        self.norm(&mut scratch.normed, &scratch.x, &self.weights.norm, width);
        Ok(())
    }

    fn embed(&self, tokens: &impl Tokens, scratch: &mut Scratch, width: usize) -> Result<()> {
        let spec = &self.weights.spec;
        let (hidden, scale) = (spec.hidden_size, spec.embedding_scale.unwrap_or(1.0) as f32);
        let rows = &mut scratch.mixed[..tokens.len() * hidden];
        for (row, out) in rows.chunks_exact_mut(hidden).enumerate() {
            self.weights.embed(tokens.token(row) as usize, out, scale)?;
        }
        to_lanes(&mut scratch.x[..hidden * width], width, rows, hidden);
        Ok(())
    }

    fn norm(&self, out: &mut [f32], x: &[f32], weight: &[f32], width: usize) {
        let len = weight.len() * width;
        let (out, x) = (&mut out[..len], &x[..len]);
        let eps = self.weights.spec.rms_norm_eps as f32;
        dispatch(RmsNorm { out, x, width, weight, eps });
    }

    /// `x += out`, or the norm of it.
    fn add(&self, scratch: &mut Scratch, norm: Option<&Vec<f32>>, width: usize) {
        let len = self.weights.spec.hidden_size * width;
        let (x, out) = (&mut scratch.x[..len], &scratch.out[..len]);
        match norm {
            None => dispatch(AddTo(x, out)),
            Some(norm) => {
                self.norm(&mut scratch.normed, out, norm, width);
                dispatch(AddTo(x, &scratch.normed[..len]));
            }
        }
    }

    /// Norms and turns queries and keys of every row, and writes keys and values to the cache.
    fn write(
        &self,
        tokens: &mut impl Tokens,
        index: usize,
        layer: &Layer,
        qkv: &mut [f32],
    ) -> Result<()> {
        let spec = &self.weights.spec;
        let CacheShape { heads, dim, .. } = self.shape;
        let (q_width, kv_width) = (spec.num_heads * dim, heads * dim);
        let eps = spec.rms_norm_eps as f32;
        for (row, qkv) in
            qkv.chunks_exact_mut(q_width + 2 * kv_width).take(tokens.len()).enumerate()
        {
            let (q, kv) = qkv.split_at_mut(q_width);
            let (k, v) = kv.split_at_mut(kv_width);
            let position = tokens.position(row);
            let parts = [(&mut *q, 0), (&mut *k, 1)];
            for (part, which) in parts {
                let norm = layer.head_norms.as_ref().map(|norms| norms[which].as_slice());
                dispatch(rope::Heads {
                    x: part,
                    dim,
                    norm: norm.map(|weight| (weight, eps)),
                    turn: layer.rope.then(|| self.rope.at(position)),
                });
            }
            let none = || SamplerError::Internal("a sequence has no room for a token".to_owned());
            let (page, slot) = tokens.place(row).ok_or_else(none)?;
            for (head, (k, v)) in k.chunks_exact(dim).zip(v.chunks_exact(dim)).enumerate() {
                self.shape.write(page, (index, head, slot), k, v);
            }
        }
        Ok(())
    }

    /// Attention of every row, into `scratch.mixed`.
    fn attend(&self, tokens: &impl Tokens, at: &At<'_>, scratch: &mut Scratch) {
        let spec = &self.weights.spec;
        let (rows, shape) = (tokens.len(), self.shape);
        let (q_width, group) = (spec.num_heads * shape.dim, spec.num_heads / shape.heads);
        let qkv_width = q_width + 2 * shape.heads * shape.dim;
        let deepest = (0..rows).map(|row| tokens.position(row)).max().unwrap_or(0);
        let room = attention::scores(deepest, group);
        let threads =
            if rows * deepest * q_width < WORTH_A_THREAD { 1 } else { at.threads.min(rows) };
        scratch.reach(threads * room);
        let (qkv, options) =
            (&scratch.qkv[..rows * qkv_width], self.weights.layers[at.layer].options);
        let some = |first: usize, out: &mut [f32], scores: &mut [f32]| {
            for (i, out) in out.chunks_exact_mut(q_width).enumerate() {
                let row = first + i;
                dispatch(Attend {
                    shape,
                    layer: at.layer,
                    options,
                    keys: tokens.keys(row),
                    q: &qkv[row * qkv_width..][..q_width],
                    out,
                    scores: &mut *scores,
                });
                pause_point();
            }
        };
        let out = &mut scratch.mixed[..rows * q_width];
        if threads == 1 {
            return some(0, out, &mut scratch.scores);
        }
        let part = rows.div_ceil(threads);
        let parts = out.par_chunks_mut(part * q_width).zip(scratch.scores.par_chunks_mut(room));
        parts.enumerate().for_each(|(i, (out, scores))| some(i * part, out, scores));
    }

    /// Logits of the first rows, a part of the vocabulary at a time.
    fn head(&self, rows: usize, width: usize, scratch: &mut Scratch, threads: usize) -> Result<()> {
        let vocab = self.vocab();
        let (normed, wide) = (&scratch.normed, &mut scratch.wide);
        let logits = &mut scratch.logits[..rows * vocab];
        for first in (0..vocab).step_by(scratch.head_part) {
            let count = scratch.head_part.min(vocab - first);
            let out = &mut wide[..count * width];
            self.weights.head(out, first, Lanes { values: normed, width }, threads)?;
            if let Some(cap) = self.weights.spec.final_softcap {
                spread(out, threads, |_, x| dispatch(Softcap { x, cap: cap as f32 }));
            }
            to_rows(logits, (first, vocab), out, width);
        }
        Ok(())
    }
}

/// Where in the model a product is.
struct At<'a> {
    factors: Option<&'a AdapterWeights>,
    layer: usize,
    width: usize,
    threads: usize,
}

impl At<'_> {
    /// Linear layers with their biases and adapters: `x` `[inner, width]` to `out`.
    fn apply(&self, stack: &Stack, out: &mut [f32], x: &[f32], down: &mut [f32]) -> Result<()> {
        let x = Lanes { values: &x[..stack.inner * self.width], width: self.width };
        // All layers in one go: threads that wait for the next product may fall asleep.
        by_outputs(out, self.width, stack.inner, self.threads, |first, out| {
            // Of each layer, what is left of its outputs behind `skip` and fits.
            let (mut rest, mut skip) = (out, first);
            for (_, linear) in &stack.linears {
                let from = skip.min(linear.out);
                skip -= from;
                let len = (linear.out - from).min(rest.len() / self.width);
                let (out, after) = rest.split_at_mut(len * self.width);
                rest = after;
                if len > 0 {
                    linear.part(out, from, x)?;
                }
            }
            Ok::<(), SamplerError>(())
        })?;
        let Some(factors) = self.factors else { return Ok(()) };
        let mut rest = out;
        for (kind, linear) in &stack.linears {
            let (out, after) = rest.split_at_mut(linear.out * self.width);
            rest = after;
            if let Some(factor) = factors.get(self.layer, *kind) {
                let down = &mut down[..factor.r * self.width];
                let a = Rows { values: &factor.a, inner: linear.inner };
                product(down, a, x, Start::Zero, self.threads);
                let b = Rows { values: &factor.b, inner: factor.r };
                let down = Lanes { values: down, width: self.width };
                product(out, b, down, Start::Output, self.threads);
            }
        }
        Ok(())
    }
}

/// Calls `f(first, values)` on parts of `out`, on several threads if it is long.
fn spread(out: &mut [f32], threads: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    const WORTH_A_THREAD: usize = 1 << 15;
    let threads = threads.min(out.len() / WORTH_A_THREAD).max(1);
    if threads == 1 {
        return f(0, out);
    }
    let part = out.len().div_ceil(threads).next_multiple_of(LANES);
    out.par_chunks_mut(part).enumerate().for_each(|(i, out)| f(i * part, out));
}

#[cfg(test)]
mod tests;
