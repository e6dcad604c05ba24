//! Sampling on a device: keys and values in pages, adapters in slots, and passes over the next tokens of many
//! sequences and parts of prompts.
//!
//! The host decides everything else: which pages a sequence has, which of them sequences share, and which slot holds
//! which adapter. All work is queued on one stream, so that a page or a slot may be used again at once.
//!
//! A pass rounds where a training pass rounds, and computes adapters from the same values. Rows that decode and
//! parts of prompts have their own kernels, which add in different orders: keys and values of a token depend on which
//! of the two computed them, but not on the other rows of the pass as far as kernels are concerned. cuBLASLt may choose
//! another algorithm for another number of rows.

use std::sync::Arc;

use crate::arena::{Arena, ArenaPlan, ArenaRegion};
use crate::compile::CubinCache;
use crate::decode::{
    DecodeBuffers, DecodePass, PAGE, RowTables, SamplerLimits, SequencePart, page_values,
};
use crate::decoder::{AdapterLayout, AdapterModule, Allocate, DecoderShape, HostFloats};
use crate::device::{Gpu, Staging, StreamPriority};
use crate::error::{GpuError, Result};
use crate::kernels::{DeviceFloat, KernelSource};
use crate::launch::arguments;
use crate::model::DeviceModel;
use crate::queue::PassQueue;

/// Bytes of each of the two buffers through which the host copies tables, adapters and logits.
const STAGING: usize = 1 << 20;

/// Threads of a block that samples a row.
const SAMPLE_THREADS: u32 = 512;

/// How a token is drawn.
#[derive(Clone, Copy, Debug)]
pub struct RowDraw {
    /// The row of the logits.
    pub row: usize,
    /// The temperature. With 0, the token is the first with the greatest logit, and its log-probability that at
    /// temperature 1.
    pub temperature: f32,
    /// A uniform random number in [0, 1), which a temperature of 0 ignores.
    pub uniform: f64,
}

/// A token that was drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowSample {
    /// The token.
    pub id: u32,
    /// The logarithm of its probability at the draw's temperature.
    pub logprob: f32,
}

/// What the sampler allocates beside the model: addresses of adapters and pages, and the buffers of passes.
#[derive(Debug)]
struct SamplerMemory {
    adapters: u64,
    pages: u64,
    buffers: DecodeBuffers,
}

/// Purposes of the memory, in the order of its arenas.
const PURPOSES: [&str; 3] = ["adapters to sample from", "keys and values", "sampling passes"];

impl SamplerMemory {
    fn new(
        shape: &DecoderShape,
        adapter: &AdapterLayout,
        float: DeviceFloat,
        limits: &SamplerLimits,
        allocate: &mut dyn FnMut(usize, &str, u64) -> Result<u64>,
    ) -> Result<Self> {
        let adapters = limits.slots as u64 * adapter.values as u64 * float.bytes();
        let pages = limits.pages as u64 * page_values(shape) as u64 * float.bytes();
        let (adapters, pages) = (allocate(0, "slots", adapters)?, allocate(1, "pages", pages)?);
        let of_passes: Allocate<'_> = &mut |name, bytes| allocate(2, name, bytes);
        let buffers = DecodeBuffers::new(shape, adapter, float, limits, of_passes)?;
        Ok(Self { adapters, pages, buffers })
    }
}

/// Samples from a decoder with adapters.
pub struct DeviceSampler {
    pass: DecodePass,
    staging: Staging,
    limits: SamplerLimits,
    /// Sequences that decode in the last pass, which are the rows of the logits.
    rows: usize,
    /// The pages.
    pages: ArenaRegion,
    /// The slots of adapters.
    adapters: ArenaRegion,
    /// The memory, which is freed last.
    _arenas: Vec<Arena<Gpu>>,
}

impl DeviceSampler {
    /// The device memory that a sampler uses beside the model.
    ///
    /// # Errors
    /// If kernels cannot compute the shape, or the decoder does not have a module.
    pub fn plan(
        shape: &DecoderShape,
        modules: &[AdapterModule],
        float: DeviceFloat,
        limits: &SamplerLimits,
    ) -> Result<Vec<ArenaPlan>> {
        check(shape, limits)?;
        let mut plans = PURPOSES.map(ArenaPlan::new);
        let adapter = AdapterLayout::new(shape, modules)?;
        SamplerMemory::new(shape, &adapter, float, limits, &mut |purpose, name, bytes| {
            plans[purpose].add(name, bytes);
            Ok(0)
        })?;
        Ok(plans.into())
    }

