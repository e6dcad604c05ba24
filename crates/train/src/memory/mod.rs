//! Memory, estimated from shapes. [`MemoryPlan`] is that of a step: it decides how large shards are, how
//! many run in parallel, and which layers the backward pass recomputes. [`ProcessMemory`] adds the rest
//! of the process, which decides how long a sample may be.

mod process;

use std::fs;
use std::path::PathBuf;

use candle_core::DType;

use hone_model::ModelSpec;
use hone_model::adapter::{LinearKind, ModuleScale};
use hone_model::kernels::compute::{self, Compute};
use hone_model::transformer::{head_packed_values, head_upcast_values, logits_in_memory};
use hone_model::weights::{LoadOptions, WeightFiles, WeightType};

use crate::config::{AverageKind, OptimizerKind, Recompute, TrainConfig};
use crate::error::Result;

pub use process::{MemoryPart, MemoryPhase, MemoryPlanner, ProcessMemory, ProcessSetup};

/// Hidden size from which one shard runs on all threads. Below it, products are too small to be split.
const WIDE: usize = 512;

/// Bytes of activations that `train.recompute = "auto"` keeps, summed over all parallel shards.
const KEPT_BYTES: usize = 768 << 20;

/// Bytes of an `f32`.
const F32: usize = 4;

/// Bytes of a bf16.
const BF16: usize = 2;

/// Target number of tokens of a shard; of the model alone, so that results do not depend on the threads.
pub(super) fn shard_tokens(spec: &ModelSpec) -> usize {
    if spec.hidden_size < WIDE { 256 } else { 1024 }
}

/// Whether shards run in parallel with one thread each.
pub(super) fn shards_in_parallel(spec: &ModelSpec) -> bool {
    spec.hidden_size < WIDE
}

/// Values per token that one layer with an adapter of rank `r` keeps for its backward pass, except its input.
fn layer_values(spec: &ModelSpec, r: usize) -> usize {
    let (hidden, inner, q, kv) = widths(spec);
    // The residual between attention and MLP, and the outputs of both if a norm follows them.
    let residual = (1 + if spec.output_norms { 2 } else { 0 }) * hidden;
    // q, k, v, the attention output, and the log-sum-exp of each head.
    let attention = 2 * q + 2 * kv + spec.num_heads;
    // Gate and up projections, and the adapters' inner values.
    residual + attention + 2 * inner + LinearKind::ALL.len() * r
}

/// Most values per token that the backward pass of one layer holds in addition to the kept ones.
fn layer_work(spec: &ModelSpec) -> usize {
    let (hidden, inner, q, kv) = widths(spec);
    // The MLP's inner product and its gradient; or gradients of q, k and v, by head and combined, and of the
    // output.
    let attention = 3 * q + (q + 2 * kv) + q + (q + kv);
    2 * hidden + (2 * inner).max(attention)
}

/// Widths of the residual stream, of the MLP, of all queries, and of all keys or values.
fn widths(spec: &ModelSpec) -> (usize, usize, usize, usize) {
    let heads = |count| count * spec.head_dim;
    (spec.hidden_size, spec.intermediate_size, heads(spec.num_heads), heads(spec.num_kv_heads))
}

/// Number of layers, from the last one, whose activations a shard of `tokens` tokens keeps. The others are
/// recomputed, with identical results.
pub(super) fn kept_layers(config: &TrainConfig, spec: &ModelSpec, tokens: usize) -> usize {
    let in_flight = if shards_in_parallel(spec) { rayon::current_num_threads() } else { 1 };
    kept(config, spec, tokens * in_flight)
}

fn kept(config: &TrainConfig, spec: &ModelSpec, tokens: usize) -> usize {
    match config.recompute {
        Recompute::Never => spec.num_layers,
        Recompute::Always => 0,
        Recompute::Auto => {
            let layer = layer_values(spec, config.lora.r) * tokens.max(1) * F32;
            (KEPT_BYTES / layer).min(spec.num_layers)
        }
    }
}

/// Lengths of shards in tokens beyond which `train.recompute = "auto"` keeps one layer fewer.
fn kept_limits(
    config: &TrainConfig,
    spec: &ModelSpec,
    in_flight: usize,
) -> impl Iterator<Item = usize> {
    let token = layer_values(spec, config.lora.r) * in_flight * F32;
    (1..=spec.num_layers).map(move |layers| KEPT_BYTES / (token * layers))
}

