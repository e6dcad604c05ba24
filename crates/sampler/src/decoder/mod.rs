//! The forward pass of a batch of tokens.

mod attend;
mod linear;
mod scratch;

use std::borrow::BorrowMut;
use std::sync::atomic::{AtomicBool, Ordering};

use hone_core::simd::{SimdTask, dispatch, mul_add};
use hone_core::types::TokenId;
use hone_kernels::columns::{COLUMN_BLOCK, TokenColumns, outputs_of_part, padded_width, par_parts};
use hone_kernels::hot_team::{for_each_chunk, keep_pool_hot};
use hone_kernels::transpose::{SharedRows, rows_to_columns};
use hone_model::{Model, ModelSpec};

use crate::error::{Result, SamplerError};
use crate::kv_cache::{CacheShape, CacheType, KvView, SequencePages};
use crate::simd_ops::{AddInPlace, GatedActivation, RmsNorm, Softcap};
use crate::weights::{AdapterWeights, BaseWeights, DecoderLayer};
use linear::{LinearPass, MinWork};

pub(crate) use linear::RowAdapter;
pub use scratch::Scratch;

/// Bytes of weights that stay in each core's own cache.
const SMALL_WEIGHTS: usize = 8 << 20;

/// Logits of a part that stay in a core's own cache until they are transposed into rows, if the part is of whole
/// blocks of columns.
const HEAD_VALUES: usize = 1 << 14;

#[derive(Clone, Copy)]
pub(crate) struct PassSettings<'a> {
    /// The adapters, for different rows, in the order of the rows. Rows without one are of the base model.
    pub adapters: &'a [RowAdapter<'a>],
    pub threads: usize,
    /// Ends the pass before its next layer, without a result, once this is set.
    pub interrupt: Option<&'a AtomicBool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PassOutcome {
    Computed,
    /// The sequences are unchanged.
    Interrupted,
}

/// The forward pass of a model.
pub struct Decoder {
    weights: BaseWeights,
    shape: CacheShape,
    rope: RotaryTable,
    min_work: MinWork,
    /// Whether the weights stay in each core's own cache. Then threads compute faster if each one runs all layers
    /// for a part of the rows. Results do not depend on it.
    pub(crate) is_small: bool,
}

impl Decoder {
    /// Shares a model's weights.
    ///
    /// # Errors
    /// If they are not contiguous f32, f16 or bf16 in main memory.
    pub fn new(model: &Model) -> Result<Self> {
        let weights = BaseWeights::new(model)?;
        let spec = &weights.spec;
        // Where products round activations to integers of 16 bits, so does the cache, which reads half of the
        // bytes then.
        let stored =
            if weights.rounding().is_to_integers() { CacheType::I16 } else { CacheType::F32 };
        let (layers, heads, dim) = (spec.num_layers, spec.num_kv_heads, spec.head_dim);
        let shape = CacheShape { layers, heads, dim, stored };
        let rope = RotaryTable::new(spec.rope.frequencies(), spec.rope.attention_factor());
        let is_small = weights.bytes <= SMALL_WEIGHTS;
        let min_work = if is_small { MinWork::SLEEPING } else { MinWork::POLLING };
        Ok(Self { weights, shape, rope, min_work, is_small })
    }

    /// The shape of the cache pages.
    pub fn shape(&self) -> CacheShape {
        self.shape
    }

