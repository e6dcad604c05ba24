//! Passes and updates on a device against hone-model's fused layers, with the libraries of `fake_cuda.cpp`.

use std::collections::HashMap;
use std::env;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor, safetensors};
use hone_cuda::{
    AdapterModule, Arena, ArenaPlan, CubinCache, DecoderShape, DeviceFloat, DeviceMemory,
    DeviceModel, DevicePolicy, DeviceTrainer, Gpu, HostFloats, PackedSegment, PassLimits,
    TokenBatch,
};
use hone_model::adapter::LoraConfig;
use hone_model::adapter::weights::LoraWeights;
use hone_model::device;
use hone_model::testing::{FAMILIES, family, randomize, varied};
use hone_model::transformer::{Segment, Segments};
use hone_model::{Model, ModelDir, ModelSpec};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::device::{ALL, run};
use super::emulator::values;

/// Segments of a tree of three levels, which is deeper than the windows, an empty one, and a sequence that is longer
/// than windows and tiles.
const TREE: [(usize, Option<usize>); 9] = [
    (9, None),
    (8, Some(0)),
    (5, Some(1)),
    (20, Some(1)),
    (4, Some(0)),
    (7, Some(4)),
    (0, Some(4)),
    (1, Some(4)),
    (37, None),
];

/// A batch whose rows are the completions of [`TREE`]: the last token of a prefix predicts for each segment that
/// continues it.
struct Batch {
    ids: Vec<u32>,
    segments: Vec<PackedSegment>,
    rows: Vec<u32>,
    targets: Vec<u32>,
    temperatures: Vec<f32>,
    /// Derivatives of a loss by log-probabilities and entropies.
    seeds: Vec<[f32; 2]>,
}

impl Batch {
    fn new(table: &[(usize, Option<usize>)], vocab: usize, seed: u64) -> Self {
        let mut end = 0;
        let segment = |&(len, prefix): &(usize, Option<usize>)| {
            end += len;
            PackedSegment { start: end - len, len, prefix }
        };
        let segments: Vec<PackedSegment> = table.iter().map(segment).collect();
        let mut rows = Vec::new();
        for PackedSegment { start, len, prefix } in &segments {
            if let Some(prefix) = prefix.filter(|_| *len > 0) {
                rows.push((segments[prefix].start + segments[prefix].len - 1) as u32);
                rows.extend((*start..start + len - 1).map(|row| row as u32));
            }
        }
        // Of the last sequence every third token.
        rows.extend((end - 30..end).step_by(3).map(|row| row as u32));
        let id = |i: usize, factor: usize| ((i + seed as usize) * factor % vocab) as u32;
        let count = rows.len();
        let seeds = values(2 * count, seed);
        let seeds = seeds.as_chunks().0.iter().map(|[a, b]| [*a as f32, *b as f32 * 0.25]);
        Self {
            ids: (0..end).map(|i| id(i, 31)).collect(),
            segments,
            targets: (0..count).map(|i| id(i, 57)).collect(),
            temperatures: (0..count).map(|i| [1.0, 0.7, 1.5][i % 3]).collect(),
            seeds: seeds.collect(),
            rows,
        }
    }

    fn on_device(&self) -> TokenBatch<'_> {
        let Self { ids, segments, rows, targets, temperatures, .. } = self;
        TokenBatch { ids, segments, rows, targets, temperatures }
    }
}

