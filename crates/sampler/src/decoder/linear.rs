//! The linear layers of one decoder layer, with biases and adapters.
//!
//! The rows of a pass may have different adapters. The base's product is computed for all rows at once. An
//! adapter's inner activations are set to zero in the rows of others, to which its product then adds zeros.

use std::convert::Infallible;
use std::mem::take;
use std::ops::Range;

use hone_kernels::columns::{TokenColumns, WeightMatrix, add_matmul_serial, par_outputs};
use hone_model::adapter::LinearKind;

use crate::error::{Result, SamplerError};
use crate::weights::{AdapterPair, AdapterWeights, LinearGroup, RoundedColumns};

/// An adapter and the consecutive rows of a pass that it is for.
pub(crate) struct RowAdapter<'a> {
    pub adapter: &'a AdapterWeights,
    pub rows: Range<usize>,
}

/// The linear layers of one decoder layer in one pass.
pub(super) struct LinearPass<'a> {
    pub adapters: &'a [RowAdapter<'a>],
    pub layer: usize,
    pub width: usize,
    pub tokens: usize,
    pub threads: usize,
    pub min_work: MinWork,
}

/// Consecutive outputs of several layers, of which parts are taken in their order.
struct OutputPart<'a> {
    /// Outputs before the first one.
    skip: usize,
    out: &'a mut [f32],
    width: usize,
}

impl<'a> OutputPart<'a> {
    /// Takes the outputs of the next layer, which has `outputs` of them. Returns the index of the first one that
    /// is in the part, and those that are, which may be none.
    fn next(&mut self, outputs: usize) -> (usize, &'a mut [f32]) {
        let from = self.skip.min(outputs);
        self.skip -= from;
        let len = (outputs - from).min(self.out.len() / self.width);
        let (piece, rest) = take(&mut self.out).split_at_mut(len * self.width);
        self.out = rest;
        (from, piece)
    }
}

impl<'a> LinearPass<'a> {
    /// Computes a group of linear layers with biases and adapters: `x` `[inner, width]` to `out`
    /// `[outputs, width]`. `lora` and `rounded` are scratch. Calls `then` with the first output of each part and the
    /// part, once it is computed, on the same thread.
    pub fn forward(
        &self,
        group: &LinearGroup,
        out: &mut [f32],
        x: &[f32],
        (lora, rounded): (&mut [f32], &mut RoundedColumns),
        then: impl Fn(usize, &[f32]) + Sync,
    ) -> Result<()> {
        let Self { width, tokens, threads, .. } = *self;
        let columns = TokenColumns { values: &x[..group.inner * width], width, tokens };
        let lora = self.adapter_inner(group, columns, lora);
        let x =
            rounded.round(group.rounding, columns, group.inner, (threads, self.min_work.elements));
        // All layers in one parallel loop, because each loop ends with a wait for the slowest thread.
        let split = (threads, self.min_work.weights);
        par_outputs(out, (width, group.inner), split, |skip, all| {
            let (mut part, mut lora) = (OutputPart { skip, out: &mut *all, width }, lora);
            for linear in &group.linears {
                let pairs = || self.pairs(linear.kind).map(|(_, pair)| pair);
                let ranks: usize = pairs().map(|pair| pair.r).sum();
                let (mut inner, after) = lora.split_at(ranks * width);
                lora = after;
                let (from, out) = part.next(linear.out);
                if out.is_empty() {
                    continue;
                }
                linear.forward(out, from, x)?;
                for AdapterPair { r, b, .. } in pairs() {
                    let (values, others) = inner.split_at(r * width);
                    inner = others;
                    let b = WeightMatrix { values: &b[from * r..], inner: *r };
                    add_matmul_serial(out, b, TokenColumns { values, width, tokens });
                }
            }
            then(skip, all);
            Ok::<(), SamplerError>(())
        })
    }

    /// The factors of a linear layer, and the rows that they are for.
    fn pairs(
        &self,
        kind: LinearKind,
    ) -> impl Iterator<Item = (&'a Range<usize>, &'a AdapterPair)> + use<'a> {
        let layer = self.layer;
        let pair =
            move |part: &'a RowAdapter<'a>| Some((&part.rows, part.adapter.get(layer, kind)?));
        self.adapters.iter().filter_map(pair)
    }

    /// Computes the inner activations of a group's adapters, `[ranks, width]`: by layer, then by adapter. They
    /// are zero in the rows of other adapters.
    fn adapter_inner<'b>(
        &self,
        group: &LinearGroup,
        x: TokenColumns<'_>,
        lora: &'b mut [f32],
    ) -> &'b [f32] {
        let pairs = || group.linears.iter().flat_map(|linear| self.pairs(linear.kind));
        let ranks: usize = pairs().map(|(_, pair)| pair.r).sum();
        if ranks == 0 {
            return &[];
        }
        let (width, inner) = (self.width, group.inner);
        let lora = &mut lora[..ranks * width];
        lora.fill(0.0);
        let split = (self.threads, self.min_work.adapter);
        let Ok(()) = par_outputs(lora, (width, inner), split, |skip, out| {
            let mut part = OutputPart { skip, out, width };
            for (rows, pair) in pairs() {
                let (from, out) = part.next(pair.r);
                if out.is_empty() {
                    continue;
                }
                let a = WeightMatrix { values: &pair.a[from * inner..], inner };
                add_matmul_serial(out, a, x);
                if *rows != (0..self.tokens) {
                    for values in out.chunks_exact_mut(width) {
                        values[..rows.start].fill(0.0);
                        values[rows.end..].fill(0.0);
                    }
                }
            }
            Ok::<(), Infallible>(())
        });
        lora
    }
}

// The work that pays for another thread.

/// Least work of a thread, for each kind of parallel loop. Results do not depend on it.
#[derive(Clone, Copy, Debug)]
pub(super) struct MinWork {
    /// Multiplications with a weight. Those of a few columns count as 16, because to read a weight takes as long.
    pub weights: usize,
    /// Multiplications with an adapter, which the processors' own caches hold.
    pub adapter: usize,
    pub attention: usize,
    pub elements: usize,
    /// Values of queries, keys and values that are written to the cache, each key to another cache line.
    pub row_values: usize,
}

impl MinWork {
    /// For threads that may have to be woken.
    pub const SLEEPING: Self = Self {
        weights: 1 << 19,
        adapter: 1 << 19,
        attention: 1 << 17,
        elements: 1 << 15,
        row_values: usize::MAX,
    };

    /// For threads that poll for work.
    pub const POLLING: Self =
        Self { adapter: 1 << 16, elements: 1 << 13, row_values: 1 << 12, ..Self::SLEEPING };

    #[cfg(test)]
    pub const NONE: Self =
        Self { weights: 1, adapter: 1, attention: 1, elements: 1, row_values: 1 };
}