    /// The type of the activations that weights are multiplied with.
    pub(crate) fn dtype(&self) -> &'static str {
        self.weights.rounding().dtype()
    }

    /// Bytes of the weights that a step reads.
    pub fn weight_bytes(&self) -> usize {
        self.weights.bytes
    }

    pub(crate) fn spec(&self) -> &ModelSpec {
        &self.weights.spec
    }

    /// Prepares for sequences of up to `positions` tokens. Call it before a pass over such a sequence.
    ///
    /// # Errors
    /// If the model does not support this length (longrope).
    pub fn reserve_positions(&mut self, positions: usize) -> Result<()> {
        self.weights.spec.check_length(positions)?;
        self.rope.extend(positions);
        Ok(())
    }

    /// Computes the keys and values of up to `limit` remaining tokens of a prompt, on up to `threads`
    /// threads of the current pool.
    ///
    /// # Errors
    /// If a token has no page ([`SequencePages::ensure_pages`]) or is outside the vocabulary.
    pub fn prefill(
        &self,
        prompt: &mut SequencePages,
        limit: usize,
        adapter: Option<&AdapterWeights>,
        scratch: &mut Scratch,
        threads: usize,
    ) -> Result<()> {
        let tokens = prompt.remaining().min(limit).min(scratch.rows());
        let mut chunks = [PromptChunk { sequence: prompt, tokens }];
        let adapter = adapter.map(|adapter| RowAdapter { adapter, rows: 0..tokens });
        let settings = PassSettings { adapters: adapter.as_slice(), threads, interrupt: None };
        let compute = || self.compute::<SequencePages>(&mut [], &mut chunks, scratch, settings);
        self.hot(threads, compute).map(drop)
    }

    /// Decodes one token of each sequence, on up to `threads` threads of the current pool. Afterwards
    /// [`Scratch::logits`] returns the logits of the tokens that follow, by row.
    ///
    /// # Errors
    /// If the scratch buffers have too few rows, a token has no page
    /// ([`SequencePages::ensure_pages`]), or it is missing ([`SequencePages::push`]) or outside the
    /// vocabulary.
    pub fn step<M: BorrowMut<SequencePages> + Send + Sync>(
        &self,
        members: &mut [M],
        adapter: Option<&AdapterWeights>,
        scratch: &mut Scratch,
        threads: usize,
    ) -> Result<()> {
        let adapter = adapter.map(|adapter| RowAdapter { adapter, rows: 0..members.len() });
        let settings = PassSettings { adapters: adapter.as_slice(), threads, interrupt: None };
        let compute = || self.compute(members, &mut [], scratch, settings);
        self.hot(threads, compute).map(drop)
    }

    /// [`Self::step`], and [`Self::prefill`] of several prompts, in one pass, which reads the weights once. Call
    /// it within [`Self::hot`].
    pub(crate) fn compute<M: BorrowMut<SequencePages> + Send + Sync>(
        &self,
        members: &mut [M],
        chunks: &mut [PromptChunk<'_>],
        scratch: &mut Scratch,
        settings: PassSettings<'_>,
    ) -> Result<PassOutcome> {
        let decoded = members.len();
        let mut rows = PassRows { members, chunks };
        if rows.len() == 0 {
            return Ok(PassOutcome::Computed);
        }
        let outcome = self.pass(&mut rows, scratch, settings)?;
        if outcome == PassOutcome::Computed {
            if decoded > 0 {
                self.head(decoded, rows.len(), scratch, settings.threads)?;
            }
            rows.advance();
        }
        Ok(outcome)
    }

    /// Runs `f`, which computes passes on up to `threads` threads, and keeps the pool hot where its threads
    /// share the matmuls.
    pub(crate) fn hot<R: Send>(&self, threads: usize, f: impl FnOnce() -> R + Send) -> R {
        if threads > 1 && !self.is_small { keep_pool_hot(f) } else { f() }
    }

    /// Computes all layers and the final norm, which is left in `scratch.normed`.
    fn pass<M: BorrowMut<SequencePages> + Send + Sync>(
        &self,
        tokens: &mut PassRows<'_, '_, M>,
        scratch: &mut Scratch,
        settings: PassSettings<'_>,
    ) -> Result<PassOutcome> {
        let PassSettings { adapters, threads, interrupt } = settings;
        let spec = &self.weights.spec;
        let rows = tokens.len();
        let width = padded_width(rows);
        scratch.prepare(rows, adapters.iter().map(|part| part.adapter.rank).max().unwrap_or(0))?;
        self.embed(tokens, scratch, width)?;
        let (hidden, q_width) = (spec.hidden_size, spec.num_heads * spec.head_dim);
        for (index, layer) in self.weights.layers.iter().enumerate() {
            if interrupt.is_some_and(|interrupt| interrupt.load(Ordering::Relaxed)) {
                return Ok(PassOutcome::Interrupted);
            }
            let min_work = self.min_work;
            let linear =
                LinearPass { adapters, layer: index, width, tokens: rows, threads, min_work };
            self.norm(&mut scratch.normed, &scratch.residual, &layer.norms[0], width);
            let outputs = layer.qkv.outputs;
            let qkv = &mut scratch.wide[..outputs * width];
            let row_values = SharedRows::new(&mut scratch.qkv[..rows * outputs], outputs);
            linear.forward(
                &layer.qkv,
                qkv,
                &scratch.normed,
                (&mut scratch.lora, &mut scratch.rounded),
                // SAFETY: parts are of different outputs.
                |first, part| unsafe { row_values.write(first, part, width) },
            )?;
            let qkv = &mut scratch.qkv[..rows * outputs];
            self.cache_keys_and_values(tokens, index, qkv, threads)?;
            self.attend(&*tokens, index, scratch, threads);
            let mixed = &mut scratch.wide[..q_width * width];
            rows_to_columns(mixed, width, &scratch.row_values[..rows * q_width], q_width);
            let out = &mut scratch.out[..hidden * width];
            let buffers = (&mut scratch.lora[..], &mut scratch.rounded);
            linear.forward(&layer.o, out, mixed, buffers, |_, _| ())?;
            self.add_to_residual(scratch, (layer, 0), (width, threads));

            self.norm(&mut scratch.normed, &scratch.residual, &layer.norms[1], width);
            let inner = spec.intermediate_size * width;
            let gate_up = &mut scratch.wide[..2 * inner];
            let buffers = (&mut scratch.lora[..], &mut scratch.rounded);
            linear.forward(&layer.gate_up, gate_up, &scratch.normed, buffers, |_, _| ())?;
            let (gate, up) = gate_up.split_at(inner);
            let activated = &mut scratch.mlp[..inner];
            par_elements(activated, (threads, self.min_work.elements), |first, out| {
                let [gate, up] = [gate, up].map(|x| &x[first..first + out.len()]);
                dispatch(GatedActivation { out, gate, up, activation: spec.activation });
            });
            let out = &mut scratch.out[..hidden * width];
            let buffers = (&mut scratch.lora[..], &mut scratch.rounded);
            linear.forward(&layer.down, out, activated, buffers, |_, _| ())?;
            self.add_to_residual(scratch, (layer, 1), (width, threads));
        }
        self.norm(&mut scratch.normed, &scratch.residual, &self.weights.norm, width);
        Ok(PassOutcome::Computed)
    }

    fn embed<M: BorrowMut<SequencePages> + Send + Sync>(
        &self,
        tokens: &PassRows<'_, '_, M>,
        scratch: &mut Scratch,
        width: usize,
    ) -> Result<()> {
        let spec = &self.weights.spec;
        let (hidden, scale) = (spec.hidden_size, spec.embedding_scale.unwrap_or(1.0) as f32);
        let rows = &mut scratch.row_values[..tokens.len() * hidden];
        for (row, out) in rows.chunks_exact_mut(hidden).enumerate() {
            let missing =
                || SamplerError::Refused("a sequence has no token for the next step".into());
            let token = tokens.token(row).ok_or_else(missing)?;
            self.weights.embed(token, out, scale)?;
        }
        rows_to_columns(&mut scratch.residual[..hidden * width], width, rows, hidden);
        Ok(())
    }

    fn norm(&self, out: &mut [f32], x: &[f32], weight: &[f32], width: usize) {
        let len = weight.len() * width;
        let (out, x) = (&mut out[..len], &x[..len]);
        let eps = self.weights.spec.rms_norm_eps as f32;
        dispatch(RmsNorm { out, x, width, weight, eps });
    }

    /// Adds `scratch.out`, the output of a half of the layer, or its norm if there is one, to the residual stream.
    fn add_to_residual(
        &self,
        scratch: &mut Scratch,
        (layer, half): (&DecoderLayer, usize),
        (width, threads): (usize, usize),
    ) {
        let len = self.weights.spec.hidden_size * width;
        let (residual, out) = (&mut scratch.residual[..len], &scratch.out[..len]);
        match &layer.output_norms {
            None => {
                let split = (threads, self.min_work.elements);
                par_elements(residual, split, |first, residual| {
                    dispatch(AddInPlace(residual, &out[first..][..residual.len()]));
                });
            }
            Some(norms) => {
                self.norm(&mut scratch.normed, out, &norms[half], width);
                dispatch(AddInPlace(residual, &scratch.normed[..len]));
            }
        }
    }

    /// Computes the logits of the first `rows` of all rows, a part of the vocabulary at a time.
    fn head(&self, rows: usize, all: usize, scratch: &mut Scratch, threads: usize) -> Result<()> {
        let vocab = self.weights.spec.vocab_size;
        let width = scratch.narrow_normed(rows, all);
        let columns = TokenColumns { values: &scratch.normed, width, tokens: rows };
        let inner = self.weights.spec.hidden_size;
        let split = (threads, self.min_work.elements);
        let x = scratch.rounded.round(self.weights.head_rounding, columns, inner, split);
        let logits = SharedRows::new(&mut scratch.logits[..rows * vocab], vocab);
        let most = (scratch.wide.len() / width).max(COLUMN_BLOCK) / COLUMN_BLOCK * COLUMN_BLOCK;
        for first in (0..vocab).step_by(most) {
            let count = most.min(vocab - first);
            let out = &mut scratch.wide[..count * width];
            let split = (threads, self.min_work.weights);
            let part = outputs_of_part(count, (width, inner), split);
            // Parts that stay in a core's own cache until they are transposed into rows.
            let small = (HEAD_VALUES / width).next_multiple_of(COLUMN_BLOCK);
            let step = if width < COLUMN_BLOCK { part } else { part.min(small) };
            let compute = |start: usize, out: &mut [f32]| -> Result<()> {
                self.weights.head(out, first + start, x)?;
                if let Some(cap) = self.weights.spec.final_softcap {
                    dispatch(Softcap { x: &mut *out, cap: cap as f32 });
                }
                // SAFETY: parts are of different tokens of the vocabulary.
                unsafe { logits.write(first + start, out, width) };
                Ok(())
            };
            if part >= count {
                // One thread.
                let mut steps = out.chunks_mut(step * width).enumerate();
                steps.try_for_each(|(i, out)| compute(i * step, out))?;
            } else {
                par_parts(out, (width, step), compute)?;
            }
        }
        Ok(())
    }
}

