//! One pass of a sampler: rows that decode, then parts of prompts, over keys and values in pages.

use std::ops::Range;

use crate::arena::ArenaRegion;
use crate::decoder::{
    AdapterLayout, AdapterPart, Allocate, DOWN, DecoderShape, GATE_UP, OUTPUT, QKV,
};
use crate::error::Result;
use crate::kernels::{AttentionTables, DeviceFloat};
use crate::launch::{KernelArgument, arguments};
use crate::model::DeviceModel;
use crate::products::{DeviceMatrix, ProductTerms};
use crate::queue::{BLOCK_THREADS, FLAT_BLOCKS, PassQueue, ROW_THREADS, WARPS};

/// Positions of a page.
pub(crate) const PAGE: usize = 16;

/// Positions that a block of `attention_decode` reads.
const SPLIT: usize = 256;

/// Query heads of a key head that `attention_decode` computes at most.
const MOST_GROUP: usize = 16;

/// Sizes of a sampler.
#[derive(Clone, Copy, Debug)]
pub struct SamplerLimits {
    /// Tokens of a pass.
    pub tokens: usize,
    /// Sequences that decode in a pass.
    pub decoding: usize,
    /// Sequences in a pass, with those whose prompts it computes.
    pub sequences: usize,
    /// Pages, of 16 positions each.
    pub pages: usize,
    /// Adapters that are on the device at once.
    pub slots: usize,
    /// Bytes of cuBLASLt's workspace.
    pub workspace: u64,
}

/// Consecutive tokens of one sequence that a pass computes.
#[derive(Clone, Copy, Debug)]
pub struct SequencePart<'a> {
    /// Tokens; one if the sequence decodes.
    pub ids: &'a [u32],
    /// The position of the first token.
    pub position: usize,
    /// The pages of all positions from 0 to that of the last token. Those of `ids` are written, so no other
    /// sequence of the pass may have them.
    pub pages: &'a [u32],
    /// The slot of the adapter; the base model without one.
    pub slot: Option<usize>,
}

/// Values of a page: for each layer its keys `[PAGE, key head, head_dim]` and its values.
pub(crate) fn page_values(shape: &DecoderShape) -> usize {
    let [_, width] = shape.widths();
    2 * shape.layers.len() * PAGE * width
}

/// Addresses of the buffers of passes, `[tokens, width]` each unless stated otherwise.
#[derive(Debug)]
pub(crate) struct DecodeBuffers {
    /// The words of [`RowTables`].
    pub tables: ArenaRegion,
    /// The residual stream, f32.
    residual: u64,
    normed: u64,
    qkv: u64,
    attended: u64,
    /// Outputs of attention and MLP.
    out: u64,
    gate_up: u64,
    product: u64,
    /// The input of a projection in the adapter's low-rank space.
    low: u64,
    /// Of the parts of `attention_decode`, f32.
    part_values: u64,
    part_sums: u64,
    /// `[decoding, vocab]`, f32
    pub logits: u64,
    /// Random numbers, and rows of logits.
    pub draws: ArenaRegion,
    pub samples: ArenaRegion,
    pub workspace: ArenaRegion,
}

impl DecodeBuffers {
    pub fn new(
        shape: &DecoderShape,
        adapter: &AdapterLayout,
        float: DeviceFloat,
        limits: &SamplerLimits,
        allocate: Allocate<'_>,
    ) -> Result<Self> {
        use DeviceFloat::F32;
        let SamplerLimits { tokens, decoding, sequences, workspace, .. } = *limits;
        let (hidden, width, [q, _]) = (shape.hidden, shape.intermediate, shape.widths());
        let ranks = adapter.stacked.iter().flatten().map(|stacked| stacked.rank);
        let parts = decoding * shape.heads * shape.positions.div_ceil(SPLIT);
        // Each table begins at a multiple of four words.
        let words = 8 * (tokens + 3) + 2 * (decoding + 3);
        let words = words + sequences * shape.positions.div_ceil(PAGE) + 3;
        let mut take = |name: &str, rows: usize, width: usize, float: DeviceFloat| -> Result<_> {
            let bytes = rows as u64 * width as u64 * float.bytes();
            Ok(ArenaRegion { address: allocate(name, bytes)?, bytes })
        };
        Ok(Self {
            tables: take("tables", words, 1, F32)?,
            residual: take("residual", tokens, hidden, F32)?.address,
            normed: take("normed", tokens, hidden, float)?.address,
            qkv: take("qkv", tokens, shape.qkv(), float)?.address,
            attended: take("attended", tokens, q, float)?.address,
            out: take("out", tokens, hidden, float)?.address,
            gate_up: take("gate_up", tokens, 2 * width, float)?.address,
            product: take("product", tokens, width, float)?.address,
            low: take("low", tokens, ranks.max().unwrap_or_default(), float)?.address,
            part_values: take("part values", parts, shape.head_dim, F32)?.address,
            part_sums: take("part sums", parts, 2, F32)?.address,
            logits: take("logits", decoding, shape.vocab, F32)?.address,
            draws: take("draws", decoding, 5, F32)?,
            samples: take("samples", decoding, 2, F32)?,
            workspace: ArenaRegion { address: allocate("workspace", workspace)?, bytes: workspace },
        })
    }
}

