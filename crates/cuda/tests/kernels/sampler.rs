//! Passes and samples of a sampler against hone-model's forward pass, with the libraries of `fake_cuda.cpp`.

use std::env;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use hone_cuda::{
    CubinCache, DeviceFloat, DeviceMemory, DeviceModel, DevicePolicy, DeviceSampler, DeviceTrainer,
    Gpu, PackedSegment, PassLimits, RowDraw, SamplerLimits, SequencePart, StreamPriority,
    TokenBatch,
};
use hone_model::adapter::LoraConfig;
use hone_model::adapter::weights::LoraWeights;
use hone_model::testing::{FAMILIES, randomize, varied};
use hone_model::{Model, device};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::device::{ALL, run};
use super::emulator::values;
use super::trainer::{difference, floats, model, take_the_rest};

const POSITIONS: usize = 64;
const PAGE: usize = 16;

const LIMITS: SamplerLimits =
    SamplerLimits { tokens: 70, decoding: 5, sequences: 6, pages: 24, slots: 2, workspace: 512 };

/// A model with two adapters, on the processor and on the device.
struct Subject {
    model: Model,
    adapters: [LoraWeights; 2],
    base: Arc<DeviceModel>,
    sampler: DeviceSampler,
}

impl Subject {
    fn new(gpu: &Arc<Gpu>, name: &str, float: DeviceFloat, config: &LoraConfig) -> Self {
        let model = model(name, float);
        let shape = device::decoder_shape(model.spec(), POSITIONS);
        let mut upload = DeviceModel::open(gpu, &shape, float, 0).unwrap();
        device::upload(&model, POSITIONS, |name, values| upload.upload(name, values)).unwrap();
        let adapters = [1, 2].map(|seed| {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let spec = model.spec();
            let lora =
                LoraWeights::fresh(spec, config, &mut rng, DType::F32, &Device::Cpu).unwrap();
            randomize(&lora, seed);
            if float == DeviceFloat::Bf16 {
                for (_, var) in lora.parameters() {
                    let rounded = var.to_dtype(DType::BF16).and_then(|t| t.to_dtype(DType::F32));
                    var.set(&rounded.unwrap().detach()).unwrap();
                }
            }
            lora
        });
        let modules = device::adapter_modules(&adapters[0]);
        let cache = CubinCache::new(Path::new(&env::var_os("HONE_CUBINS").unwrap()));
        let free = gpu.free_bytes().unwrap();
        let plans = DeviceSampler::plan(&shape, &modules, float, &LIMITS).unwrap();
        let planned: u64 = plans.iter().map(hone_cuda::ArenaPlan::total).sum();
        let base = upload.finish().unwrap();
        let priority = StreamPriority::Serving;
        let sampler = DeviceSampler::open(&base, &cache, &modules, &LIMITS, 0, priority);
        let mut sampler = sampler.unwrap();
        assert_eq!(free - gpu.free_bytes().unwrap(), planned);
        for (slot, lora) in adapters.iter().enumerate() {
            let values = device::adapter_values(lora, sampler.layout()).unwrap();
            sampler.set_adapter(slot, &values).unwrap();
        }
        Self { model, adapters, base, sampler }
    }

    /// Logits `[tokens][vocab]`.
    fn on_cpu(&self, ids: &[u32], slot: Option<usize>) -> Vec<Vec<f32>> {
        let input = Tensor::new(ids, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
        let lora = slot.map(|slot| &self.adapters[slot]);
        let logits = floats(&self.model.forward(&input, lora, None).unwrap());
        logits.chunks(self.model.spec().vocab_size).map(<[f32]>::to_vec).collect()
    }
}

/// A sequence with given tokens and pages.
struct Sequence {
    ids: Vec<u32>,
    pages: Vec<u32>,
    slot: Option<usize>,
    /// Tokens that are computed.
    len: usize,
}

impl Sequence {
    fn new(count: usize, vocab: usize, factor: usize, pages: &[u32], slot: Option<usize>) -> Self {
        let ids = (0..count).map(|i| ((i + 3) * factor % vocab) as u32).collect();
        Self { ids, pages: pages.to_vec(), slot, len: 0 }
    }

    /// The next tokens, with the pages that they need.
    fn part(&self, count: usize) -> SequencePart<'_> {
        let end = self.len + count;
        SequencePart {
            ids: &self.ids[self.len..end],
            position: self.len,
            pages: &self.pages[..end.div_ceil(PAGE)],
            slot: self.slot,
        }
    }
}

fn log_softmax(logits: &[f32]) -> Vec<f32> {
    let most = logits.iter().copied().fold(f32::MIN, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - most).exp()).sum();
    logits.iter().map(|x| (f64::from(x - most) - sum.ln()) as f32).collect()
}