    /// Allocates what [`Self::plan`] says, beside a reserve of bytes, and compiles the kernels, which run on a stream of
    /// this priority. All adapters must have these modules; without modules there are none.
    ///
    /// # Errors
    /// As [`Self::plan`], or if the memory is too small, or a library refuses.
    pub fn open(
        model: &Arc<DeviceModel>,
        cache: &CubinCache,
        modules: &[AdapterModule],
        limits: &SamplerLimits,
        reserve: u64,
        priority: StreamPriority,
    ) -> Result<Self> {
        let DeviceModel { gpu, shape, float, .. } = &**model;
        let plans = Self::plan(shape, modules, *float, limits)?;
        let adapter = AdapterLayout::new(shape, modules)?;
        let arenas = Arena::allocate(gpu, plans, reserve)?;
        let memory =
            SamplerMemory::new(shape, &adapter, *float, limits, &mut |purpose, name, _| {
                Ok(arenas[purpose].region(name)?.address)
            })?;
        let SamplerMemory { adapters, pages, buffers } = memory;
        let [adapters, pages] = [
            ArenaRegion { address: adapters, bytes: arenas[0].region("slots")?.bytes },
            ArenaRegion { address: pages, bytes: arenas[1].region("pages")?.bytes },
        ];
        let sources = [KernelSource::ADAPTERS, KernelSource::SAMPLE];
        let queue = PassQueue::open(model, cache, sources, priority, buffers.workspace)?;
        let staging = Staging::new(gpu, &queue.stream, STAGING)?;
        let (first_slot, first_page) = (adapters.address, pages.address);
        let pass = DecodePass { queue, adapter, buffers, first_slot, first_page };
        let limits = *limits;
        Ok(Self { pass, staging, limits, rows: 0, pages, adapters, _arenas: arenas })
    }

    /// The sizes.
    pub fn limits(&self) -> &SamplerLimits {
        &self.limits
    }

    /// The shape of the model.
    pub fn shape(&self) -> &DecoderShape {
        &self.pass.queue.model.shape
    }

    /// The type of weights and activations.
    pub fn float(&self) -> DeviceFloat {
        self.pass.queue.model.float
    }

    /// Where the matrices of an adapter are in its values.
    pub fn layout(&self) -> &AdapterLayout {
        &self.pass.adapter
    }

    /// Replaces the adapter in a slot. Passes before it used the last one. Values are rounded to the type of the
    /// weights.
    ///
    /// # Errors
    /// If there is no such slot, or the number of values is not that of the layout.
    pub fn set_adapter(&mut self, slot: usize, values: &[f32]) -> Result<()> {
        let (expected, found) = (self.pass.adapter.values, values.len());
        if found != expected || slot >= self.limits.slots {
            let slots = self.limits.slots;
            return Err(GpuError::Misuse(format!(
                "an adapter of {found} values, not {expected}, for slot {slot} of {slots}"
            )));
        }
        let bytes = HostFloats::F32(values).bytes(self.float());
        let address = self.adapters.address + (slot * bytes.len()) as u64;
        self.staging.upload(&bytes, ArenaRegion { address, bytes: bytes.len() as u64 })
    }

    /// Copies pages, in their order: `[from, to]`.
    ///
    /// # Errors
    /// If there is no such page, or the driver refuses.
    pub fn copy_pages(&mut self, copies: &[[u32; 2]]) -> Result<()> {
        let bytes = page_values(self.shape()) as u64 * self.float().bytes();
        for pages in copies {
            if pages.iter().any(|page| *page as usize >= self.limits.pages) {
                return Err(GpuError::Misuse(format!("pages {pages:?} of {}", self.limits.pages)));
            }
            let [from, to] = pages.map(|page| ArenaRegion {
                address: self.pages.address + u64::from(page) * bytes,
                bytes,
            });
            self.pass.queue.model.gpu.copy(&self.pass.queue.stream, from, to)?;
        }
        Ok(())
    }

