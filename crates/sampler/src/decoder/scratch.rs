//! Memory of a pass, which keeps its size.

use hone_model::ModelSpec;

use super::{HEAD_PART, LANES, Result};
use crate::SamplerError;

/// Buffers for passes of up to a number of rows.
#[derive(Debug)]
pub struct Scratch {
    rows: usize,
    /// Rank that `down` has room for.
    rank: usize,
    vocab: usize,
    /// The residual stream, `[hidden, width]`.
    pub(super) x: Vec<f32>,
    pub(super) normed: Vec<f32>,
    pub(super) out: Vec<f32>,
    /// Whatever is widest: queries, keys and values; gate and up; a part of the logits.
    pub(super) wide: Vec<f32>,
    pub(super) inner: Vec<f32>,
    pub(super) down: Vec<f32>,
    /// `[row, ..]` from here on.
    pub(super) qkv: Vec<f32>,
    pub(super) mixed: Vec<f32>,
    pub(super) scores: Vec<f32>,
    pub(super) logits: Vec<f32>,
    /// Logits of a row that `wide` holds at once.
    pub(super) head_part: usize,
}

/// Values of each buffer.
struct Sizes {
    hidden: usize,
    wide: usize,
    inner: usize,
    qkv: usize,
    mixed: usize,
    head_part: usize,
}

impl Sizes {
    /// Of one row.
    fn new(spec: &ModelSpec) -> Self {
        let (q, kv) = (spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim);
        let head_part = HEAD_PART.min(spec.vocab_size);
        let (hidden, inner) = (spec.hidden_size, spec.intermediate_size);
        let wide = (q + 2 * kv).max(2 * inner).max(head_part);
        Self { hidden, wide, inner, qkv: q + 2 * kv, mixed: q.max(hidden), head_part }
    }
}

impl Scratch {
    /// For `rows` rows at a time, of which `logits` may want logits.
    pub fn new(spec: &ModelSpec, rows: usize, logits: usize) -> Self {
        let width = rows.max(logits).next_multiple_of(LANES);
        let Sizes { hidden, wide, inner, qkv, mixed, head_part } = Sizes::new(spec);
        let zeros = |n: usize| vec![0.0; n];
        Self {
            rows: width,
            rank: 0,
            vocab: spec.vocab_size,
            x: zeros(hidden * width),
            normed: zeros(hidden * width),
            out: zeros(hidden * width),
            wide: zeros(wide * width),
            inner: zeros(inner * width),
            down: Vec::new(),
            qkv: zeros(qkv * width),
            mixed: zeros(mixed * width),
            scores: Vec::new(),
            logits: zeros(spec.vocab_size * logits),
            head_part,
        }
    }

    /// Bytes that [`Self::new`] takes.
    pub fn bytes(spec: &ModelSpec, rows: usize, logits: usize) -> usize {
        let width = rows.max(logits).next_multiple_of(LANES);
        let Sizes { hidden, wide, inner, qkv, mixed, .. } = Sizes::new(spec);
        let row = 3 * hidden + wide + inner + qkv + mixed;
        (row * width + spec.vocab_size * logits) * size_of::<f32>()
    }

    /// Most rows of a pass.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Logits `[vocab]` of a row of the last step.
    pub fn logits(&self, row: usize) -> &[f32] {
        &self.logits[row * self.vocab..][..self.vocab]
    }

    /// Makes sure of room for an adapter of this rank; grows only when a greater one comes.
    pub(super) fn check(&mut self, rows: usize, rank: usize) -> Result<()> {
        if rows > self.rows {
            let most = self.rows;
            return Err(SamplerError::Internal(format!("{rows} rows do not fit in {most}")));
        }
        if rank > self.rank {
            self.rank = rank;
            self.down.resize(rank * self.rows, 0.0);
        }
        Ok(())
    }

    /// Makes sure of room for attention scores; grows, by doubling, when sequences become longer.
    pub(super) fn reach(&mut self, scores: usize) {
        if scores > self.scores.len() {
            self.scores.resize(scores.next_power_of_two(), 0.0);
        }
    }
}
