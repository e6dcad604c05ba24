//! A training pass: log-probabilities and entropies of packed sequences, and the gradients of the adapter.
//!
//! Layers are computed in the order of hone-model's `fused_layer`, which is the same on the processor. The residual
//! stream and its gradient are f32, sums are f32, and what enters a product is of the type of the weights. A forward
//! pass saves the input of each layer and the activations of the last ones; the backward pass recomputes the others.
//! All products and kernels are queued on one stream.

use std::ops::Range;

use crate::arena::ArenaRegion;
use crate::decoder::{
    AdapterLayout, Allocate, DOWN, DecoderShape, GATE_UP, LayerWeights, OUTPUT, QKV,
};
use crate::device::Staging;
use crate::error::{GpuError, Result};
use crate::kernels::{AttentionTables, DeviceFloat, PackedSegment};
use crate::launch::{KernelArgument, arguments};
use crate::model::DeviceModel;
use crate::products::{DeviceMatrix, ProductTerms};
use crate::queue::{BLOCK_THREADS, FLAT_BLOCKS, PassQueue, ROW_THREADS, WARPS};

/// Threads of a block that computes a row of logits.
const LOGITS_THREADS: u32 = 512;

/// What a pass may be at most.
#[derive(Clone, Copy, Debug)]
pub struct PassLimits {
    /// Tokens.
    pub tokens: usize,
    /// Predicted tokens.
    pub rows: usize,
    /// Rows whose logits are in memory at once.
    pub head_rows: usize,
    /// [`TokenBatch::table_words`].
    pub table_words: usize,
    /// Last layers whose activations are kept; those of the others are recomputed.
    pub kept_layers: usize,
    /// Bytes of cuBLASLt's workspace.
    pub workspace: u64,
}

/// Packed sequences and what they predict.
#[derive(Clone, Copy, Debug)]
pub struct TokenBatch<'a> {
    /// Tokens.
    pub ids: &'a [u32],
    /// Which of them are one sequence.
    pub segments: &'a [PackedSegment],
    /// Indices into `ids` of the tokens that predict; may repeat.
    pub rows: &'a [u32],
    /// The token that each of them predicts.
    pub targets: &'a [u32],
    /// The temperature of each.
    pub temperatures: &'a [f32],
}

