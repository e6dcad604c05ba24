//! Passes on a GPU: statistics of predicted tokens, and gradients of the adapter.
//!
//! The base's weights stay in device memory. Adapters are copied there for each pass over a step's samples, and the
//! gradient back: at 1.5 billion parameters an adapter of rank 16 has 74 MB, some milliseconds each way. Losses, the bound of
//! the gradient's norm, the optimizer, averages and checkpoints stay on the host, so that they are the same wherever passes
//! run, and a run can go on elsewhere.
//!
//! The gate's scores of a publication use the same buffers while the next step computes. [`SharedPasses`] is locked for a
//! score, and for a shard of a step from its forward pass to its backward pass.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use candle_core::Tensor;
use parking_lot::Mutex;

use hone_cuda::{
    AdapterModule, ArenaPlan, DecoderShape, DeviceFloat, DeviceMemory, DevicePolicy, DeviceTrainer,
    PackedSegment, PassLimits, TokenBatch,
};
use hone_model::adapter::weights::LoraWeights;
use hone_model::device::{DeviceBase, adapter_modules, adapter_tensors, adapter_values};
use hone_model::{ModelError, ModelSpec};

use crate::data::packing::PackedBatch;
use crate::error::Result;
use crate::memory;

/// Shards on a device have up to this many times as many tokens as on the host: it computes long ones faster.
const SHARD_TIMES: usize = 16;

/// Rows whose logits are in memory at once.
const HEAD_ROWS: usize = 1024;

/// A pass whose completions each repeat the longest prompt lists as many tokens for as many completions.
const LISTED_PROMPTS: usize = 512;

/// The passes of a learner, which steps and the [snapshots](super::Snapshot) of its policies take in turn.
pub(crate) type SharedPasses = Arc<Mutex<DevicePasses>>;

/// The base model, the adapter, the reference and a policy to score in device memory.
pub(crate) struct DevicePasses {
    trainer: DeviceTrainer,
    limits: PassLimits,
    /// The linear layers that all adapters are on.
    modules: Vec<AdapterModule>,
    /// The adapter of the last score, which is on the device.
    scored: Weak<LoraWeights>,
}

impl DevicePasses {
    /// Plans what the memory has room for beside the base and what else is there, with samples of `longest` tokens if it
    /// suffices.
    pub fn open(
        base: &DeviceBase,
        lora: &LoraWeights,
        spec: &ModelSpec,
        longest: usize,
    ) -> Result<Self> {
        let DeviceBase { model, kernels, reserve, workspace } = base;
        let modules = adapter_modules(lora);
        let free = model.gpu().free_bytes().map_err(ModelError::from)?;
        let room = Room { most: free.saturating_sub(*reserve), workspace: *workspace };
        let limits = limits(spec, model.shape(), &modules, model.float(), longest, room)?;
        let trainer = DeviceTrainer::open(model, kernels, &modules, &limits, *reserve);
        let trainer = trainer.map_err(ModelError::from)?;
        let (tokens, kept_layers) = (limits.tokens, limits.kept_layers);
        tracing::info!(tokens, kept_layers, "passes of the trainer run on the GPU");
        Ok(Self { trainer, limits, modules, scored: Weak::new() })
    }

    /// Tokens of the longest shard.
    pub fn longest_shard(&self) -> usize {
        self.limits.tokens
    }

    /// Begins the passes over a step's samples with these policies.
    pub fn begin(&mut self, lora: &LoraWeights, reference: Option<&LoraWeights>) -> Result<()> {
        let policies = [(DevicePolicy::Adapter, Some(lora)), (DevicePolicy::Reference, reference)];
        for (policy, lora) in policies {
            let Some(lora) = lora else { continue };
            let values = adapter_values(lora, self.trainer.layout())?;
            self.trainer.set_adapter(policy, &values).map_err(ModelError::from)?;
        }
        Ok(self.trainer.clear_gradient().map_err(ModelError::from)?)
    }