/// Splits `out` into parts of at least `least` elements, and calls `f(first element, part)` on up to `threads`
/// threads.
fn par_elements(
    out: &mut [f32],
    (threads, least): (usize, usize),
    f: impl Fn(usize, &mut [f32]) + Sync,
) {
    let threads = threads.min(out.len() / least).max(1);
    if threads == 1 {
        return f(0, out);
    }
    let part = out.len().div_ceil(threads).next_multiple_of(COLUMN_BLOCK);
    for_each_chunk(out, part, |i, out| f(i * part, out));
}

// The tokens that one forward pass computes.

/// Consecutive tokens of a prompt, which a pass computes without their logits.
pub(crate) struct PromptChunk<'a> {
    pub sequence: &'a mut SequencePages,
    pub tokens: usize,
}

/// The tokens of a forward pass, one in each row: the next token of each member, then parts of different
/// prompts.
pub(crate) struct PassRows<'a, 'c, M> {
    pub members: &'a mut [M],
    pub chunks: &'a mut [PromptChunk<'c>],
}

struct SequenceRow<'a> {
    sequence: &'a SequencePages,
    /// Tokens between the sequence's next one and the row's.
    offset: usize,
    /// Rows of the sequence from this one on.
    rest: usize,
}

impl<M: BorrowMut<SequencePages> + Send + Sync> PassRows<'_, '_, M> {
    pub fn len(&self) -> usize {
        self.members.len() + self.chunks.iter().map(|chunk| chunk.tokens).sum::<usize>()
    }