impl TokenBatch<'_> {
    /// Words of 32 bits of the tables that a pass uploads.
    ///
    /// # Errors
    /// If segments do not fit each other.
    pub fn table_words(&self, shape: &DecoderShape) -> Result<usize> {
        let attention = AttentionTables::new(self.segments, shape.head_dim)?;
        Ok(self.tables(0, &attention).0.len())
    }

    /// Words for the device at address `base`, and the places of the tables in them.
    fn tables(&self, base: u64, attention: &AttentionTables) -> (Vec<u32>, PassTables) {
        let mut words: Vec<u32> = Vec::new();
        let mut place = |table: &mut dyn Iterator<Item = u32>| {
            // Tiles are read 16 bytes at once.
            words.resize(words.len().next_multiple_of(4), 0);
            let address = base + 4 * words.len() as u64;
            words.extend(table);
            address
        };
        let int = |x: &i32| *x as u32;
        // Of each token the rows that it predicts, in their order.
        let mut order: Vec<u32> = (0..self.rows.len() as u32).collect();
        order.sort_by_key(|row| self.rows[*row as usize]);
        let starts = (0..=self.ids.len() as u32)
            .map(|token| order.partition_point(|row| self.rows[*row as usize] < token) as u32);
        let tables = PassTables {
            tokens: self.ids.len(),
            rows: self.rows.len(),
            ids: place(&mut self.ids.iter().copied()),
            positions: place(&mut attention.positions.iter().map(int)),
            query_tiles: place(&mut attention.query_tiles.iter().flatten().map(int)),
            query_tile_count: attention.query_tiles.len(),
            key_tokens: place(&mut attention.key_tokens.iter().map(int)),
            key_tiles: place(&mut attention.key_tiles.iter().flatten().map(int)),
            key_tile_count: attention.key_tiles.len(),
            query_tokens: place(&mut attention.query_tokens.iter().map(int)),
            predicting: place(&mut self.rows.iter().copied()),
            targets: place(&mut self.targets.iter().copied()),
            temperatures: place(&mut self.temperatures.iter().map(|t| t.to_bits())),
            each: place(&mut (0..=self.rows.len() as u32)),
            starts: place(&mut starts.collect::<Vec<_>>().into_iter()),
            order: place(&mut order.iter().copied()),
        };
        (words, tables)
    }

    /// Whether a pass of these limits can compute it.
    fn check(&self, shape: &DecoderShape, limits: &PassLimits, positions: &[i32]) -> Result<()> {
        let Self { ids, rows, targets, temperatures, .. } = self;
        let misuse = |message: String| Err(GpuError::Misuse(message));
        if ids.len() != positions.len() {
            return misuse(format!("{} ids for segments of {} tokens", ids.len(), positions.len()));
        }
        if [targets.len(), temperatures.len()] != [rows.len(); 2] {
            let [targets, temperatures] = [targets.len(), temperatures.len()];
            let rows = rows.len();
            return misuse(format!("{rows} rows, {targets} targets, {temperatures} temperatures"));
        }
        if ids.len() > limits.tokens || rows.len() > limits.rows {
            let (tokens, rows) = (ids.len(), rows.len());
            return misuse(format!("{tokens} tokens that predict {rows} are more than {limits:?}"));
        }
        if let Some(id) = ids.iter().chain(*targets).find(|id| **id as usize >= shape.vocab) {
            return misuse(format!("token {id} is outside the vocabulary of {}", shape.vocab));
        }
        if let Some(row) = rows.iter().find(|row| **row as usize >= ids.len()) {
            return misuse(format!("row {row} is outside the {} tokens", ids.len()));
        }
        if let Some(position) = positions.iter().find(|at| **at as usize >= shape.positions) {
            let known = shape.positions;
            return misuse(format!("position {position}, but there are angles of {known}"));
        }
        Ok(())
    }
}

/// Addresses of a batch's tables.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PassTables {
    tokens: usize,
    rows: usize,
    ids: u64,
    positions: u64,
    query_tiles: u64,
    query_tile_count: usize,
    key_tokens: u64,
    key_tiles: u64,
    key_tile_count: usize,
    query_tokens: u64,
    /// The token of each row.
    predicting: u64,
    targets: u64,
    temperatures: u64,
    /// Ascending numbers from 0.
    each: u64,
    /// For each token where its rows begin in `order`.
    starts: u64,
    order: u64,
}

/// Addresses of the activations that a layer's backward pass needs beside the layer's input, `[tokens, width]` each.
#[derive(Clone, Copy, Debug)]
struct LayerBuffers {
    /// Queries and keys before their norms and their rotation, and values.
    qkv: u64,
    attended: u64,
    lse: u64,
    /// The residual stream after the attention, f32.
    middle: u64,
    gate_up: u64,
    /// The inputs of the projections in the adapters' low-rank spaces.
    low: [u64; 4],
    /// The outputs of attention and MLP. Without norms of them they are not kept.
    out: [u64; 2],
}

/// Addresses of all buffers of a pass.
#[derive(Debug)]
pub(crate) struct PassBuffers {
    tables: u64,
    /// The residual stream before each layer and after the last, f32.
    inputs: Vec<u64>,
    /// Of the kept layers, and of one that is not kept.
    layers: Vec<LayerBuffers>,
    normed: u64,
    rotated: u64,
    product: u64,
    /// The gradient of the residual stream, f32.
    grad: u64,
    d_out: u64,
    d_normed: u64,
    d_product: u64,
    d_attended: u64,
    delta: u64,
    d_qkv: u64,
    /// The gradient in the low-rank space.
    d_low: u64,
    /// Hidden states of a chunk of rows, their logits and the gradient of those.
    head_rows: u64,
    logits: u64,
    d_logits: u64,
    d_rows: u64,
    stats: u64,
    seeds: u64,
    pub workspace: ArenaRegion,
}

