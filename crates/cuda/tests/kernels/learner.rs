//! Whole steps of hone-train whose passes run on a device, against the same steps on the processor, with the libraries
//! of `fake_cuda.cpp`.

use std::collections::BTreeMap;
use std::env;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::abort;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use hone_cuda::DeviceFloat;
use hone_model::adapter::LoraConfig;
use hone_model::device::CudaDevice;
use hone_model::testing::FAMILIES;
use hone_train::config::{KlConfig, PeakRate, TrainConfig};
use hone_train::{Learner, Snapshot, TrainSample};

use super::device::{ALL, run};
use super::fake::command;
use super::trainer::model;

#[test]
fn steps_on_a_device_follow_those_on_the_processor() {
    run("learner::follow", &ALL, &[]);
}

/// Groups of a common prompt, a correction, and a completion with a masked token.
fn samples(seed: usize, vocab: usize) -> Vec<TrainSample> {
    let id = |i: usize| ((i * 31 + seed * 7) % vocab) as u32;
    let sample = |i: usize| {
        let ids: Vec<u32> = (0..4 + i % 5).map(|t| id(i * 11 + t)).collect();
        TrainSample {
            prompt_ids: (0..20 + i / 4 * 3).map(|t| id(i / 4 + t * 2)).collect(),
            logprobs: if i == 5 { Vec::new() } else { vec![-3.0 - i as f32 * 0.1; ids.len()] },
            masked: if i == 3 { (0..ids.len()).map(|t| t == 1).collect() } else { Vec::new() },
            ids,
            temperature: [1.0, 0.8][i % 2],
            advantage: [1.0, -0.5, 0.25][i % 3],
            version: 1,
            correction: i == 5,
            ..TrainSample::default()
        }
    };
    (0..6).map(sample).collect()
}

fn on_host(name: &str, config: &TrainConfig) -> Learner {
    Learner::with_model(model(name, DeviceFloat::F32), config).unwrap()
}

fn device(ordinal: usize) -> CudaDevice {
    CudaDevice { ordinal, kernels: PathBuf::from(env::var_os("HONE_CUBINS").unwrap()) }
}

fn on_device(name: &str, config: &TrainConfig) -> Learner {
    let mut learner = on_host(name, config);
    let base = device(0).load(learner.model(), config.compute, 64).unwrap();
    learner.use_device(&base, 64).unwrap();
    learner
}

/// The values of the served adapter's files.
fn values(learner: &Learner) -> BTreeMap<String, Vec<f32>> {
    let folder = tempfile::tempdir().unwrap();
    learner.snapshot().unwrap().write(folder.path(), "base").unwrap();
    let file = folder.path().join("adapter_model.safetensors");
    let tensors = candle_core::safetensors::load(file, &candle_core::Device::Cpu).unwrap();
    let values = |tensor: candle_core::Tensor| tensor.flatten_all().unwrap().to_vec1().unwrap();
    tensors.into_iter().map(|(name, tensor)| (name, values(tensor))).collect()
}

fn config() -> TrainConfig {
    TrainConfig {
        learning_rate: PeakRate::Fixed(1e-2),
        warmup_steps: Some(0.0),
        num_iterations: 2,
        beta: 0.1,
        kl: KlConfig { sync_steps: 2, ..KlConfig::default() },
        correction_weight: 0.5,
        top_entropy_quantile: 0.8,
        max_sampler_difference: 0.0,
        lora: LoraConfig { r: 3, ..LoraConfig::default() },
        ..TrainConfig::default()
    }
}

#[test]
#[ignore = "started by `steps_on_a_device_follow_those_on_the_processor`"]
fn follow() {
    let config = config();
    for name in FAMILIES {
        let (mut expected, mut found) = (on_host(name, &config), on_device(name, &config));
        let vocab = expected.spec().vocab_size;
        for step in 0..5 {
            let samples = samples(step, vocab);
            let own = expected.step(&samples, 1, 16).unwrap();
            let other = found.step(&samples, 1, 16).unwrap();
            assert_eq!((&own.skipped, &other.skipped), (&None, &None));
            for (metric, value) in &own.metrics {
                let difference = (value - other.metrics[metric]).abs();
                let bound = 1e-4 * value.abs().max(1.0);
                // Shards on the device are longer.
                let is_layout = metric == "loss_token_fraction";
                assert!(is_layout || difference < bound, "{name} {step} {metric}: {difference:e}");
            }
        }
        for (tensor, own) in values(&expected) {
            let other = &values(&found)[&tensor];
            let largest = own.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
            let errors = own.iter().zip(other).map(|(a, b)| (a - b).abs());
            let error = errors.fold(0.0, f32::max);
            assert!(largest > 0.0 && error < 5e-3 * largest, "{name} {tensor}: {error:e}");
        }
    }
    // A checkpoint of either is one of both.
    let folder = tempfile::tempdir().unwrap();
    let (mut first, mut second) = (on_device("qwen2", &config), on_host("qwen2", &config));
    first.step(&samples(1, 112), 1, 16).unwrap();
    let saved = folder.path().join("checkpoint");
    first.save(&saved, &"").unwrap();
    second.load(&saved).unwrap();
    assert_eq!(values(&first), values(&second));

    let error = device(3).load(second.model(), config.compute, 64).unwrap_err().to_string();
    assert_eq!(error, "`model.device`: there is no device 3: the driver shows 1, counted from 0");
}

