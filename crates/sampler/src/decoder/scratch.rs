//! The buffers of a forward pass, which are reused by later passes.

use hone_kernels::columns::{COLUMN_BLOCK, padded_width};
use hone_model::ModelSpec;

use crate::error::{Result, SamplerError};
use crate::weights::RoundedColumns;

/// Logits of a token that `wide` has room for, unless the vocabulary is smaller.
pub(super) const HEAD_PART: usize = 3072;

/// The maximum number of linear layers with the same input: queries, keys and values.
const GROUP_LINEARS: usize = 3;

/// Buffers for passes of up to a fixed number of rows.
///
/// Activations are `[feature, width]`, where `width` is the number of rows rounded up as the matmul kernels
/// need it.
#[derive(Debug)]
pub struct Scratch {
    rows: usize,
    vocab: usize,
    /// The rank that `lora` has room for.
    rank: usize,
    /// The residual stream, `[hidden, width]`.
    pub(super) residual: Vec<f32>,
    /// The output of a norm, `[hidden, width]`.
    pub(super) normed: Vec<f32>,
    /// The output of attention or the MLP, `[hidden, width]`.
    pub(super) out: Vec<f32>,
    /// The widest activations: queries, keys and values; gate and up; a part of the logits.
    pub(super) wide: Vec<f32>,
    /// The gated activation, `[intermediate, width]`.
    pub(super) mlp: Vec<f32>,
    /// The input of layers, rounded for products in fewer bits.
    pub(super) rounded: RoundedColumns,
    /// The inner activations of a group of layers, each row's of its own adapter.
    pub(super) lora: Vec<f32>,
    /// Queries, keys and values of each row.
    pub(super) qkv: Vec<f32>,
    /// The embedding, later the attention output, of each row.
    pub(super) row_values: Vec<f32>,
    /// Scratch of attention for each thread.
    pub(super) scores: Vec<f32>,
    /// `[row, vocab]`
    pub(super) logits: Vec<f32>,
}

/// Values per row of the buffers: of the hidden state, `wide`, `mlp`, `qkv` and `row_values`.
fn sizes(spec: &ModelSpec) -> [usize; 5] {
    let (q, kv) = (spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim);
    let (hidden, mlp, qkv) = (spec.hidden_size, spec.intermediate_size, q + 2 * kv);
    let wide = qkv.max(2 * mlp).max(HEAD_PART.min(spec.vocab_size));
    [hidden, wide, mlp, qkv, q.max(hidden)]
}

impl Scratch {
    /// Allocates buffers for passes of `rows` rows, or for steps of `logits` rows.
    pub fn new(spec: &ModelSpec, rows: usize, logits: usize) -> Self {
        let ([hidden, wide, mlp, qkv, row_values], rows) =
            (sizes(spec), Self::padded_rows(rows, logits));
        let buffer = |features: usize| vec![0.0; features * rows];
        Self {
            rows,
            vocab: spec.vocab_size,
            rank: 0,
            residual: buffer(hidden),
            normed: buffer(hidden),
            out: buffer(hidden),
            wide: buffer(wide),
            mlp: buffer(mlp),
            rounded: RoundedColumns::default(),
            lora: Vec::new(),
            qkv: buffer(qkv),
            row_values: buffer(row_values),
            scores: Vec::new(),
            logits: vec![0.0; spec.vocab_size * logits],
        }
    }

    /// Bytes of the buffers of [`Self::new`] with those of quantized layers, without the ones that depend
    /// on an adapter's rank or on lengths.
    pub(crate) fn bytes(spec: &ModelSpec, rows: usize, logits: usize) -> usize {
        let ([hidden, wide, mlp, qkv, row_values], rows) =
            (sizes(spec), Self::padded_rows(rows, logits));
        let values = 3 * hidden + wide + mlp + qkv + row_values;
        let rounded = RoundedColumns::bytes(rows, hidden.max(mlp).max(row_values));
        (values * rows + spec.vocab_size * logits) * size_of::<f32>() + rounded
    }

    fn padded_rows(rows: usize, logits: usize) -> usize {
        rows.max(logits).next_multiple_of(COLUMN_BLOCK)
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// The maximum number of rows of a pass that have logits.
    pub(crate) fn most_logits(&self) -> usize {
        self.logits.len() / self.vocab.max(1)
    }

    /// The logits `[vocab]` of a row of the last step.
    pub fn logits(&self, row: usize) -> &[f32] {
        &self.logits[row * self.vocab..][..self.vocab]
    }

    /// Prepares a pass with adapters of at most this rank. Allocates only if no earlier rank was as great.
    pub(super) fn prepare(&mut self, rows: usize, rank: usize) -> Result<()> {
        if rows > self.rows {
            let reason = format!("{rows} rows do not fit in {}", self.rows);
            return Err(SamplerError::Refused(reason));
        }
        if rank > self.rank {
            self.rank = rank;
            self.lora.resize(GROUP_LINEARS * rank * self.rows, 0.0);
        }
        Ok(())
    }

    /// Drops the columns of `normed` after the first `rows` of `all`, so that the head does not compute
    /// them. Returns the width that is left.
    pub(super) fn narrow_normed(&mut self, rows: usize, all: usize) -> usize {
        let [width, all] = [rows, all].map(padded_width);
        if width < all {
            for feature in 0..self.normed.len() / self.rows {
                let from = feature * all;
                self.normed.copy_within(from..from + width, feature * width);
            }
        }
        width
    }

    /// Makes room for the scratch of attention. The buffer doubles when sequences outgrow it.
    pub(super) fn reserve_scores(&mut self, scores: usize) {
        if scores > self.scores.len() {
            self.scores.resize(scores.next_power_of_two(), 0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use hone_model::testing::tiny_spec;

    use super::*;

    #[test]
    fn planned_bytes_are_those_of_the_buffers() {
        let (spec, rows) = (tiny_spec(), 40);
        let scratch = Scratch::new(&spec, rows, 8);
        let Scratch { residual, normed, out, wide, mlp, qkv, row_values, logits, .. } = &scratch;
        let buffers = [residual, normed, out, wide, mlp, qkv, row_values, logits];
        let values: usize = buffers.iter().map(|buffer| buffer.len()).sum();
        let q = spec.num_heads * spec.head_dim;
        let inner = spec.hidden_size.max(spec.intermediate_size).max(q);
        let rounded = RoundedColumns::bytes(48, inner);
        assert_eq!(Scratch::bytes(&spec, rows, 8), 4 * values + rounded);
    }
}
