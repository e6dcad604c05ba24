//! Passes on a device, and the choice between it and the processor.

use hone_cuda::{DeviceFloat, DeviceSampler, RowDraw, RowSample, SamplerLimits, SequencePart};
use hone_model::ModelSpec;

use crate::capacity::SamplerCapacity;
use crate::config::SamplerConfig;
use crate::decoder::Decoder;
use crate::error::{Result, SamplerError};
use crate::kv_cache::{PagePool, SequencePages, WeightsId};
use crate::weights::AdapterWeights;

/// What computes the passes of an engine.
pub(crate) enum PassDecoder {
    Processor(Box<Decoder>),
    Device(Box<DeviceDecoder>),
}

impl PassDecoder {
    pub fn spec(&self) -> &ModelSpec {
        match self {
            Self::Processor(decoder) => decoder.spec(),
            Self::Device(device) => &device.spec,
        }
    }

    /// The type of the activations that weights are multiplied with.
    pub fn dtype(&self) -> &'static str {
        match self {
            Self::Processor(decoder) => decoder.dtype(),
            Self::Device(device) => match device.sampler.float() {
                DeviceFloat::F32 => "f32",
                DeviceFloat::Bf16 => "bf16",
            },
        }
    }

    /// Whether each thread should run all layers for a part of the rows ([`Decoder::is_small`]).
    pub fn is_small(&self) -> bool {
        match self {
            Self::Processor(decoder) => decoder.is_small,
            Self::Device(_) => false,
        }
    }

    /// A pool of pages for its keys and values.
    pub fn pool(&self, limit: usize) -> PagePool {
        match self {
            Self::Processor(decoder) => PagePool::new(decoder.shape(), limit),
            Self::Device(_) => PagePool::on_device(limit),
        }
    }

    /// Prepares for sequences of up to `positions` tokens.
    pub fn reserve_positions(&mut self, positions: usize) -> Result<()> {
        match self {
            Self::Processor(decoder) => decoder.reserve_positions(positions),
            Self::Device(device) => Ok(device.spec.check_length(positions)?),
        }
    }
}

impl From<Decoder> for PassDecoder {
    fn from(decoder: Decoder) -> Self {
        Self::Processor(Box::new(decoder))
    }
}

impl SamplerConfig {
    /// What a device sampler for an engine with these settings must have room for, with `adapters` versions at once. The
    /// model must have angles for [`Self::context`] positions.
    ///
    /// # Errors
    /// If a setting is out of range.
    pub fn device_limits(&self, adapters: usize, workspace: u64) -> Result<SamplerLimits> {
        let (capacity, slots) = (SamplerCapacity::new(self)?, self.slots.max(1));
        Ok(SamplerLimits {
            tokens: capacity.batch_rows,
            decoding: slots,
            sequences: slots,
            pages: capacity.pages,
            slots: adapters.max(1),
            workspace,
        })
    }
}

/// The tokens of one sequence that a pass computes, and its weights.
pub(crate) struct DevicePart<'a> {
    pub pages: &'a SequencePages,
    pub tokens: usize,
    pub weights: WeightsId,
    /// `None` is the base model.
    pub adapter: Option<&'a AdapterWeights>,
}

/// The adapter in a slot.
#[derive(Clone, Copy, Default)]
struct AdapterSlot {
    /// The base model's if the slot is empty.
    weights: WeightsId,
    /// The last pass that used it.
    used: u64,
}

/// Computes passes on a device. Adapters are copied to it when a pass needs them, in place of those that were used
/// least recently.
pub(crate) struct DeviceDecoder {
    spec: ModelSpec,
    sampler: DeviceSampler,
    slots: Vec<AdapterSlot>,
    passes: u64,
}