    /// Log-probability and entropy of every sampled token.
    pub fn forward(&mut self, layout: &PackedBatch, policy: DevicePolicy) -> Result<[Vec<f64>; 2]> {
        let segment = |s: &hone_model::transformer::Segment| PackedSegment {
            start: s.start,
            len: s.len,
            prefix: s.prefix,
        };
        let segments: Vec<_> = layout.table.iter().map(segment).collect();
        let (ids, rows) = (layout.ids.to_vec1::<u32>()?, layout.rows.to_vec1::<u32>()?);
        let batch = TokenBatch {
            ids: &ids,
            segments: &segments,
            rows: &rows,
            targets: &layout.targets,
            temperatures: &layout.temperatures,
        };
        let stats = self.trainer.forward(&batch, policy).map_err(ModelError::from)?;
        Ok([0, 1].map(|column| stats.iter().map(|row| f64::from(row[column])).collect()))
    }

    /// The log-probability of every token by an adapter; `None` if that is for the processor to compute: an adapter on other
    /// linear layers or of another rank, or texts that are longer than a pass.
    pub fn score(
        &mut self,
        layout: &PackedBatch,
        lora: &Arc<LoraWeights>,
    ) -> Result<Option<Vec<f32>>> {
        let tokens = layout.segments.tokens();
        if tokens > self.limits.tokens || adapter_modules(lora) != self.modules {
            return Ok(None);
        }
        if self.scored.as_ptr() != Arc::as_ptr(lora) {
            // There is none if the copy fails.
            self.scored = Weak::new();
            let values = adapter_values(lora, self.trainer.layout())?;
            self.trainer.set_adapter(DevicePolicy::Scored, &values).map_err(ModelError::from)?;
            self.scored = Arc::downgrade(lora);
        }
        let [logprobs, _] = self.forward(layout, DevicePolicy::Scored)?;
        Ok(Some(logprobs.into_iter().map(|logprob| logprob as f32).collect()))
    }

    /// Adds the gradient for the last forward pass with the adapter, from the derivatives of the loss by its results.
    pub fn backward(&mut self, seeds: &[[f64; 2]]) -> Result<()> {
        let seeds: Vec<[f32; 2]> = seeds.iter().map(|row| row.map(|x| x as f32)).collect();
        Ok(self.trainer.backward(&seeds).map_err(ModelError::from)?)
    }

    /// The sum of the gradients since [`Self::begin`], by the adapter's tensor.
    pub fn gradients(&mut self, lora: &LoraWeights) -> Result<BTreeMap<String, Tensor>> {
        let values = self.trainer.gradient().map_err(ModelError::from)?;
        Ok(adapter_tensors(lora, self.trainer.layout(), &values)?)
    }
}

/// The device memory of the trainer in `most` bytes, of which products use a workspace: of samples of `longest` tokens
/// and as many kept layers as fit.
///
/// # Errors
/// If kernels cannot compute the shape, or the model does not have a module.
pub fn device_plan(
    spec: &ModelSpec,
    shape: &DecoderShape,
    modules: &[AdapterModule],
    float: DeviceFloat,
    longest: usize,
    [most, workspace]: [u64; 2],
) -> Result<Vec<ArenaPlan>> {
    let limits = limits(spec, shape, modules, float, longest, Room { most, workspace })?;
    let plans = DeviceTrainer::plan(shape, modules, float, &limits);
    Ok(plans.map_err(ModelError::from)?)
}

/// Bytes of memory for the trainer's plan, and those of a workspace in it.
#[derive(Clone, Copy)]
struct Room {
    most: u64,
    workspace: u64,
}

/// The limits of passes whose plan fits: of a device's usual shard or the longest sample, or else of half as many tokens,
/// and so on down to a usual shard of the host; with as many kept layers as fit.
fn limits(
    spec: &ModelSpec,
    shape: &DecoderShape,
    modules: &[AdapterModule],
    float: DeviceFloat,
    longest: usize,
    Room { most, workspace }: Room,
) -> Result<PassLimits> {
    let shard = memory::shard_tokens(spec);
    let of = |tokens: usize, kept_layers: usize| PassLimits {
        tokens,
        rows: tokens,
        head_rows: HEAD_ROWS.min(tokens),
        table_words: 16 * tokens + LISTED_PROMPTS * tokens.min(longest),
        kept_layers,
        workspace,
    };
    let needed = |limits: &PassLimits| -> Result<u64> {
        let plans = DeviceTrainer::plan(shape, modules, float, limits).map_err(ModelError::from)?;
        Ok(plans.iter().map(ArenaPlan::total).sum())
    };
    let mut tokens = longest.max(SHARD_TIMES * shard);
    while tokens > shard && needed(&of(tokens, 0))? > most {
        tokens = (tokens / 2).max(shard);
    }
    let mut kept = shape.layers.len();
    while kept > 0 && needed(&of(tokens, kept))? > most {
        kept -= 1;
    }
    Ok(of(tokens, kept))
}