    /// Computes the next token of sequences that decode, whose logits are then on the device in their order, and
    /// parts of the prompts of others, all with their keys and values.
    ///
    /// # Errors
    /// If the pass does not fit the limits, a token, page or slot does not exist, or a library refuses.
    pub fn compute(
        &mut self,
        decoding: &[SequencePart<'_>],
        prompts: &[SequencePart<'_>],
    ) -> Result<()> {
        self.rows = 0;
        self.check_parts(decoding, prompts)?;
        let tables = RowTables::new(self.shape(), decoding, prompts);
        let region = self.pass.buffers.tables;
        let bytes: Vec<u8> = tables.words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.staging.upload(&bytes, region)?;
        self.pass.compute(&tables.at(region.address))?;
        self.rows = decoding.len();
        Ok(())
    }

    /// Draws tokens from the logits of the last pass. A sample is `None` if the logits make no distribution.
    ///
    /// # Errors
    /// If there is no such row, there are more draws than rows, or a library refuses.
    pub fn sample(&mut self, draws: &[RowDraw]) -> Result<Vec<Option<RowSample>>> {
        if draws.len() > self.rows || draws.iter().any(|draw| draw.row >= self.rows) {
            let (draws, rows) = (draws.len(), self.rows);
            return Err(GpuError::Misuse(format!("{draws} draws from {rows} rows of logits")));
        }
        if draws.is_empty() {
            return Ok(Vec::new());
        }
        let numbers = draws.iter().flat_map(|draw| {
            let inverse = match draw.temperature {
                0.0 => 0.0,
                temperature => 1.0 / f64::from(temperature),
            };
            [inverse, draw.uniform].map(f64::to_le_bytes)
        });
        let rows = draws.iter().flat_map(|draw| (draw.row as u32).to_le_bytes());
        let bytes: Vec<u8> = numbers.flatten().chain(rows).collect();
        let DecodeBuffers { draws: region, samples, logits, .. } = self.pass.buffers;
        self.staging.upload(&bytes, region)?;
        let rows = region.address + 16 * draws.len() as u64;
        let vocab = self.shape().vocab;
        let arguments = arguments![logits, rows, region.address, samples.address, vocab];
        self.pass.queue.launch("sample_rows", [draws.len(), 1, 1], SAMPLE_THREADS, arguments)?;
        let mut bytes = vec![0; 8 * draws.len()];
        self.staging.download(samples, &mut bytes)?;
        let sample = |[a, b, c, d, e, f, g, h]: &[u8; 8]| {
            let id = u32::try_from(i32::from_le_bytes([*a, *b, *c, *d])).ok()?;
            Some(RowSample { id, logprob: f32::from_le_bytes([*e, *f, *g, *h]) })
        };
        Ok(bytes.as_chunks().0.iter().map(sample).collect())
    }

    /// Copies the logits `[vocab]` of a row of the last pass to `logits`.
    ///
    /// # Errors
    /// If there is no such row, or the driver refuses.
    pub fn logits(&mut self, row: usize, logits: &mut Vec<f32>) -> Result<()> {
        if row >= self.rows {
            return Err(GpuError::Misuse(format!("row {row} of {} rows of logits", self.rows)));
        }
        let mut bytes = vec![0; 4 * self.shape().vocab];
        let region = ArenaRegion {
            address: self.pass.buffers.logits + (row * bytes.len()) as u64,
            bytes: bytes.len() as u64,
        };
        self.staging.download(region, &mut bytes)?;
        logits.clear();
        logits.extend(bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)));
        Ok(())
    }

    /// Whether a pass of these limits can compute the parts.
    fn check_parts(
        &self,
        decoding: &[SequencePart<'_>],
        prompts: &[SequencePart<'_>],
    ) -> Result<()> {
        let (shape, limits) = (self.shape(), &self.limits);
        let misuse = |message: String| Err(GpuError::Misuse(message));
        let parts = || decoding.iter().chain(prompts);
        let tokens: usize = parts().map(|part| part.ids.len()).sum();
        let [rows, sequences] = [decoding.len(), decoding.len() + prompts.len()];
        if tokens > limits.tokens || rows > limits.decoding || sequences > limits.sequences {
            return misuse(format!(
                "{tokens} tokens of {sequences} sequences, of which {rows} decode, are more than {limits:?}"
            ));
        }
        if decoding.iter().any(|part| part.ids.len() != 1) {
            return misuse("a sequence decodes one token at a time".into());
        }
        for part in parts() {
            let SequencePart { ids, position, pages, slot } = *part;
            let end = position + ids.len();
            if let Some(id) = ids.iter().find(|id| **id as usize >= shape.vocab) {
                return misuse(format!("token {id} is outside the vocabulary of {}", shape.vocab));
            }
            if end > shape.positions {
                let known = shape.positions;
                return misuse(format!("position {}, but there are angles of {known}", end - 1));
            }
            if pages.len() * PAGE < end || pages.iter().any(|p| *p as usize >= limits.pages) {
                return misuse(format!("pages {pages:?} of {} for {end} positions", limits.pages));
            }
            if let Some(slot) = slot.filter(|slot| *slot >= limits.slots) {
                return misuse(format!("slot {slot} of {}", limits.slots));
            }
        }
        Ok(())
    }
}

/// Whether kernels can compute the shape: their sizes are `int`s.
fn check(shape: &DecoderShape, limits: &SamplerLimits) -> Result<()> {
    KernelSource::attention(shape.head_dim)?;
    let DecoderShape { vocab, hidden, intermediate, heads, key_heads, .. } = *shape;
    let most = i32::MAX as usize;
    let [_, key_width] = shape.widths();
    let sizes = [vocab, hidden, 2 * intermediate, shape.qkv(), limits.decoding, limits.sequences];
    let products = [
        limits.tokens.checked_mul(heads),
        // Rows of keys and values in all pages.
        (page_values(shape) / key_width.max(1)).checked_mul(limits.pages),
    ];
    let fits = sizes.iter().all(|size| (1..=most).contains(size))
        && products.iter().all(|product| product.is_some_and(|n| (1..=most).contains(&n)))
        && key_heads > 0
        && heads % key_heads == 0
        && 2 * shape.rotated_pairs <= shape.head_dim;
    if !fits {
        return Err(GpuError::Misuse(format!("kernels cannot compute {shape:?} with {limits:?}")));
    }
    Ok(())
}