/// Computes parts of prompts by their sequences and numbers of tokens, and one token of each sequence that decodes.
/// Compares log-probabilities with those of the processor.
fn pass(
    subject: &mut Subject,
    all: &mut [Sequence],
    decoding: &[usize],
    prompts: &[(usize, usize)],
    tolerance: f64,
    what: &str,
) {
    let rows: Vec<_> = decoding.iter().map(|i| all[*i].part(1)).collect();
    let parts: Vec<_> = prompts.iter().map(|(i, count)| all[*i].part(*count)).collect();
    subject.sampler.compute(&rows, &parts).unwrap();
    let mut logits = Vec::new();
    for (row, index) in decoding.iter().enumerate() {
        let sequence = &all[*index];
        subject.sampler.logits(row, &mut logits).unwrap();
        let expected = subject.on_cpu(&sequence.ids[..=sequence.len], sequence.slot);
        let error = difference(&log_softmax(&logits), &log_softmax(&expected[sequence.len]));
        assert!(error < tolerance, "{what}: position {} of {index}: {error:e}", sequence.len);
    }
    decoding.iter().for_each(|index| all[*index].len += 1);
    prompts.iter().for_each(|(index, count)| all[*index].len += count);
}

fn check_families(float: DeviceFloat, tolerance: f64) {
    let gpu = Arc::new(Gpu::open(0).unwrap());
    let free = gpu.free_bytes().unwrap();
    let config = LoraConfig { r: 3, alpha: 4.0, ..LoraConfig::default() };
    for (i, name) in FAMILIES.iter().enumerate() {
        // Adapters on all linear layers, or on some.
        let config = if i % 2 == 0 { config.clone() } else { varied(config.clone()) };
        let mut subject = Subject::new(&gpu, name, float, &config);
        let _rest = take_the_rest(&gpu);
        let vocab = subject.model.spec().vocab_size;
        let mut all = [
            Sequence::new(70, vocab, 31, &[5, 0, 17, 8], Some(0)),
            Sequence::new(60, vocab, 31, &[5, 0, 9, 11], Some(0)),
            Sequence::new(30, vocab, 7, &[3, 1], Some(1)),
            Sequence::new(20, vocab, 57, &[4, 23], None),
        ];
        // Parts of any size, also of one token, while others decode.
        pass(&mut subject, &mut all, &[], &[(0, 7), (2, 20), (3, 1)], tolerance, name);
        pass(&mut subject, &mut all, &[2, 3], &[(0, 1)], tolerance, name);
        pass(&mut subject, &mut all, &[3, 2], &[(0, 34)], tolerance, name);
        // The second sequence has the first 36 tokens in common: two pages, and a part of the third.
        subject.sampler.copy_pages(&[[17, 9]]).unwrap();
        (all[1].len, all[1].ids[36]) = (36, 2);
        pass(&mut subject, &mut all, &[3, 0], &[(1, 3)], tolerance, name);
        for _ in 0..5 {
            pass(&mut subject, &mut all, &[1, 0, 3, 2], &[], tolerance, name);
        }
        pass(&mut subject, &mut all, &[2], &[(1, 12), (0, 14)], tolerance, name);
        pass(&mut subject, &mut all, &[0, 1], &[], tolerance, name);
        // The adapters change places, which takes no memory.
        let layout = subject.sampler.layout();
        let values =
            [1, 0].map(|of| device::adapter_values(&subject.adapters[of], layout).unwrap());
        for swap in 0..if i == 0 { 1_000 } else { 2 } {
            subject.sampler.set_adapter(swap % 2, &values[swap % 2]).unwrap();
        }
        subject.adapters.reverse();
        let mut fresh = [Sequence::new(9, vocab, 11, &[17], Some(1))];
        pass(&mut subject, &mut fresh, &[], &[(0, 8)], tolerance, name);
        pass(&mut subject, &mut fresh, &[0], &[], tolerance, name);
    }
    assert_eq!(gpu.free_bytes().unwrap(), free);
}

#[test]
fn log_probabilities_of_every_family_equal_those_of_the_cpu() {
    run("sampler::families_in_f32", &ALL, &[]);
}

#[test]
#[ignore = "started by `log_probabilities_of_every_family_equal_those_of_the_cpu`"]
fn families_in_f32() {
    check_families(DeviceFloat::F32, 1e-5);
}

#[test]
fn log_probabilities_in_bf16_are_near_those_of_the_cpu() {
    run("sampler::families_in_bf16", &ALL, &[]);
}

#[test]
#[ignore = "started by `log_probabilities_in_bf16_are_near_those_of_the_cpu`"]
fn families_in_bf16() {
    // The greatest difference of a whole vocabulary, from activations that are not rounded.
    check_families(DeviceFloat::Bf16, 3e-2);
}