#[test]
fn scores_are_those_of_the_processor_and_leave_steps_alone() {
    run("learner::score", &ALL, &[]);
}

fn scores(policy: &Snapshot, samples: &[TrainSample]) -> Vec<f32> {
    let of = |s: &TrainSample| policy.score(&s.prompt_ids, &s.ids, s.temperature).unwrap();
    samples.iter().flat_map(of).collect()
}

#[test]
#[ignore = "started by `scores_are_those_of_the_processor_and_leave_steps_alone`"]
fn score() {
    let config = TrainConfig { micro_batch: 2, ..config() };
    let samples = &samples(0, 112)[..5];
    let folder = tempfile::tempdir().unwrap();
    let other = TrainConfig { lora: LoraConfig { r: 2, ..config.lora.clone() }, ..config.clone() };
    let host = on_host("qwen2", &other).snapshot().unwrap();
    host.write(&folder.path().join("other"), "base").unwrap();
    let expected = {
        let mut learner = on_device("qwen2", &config);
        let stats = learner.step(samples, 1, 16).unwrap();
        let device = learner.snapshot().unwrap();
        device.write(&folder.path().join("own"), "base").unwrap();
        // An adapter of another rank is scored by the processor.
        for (name, bound) in [("own", 1e-5), ("other", 0.0)] {
            let [device, host] = [&device, &host].map(|s| {
                scores(&s.with_adapter(&folder.path().join(name)).unwrap(), &samples[..2])
            });
            let largest = host.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
            let errors = device.iter().zip(&host).map(|(a, b)| (a - b).abs());
            let error = errors.fold(0.0, f32::max);
            assert!(error <= bound * largest, "{name}: {error:e} of {largest}");
            assert_eq!(device == host, bound == 0.0, "{name}");
        }
        (stats, values(&learner))
    };
    // The memory is for one learner at a time.
    let mut learner = on_device("qwen2", &config);
    let (snapshot, is_done) = (learner.snapshot().unwrap(), AtomicBool::new(false));
    let (found, all) = thread::scope(|scope| {
        let scorer = scope.spawn(|| {
            let mut all = vec![scores(&snapshot, &samples[..1])];
            while !is_done.load(Ordering::Acquire) {
                all.push(scores(&snapshot, &samples[..1]));
            }
            all
        });
        let found = learner.step(samples, 1, 16);
        is_done.store(true, Ordering::Release);
        (found.unwrap(), scorer.join().unwrap())
    });
    assert_eq!((found, values(&learner)), expected);
    assert!(all.len() > 1 && all.iter().all(|scores| *scores == all[0]));
}

#[test]
fn a_run_that_is_killed_goes_on_with_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("checkpoint");
    let setting = [("HONE_CHECKPOINT", place.to_str().unwrap())];
    let Some((mut first, _libraries)) = command(&ALL) else { return };
    let first = first.args(["--exact", "learner::end_early", "--ignored"]).envs(setting);
    let output = first.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.signal().is_some() && place.exists(), "{errors}");
    run("learner::go_on", &ALL, &setting);
}

fn checkpoint() -> PathBuf {
    PathBuf::from(env::var_os("HONE_CHECKPOINT").unwrap())
}

/// The process ends a step after its checkpoint, without any destructor.
#[test]
#[ignore = "started by `a_run_that_is_killed_goes_on_with_the_same_bits`"]
fn end_early() {
    let mut learner = on_device("gemma2", &config());
    for step in 0..3 {
        learner.step(&samples(step, 112), 1, 16).unwrap();
        if step == 1 {
            learner.save(&checkpoint(), &"").unwrap();
        }
    }
    abort();
}

#[test]
#[ignore = "started by `a_run_that_is_killed_goes_on_with_the_same_bits`"]
fn go_on() {
    let mut learner = on_device("gemma2", &config());
    let steps: Vec<_> =
        (0..4).map(|step| learner.step(&samples(step, 112), 1, 16).unwrap()).collect();
    let expected = values(&learner);
    // The memory is for one learner at a time.
    drop(learner);
    let mut learner = on_device("gemma2", &TrainConfig { seed: 99, ..config() });
    learner.load(&checkpoint()).unwrap();
    for (step, expected) in steps.iter().enumerate().skip(2) {
        assert_eq!(learner.step(&samples(step, 112), 1, 16).unwrap(), *expected);
    }
    assert_eq!(values(&learner), expected);
}