impl PassBuffers {
    pub fn new(
        shape: &DecoderShape,
        adapter: &AdapterLayout,
        float: DeviceFloat,
        limits: &PassLimits,
        allocate: Allocate<'_>,
    ) -> Result<Self> {
        use DeviceFloat::F32;
        let PassLimits { tokens, rows, head_rows, table_words, kept_layers, workspace } = *limits;
        let (hidden, [q, _], count) = (shape.hidden, shape.widths(), shape.layers.len());
        let width = shape.intermediate;
        let out = if shape.output_norms { hidden } else { 0 };
        let ranks = |projection: usize| {
            adapter.stacked.iter().map(|layer| layer[projection].rank).max().unwrap_or_default()
        };
        let mut take = |name: &str, rows: usize, width: usize, float: DeviceFloat| -> Result<u64> {
            allocate(name, rows as u64 * width as u64 * float.bytes())
        };
        let mut layers = Vec::new();
        for index in 0..(kept_layers + 1).min(count) {
            let mut take = |name: &str, width: usize, float: DeviceFloat| {
                take(&format!("{name} {index}"), tokens, width, float)
            };
            layers.push(LayerBuffers {
                qkv: take("qkv", shape.qkv(), float)?,
                attended: take("attended", q, float)?,
                lse: take("lse", shape.heads, F32)?,
                middle: take("middle", hidden, F32)?,
                gate_up: take("gate_up", 2 * width, float)?,
                low: [
                    take("low qkv", ranks(QKV), float)?,
                    take("low output", ranks(OUTPUT), float)?,
                    take("low gate_up", ranks(GATE_UP), float)?,
                    take("low down", ranks(DOWN), float)?,
                ],
                out: [take("attention out", out, float)?, take("mlp out", out, float)?],
            });
        }
        let chunk = head_rows.clamp(1, rows.max(1));
        Ok(Self {
            tables: take("tables", table_words, 1, F32)?,
            inputs: (0..=count)
                .map(|index| take(&format!("input {index}"), tokens, hidden, F32))
                .collect::<Result<_>>()?,
            layers,
            normed: take("normed", tokens, hidden, float)?,
            rotated: take("rotated", tokens, shape.qkv(), float)?,
            product: take("product", tokens, width, float)?,
            grad: take("grad", tokens, hidden, F32)?,
            d_out: take("d_out", tokens, hidden, float)?,
            d_normed: take("d_normed", tokens, hidden, float)?,
            d_product: take("d_product", tokens, width, float)?,
            d_attended: take("d_attended", tokens, q, float)?,
            delta: take("delta", tokens, shape.heads, F32)?,
            d_qkv: take("d_qkv", tokens, shape.qkv(), float)?,
            d_low: take("d_low", tokens, (QKV..=DOWN).map(ranks).max().unwrap_or(0), float)?,
            head_rows: take("head rows", chunk, hidden, float)?,
            logits: take("logits", chunk, shape.vocab, F32)?,
            d_logits: take("d_logits", chunk, shape.vocab, float)?,
            d_rows: take("d_rows", rows, hidden, float)?,
            stats: take("stats", rows, 2, F32)?,
            seeds: take("seeds", rows, 2, F32)?,
            workspace: ArenaRegion { address: allocate("workspace", workspace)?, bytes: workspace },
        })
    }
}

/// What a pass computes with. Addresses are of arenas that outlive it.
pub(crate) struct DevicePass {
    pub queue: PassQueue,
    pub limits: PassLimits,
    pub adapter: AdapterLayout,
    /// Address of the adapter of the last forward pass, in the type of the weights; 0 without one.
    pub policy: u64,
    /// Address of the gradient of the adapter under training, in f32.
    pub gradient: u64,
    pub buffers: PassBuffers,
    /// The batch of the last forward pass with the adapter under training, until its backward pass.
    pub saved: Option<PassTables>,
}