/// The tiny model of a family.
pub fn model(name: &str, float: DeviceFloat) -> Model {
    let dir = ModelDir::open(&family(name)).unwrap();
    let mut spec = ModelSpec::from_config(&dir.config).unwrap();
    let mut weights: HashMap<String, Tensor> = dir
        .weights
        .iter()
        .flat_map(|file| safetensors::load(file, &Device::Cpu).unwrap())
        .map(|(name, tensor)| (name, tensor.to_dtype(DType::F32).unwrap()))
        .collect();
    if !spec.head_dim.is_multiple_of(8) {
        // Kernels need a multiple of 8, as all published models have; other weights serve as well.
        (spec.head_dim, spec.rope.rotary_dim) = (16, 16);
        let random = |(i, (name, shape)): (usize, (String, Vec<usize>))| {
            let count = shape.iter().product();
            let first = if name.contains("norm") { 1.0 } else { 0.0 };
            let values = values(count, i as u64 + 7).into_iter().map(|x| first + 0.4 * x);
            let values: Vec<f64> = values.collect();
            let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
            (name, tensor.to_dtype(DType::F32).unwrap())
        };
        weights = spec.weight_shapes().into_iter().enumerate().map(random).collect();
    }
    for (name, tensor) in &mut weights {
        // The device's norms are f32.
        if float == DeviceFloat::Bf16 && !name.contains("norm") {
            *tensor = tensor.to_dtype(DType::BF16).unwrap();
            // Files have either type.
            if !name.ends_with("proj.weight") {
                *tensor = tensor.to_dtype(DType::F32).unwrap();
            }
        }
    }
    Model::new(spec, weights).unwrap()
}

pub fn floats(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

const POSITIONS: usize = 64;

fn shape(spec: &ModelSpec) -> DecoderShape {
    device::decoder_shape(spec, POSITIONS)
}

/// A model, an adapter, and both on the device.
struct Subject {
    model: Model,
    lora: LoraWeights,
    trainer: DeviceTrainer,
}

fn limits(shape: &DecoderShape, batch: &Batch, kept_layers: usize) -> PassLimits {
    PassLimits {
        tokens: batch.ids.len(),
        rows: batch.rows.len(),
        head_rows: 17,
        table_words: batch.on_device().table_words(shape).unwrap(),
        kept_layers,
        workspace: 512,
    }
}

impl Subject {
    fn new(
        gpu: &Arc<Gpu>,
        name: &str,
        float: DeviceFloat,
        config: &LoraConfig,
        keep: usize,
    ) -> Self {
        let model = model(name, float);
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let lora =
            LoraWeights::fresh(model.spec(), config, &mut rng, DType::F32, &Device::Cpu).unwrap();
        randomize(&lora, 2);
        let shape = shape(model.spec());
        let batch = Batch::new(&TREE, shape.vocab, 1);
        let limits = limits(&shape, &batch, keep);
        let modules = device::adapter_modules(&lora);
        let cache = CubinCache::new(Path::new(&env::var_os("HONE_CUBINS").unwrap()));
        let mut upload = DeviceModel::open(gpu, &shape, float, 0).unwrap();
        device::upload(&model, POSITIONS, |name, values| upload.upload(name, values)).unwrap();
        let on_device = upload.finish().unwrap();
        let free = gpu.free_bytes().unwrap();
        let plans = DeviceTrainer::plan(&shape, &modules, float, &limits).unwrap();
        let planned: u64 = plans.iter().map(hone_cuda::ArenaPlan::total).sum();
        let trainer = DeviceTrainer::open(&on_device, &cache, &modules, &limits, 0).unwrap();
        assert_eq!(free - gpu.free_bytes().unwrap(), planned);
        let mut subject = Self { model, lora, trainer };
        if float == DeviceFloat::Bf16 {
            for (_, var) in subject.lora.parameters() {
                let rounded = var.to_dtype(DType::BF16).and_then(|t| t.to_dtype(DType::F32));
                var.set(&rounded.unwrap().detach()).unwrap();
            }
        }
        let all = device::adapter_values(&subject.lora, subject.trainer.layout()).unwrap();
        subject.trainer.set_adapter(DevicePolicy::Adapter, &all).unwrap();
        subject
    }

    /// Statistics and gradients by the fused layers of the processor.
    fn on_cpu(&self, batch: &Batch) -> (Vec<f32>, Vec<f32>) {
        let tensor = |values: &[u32]| Tensor::new(values, &Device::Cpu).unwrap();
        let segment = |s: &PackedSegment| Segment { start: s.start, len: s.len, prefix: s.prefix };
        let table: Vec<Segment> = batch.segments.iter().map(segment).collect();
        let segments = Arc::new(Segments::new(&table).unwrap());
        let (ids, rows) = (tensor(&batch.ids), tensor(&batch.rows));
        let saved = self.model.forward_saving(&ids, &segments, &self.lora, None, 1).unwrap();
        let stats =
            self.model.stats(saved.hidden(), &rows, &batch.targets, &batch.temperatures).unwrap();
        let seeds = batch.seeds.concat();
        let seeds = Tensor::from_vec(seeds, (batch.rows.len(), 2), &Device::Cpu).unwrap();
        let gradients = self.model.backward(saved, &stats, &seeds, &self.lora).unwrap();
        let lora = self.lora.zeroed_copy().unwrap();
        lora.assign(&gradients).unwrap();
        let gradients = device::adapter_values(&lora, self.trainer.layout()).unwrap();
        (floats(&stats.detach()), gradients)
    }

    /// Statistics and gradients by the device.
    fn on_device(&mut self, batch: &Batch) -> (Vec<f32>, Vec<f32>) {
        self.trainer.clear_gradient().unwrap();
        let stats = self.trainer.forward(&batch.on_device(), DevicePolicy::Adapter).unwrap();
        self.trainer.backward(&batch.seeds).unwrap();
        (stats.concat(), self.trainer.gradient().unwrap())
    }

    /// The largest difference of a matrix's values, relative to the largest of the matrix.
    fn largest_difference(&self, found: &[f32], expected: &[f32]) -> f64 {
        let places = self.trainer.layout().places.values().flatten();
        places
            .map(|place| difference(&found[place.clone()], &expected[place.clone()]))
            .fold(0.0, f64::max)
    }
}

/// The largest difference relative to the largest value. Poison is not a number, and counts as infinite.
pub fn difference(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0.0_f64, |most, x| most.max(f64::from(x.abs())));
    assert!(largest > 0.0);
    let error = |(a, b): (&f32, &f32)| match f64::from((a - b).abs()) / largest {
        error if error.is_nan() => f64::INFINITY,
        error => error,
    };
    found.iter().zip(expected).map(error).fold(0.0, f64::max)
}