#[test]
fn a_row_does_not_depend_on_the_others() {
    run("sampler::compositions", &ALL, &[]);
}

#[test]
#[ignore = "started by `a_row_does_not_depend_on_the_others`"]
fn compositions() {
    let gpu = Arc::new(Gpu::open(0).unwrap());
    let config = LoraConfig { r: 3, alpha: 4.0, ..LoraConfig::default() };
    for name in ["qwen2", "gemma2"] {
        let mut subject = Subject::new(&gpu, name, DeviceFloat::Bf16, &config);
        let vocab = subject.model.spec().vocab_size;
        let sampler = &mut subject.sampler;
        let mut results = Vec::new();
        // The whole prompt at once and alone, and in parts with another sequence of another adapter.
        for (with_other, parts) in [(false, &[40][..]), (true, &[13, 1, 26]), (true, &[16, 24])] {
            let mut one = Sequence::new(45, vocab, 31, &[5, 0, 17], Some(0));
            let mut other = Sequence::new(45, vocab, 7, &[6, 1, 3], Some(1));
            for count in parts {
                let mut prompts = vec![one.part(*count)];
                if with_other {
                    prompts.insert(0, other.part(2));
                }
                sampler.compute(&[], &prompts).unwrap();
                one.len += count;
                other.len += 2;
            }
            let (mut logits, mut drawn) = (Vec::new(), Vec::new());
            for step in 0..4 {
                let row = usize::from(with_other);
                let mut rows = vec![one.part(1)];
                if with_other {
                    rows.insert(0, other.part(1));
                }
                sampler.compute(&rows, &[]).unwrap();
                one.len += 1;
                other.len += 1;
                let mut own = Vec::new();
                sampler.logits(row, &mut own).unwrap();
                let draw = RowDraw { row, temperature: 0.8, uniform: 0.2 + 0.2 * f64::from(step) };
                let sample = sampler.sample(&[draw]).unwrap()[0].unwrap();
                let logps = log_softmax(&own.iter().map(|x| x / 0.8).collect::<Vec<_>>());
                let expected = {
                    let mut sum = 0.0;
                    let passes = |logp: &f32| {
                        sum += f64::from(*logp).exp();
                        sum > draw.uniform
                    };
                    logps.iter().position(passes).unwrap()
                };
                assert_eq!(sample.id as usize, expected, "{name}");
                assert!((sample.logprob - logps[expected]).abs() < 1e-5);
                logits.push(own);
                drawn.push(sample);
            }
            results.push((logits, drawn));
        }
        assert!(results.iter().all(|result| *result == results[0]), "{name}");
    }
}

#[test]
fn recorded_log_probabilities_are_those_of_a_training_pass() {
    run("sampler::parity", &ALL, &[]);
}

/// A training pass rounds the same values, and adds in another order.
#[test]
#[ignore = "started by `recorded_log_probabilities_are_those_of_a_training_pass`"]
fn parity() {
    let gpu = Arc::new(Gpu::open(0).unwrap());
    let config = LoraConfig { r: 3, alpha: 4.0, ..LoraConfig::default() };
    let (count, prompt) = (40, 9);
    for (name, float, bound) in [
        ("qwen2", DeviceFloat::F32, 1e-5),
        ("qwen2", DeviceFloat::Bf16, 1e-2),
        ("gemma2", DeviceFloat::Bf16, 1e-2),
        ("phi3", DeviceFloat::Bf16, 1e-2),
    ] {
        let mut subject = Subject::new(&gpu, name, float, &config);
        let vocab = subject.model.spec().vocab_size;
        let mut sequence = Sequence::new(prompt, vocab, 31, &[5, 0, 17], Some(0));
        let uniforms = values(count, 3);
        let mut recorded = Vec::new();
        subject.sampler.compute(&[], &[sequence.part(prompt - 1)]).unwrap();
        sequence.len = prompt - 1;
        for uniform in uniforms {
            subject.sampler.compute(&[sequence.part(1)], &[]).unwrap();
            let draw = RowDraw { row: 0, temperature: 0.8, uniform: uniform.abs().min(0.999) };
            let sample = subject.sampler.sample(&[draw]).unwrap()[0].unwrap();
            sequence.len += 1;
            sequence.ids.push(sample.id);
            recorded.push(sample.logprob);
        }
        let Subject { adapters, base, sampler, .. } = subject;
        let (layout, shape) = (sampler.layout().clone(), sampler.shape().clone());
        drop(sampler);
        let segments = [PackedSegment { start: 0, len: prompt + count, prefix: None }];
        let rows: Vec<u32> = (prompt - 1..prompt + count - 1).map(|row| row as u32).collect();
        let batch = TokenBatch {
            ids: &sequence.ids,
            segments: &segments,
            rows: &rows,
            targets: &sequence.ids[prompt..],
            temperatures: &vec![0.8; count],
        };
        let limits = PassLimits {
            tokens: prompt + count,
            rows: count,
            head_rows: 17,
            table_words: batch.table_words(&shape).unwrap(),
            kept_layers: 0,
            workspace: 512,
        };
        let cache = CubinCache::new(Path::new(&env::var_os("HONE_CUBINS").unwrap()));
        let modules = device::adapter_modules(&adapters[0]);
        // On the same weights.
        let mut trainer = DeviceTrainer::open(&base, &cache, &modules, &limits, 0).unwrap();
        let adapter = device::adapter_values(&adapters[0], &layout).unwrap();
        trainer.set_adapter(DevicePolicy::Adapter, &adapter).unwrap();
        let stats = trainer.forward(&batch, DevicePolicy::Adapter).unwrap();
        let errors = stats.iter().zip(&recorded).map(|([logp, _], of)| (logp - of).abs());
        let greatest = errors.fold(0.0, f32::max);
        assert!(greatest < bound, "{name} {float:?}: {greatest:e}");
    }
}