impl DevicePass {
    /// The statistics `[ln p, entropy]` of all rows by [`Self::policy`].
    pub fn forward(
        &mut self,
        staging: &mut Staging,
        batch: &TokenBatch<'_>,
    ) -> Result<Vec<[f32; 2]>> {
        self.saved = None;
        let attention = AttentionTables::new(batch.segments, self.queue.model.shape.head_dim)?;
        batch.check(&self.queue.model.shape, &self.limits, &attention.positions)?;
        let (words, tables) = batch.tables(self.buffers.tables, &attention);
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let region = 4 * self.limits.table_words as u64;
        staging.upload(&bytes, ArenaRegion { address: self.buffers.tables, bytes: region })?;

        let (buffers, DeviceModel { shape, weights, .. }) = (&self.buffers, &*self.queue.model);
        let input = buffers.inputs[0];
        self.queue.embed(tables.tokens, tables.ids, input)?;
        for (index, layer) in weights.layers.iter().enumerate() {
            if index == 0 {
                self.norm(&tables, input, layer.norms[0])?;
            }
            self.layer(&tables, index, true)?;
        }
        for chunk in self.chunks(tables.rows) {
            self.logits(&tables, &chunk)?;
            let [targets, temperatures, stats] = self.of_rows(&tables, &chunk);
            let (vocab, cap) = (shape.vocab, shape.final_softcap);
            let arguments = arguments![buffers.logits, targets, temperatures, stats, vocab, cap];
            self.queue.launch("token_stats", [chunk.len(), 1, 1], LOGITS_THREADS, arguments)?;
        }
        let mut bytes = vec![0; 8 * tables.rows];
        let region = ArenaRegion { address: buffers.stats, bytes: bytes.len() as u64 };
        staging.download(region, &mut bytes)?;
        self.saved = Some(tables);
        let pair = |pair: &[u8; 8]| {
            let [a, b, c, d, e, f, g, h] = *pair;
            [f32::from_le_bytes([a, b, c, d]), f32::from_le_bytes([e, f, g, h])]
        };
        Ok(bytes.as_chunks().0.iter().map(pair).collect())
    }

    /// Adds the gradients of the adapter of the last batch from those of its statistics.
    pub fn backward(&mut self, staging: &mut Staging, seeds: &[[f32; 2]]) -> Result<()> {
        let tables = self.saved.take().filter(|tables| tables.rows == seeds.len());
        let tables = tables.ok_or_else(|| {
            let rows = seeds.len();
            GpuError::Misuse(format!("no forward pass with the adapter of {rows} rows precedes"))
        })?;
        let bytes: Vec<u8> = seeds.iter().flatten().flat_map(|seed| seed.to_le_bytes()).collect();
        let region = ArenaRegion { address: self.buffers.seeds, bytes: bytes.len() as u64 };
        staging.upload(&bytes, region)?;

        let (buffers, DeviceModel { shape, weights, .. }) = (&self.buffers, &*self.queue.model);
        let (hidden, vocab) = (shape.hidden, shape.vocab);
        for chunk in self.chunks(tables.rows) {
            self.logits(&tables, &chunk)?;
            let [targets, temperatures, stats] = self.of_rows(&tables, &chunk);
            let seeds = buffers.seeds + 8 * chunk.start as u64;
            let (d_logits, cap) = (buffers.d_logits, shape.final_softcap);
            let arguments = arguments![
                buffers.logits,
                targets,
                temperatures,
                stats,
                seeds,
                d_logits,
                vocab,
                cap
            ];
            self.queue.launch(
                "token_stats_backward",
                [chunk.len(), 1, 1],
                LOGITS_THREADS,
                arguments,
            )?;
            let d_rows = self.queue.value(buffers.d_rows, chunk.start * hidden);
            let d_rows = self.queue.matrix(d_rows, [chunk.len(), hidden]);
            let d_logits = self.queue.matrix(d_logits, [chunk.len(), vocab]);
            self.queue.multiply(d_rows, d_logits, weights.head, ProductTerms::REPLACE)?;
        }
        let (d_rows, d_normed) = (buffers.d_rows, buffers.d_normed);
        let arguments = arguments![d_rows, tables.starts, tables.order, d_normed, hidden];
        self.queue.rows("sum_rows", tables.tokens, arguments)?;
        let bytes = 4 * (tables.tokens * hidden) as u64;
        self.queue
            .model
            .gpu
            .clear(&self.queue.stream, ArenaRegion { address: buffers.grad, bytes })?;
        let count = weights.layers.len();
        self.norm_backward(&tables, buffers.inputs[count], weights.norm)?;
        for (index, layer) in weights.layers.iter().enumerate().rev() {
            if !self.is_kept(index) {
                self.norm(&tables, buffers.inputs[index], layer.norms[0])?;
                self.layer(&tables, index, false)?;
            }
            self.mlp_backward(&tables, index)?;
            self.attention_backward(&tables, index)?;
        }
        Ok(())
    }