/// What the kernels of a pass read beside activations. Addresses are offsets in `words` until [`Self::at`].
#[derive(Clone, Debug, Default)]
pub(crate) struct RowTables {
    pub words: Vec<u32>,
    tokens: usize,
    /// Rows that decode, which come first.
    decoding: usize,
    ids: u64,
    positions: u64,
    /// The row of keys and values of each token in the pages.
    places: u64,
    /// Slots and lengths of the rows that decode.
    slots: u64,
    lengths: u64,
    /// First rows of the pages of each sequence, in units of 16 rows.
    pages: u64,
    pages_of_sequence: usize,
    /// Tiles of queries that `attention_prefill` computes.
    tiles: u64,
    tile_count: usize,
    /// Parts of the longest sequence that decodes.
    parts: usize,
    /// Whether a row that decodes has an adapter.
    decodes_adapters: bool,
    /// Rows of prompts in turn that have the adapter in a slot.
    adapted: Vec<(Range<usize>, usize)>,
}

impl RowTables {
    pub fn new(
        shape: &DecoderShape,
        decoding: &[SequencePart<'_>],
        prompts: &[SequencePart<'_>],
    ) -> Self {
        let parts = || decoding.iter().chain(prompts);
        // A layer's keys and values are 32 rows of a page.
        let first = |page: u32| page * 2 * shape.layers.len() as u32;
        let positions = |part: &SequencePart<'_>| part.position..part.position + part.ids.len();
        let pages_of_sequence = parts().map(|part| part.pages.len()).max().unwrap_or_default();
        let mut tables = Self {
            tokens: parts().map(|part| part.ids.len()).sum(),
            decoding: decoding.len(),
            pages_of_sequence,
            decodes_adapters: decoding.iter().any(|part| part.slot.is_some()),
            ..Self::default()
        };
        let place = |part: &SequencePart<'_>, position: usize| {
            first(part.pages[position / PAGE]) * PAGE as u32 + (position % PAGE) as u32
        };
        let places: Vec<u32> =
            parts().flat_map(|part| positions(part).map(|at| place(part, at))).collect();
        let (mut row, mut tiles) = (0, Vec::new());
        let tile = AttentionTables::tile(shape.head_dim);
        let by_tiles = shape.heads / shape.key_heads > MOST_GROUP;
        for (sequence, part) in parts().enumerate() {
            let count = part.ids.len();
            let is_prompt = sequence >= decoding.len();
            if is_prompt || by_tiles {
                tiles.extend((0..count).step_by(tile).flat_map(|first| {
                    let rows = tile.min(count - first);
                    [row + first, rows, sequence, part.position + first].map(|x| x as u32)
                }));
            } else {
                tables.parts = tables.parts.max((part.position + 1).div_ceil(SPLIT));
            }
            let rows = row..row + count;
            row = rows.end;
            let Some(slot) = part.slot.filter(|_| is_prompt) else { continue };
            match tables.adapted.last_mut() {
                Some((last, of)) if last.end == rows.start && *of == slot => last.end = rows.end,
                _ => tables.adapted.push((rows, slot)),
            }
        }
        tables.tile_count = tiles.len() / 4;
        let ids: Vec<u32> = parts().flat_map(|part| part.ids).copied().collect();
        let all: Vec<u32> = parts().flat_map(|p| positions(p).map(|at| at as u32)).collect();
        let slots: Vec<u32> =
            decoding.iter().map(|part| part.slot.map_or(u32::MAX, |slot| slot as u32)).collect();
        let lengths: Vec<u32> = decoding.iter().map(|part| part.position as u32 + 1).collect();
        let page_row = |part: &SequencePart<'_>| -> Vec<u32> {
            let mut row: Vec<u32> = part.pages.iter().map(|page| first(*page)).collect();
            row.resize(pages_of_sequence, 0);
            row
        };
        let pages: Vec<u32> = parts().flat_map(page_row).collect();
        tables.ids = tables.place(&ids);
        tables.positions = tables.place(&all);
        tables.places = tables.place(&places);
        tables.slots = tables.place(&slots);
        tables.lengths = tables.place(&lengths);
        tables.tiles = tables.place(&tiles);
        tables.pages = tables.place(&pages);
        tables
    }