#[test]
fn what_a_sampler_cannot_compute_is_refused() {
    run("sampler::refuse", &ALL, &[]);
}

#[test]
#[ignore = "started by `what_a_sampler_cannot_compute_is_refused`"]
fn refuse() {
    let gpu = Arc::new(Gpu::open(0).unwrap());
    let config = LoraConfig { r: 3, alpha: 4.0, ..LoraConfig::default() };
    let mut subject = Subject::new(&gpu, "qwen2", DeviceFloat::F32, &config);
    let vocab = subject.model.spec().vocab_size as u32;
    let sampler = &mut subject.sampler;
    let part = SequencePart { ids: &[1], position: 0, pages: &[0], slot: None };
    let mut refusal =
        |decoding: &[SequencePart<'_>], prompts: &[SequencePart<'_>], expected: &str| {
            let error = sampler.compute(decoding, prompts).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        };
    refusal(&[part; 6], &[], "6 tokens of 6 sequences, of which 6 decode, are more than");
    refusal(&[part; 5], &[part; 2], "7 tokens of 7 sequences, of which 5 decode, are more than");
    refusal(&[], &[SequencePart { ids: &[1; 71], ..part }], "71 tokens of 1 sequences, of which 0");
    refusal(
        &[SequencePart { ids: &[1, 2], ..part }],
        &[],
        "a sequence decodes one token at a time",
    );
    let ids = [1, vocab];
    refusal(&[], &[SequencePart { ids: &ids, ..part }], "token 112 is outside the vocabulary of");
    refusal(
        &[SequencePart { position: 64, ..part }],
        &[],
        "position 64, but there are angles of 64",
    );
    refusal(&[SequencePart { position: 16, ..part }], &[], "pages [0] of 24 for 17 positions");
    refusal(&[SequencePart { pages: &[24], ..part }], &[], "pages [24] of 24 for 1 positions");
    refusal(&[SequencePart { slot: Some(2), ..part }], &[], "slot 2 of 2");
    let error = sampler.set_adapter(0, &[1.0]).unwrap_err().to_string();
    assert!(error.starts_with("an adapter of 1 values, not "), "{error}");
    let values = vec![0.0; sampler.layout().values];
    assert!(sampler.set_adapter(2, &values).unwrap_err().to_string().contains("for slot 2 of 2"));
    assert!(sampler.copy_pages(&[[0, 24]]).is_err());
    // A pass that is refused leaves no logits.
    let draw = RowDraw { row: 0, temperature: 1.0, uniform: 0.5 };
    assert_eq!(sampler.sample(&[draw]).unwrap_err().to_string(), "1 draws from 0 rows of logits");
    let error = sampler.logits(0, &mut Vec::new()).unwrap_err().to_string();
    assert_eq!(error, "row 0 of 0 rows of logits");
    sampler.compute(&[part], &[]).unwrap();
    assert!(sampler.sample(&[draw]).unwrap()[0].is_some());
    assert!(sampler.sample(&[]).unwrap().is_empty());
    assert!(sampler.sample(&[RowDraw { row: 1, ..draw }]).is_err());
    sampler.compute(&[], &[]).unwrap();

    let shape = sampler.shape().clone();
    let error = DeviceModel::open(&gpu, &shape, DeviceFloat::F32, 0).unwrap().finish().unwrap_err();
    assert_eq!(error.to_string(), "`cosines` was not uploaded");
    let modules = device::adapter_modules(&subject.adapters[0]);
    let huge = SamplerLimits { pages: usize::MAX / 2, ..LIMITS };
    let error = DeviceSampler::plan(&shape, &modules, DeviceFloat::F32, &huge).unwrap_err();
    assert!(error.to_string().starts_with("kernels cannot compute"));
}
