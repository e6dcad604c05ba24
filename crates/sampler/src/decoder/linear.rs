//! The linear layers of one decoder layer, with biases and adapters.
//!
//! The rows of a pass may have different adapters. The base's product is computed for all rows at once, and each
//! adapter's for its own rows only, a block of rows after the other. The vectors of an adapter with few rows in a block
//! run along ranks and outputs, so they are full for a single row too; those of one with many rows run along rows.
//! Results are the same ([`hone_kernels::strided`]).

use std::convert::Infallible;
use std::mem::take;
use std::ops::Range;

use hone_kernels::columns::{COLUMN_BLOCK, TokenColumns, par_outputs, par_parts};
use hone_kernels::strided::{StridedFactor, add_strided};
use hone_kernels::transpose::transpose_strided;
use hone_model::adapter::LinearKind;

use crate::error::{Result, SamplerError};
use crate::weights::{AdapterPair, AdapterWeights, LinearGroup, PANEL, RoundedColumns};

/// Rows of an adapter in a block from which on vectors run along rows.
const MANY_ROWS: usize = 8;

/// An adapter and the consecutive rows of a pass that it is for.
pub(crate) struct RowAdapter<'a> {
    pub adapter: &'a AdapterWeights,
    pub rows: Range<usize>,
}

/// The factors of one linear layer, and the rows that they are for in one block of [`COLUMN_BLOCK`] rows.
#[derive(Clone, Copy)]
struct BlockAdapter<'a> {
    pair: &'a AdapterPair,
    /// The first row in the pass, and how many there are.
    first: usize,
    rows: usize,
    /// Where the inner activations begin in those of the block: `[rows, r]`, or with [many](MANY_ROWS) rows,
    /// `[r, rows]`.
    inner: usize,
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
        let ranks = self.ranks(group);
        let lora = self.adapter_inner(group, ranks, columns, lora);
        let x =
            rounded.round(group.rounding, columns, group.inner, (threads, self.min_work.elements));
        // All layers in one parallel loop, because each loop ends with a wait for the slowest thread.
        let split = (threads, self.min_work.weights);
        par_outputs(out, (width, group.inner), split, |skip, all| {
            let mut part = OutputPart { skip, out: &mut *all, width };
            for linear in &group.linears {
                let (from, out) = part.next(linear.out);
                if out.is_empty() {
                    continue;
                }
                linear.forward(out, from, x)?;
                for (block, inner) in lora.chunks_exact(COLUMN_BLOCK * ranks.max(1)).enumerate() {
                    let of_kind = self.block(group, block).filter(|(kind, _)| *kind == linear.kind);
                    self.add_outputs((out, from), of_kind.map(|(_, part)| part), inner, block);
                }
            }
            then(skip, all);
            Ok::<(), SamplerError>(())
        })
    }

    /// The most ranks that an adapter has in a group's layers together.
    fn ranks(&self, group: &LinearGroup) -> usize {
        let ranks = |part: &RowAdapter<'_>| -> usize {
            let pairs = group.linears.iter().filter_map(|l| part.adapter.get(self.layer, l.kind));
            pairs.map(|pair| pair.r).sum()
        };
        self.adapters.iter().map(ranks).max().unwrap_or(0)
    }

    /// The rows of a block.
    fn block_rows(&self, block: usize) -> Range<usize> {
        block * COLUMN_BLOCK..self.tokens.min((block + 1) * COLUMN_BLOCK)
    }

    /// The adapters of a group's layers in a block, by rows, then by layer.
    fn block<'b>(
        &'b self,
        group: &'b LinearGroup,
        block: usize,
    ) -> impl Iterator<Item = (LinearKind, BlockAdapter<'a>)> + use<'a, 'b> {
        let (Range { start, end }, mut inner) = (self.block_rows(block), 0);
        let before = self.adapters.partition_point(|part| part.rows.end <= start);
        let parts = self.adapters[before..].iter().take_while(move |part| part.rows.start < end);
        parts
            .flat_map(move |part| {
                let first = part.rows.start.max(start);
                let rows = part.rows.end.min(end) - first;
                let pairs = group.linears.iter().filter_map(|linear| {
                    Some((linear.kind, part.adapter.get(self.layer, linear.kind)?))
                });
                pairs.map(move |(kind, pair)| (kind, BlockAdapter { pair, first, rows, inner: 0 }))
            })
            .map(move |(kind, part)| {
                let part = BlockAdapter { inner, ..part };
                inner += part.rows * part.pair.r;
                (kind, part)
            })
    }

    /// Computes the inner activations of a group's adapters: for each block as [`BlockAdapter`] says, in
    /// `[COLUMN_BLOCK, ranks]`.
    fn adapter_inner<'b>(
        &self,
        group: &LinearGroup,
        ranks: usize,
        x: TokenColumns<'_>,
        lora: &'b mut [f32],
    ) -> &'b [f32] {
        if ranks == 0 {
            return &[];
        }
        let blocks = self.tokens.div_ceil(COLUMN_BLOCK);
        let lora = &mut lora[..blocks * COLUMN_BLOCK * ranks];
        lora.fill(0.0);
        let threads = self.threads.min(lora.len() * group.inner / self.min_work.adapter);
        let part = if threads > 1 { 1 } else { blocks };
        let Ok(()) = par_parts(lora, (COLUMN_BLOCK * ranks, part), |first, lora| {
            for (block, lora) in (first..).zip(lora.chunks_exact_mut(COLUMN_BLOCK * ranks)) {
                for (_, BlockAdapter { pair, first, rows, inner }) in self.block(group, block) {
                    let (r, out, x) = (pair.r, &mut lora[inner..], &x.values[first..]);
                    if rows < MANY_ROWS {
                        let x = StridedFactor { values: x, row: 1, step: self.width };
                        add_strided((out, r), x, (&pair.a, r), [rows, group.inner, r]);
                    } else {
                        let a = StridedFactor { values: &pair.a, row: 1, step: r };
                        add_strided((out, rows), a, (x, self.width), [r, group.inner, rows]);
                    }
                }
            }
            Ok::<(), Infallible>(())
        });
        lora
    }

    /// Adds the products of a layer's adapters in a block to its outputs from `from` on, `out` `[outputs, width]`.
    /// `inner` are the block's inner activations.
    fn add_outputs(
        &self,
        (out, from): (&mut [f32], usize),
        adapters: impl Iterator<Item = BlockAdapter<'a>>,
        inner: &[f32],
        block: usize,
    ) {
        let (width, within) = (self.width, self.block_rows(block));
        // A row has at most one adapter.
        let mut found = [None; COLUMN_BLOCK];
        found.iter_mut().zip(adapters).for_each(|(found, adapter)| *found = Some(adapter));
        let adapters = || found.iter().map_while(|found| *found);
        if adapters().next().is_none() {
            return;
        }
        let few = adapters().any(|adapter| adapter.rows < MANY_ROWS);
        let (end, mut output) = (from + out.len() / width, from);
        while output < end {
            let next = end.min((output / PANEL + 1) * PANEL);
            let count = next - output;
            let out = &mut out[(output - from) * width..(next - from) * width];
            for BlockAdapter { pair, first, rows, inner: at } in adapters() {
                if rows >= MANY_ROWS {
                    let (panel, step, values) = pair.panel(output);
                    let b = StridedFactor { values: &values[output - panel..], row: 1, step };
                    let shape = [count, pair.r, rows];
                    add_strided((&mut out[first..], width), b, (&inner[at..], rows), shape);
                }
            }
            if few {
                let mut of_rows = [0.0; COLUMN_BLOCK * PANEL];
                let shape = (count, within.len());
                transpose_strided((&mut of_rows, PANEL), (&out[within.start..], width), shape);
                for BlockAdapter { pair, first, rows, inner: at } in adapters() {
                    if rows < MANY_ROWS {
                        let (panel, step, values) = pair.panel(output);
                        let of_rows = &mut of_rows[(first - within.start) * PANEL..];
                        let x = StridedFactor { values: &inner[at..], row: pair.r, step: 1 };
                        let b = (&values[output - panel..], step);
                        add_strided((of_rows, PANEL), x, b, [rows, pair.r, count]);
                    }
                }
                let shape = (within.len(), count);
                transpose_strided((&mut out[within.start..], width), (&of_rows, PANEL), shape);
            }
            output = next;
        }
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