    /// Adds a table, which begins at a multiple of 16 bytes, as tiles are read at once. Returns its offset in bytes.
    fn place(&mut self, table: &[u32]) -> u64 {
        self.words.resize(self.words.len().next_multiple_of(4), 0);
        let first = 4 * self.words.len() as u64;
        self.words.extend(table);
        first
    }

    /// The tables at an address, without their words.
    pub fn at(mut self, address: u64) -> Self {
        self.words = Vec::new();
        for table in [
            &mut self.ids,
            &mut self.positions,
            &mut self.places,
            &mut self.slots,
            &mut self.lengths,
            &mut self.tiles,
            &mut self.pages,
        ] {
            *table += address;
        }
        self
    }
}

/// What a pass computes with. Addresses are of arenas that outlive it.
pub(crate) struct DecodePass {
    pub queue: PassQueue,
    pub adapter: AdapterLayout,
    pub buffers: DecodeBuffers,
    /// Addresses of the adapter in slot 0 and of page 0.
    pub first_slot: u64,
    pub first_page: u64,
}

impl DecodePass {
    /// Queues a pass, with the logits of the rows that decode.
    pub fn compute(&self, tables: &RowTables) -> Result<()> {
        let DeviceModel { shape, weights, .. } = &*self.queue.model;
        let DecodeBuffers { residual, normed, logits, .. } = self.buffers;
        let DecoderShape { hidden, vocab, final_softcap: cap, .. } = *shape;
        self.queue.embed(tables.tokens, tables.ids, residual)?;
        if let Some(first) = weights.layers.first() {
            self.queue.norm(tables.tokens, residual, first.norms[0], normed)?;
        }
        for index in 0..weights.layers.len() {
            self.layer(tables, index)?;
        }
        let rows = tables.decoding;
        let (x, out) = (self.queue.matrix(normed, [rows, hidden]), [rows, vocab]);
        let out = DeviceMatrix::new(logits, out, DeviceFloat::F32);
        self.queue.multiply(out, x, weights.head.t(), ProductTerms::REPLACE)?;
        if cap == 0.0 || rows == 0 {
            return Ok(());
        }
        let arguments = arguments![logits, KernelArgument::Long((rows * vocab) as i64), cap];
        self.queue.launch("cap_logits", [FLAT_BLOCKS, 1, 1], ROW_THREADS, arguments)
    }

    /// A layer, from its normed input to the normed input of the next one, or the final norm.
    fn layer(&self, tables: &RowTables, index: usize) -> Result<()> {
        let weights = &self.queue.model.weights;
        let DecodeBuffers { normed, qkv, attended, out, gate_up, product, .. } = self.buffers;
        let layer = &weights.layers[index];
        let output_norm = |half: usize| layer.output_norms.map(|norms| norms[half]);
        self.project(tables, [index, QKV], normed, qkv)?;
        self.queue.rotate("rotate_heads", index, tables.tokens, tables.positions, [qkv, qkv])?;
        self.attend(tables, index)?;
        self.project(tables, [index, OUTPUT], attended, out)?;
        self.residual(tables, output_norm(0), layer.norms[1])?;
        self.project(tables, [index, GATE_UP], normed, gate_up)?;
        self.queue.activate(tables.tokens, gate_up, product)?;
        self.project(tables, [index, DOWN], product, out)?;
        let next = weights.layers.get(index + 1).map_or(weights.norm, |next| next.norms[0]);
        self.residual(tables, output_norm(1), next)
    }