impl DeviceDecoder {
    /// A decoder for an engine with these settings.
    ///
    /// # Errors
    /// If the sampler has room for less.
    pub fn new(spec: ModelSpec, sampler: DeviceSampler, config: &SamplerConfig) -> Result<Self> {
        let (limits, positions) = (*sampler.limits(), sampler.shape().positions);
        let needed = config.device_limits(1, 0)?;
        let fits = limits.tokens >= needed.tokens
            && limits.decoding >= needed.decoding
            && limits.sequences >= needed.sequences
            && limits.pages >= needed.pages
            && limits.slots >= needed.slots
            && positions >= config.context;
        if !fits {
            let context = config.context;
            return Err(SamplerError::Refused(format!(
                "{limits:?} and {positions} positions are less than {needed:?} and {context}"
            )));
        }
        let slots = vec![AdapterSlot::default(); limits.slots];
        Ok(Self { spec, sampler, slots, passes: 0 })
    }

    /// Different adapters that one pass can have.
    pub fn adapters(&self) -> usize {
        self.slots.len()
    }

    /// Logits of a row.
    pub fn vocab(&self) -> usize {
        self.spec.vocab_size
    }

    /// Copies pages ([`PagePool::take_copies`]).
    pub fn copy_pages(&mut self, copies: &[[u32; 2]]) -> Result<()> {
        Ok(self.sampler.copy_pages(copies)?)
    }

    /// Computes the next token of sequences that decode, and parts of prompts. The sequences are not advanced.
    pub fn compute(&mut self, rows: &[DevicePart<'_>], prompts: &[DevicePart<'_>]) -> Result<()> {
        self.passes += 1;
        let all = || rows.iter().chain(prompts);
        // Those that are on the device keep their slots.
        for part in all().filter(|part| part.adapter.is_some()) {
            if let Some(slot) = self.slots.iter_mut().find(|slot| slot.weights == part.weights) {
                slot.used = self.passes;
            }
        }
        let slots = all().map(|part| self.slot(part)).collect::<Result<Vec<_>>>()?;
        let numbers: Vec<_> = all().map(|part| part.pages.page_numbers(part.tokens)).collect();
        let missing = || SamplerError::Refused("a sequence has no token for the next step".into());
        let mut parts = Vec::with_capacity(numbers.len());
        for ((part, slot), pages) in all().zip(slots).zip(&numbers) {
            let (ids, position) = (part.pages.next_tokens(part.tokens), part.pages.position(0));
            parts.push(SequencePart { ids: ids.ok_or_else(missing)?, position, pages, slot });
        }
        let (rows, prompts) = parts.split_at(rows.len());
        Ok(self.sampler.compute(rows, prompts)?)
    }

    /// Draws tokens from the logits of the last pass; `None` where they make no distribution.
    pub fn sample(&mut self, draws: &[RowDraw]) -> Result<Vec<Option<RowSample>>> {
        Ok(self.sampler.sample(draws)?)
    }

    /// Copies the logits of a row of the last pass.
    pub fn logits(&mut self, row: usize, logits: &mut Vec<f32>) -> Result<()> {
        Ok(self.sampler.logits(row, logits)?)
    }

    /// The slot of a part's adapter, which is copied to the device if it is not there.
    fn slot(&mut self, part: &DevicePart<'_>) -> Result<Option<usize>> {
        let Some(adapter) = part.adapter else { return Ok(None) };
        if let Some(found) = self.slots.iter().position(|slot| slot.weights == part.weights) {
            return Ok(Some(found));
        }
        let free = self.slots.iter().enumerate().filter(|(_, slot)| slot.used < self.passes);
        let free = free.min_by_key(|(_, slot)| slot.used).map(|(index, _)| index);
        let full = || SamplerError::Refused("a pass has more adapters than there are slots".into());
        let index = free.ok_or_else(full)?;
        // The slot is empty if the copy fails.
        self.slots[index] = AdapterSlot::default();
        self.sampler.set_adapter(index, &adapter.values(self.sampler.layout())?)?;
        self.slots[index] = AdapterSlot { weights: part.weights, used: self.passes };
        Ok(Some(index))
    }
}