    /// A layer's activations from the normed input, and, with `output`, the next layer's input and its norm, or the
    /// final norm.
    fn layer(&self, tables: &PassTables, index: usize, output: bool) -> Result<()> {
        let (buffers, DeviceModel { shape, weights, .. }) = (&self.buffers, &*self.queue.model);
        let (layer, saved) = (&weights.layers[index], self.layer_buffers(index));
        let tokens = tables.tokens;
        let out = |half: usize| if shape.output_norms { saved.out[half] } else { buffers.d_out };
        let project = |projection: usize, x: u64, y: Option<u64>| {
            let low = (self.policy != 0).then_some(saved.low[projection]);
            self.project(tokens, [index, projection], x, low, y)
        };
        let residual = |half: usize, sum: [u64; 3], next: u64| {
            let output_norm = layer.output_norms.map(|norms| norms[half]);
            self.queue.residual(tokens, sum, output_norm, [next, buffers.normed])
        };
        project(QKV, buffers.normed, Some(saved.qkv))?;
        self.rotate("rotate_heads", tables, index, buffers.rotated)?;
        let [q, k, v] = self.attention_inputs(saved.qkv);
        let (tiles, tokens_of) = (tables.query_tiles, tables.key_tokens);
        let inputs: &[_] = arguments![q, k, v, saved.attended, saved.lse, tiles, tokens_of];
        let grid = [tables.query_tile_count, shape.heads, 1];
        let arguments = [inputs, &self.attention_options(index)].concat();
        self.queue.launch("attention_forward", grid, BLOCK_THREADS, &arguments)?;
        project(OUTPUT, saved.attended, Some(out(0)))?;
        let input = buffers.inputs[index];
        residual(0, [input, out(0), saved.middle], layer.norms[1])?;

        project(GATE_UP, buffers.normed, Some(saved.gate_up))?;
        self.activate(tables, saved.gate_up)?;
        let needs_out = output || shape.output_norms;
        project(DOWN, buffers.product, needs_out.then(|| out(1)))?;
        if output {
            let next = weights.layers.get(index + 1).map_or(weights.norm, |next| next.norms[0]);
            let sum = buffers.inputs[index + 1];
            residual(1, [saved.middle, out(1), sum], next)?;
        }
        Ok(())
    }

    /// Replaces the gradient of a layer's output by that of the residual stream after the attention.
    fn mlp_backward(&self, tables: &PassTables, index: usize) -> Result<()> {
        let (buffers, DeviceModel { shape, weights, .. }) = (&self.buffers, &*self.queue.model);
        let (layer, saved) = (&weights.layers[index], self.layer_buffers(index));
        let width = shape.intermediate;
        self.residual_backward(tables, layer, 1, saved.out[1])?;
        self.activate(tables, saved.gate_up)?;
        let (x, d_product) = (buffers.product, buffers.d_product);
        self.project_backward(tables, [index, DOWN], x, buffers.d_out, Some(d_product))?;
        let gelu = usize::from(shape.is_gelu);
        let arguments = arguments![saved.gate_up, d_product, width, gelu];
        self.queue.rows("gated_activation_backward", tables.tokens, arguments)?;
        self.norm(tables, saved.middle, layer.norms[1])?;
        let (x, dx) = (buffers.normed, Some(buffers.d_normed));
        self.project_backward(tables, [index, GATE_UP], x, saved.gate_up, dx)?;
        self.norm_backward(tables, saved.middle, layer.norms[1])
    }