    fn find(&self, row: usize) -> Option<SequenceRow<'_>> {
        if let Some(member) = self.members.get(row) {
            return Some(SequenceRow { sequence: member.borrow(), offset: 0, rest: 1 });
        }
        let mut offset = row - self.members.len();
        for PromptChunk { sequence, tokens } in self.chunks.iter() {
            if offset < *tokens {
                return Some(SequenceRow { sequence, offset, rest: tokens - offset });
            }
            offset -= tokens;
        }
        None
    }

    pub fn token(&self, row: usize) -> Option<TokenId> {
        self.find(row).and_then(|row| row.sequence.token(row.offset))
    }

    pub fn position(&self, row: usize) -> usize {
        self.find(row).map_or(0, |row| row.sequence.position(row.offset))
    }

    /// The positions that a row attends to, including its own.
    pub fn view(&self, row: usize) -> KvView<'_> {
        let empty = KvView { pages: &[], len: 0 };
        self.find(row).map_or(empty, |row| row.sequence.view(row.offset))
    }

    /// Rows from `row` on that are consecutive tokens of one sequence.
    pub fn run_len(&self, row: usize) -> usize {
        self.find(row).map_or(1, |row| row.rest)
    }

    pub fn advance(self) {
        self.members.iter_mut().for_each(|member| member.borrow_mut().advance(1));
        self.chunks.iter_mut().for_each(|chunk| chunk.sequence.advance(chunk.tokens));
    }
}