/// Memory of the frozen weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BaseMemory {
    bytes: usize,
    /// Bytes, in `f32`, of the largest matrix of 16 bits or quantized blocks that a thread widens at once.
    widened: usize,
    /// Bytes of the largest matrix that is packed at once for a product in bf16.
    packed: usize,
    /// Whether a matrix is quantized.
    is_quantized: bool,
    /// Whether all weights are in 32 bits, in memory.
    pub is_f32: bool,
}

impl BaseMemory {
    /// The memory of weights whose type in the files `stored` returns by name, loaded with `options`.
    ///
    /// # Errors
    /// The first error of `stored`.
    pub fn new<S: Into<WeightType>>(
        spec: &ModelSpec,
        options: impl Into<LoadOptions>,
        stored: impl Fn(&str) -> Result<S>,
    ) -> Result<Self> {
        let options = options.into();
        let mut base = Self { bytes: 0, widened: 0, packed: 0, is_quantized: false, is_f32: true };
        for (name, shape) in spec.weight_shapes() {
            let count: usize = shape.iter().product();
            let held = options.in_memory(spec, &name, &shape, stored(&name)?.into());
            base.bytes += held.size(count);
            base.is_quantized |= matches!(held, WeightType::Blocks(_));
            base.is_f32 &= held == WeightType::Float(DType::F32);
            // The output layer, which may be the embedding, is widened or packed in pieces.
            let linear = name.starts_with("model.layers.");
            if held.is_widened() {
                let at_once = if linear { count } else { head_upcast_values(spec) };
                base.widened = base.widened.max(at_once * F32);
            }
            if shape.len() == 2 {
                let at_once = if linear { count } else { head_packed_values(spec) };
                base.packed = base.packed.max(at_once * BF16);
            }
        }
        Ok(base)
    }

    /// The memory of the weights in safetensors files or a GGUF file, from their headers.
    ///
    /// # Errors
    /// If a file cannot be read or a weight is missing.
    pub fn read(
        spec: &ModelSpec,
        files: &[PathBuf],
        options: impl Into<LoadOptions>,
    ) -> Result<Self> {
        let files = WeightFiles::open(spec, files)?;
        Self::new(spec, options, |name| Ok(files.stored(name)?))
    }
}