    /// Replaces the gradient of the residual stream after the attention by that of the layer's input, which the first
    /// layer does not need.
    fn attention_backward(&self, tables: &PassTables, index: usize) -> Result<()> {
        let (buffers, DeviceModel { shape, weights, .. }) = (&self.buffers, &*self.queue.model);
        let (layer, saved) = (&weights.layers[index], self.layer_buffers(index));
        let (d_attended, delta) = (buffers.d_attended, buffers.delta);
        self.residual_backward(tables, layer, 0, saved.out[0])?;
        let (x, dx) = (saved.attended, Some(d_attended));
        self.project_backward(tables, [index, OUTPUT], x, buffers.d_out, dx)?;
        self.rotate("rotate_heads", tables, index, buffers.rotated)?;
        let rows = tables.tokens * shape.heads;
        let arguments = arguments![saved.attended, d_attended, delta, rows];
        let blocks = rows.div_ceil(WARPS);
        self.queue.launch("attention_delta", [blocks, 1, 1], BLOCK_THREADS, arguments)?;
        let [q, k, v] = self.attention_inputs(saved.qkv);
        let inputs: &[_] = arguments![q, k, v, d_attended, saved.lse, delta];
        let ([dq, dk, dv], options) =
            (self.queue.qkv_parts(buffers.d_qkv), self.attention_options(index));
        let own: &[_] = arguments![dq, tables.query_tiles, tables.key_tokens];
        let grid = [tables.query_tile_count, shape.heads, 1];
        let arguments = [inputs, own, &options].concat();
        self.queue.launch("attention_backward_queries", grid, BLOCK_THREADS, &arguments)?;
        let (tiles, queries, positions) = (tables.key_tiles, tables.query_tokens, tables.positions);
        let own: &[_] = arguments![dk, dv, tiles, queries, positions];
        let arguments = [inputs, own, &options].concat();
        let grid = [tables.key_tile_count, shape.key_heads, 1];
        self.queue.launch("attention_backward_keys", grid, BLOCK_THREADS, &arguments)?;
        self.rotate("rotate_heads_backward", tables, index, buffers.d_qkv)?;
        let input = buffers.inputs[index];
        self.norm(tables, input, layer.norms[0])?;
        let dx = (index > 0).then_some(buffers.d_normed);
        self.project_backward(tables, [index, QKV], buffers.normed, buffers.d_qkv, dx)?;
        if index > 0 {
            self.norm_backward(tables, input, layer.norms[0])?;
        }
        Ok(())
    }

    /// The output y of linear layers for x, if it is needed, and, with the adapter, x in its low-rank space.
    fn project(
        &self,
        tokens: usize,
        [index, projection]: [usize; 2],
        x: u64,
        low: Option<u64>,
        y: Option<u64>,
    ) -> Result<()> {
        let linear = &self.queue.model.weights.layers[index].projections[projection];
        let adapter = &self.adapter.stacked[index][projection];
        let [outputs, inputs] = linear.weight.shape;
        let x = self.queue.matrix(x, [tokens, inputs]);
        let y = y.map(|y| self.queue.matrix(y, [tokens, outputs]));
        if let Some(y) = y {
            let terms = ProductTerms { bias: linear.bias, ..ProductTerms::REPLACE };
            self.queue.multiply(y, x, linear.weight.t(), terms)?;
        }
        let Some(low) = low.filter(|_| adapter.rank > 0) else { return Ok(()) };
        let low = self.queue.matrix(low, [tokens, adapter.rank]);
        let a = self.adapter_matrix(adapter.a, [adapter.rank, inputs]);
        self.queue.multiply(low, x, a.t(), ProductTerms::REPLACE)?;
        let Some(y) = y else { return Ok(()) };
        for part in &adapter.parts {
            let y = y.columns(part.outputs.start, part.outputs.len());
            let low = low.columns(part.rows.start, part.rows.len());
            let b = self.adapter_matrix(part.b, [part.outputs.len(), part.rows.len()]);
            self.queue.multiply(
                y,
                low,
                b.t(),
                ProductTerms { alpha: part.scale, beta: 1.0, bias: 0 },
            )?;
        }
        Ok(())
    }