// Rotary position embeddings, and the norms over heads that precede them.

/// Cosines and sines for each position.
pub(crate) struct RotaryTable {
    frequencies: Vec<f32>,
    /// Multiplies all cosines and sines (YaRN, longrope).
    attention_factor: f64,
    /// `[position][cosines | sines]`
    table: Vec<f32>,
}

/// The cosines and sines of one position, `[dim / 2]` each.
pub(crate) type CosSin<'a> = (&'a [f32], &'a [f32]);

impl RotaryTable {
    pub fn new(frequencies: Vec<f32>, attention_factor: f64) -> Self {
        Self { frequencies, attention_factor, table: Vec::new() }
    }

    /// Extends the table to `positions`. Angles are rounded to f32, as in training.
    pub fn extend(&mut self, positions: usize) {
        let row = 2 * self.frequencies.len();
        for position in self.table.len() / row.max(1)..positions {
            let angles = self.frequencies.iter().map(|f| f64::from(position as f32 * f));
            let factor = self.attention_factor;
            self.table.extend(angles.clone().map(|a| (a.cos() * factor) as f32));
            self.table.extend(angles.map(|a| (a.sin() * factor) as f32));
        }
    }

    pub fn get(&self, position: usize) -> CosSin<'_> {
        let half = self.frequencies.len();
        self.table[2 * half * position..][..2 * half].split_at(half)
    }
}

/// Normalizes and rotates all heads of one token.
pub(crate) struct NormAndRotate<'a> {
    /// `[heads * dim]`
    pub x: &'a mut [f32],
    pub dim: usize,
    /// The norm's weight `[dim]` and its epsilon.
    pub norm: Option<(&'a [f32], f32)>,
    pub rotation: Option<CosSin<'a>>,
}

impl SimdTask for NormAndRotate<'_> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        for head in self.x.chunks_exact_mut(self.dim) {
            if let Some((weight, eps)) = self.norm {
                let mut sums = [0.0_f32; 8];
                for (i, x) in head.iter().enumerate() {
                    sums[i % 8] = mul_add::<FUSED>(*x, *x, sums[i % 8]);
                }
                let mean = sums.iter().sum::<f32>() / weight.len() as f32;
                let scale = 1.0 / (mean + eps).sqrt();
                head.iter_mut().zip(weight).for_each(|(x, w)| *x = *x * scale * w);
            }
            if let Some((cos, sin)) = self.rotation {
                let (a, b) = head.split_at_mut(cos.len());
                for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
                    (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