fn gpu() -> Arc<Gpu> {
    Arc::new(Gpu::open(0).unwrap())
}

/// Takes all memory that is left, so that what needs more than its plan fails.
pub fn take_the_rest(gpu: &Arc<Gpu>) -> Vec<Arena<Gpu>> {
    let mut plan = ArenaPlan::new("the rest");
    plan.add("all", gpu.free_bytes().unwrap());
    let rest = Arena::allocate(gpu, vec![plan], 0).unwrap();
    assert_eq!(gpu.free_bytes().unwrap(), 0);
    rest
}

fn config() -> LoraConfig {
    LoraConfig { r: 3, alpha: 4.0, ..LoraConfig::default() }
}

/// Compares every family, with adapters on all linear layers and on some.
fn check_families(float: DeviceFloat, of_stats: f64, of_gradients: f64) {
    let gpu = gpu();
    let free = gpu.free_bytes().unwrap();
    for name in FAMILIES {
        let configs = [config(), varied(config())];
        // Rounding does not depend on the adapter's places.
        let count = if float == DeviceFloat::F32 { 2 } else { 1 };
        for config in &configs[..count] {
            let mut subject = Subject::new(&gpu, name, float, config, 1);
            let _rest = take_the_rest(&gpu);
            let batch = Batch::new(&TREE, subject.model.spec().vocab_size, 3);
            let (expected, expected_gradient) = subject.on_cpu(&batch);
            let (found, gradient) = subject.on_device(&batch);
            let column = |stats: &[f32], i: usize| -> Vec<f32> {
                stats.iter().skip(i).step_by(2).copied().collect()
            };
            let [logps, entropies] =
                [0, 1].map(|i| difference(&column(&found, i), &column(&expected, i)));
            let gradients = subject.largest_difference(&gradient, &expected_gradient);
            assert!(logps < of_stats && entropies < of_stats, "{name}: {logps:e} {entropies:e}");
            assert!(gradients < of_gradients, "{name}: {gradients:e}");
        }
    }
    assert_eq!(gpu.free_bytes().unwrap(), free);
}