/// Estimated bytes that training needs, by part, without buffers of single operations and allocator overhead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Number of tokens of a shard.
    pub tokens: usize,
    /// Number of shards that run in parallel.
    pub in_flight: usize,
    /// Number of layers whose activations are kept, and of all layers.
    pub kept_layers: (usize, usize),
    /// Name and bytes of each part.
    parts: [(&'static str, usize); 8],
}

impl MemoryPlan {
    /// The plan for shards of `tokens` tokens (0: the trainer's target) on `threads` threads.
    pub fn new(
        spec: &ModelSpec,
        base: BaseMemory,
        config: &TrainConfig,
        threads: usize,
        tokens: usize,
    ) -> Self {
        let tokens = if tokens == 0 { shard_tokens(spec) } else { tokens };
        let in_flight = if shards_in_parallel(spec) { threads.max(1) } else { 1 };
        let all = tokens * in_flight * F32;
        let r = config.lora.r;
        // `Learner::check` reports settings that match no module.
        let modules = hone_model::adapter::weights::plan(spec, &config.lora).unwrap_or_default();
        let parameters = |((_, kind), factor): (&(usize, LinearKind), &ModuleScale)| {
            let (out, inner) = spec.linear_shape(*kind);
            factor.r * (out + inner)
        };
        let adapter = modules.iter().map(parameters).sum::<usize>() * F32;
        let moments = match config.optimizer.kind {
            OptimizerKind::AdamW => 2 * adapter,
            OptimizerKind::AdamW8bit => adapter / 2,
        };
        let averaged = config.average.kind != AverageKind::None;
        let starts_from_adapter =
            config.beta != 0.0 && !config.lora.init_adapter.as_os_str().is_empty();
        let references = [config.kl.sync_steps > 0, starts_from_adapter];
        let copies = 2 + usize::from(averaged) + references.map(usize::from).iter().sum::<usize>();
        let (layer, work) = (layer_values(spec, r) * all, layer_work(spec) * all);
        let kept = kept(config, spec, tokens * in_flight);
        let one_layer = work + if kept == 0 { layer } else { 0 };
        let logits = logits_in_memory(tokens, spec.vocab_size) * in_flight * F32;
        let widened = match compute::available(config.compute) {
            Compute::F32 => base.widened * threads.max(1),
            Compute::Bf16 => {
                let (hidden, inner, q, _) = widths(spec);
                (base.packed + hidden.max(inner).max(q) * tokens * BF16) * in_flight
            }
        };
        let parts = [
            ("base weights", base.bytes),
            // 16 bits or blocks widened to f32 at once, or the packed factors of a product in bf16.
            ("widened weights", widened),
            // The adapter, the copy that is being published, and, if configured, its average, the synchronized
            // reference and the adapter to start from, which is the first reference.
            ("adapter", adapter * copies),
            // Their sum, and those of each parallel shard.
            ("gradients", adapter * (1 + in_flight)),
            ("optimizer moments", moments),
            ("layer inputs", (spec.num_layers + 1) * spec.hidden_size * all),
            // Other activations of the kept layers.
            ("kept activations", kept * layer),
            // The larger of two that never exist at once: gradients of the layer in the backward pass, and logits
            // of one chunk of rows. If all layers are recomputed, the former with the layer's activations;
            // otherwise those take the place of kept ones.
            ("one layer or logits", one_layer.max(logits)),
        ];
        Self { tokens, in_flight, kept_layers: (kept, spec.num_layers), parts }
    }

    /// Bytes of a part.
    fn part(&self, name: &str) -> usize {
        self.parts.iter().find(|(part, _)| *part == name).map_or(0, |(_, bytes)| *bytes)
    }

    /// Sum of all parts.
    pub fn total(&self) -> usize {
        self.parts.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Name and bytes of the parts that exist only during a step.
    fn step_parts(&self) -> impl Iterator<Item = (&'static str, usize)> {
        let held = ["base weights", "adapter", "optimizer moments"];
        self.parts.into_iter().filter(move |(name, _)| !held.contains(name))
    }

    /// Sum of the parts that exist only during a step.
    fn step(&self) -> usize {
        self.step_parts().map(|(_, bytes)| bytes).sum()
    }
}

// The memory that the system and the process's control group leave.

/// Bytes that the process can still allocate: what the system, and the process's control group, leave. `None`
/// if neither is known.
pub fn available_memory() -> Option<usize> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let group = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"].map(read);
    available(&read("/proc/meminfo"), &group[0], &group[1])
}

/// [`available_memory`] from `/proc/meminfo` and a control group's `memory.max` and `memory.current` (version
/// 2).
fn available(meminfo: &str, limit: &str, used: &str) -> Option<usize> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib: Option<usize> = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    let system = kib.map(|kib| kib << 10);
    let bytes = |text: &str| text.trim().parse::<usize>().ok();
    // Without a limit the content is `max`.
    let group = bytes(limit).zip(bytes(used)).map(|(limit, used)| limit.saturating_sub(used));
    system.into_iter().chain(group).min()
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use hone_model::ModelSpec;
    use hone_model::adapter::BaseDtype;
    use hone_model::testing::{test_file, tiny_spec};
    use hone_model::weights::{LoadOptions, Quantize};

    use super::{BaseMemory, Compute, MemoryPlan, available, compute};
    use crate::config::{Recompute, TrainConfig};
    use crate::testing::tiny_config;

    fn wide() -> ModelSpec {
        ModelSpec::from_config(&serde_json::json!({
            "model_type": "qwen2", "vocab_size": 96, "hidden_size": 1024, "num_attention_heads": 16,
            "num_key_value_heads": 4, "num_hidden_layers": 24, "intermediate_size": 4096,
        }))
        .unwrap()
    }

    fn base(spec: &ModelSpec, stored: DType) -> BaseMemory {
        BaseMemory::new(spec, BaseDtype::Auto, |_| Ok(stored)).unwrap()
    }

    #[test]
    fn a_16_bit_base_takes_half_and_one_widened_matrix_per_thread() {
        let (spec, config) = (wide(), TrainConfig::default());
        let [wide, half] = [DType::F32, DType::BF16]
            .map(|stored| MemoryPlan::new(&spec, base(&spec, stored), &config, 2, 0));
        assert_eq!(wide.part("widened weights"), 0);
        // The largest matrix is one of the MLP, once for each of two threads.
        assert_eq!(half.part("widened weights"), 2 * 4 * 1024 * 4096);
        assert!(
            (0.5..0.501)
                .contains(&(half.part("base weights") as f64 / wide.part("base weights") as f64)),
            "{half:?}"
        );
        assert_eq!(half.step() - half.part("widened weights"), wide.step());
        let all = BaseMemory::new(&spec, BaseDtype::Float32, |_| Ok(DType::BF16)).unwrap();
        assert_eq!(all, base(&spec, DType::F32));
    }

    #[test]
    fn products_in_bf16_pack_their_factors() {
        let (spec, config) =
            (wide(), TrainConfig { compute: Compute::Bf16, ..TrainConfig::default() });
        let plan = MemoryPlan::new(&spec, base(&spec, DType::F32), &config, 2, 100);
        // The largest matrix, and the activations of the MLP; one shard runs at a time.
        let expected = match compute::available(config.compute) {
            Compute::Bf16 => 2 * (1024 * 4096 + 4096 * 100),
            Compute::F32 => 0,
        };
        assert_eq!(plan.part("widened weights"), expected);
    }

    #[test]
    fn a_quantized_base_takes_the_bytes_of_its_blocks() {
        let (spec, config) = (wide(), TrainConfig::default());
        let memory = |quantize| {
            let options = LoadOptions { quantize, ..LoadOptions::default() };
            BaseMemory::new(&spec, options, |_| Ok(DType::BF16)).unwrap()
        };
        let [half, eight, four] = Quantize::ALL.map(memory);
        assert!((0.531..0.532).contains(&(eight.bytes as f64 / half.bytes as f64)), "{eight:?}");
        assert!((0.281..0.283).contains(&(four.bytes as f64 / half.bytes as f64)), "{four:?}");
        assert_eq!((eight.widened, four.widened), (half.widened, half.widened));
        let plan = MemoryPlan::new(&spec, four, &config, 2, 0);
        assert_eq!(plan.part("base weights"), four.bytes);

        // Rows of 48 values are not whole blocks, and stay in 16 bits.
        let file = test_file("fixtures/gguf/qwen2-q8_0.gguf");
        let read = BaseMemory::read(&tiny_spec(), &[file], BaseDtype::Auto).unwrap();
        let held: usize = tiny_spec()
            .weight_shapes()
            .iter()
            .map(|(_, shape)| match shape[..] {
                [rows, 48] => rows * 48 * 2,
                [rows, columns] => rows * columns / 32 * 34,
                _ => shape[0] * 4,
            })
            .sum();
        assert_eq!(read.bytes, held);
    }

    #[test]
    fn from_a_hidden_size_of_512_one_shard_runs_at_a_time() {
        let plan = |hidden_size| {
            let spec = ModelSpec { hidden_size, ..wide() };
            let plan = MemoryPlan::new(&spec, base(&spec, DType::F32), &tiny_config(), 4, 0);
            (plan.in_flight, plan.tokens)
        };
        assert_eq!([plan(511), plan(512)], [(4, 256), (1, 1024)]);
    }

    #[test]
    fn recomputing_layers_bounds_the_kept_activations() {
        let plan = |recompute, tokens| {
            let config = TrainConfig { recompute, ..TrainConfig::default() };
            MemoryPlan::new(&wide(), base(&wide(), DType::F32), &config, 2, tokens)
        };
        assert_eq!(plan(Recompute::Never, 4096).kept_layers.0, 24);
        assert_eq!(plan(Recompute::Always, 4096).part("kept activations"), 0);
        for tokens in [64, 1024, 4096, 100_000] {
            let plan = plan(Recompute::Auto, tokens);
            assert!(plan.part("kept activations") <= super::KEPT_BYTES, "{plan:?}");
        }
        assert_eq!(plan(Recompute::Auto, 64).kept_layers.0, 24);
        assert!((1..24).contains(&plan(Recompute::Auto, 4096).kept_layers.0));
    }

    #[test]
    fn available_memory_is_the_minimum_of_system_and_control_group() {
        let meminfo = "MemTotal:  24000 kB\nMemAvailable:    1000 kB\n";
        assert_eq!(available(meminfo, "", ""), Some(1_024_000));
        assert_eq!(available(meminfo, "max\n", "5000\n"), Some(1_024_000));
        assert_eq!(available(meminfo, "500000\n", "100000\n"), Some(400_000));
        assert_eq!(available("", "500000\n", "600000\n"), Some(0));
        assert_eq!(available("", "max\n", "5\n"), None);
    }
}