    /// The output y of linear layers for x, with the adapter of each row.
    fn project(
        &self,
        tables: &RowTables,
        [index, projection]: [usize; 2],
        x: u64,
        y: u64,
    ) -> Result<()> {
        let linear = &self.queue.model.weights.layers[index].projections[projection];
        let adapter = &self.adapter.stacked[index][projection];
        let ([outputs, inputs], low) = (linear.weight.shape, self.buffers.low);
        let rows = |first: u64, width: usize, rows: &Range<usize>| {
            self.queue.matrix(self.queue.value(first, rows.start * width), [rows.len(), width])
        };
        let terms = ProductTerms { bias: linear.bias, ..ProductTerms::REPLACE };
        let all = 0..tables.tokens;
        self.queue.multiply(
            rows(y, outputs, &all),
            rows(x, inputs, &all),
            linear.weight.t(),
            terms,
        )?;
        let rank = adapter.rank;
        if rank == 0 {
            return Ok(());
        }
        if tables.decodes_adapters {
            let (count, slots) = (tables.decoding, tables.slots);
            let size = KernelArgument::Long(self.adapter.values as i64);
            let arguments =
                arguments![x, self.of_slot(0, adapter.a), slots, low, inputs, rank, size];
            let grid = [rank.div_ceil(WARPS), count, 1];
            self.queue.launch("adapter_down", grid, BLOCK_THREADS, arguments)?;
            for AdapterPart { outputs: of, rows, b, scale } in &adapter.parts {
                let (low, y) = (self.queue.value(low, rows.start), self.queue.value(y, of.start));
                let (width, b) = (of.len(), self.of_slot(0, *b));
                let arguments =
                    arguments![low, b, slots, y, width, rows.len(), size, rank, outputs, *scale];
                let grid = [width.div_ceil(BLOCK_THREADS as usize), count, 1];
                self.queue.launch("adapter_up", grid, BLOCK_THREADS, arguments)?;
            }
        }
        for (range, slot) in &tables.adapted {
            let (x, low) = (rows(x, inputs, range), rows(low, rank, range));
            let a = self.queue.matrix(self.of_slot(*slot, adapter.a), [rank, inputs]);
            self.queue.multiply(low, x, a.t(), ProductTerms::REPLACE)?;
            for AdapterPart { outputs: of, rows: own, b, scale } in &adapter.parts {
                let y = rows(y, outputs, range).columns(of.start, of.len());
                let low = low.columns(own.start, own.len());
                let b = self.queue.matrix(self.of_slot(*slot, *b), [of.len(), own.len()]);
                self.queue.multiply(
                    y,
                    low,
                    b.t(),
                    ProductTerms { alpha: *scale, beta: 1.0, bias: 0 },
                )?;
            }
        }
        Ok(())
    }

    /// Writes keys and values to their pages, and the attention of all rows to `attended`.
    fn attend(&self, tables: &RowTables, index: usize) -> Result<()> {
        let shape = &self.queue.model.shape;
        let DecodeBuffers { attended, part_values: values, part_sums: sums, .. } = self.buffers;
        let ([q, k, v], [_, width]) = (self.queue.qkv_parts(self.buffers.qkv), shape.widths());
        let (heads, stride) = (shape.heads, shape.qkv());
        let k_pages = self.queue.value(self.first_page, 2 * index * PAGE * width);
        let v_pages = self.queue.value(k_pages, PAGE * width);
        let arguments = arguments![k, v, tables.places, k_pages, v_pages, width, stride];
        self.queue.launch("write_pages", [tables.tokens, 1, 1], BLOCK_THREADS, arguments)?;

        let (scale, cap, window) =
            (shape.attention_scale, shape.attention_softcap, shape.layers[index].1);
        let (of_sequence, group) = (tables.pages_of_sequence, heads / shape.key_heads);
        let options: &[_] =
            arguments![tables.pages, of_sequence, heads, group, stride, scale, cap, window];
        if tables.parts > 0 {
            let (rows, parts, lengths) = (tables.decoding, tables.parts, tables.lengths);
            let inputs: &[_] = arguments![q, k_pages, v_pages, values, sums, lengths];
            let grid = [rows, shape.key_heads, parts];
            self.queue.launch(
                "attention_decode",
                grid,
                BLOCK_THREADS,
                &[inputs, options].concat(),
            )?;
            let arguments = arguments![values, sums, lengths, attended, parts];
            self.queue.launch("attention_join", [rows, heads, 1], BLOCK_THREADS, arguments)?;
        }
        let inputs: &[_] = arguments![q, k_pages, v_pages, attended, tables.tiles];
        let grid = [tables.tile_count, heads, 1];
        self.queue.launch("attention_prefill", grid, BLOCK_THREADS, &[inputs, options].concat())
    }

    /// Adds `out`, or its norm in families that have that norm, to the residual stream, of which `normed` is then the
    /// norm by `next`.
    fn residual(&self, tables: &RowTables, output_norm: Option<u64>, next: u64) -> Result<()> {
        let DecodeBuffers { residual: x, out, normed, .. } = self.buffers;
        self.queue.residual(tables.tokens, [x, out, x], output_norm, [next, normed])
    }

    /// The address of a value of the adapter in a slot.
    fn of_slot(&self, slot: usize, index: usize) -> u64 {
        self.queue.value(self.first_slot, slot * self.adapter.values + index)
    }
}