    /// Adds the gradients of A and B from that of y. With the gradient g of y and `u = scale g B`:
    /// `dx = g W + u A`, `dA += u^T x` and `dB += scale g^T (x A^T)`.
    fn project_backward(
        &self,
        tables: &PassTables,
        [index, projection]: [usize; 2],
        x: u64,
        grad: u64,
        dx: Option<u64>,
    ) -> Result<()> {
        let weight = self.queue.model.weights.layers[index].projections[projection].weight;
        let adapter = &self.adapter.stacked[index][projection];
        let (tokens, [outputs, inputs]) = (tables.tokens, weight.shape);
        let (x, grad) =
            (self.queue.matrix(x, [tokens, inputs]), self.queue.matrix(grad, [tokens, outputs]));
        let dx = dx.map(|dx| self.queue.matrix(dx, [tokens, inputs]));
        if let Some(dx) = dx {
            self.queue.multiply(dx, grad, weight, ProductTerms::REPLACE)?;
        }
        if adapter.rank == 0 {
            return Ok(());
        }
        let low = self.layer_buffers(index).low[projection];
        let [low, u] =
            [low, self.buffers.d_low].map(|x| self.queue.matrix(x, [tokens, adapter.rank]));
        let gradient = |first: usize, shape: [usize; 2]| {
            DeviceMatrix::new(self.gradient + 4 * first as u64, shape, DeviceFloat::F32)
        };
        for part in &adapter.parts {
            let shape = [part.outputs.len(), part.rows.len()];
            let grad = grad.columns(part.outputs.start, shape[0]);
            let [low, u] = [low, u].map(|x| x.columns(part.rows.start, shape[1]));
            let b = self.adapter_matrix(part.b, shape);
            let terms = ProductTerms { alpha: part.scale, beta: 0.0, bias: 0 };
            self.queue.multiply(u, grad, b, terms)?;
            self.queue.multiply(
                gradient(part.b, shape),
                grad.t(),
                low,
                ProductTerms { beta: 1.0, ..terms },
            )?;
        }
        let add = ProductTerms { beta: 1.0, ..ProductTerms::REPLACE };
        let shape = [adapter.rank, inputs];
        self.queue.multiply(gradient(adapter.a, shape), u.t(), x, add)?;
        match dx {
            Some(dx) => self.queue.multiply(dx, u, self.adapter_matrix(adapter.a, shape), add),
            None => Ok(()),
        }
    }

    /// The gradient of `out` in [`PassQueue::residual`] from that of the sum.
    fn residual_backward(
        &self,
        tables: &PassTables,
        layer: &LayerWeights,
        half: usize,
        out: u64,
    ) -> Result<()> {
        let DecoderShape { hidden, eps, norm_offset, .. } = self.queue.model.shape;
        let (grad, d_out) = (self.buffers.grad, self.buffers.d_out);
        let Some(norms) = layer.output_norms else {
            let values = KernelArgument::Long((tables.tokens * hidden) as i64);
            let arguments = [grad.into(), d_out.into(), values, 1.0_f32.into()];
            return self.queue.launch("round_values", [FLAT_BLOCKS, 1, 1], ROW_THREADS, &arguments);
        };
        let arguments = arguments![out, grad, norms[half], d_out, hidden, eps, norm_offset];
        self.queue.rows("norm_residual_backward", tables.tokens, arguments)
    }