#[cfg(test)]
mod tests {
    use hone_cuda::DeviceModel;
    use hone_model::adapter::LoraConfig;
    use hone_model::device::{decoder_shape, planned_modules};
    use serde_json::json;

    use super::*;

    /// The table of `docs/gpu.md`.
    #[test]
    fn limits_follow_the_memory() {
        let models = [
            ("0.5 B", 896, 4864, 24, [14, 2, 64]),
            ("1.5 B", 1536, 8960, 28, [12, 2, 128]),
            ("4 B", 2560, 9728, 36, [32, 8, 128]),
        ];
        let mut lines = Vec::new();
        for (name, hidden, intermediate, layers, [heads, key_heads, head_dim]) in models {
            let config = json!({
                "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": hidden,
                "intermediate_size": intermediate, "num_hidden_layers": layers,
                "num_attention_heads": heads, "num_key_value_heads": key_heads,
                "head_dim": head_dim, "vocab_size": 151_936, "rms_norm_eps": 1e-6,
                "rope_theta": 1e6, "tie_word_embeddings": true, "max_position_embeddings": 32_768,
            });
            let spec = ModelSpec::from_config(&config).unwrap();
            let lora = LoraConfig { r: 16, ..LoraConfig::default() };
            let modules = planned_modules(&spec, &lora).unwrap();
            let shape = decoder_shape(&spec, 16_384);
            for gib in [12, 24, 80] {
                let float = DeviceFloat::Bf16;
                let base = DeviceModel::plan(&shape, float).unwrap();
                let most = ((gib << 30) - (512 << 20)) - base.total();
                let room = Room { most, workspace: 32 << 20 };
                let limits = limits(&spec, &shape, &modules, float, 4096, room).unwrap();
                let mut plans = vec![base];
                plans.extend(DeviceTrainer::plan(&shape, &modules, float, &limits).unwrap());
                let plans: Vec<_> = plans.iter().map(|plan| plan.total() >> 20).collect();
                let fits = plans[1..].iter().sum::<u64>() <= most >> 20;
                let PassLimits { tokens, kept_layers, .. } = limits;
                lines.push(format!(
                    "{name}, {gib} GiB: {tokens} tokens, {kept_layers} of {layers} layers kept, \
                     {plans:?} MiB, fits: {fits}"
                ));
            }
        }
        insta::assert_snapshot!(lines.join("\n"), @"
        0.5 B, 12 GiB: 16384 tokens, 17 of 24 layers kept, [946, 83, 10618] MiB, fits: true
        0.5 B, 24 GiB: 16384 tokens, 24 of 24 layers kept, [946, 83, 13188] MiB, fits: true
        0.5 B, 80 GiB: 16384 tokens, 24 of 24 layers kept, [946, 83, 13188] MiB, fits: true
        1.5 B, 12 GiB: 16384 tokens, 4 of 28 layers kept, [2952, 176, 8606] MiB, fits: true
        1.5 B, 24 GiB: 16384 tokens, 19 of 28 layers kept, [2952, 176, 20189] MiB, fits: true
        1.5 B, 80 GiB: 16384 tokens, 28 of 28 layers kept, [2952, 176, 26367] MiB, fits: true
        4 B, 12 GiB: 4096 tokens, 2 of 36 layers kept, [7680, 315, 3636] MiB, fits: true
        4 B, 24 GiB: 16384 tokens, 5 of 36 layers kept, [7680, 315, 15021] MiB, fits: true
        4 B, 80 GiB: 16384 tokens, 36 of 36 layers kept, [7680, 315, 47826] MiB, fits: true
        ");
    }
}