#[test]
fn passes_of_every_family_equal_those_of_the_cpu() {
    run("trainer::families_in_f32", &ALL, &[]);
}

#[test]
#[ignore = "started by `passes_of_every_family_equal_those_of_the_cpu`"]
fn families_in_f32() {
    check_families(DeviceFloat::F32, 1e-5, 1e-5);
}

#[test]
fn passes_in_bf16_are_near_those_of_the_cpu() {
    run("trainer::families_in_bf16", &ALL, &[]);
}

#[test]
#[ignore = "started by `passes_in_bf16_are_near_those_of_the_cpu`"]
fn families_in_bf16() {
    check_families(DeviceFloat::Bf16, 2e-2, 1e-1);
}

#[test]
fn recomputed_layers_and_shards_give_the_same_gradient() {
    run("trainer::recompute_and_add", &ALL, &[]);
}

#[test]
#[ignore = "started by `recomputed_layers_and_shards_give_the_same_gradient`"]
fn recompute_and_add() {
    let gpu = gpu();
    for (name, keeps) in [("qwen2", &[0, 1, 9][..]), ("gemma2", &[0, 9])] {
        let mut results = Vec::new();
        for keep in keeps.iter().copied() {
            let mut subject = Subject::new(&gpu, name, DeviceFloat::Bf16, &config(), keep);
            let batch = Batch::new(&TREE, subject.model.spec().vocab_size, 3);
            results.push(subject.on_device(&batch));
            let first = subject.on_device(&batch);
            assert!(first == results[results.len() - 1], "{name}: another pass");

            // Another policy with the same values.
            let all = device::adapter_values(&subject.lora, subject.trainer.layout()).unwrap();
            subject.trainer.set_adapter(DevicePolicy::Reference, &all).unwrap();
            let stats = subject.trainer.forward(&batch.on_device(), DevicePolicy::Reference);
            assert_eq!(stats.unwrap().concat(), first.0, "{name}: the reference");

            // The base model, and then a shorter batch, whose gradient is added.
            let before = subject.trainer.gradient().unwrap();
            let base = subject.trainer.forward(&batch.on_device(), DevicePolicy::Base).unwrap();
            let zero = subject.lora.zeroed_copy().unwrap();
            let cpu = Subject { lora: zero, ..subject };
            let expected = cpu.on_cpu(&batch).0;
            subject = cpu;
            assert!(difference(&base.concat(), &expected) < 2e-2, "{name}: the base");
            let error = subject.trainer.backward(&batch.seeds).unwrap_err().to_string();
            assert!(error.starts_with("no forward pass with the adapter of"), "{error}");
            let short = Batch::new(&TREE[8..], subject.model.spec().vocab_size, 5);
            subject.trainer.forward(&short.on_device(), DevicePolicy::Adapter).unwrap();
            subject.trainer.backward(&short.seeds).unwrap();
            let sum = subject.trainer.gradient().unwrap();
            let alone = subject.on_device(&short).1;
            let parts: Vec<f32> = before.iter().zip(&alone).map(|(a, b)| a + b).collect();
            assert!(subject.largest_difference(&sum, &parts) < 1e-5, "{name}: a sum of shards");
        }
        assert!(results.iter().all(|result| *result == results[0]), "{name}: recomputation");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    run("trainer::refuse", &ALL, &[]);
}

#[test]
#[ignore = "started by `what_does_not_fit_is_refused`"]
fn refuse() {
    let gpu = gpu();
    let mut subject = Subject::new(&gpu, "qwen2", DeviceFloat::F32, &config(), 1);
    let batch = Batch::new(&TREE, 112, 1);
    let mut refusal = |change: &dyn Fn(&mut Batch), expected: &str| {
        let mut batch = Batch::new(&TREE, 112, 1);
        change(&mut batch);
        let error = subject
            .trainer
            .forward(&batch.on_device(), DevicePolicy::Adapter)
            .unwrap_err()
            .to_string();
        assert!(error.starts_with(expected), "{error}");
    };
    refusal(&|batch| batch.ids[3] = 112, "token 112 is outside the vocabulary of 112");
    refusal(&|batch| batch.targets[3] = 113, "token 113 is outside");
    refusal(&|batch| batch.rows[0] = 91, "row 91 is outside the 91 tokens");
    refusal(&|batch| batch.ids.truncate(90), "90 ids for segments of 91 tokens");
    refusal(&|batch| batch.targets.truncate(3), "55 rows, 3 targets, 55 temperatures");
    refusal(&|batch| *batch = Batch::new(&[(92, None)], 112, 1), "92 tokens that predict 10 are");
    refusal(&|batch| *batch = Batch::new(&[(70, None)], 112, 1), "position 64, but there are");
    let small = shape(subject.model.spec());
    let mut upload = DeviceModel::open(&gpu, &small, DeviceFloat::F32, 0).unwrap();
    let error = upload.upload("model.norm.weight", HostFloats::F32(&[1.0])).unwrap_err();
    assert_eq!(error.to_string(), "`model.norm.weight` has 1 values, not 32");
    let error = upload.upload("model.norm", HostFloats::F32(&[1.0])).unwrap_err();
    assert_eq!(error.to_string(), "no weight `model.norm`");
    assert_eq!(upload.finish().unwrap_err().to_string(), "`cosines` was not uploaded");
    assert!(subject.trainer.set_adapter(DevicePolicy::Adapter, &[1.0]).is_err());
    // No rows are a pass, too.
    let TokenBatch { ids, segments, .. } = batch.on_device();
    let (rows, targets, temperatures) = (&[], &[], &[]);
    let empty = TokenBatch { ids, segments, rows, targets, temperatures };
    assert!(subject.trainer.forward(&empty, DevicePolicy::Adapter).unwrap().is_empty());
    subject.trainer.backward(&[]).unwrap();
    assert!(subject.trainer.gradient().unwrap().iter().all(|g| *g == 0.0));

    let shape = shape(subject.model.spec());
    let limits = limits(&shape, &batch, 1);
    let plan = |shape: &DecoderShape, name: &str, rank: usize| {
        let modules = [AdapterModule { name: name.to_owned(), rank, scale: 1.0 }];
        DeviceTrainer::plan(shape, &modules, DeviceFloat::Bf16, &limits)
    };
    let name = "model.layers.0.mlp.up_proj";
    assert!(plan(&shape, name, 2).is_ok());
    let error = plan(&shape, name, 0).unwrap_err().to_string();
    assert_eq!(error, "the adapter of model.layers.0.mlp.up_proj has rank 0");
    let error = plan(&shape, "model.layers.3.mlp.up_proj", 2).unwrap_err().to_string();
    assert_eq!(error, "no linear layer `model.layers.3.mlp.up_proj` for an adapter");
    let odd = DecoderShape { head_dim: 12, ..shape.clone() };
    assert!(plan(&odd, name, 2).unwrap_err().to_string().starts_with("heads of 12 values"));
    let odd = DecoderShape { key_heads: 3, ..shape };
    assert!(plan(&odd, name, 2).unwrap_err().to_string().starts_with("kernels cannot compute"));
}