    /// Adds the gradient of x in [`Self::norm`] to that of the residual stream.
    fn norm_backward(&self, tables: &PassTables, x: u64, weight: u64) -> Result<()> {
        let DecoderShape { hidden, eps, norm_offset, .. } = self.queue.model.shape;
        let (d_normed, grad) = (self.buffers.d_normed, self.buffers.grad);
        let arguments = arguments![x, d_normed, weight, grad, hidden, eps, norm_offset];
        self.queue.rows("residual_norm_backward", tables.tokens, arguments)
    }

    /// Rotated queries and keys, and the values of `qkv`.
    fn attention_inputs(&self, qkv: u64) -> [u64; 3] {
        let [q, k, _] = self.queue.qkv_parts(self.buffers.rotated);
        [q, k, self.queue.qkv_parts(qkv)[2]]
    }

    /// The last arguments of attention kernels.
    fn attention_options(&self, index: usize) -> [KernelArgument; 7] {
        let shape = &self.queue.model.shape;
        let (heads, group, stride) = (shape.heads, shape.heads / shape.key_heads, shape.qkv());
        let (scale, cap, window) =
            (shape.attention_scale, shape.attention_softcap, shape.layers[index].1);
        *arguments![heads, group, stride, stride, scale, cap, window]
    }

    /// Rows whose logits are computed at once.
    fn chunks(&self, rows: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let most = self.limits.head_rows.max(1);
        (0..rows).step_by(most).map(move |first| first..rows.min(first + most))
    }

    /// The logits of a chunk, not yet capped. `normed` has the final hidden states.
    fn logits(&self, tables: &PassTables, chunk: &Range<usize>) -> Result<()> {
        let (buffers, DeviceModel { shape, weights, .. }) = (&self.buffers, &*self.queue.model);
        let rows = tables.predicting + 4 * chunk.start as u64;
        let (normed, to) = (buffers.normed, buffers.head_rows);
        let arguments = arguments![normed, tables.each, rows, to, shape.hidden];
        self.queue.rows("sum_rows", chunk.len(), arguments)?;
        let x = self.queue.matrix(to, [chunk.len(), shape.hidden]);
        let logits = [chunk.len(), shape.vocab];
        let logits = DeviceMatrix::new(buffers.logits, logits, DeviceFloat::F32);
        self.queue.multiply(logits, x, weights.head.t(), ProductTerms::REPLACE)
    }

    /// Targets, temperatures and statistics of a chunk.
    fn of_rows(&self, tables: &PassTables, chunk: &Range<usize>) -> [u64; 3] {
        let first = 4 * chunk.start as u64;
        let stats = self.buffers.stats + 2 * first;
        [tables.targets + first, tables.temperatures + first, stats]
    }

    fn is_kept(&self, index: usize) -> bool {
        index + self.limits.kept_layers >= self.queue.model.weights.layers.len()
    }

    /// The buffers of a layer; layers that are not kept share theirs.
    fn layer_buffers(&self, index: usize) -> &LayerBuffers {
        let last = self.queue.model.weights.layers.len() - 1 - index;
        &self.buffers.layers[last.min(self.limits.kept_layers)]
    }

    fn adapter_matrix(&self, first: usize, shape: [usize; 2]) -> DeviceMatrix {
        self.queue.matrix(self.queue.value(self.policy, first), shape)
    }

    /// Norms the rows of x into `normed`.
    fn norm(&self, tables: &PassTables, x: u64, weight: u64) -> Result<()> {
        self.queue.norm(tables.tokens, x, weight, self.buffers.normed)
    }

    fn activate(&self, tables: &PassTables, gate_up: u64) -> Result<()> {
        self.queue.activate(tables.tokens, gate_up, self.buffers.product)
    }

    /// Queries and keys after their norms and their rotation, or a gradient by a kernel that reads those before.
    fn rotate(&self, kernel: &str, tables: &PassTables, index: usize, out: u64) -> Result<()> {
        let qkv = self.layer_buffers(index).qkv;
        self.queue.rotate(kernel, index, tables.tokens, tables.positions, [qkv, out])
    }
}
