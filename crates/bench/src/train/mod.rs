//! `hone-bench train`: the duration of an optimizer step and its parts. Sampling and scoring are not included.

mod subject;

use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};

use hone_core::memory;
use hone_model::adapter::{BaseDtype, LoraConfig};
use hone_model::device::CudaDevice;
use hone_model::kernels::compute::Compute;
use hone_train::config::{DeviceChoice, PeakRate, Recompute, TrainConfig};
use hone_train::memory::BaseMemory;
use hone_train::{Learner, MemoryPlan, StepTiming, TrainSample};

use super::measure::{Seconds, machine_load, threads_or_cores, timed};
use hone_config::flags::{compute, device};
use subject::{Data, Workload};

pub use subject::Subject;

/// `hone-bench train`, which measures neither sampling nor scoring.
#[derive(Debug, Args)]
pub struct TrainBenchOptions {
    /// `embedded`, `100m` or `100m-bf16` (random weights), or a Hugging Face directory
    #[arg(long, value_name = "MODEL", default_value = "embedded")]
    pub model: Subject,
    /// Only write the random model as a Hugging Face directory
    #[arg(long, value_name = "DIR")]
    pub write_model: Option<PathBuf>,
    /// Prompts per step [default: 8 for the embedded model, else 1]
    #[arg(long, value_name = "N")]
    pub groups: Option<usize>,
    /// Completions per prompt [default: 8]
    #[arg(long, value_name = "N")]
    pub group_size: Option<usize>,
    /// Tokens per prompt [default: 20 for the embedded model, else 64]
    #[arg(long, value_name = "N")]
    pub prompt: Option<usize>,
    /// Tokens that all prompts begin with. If above 0, steps on prompts of the same lengths without a common
    /// beginning are measured too
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub common: usize,
    /// Mean tokens per completion [default: 24 for the embedded model, else 448]
    #[arg(long, value_name = "N")]
    pub completion: Option<usize>,
    /// Largest relative deviation of a length from the mean [default: 0.5 for the embedded model,
    /// else 0]
    #[arg(long, value_name = "SHARE")]
    pub spread: Option<f64>,
    /// Read the samples from a JSON file: {"samples": [{prompt, completion, advantage, logprobs?}]}
    #[arg(long, value_name = "FILE", conflicts_with_all = ["groups", "group_size", "prompt", "common", "completion", "spread"])]
    pub data: Option<PathBuf>,
    /// Rank of the adapter on all linear layers
    #[arg(long, value_name = "R", default_value_t = 16)]
    pub rank: usize,
    /// Coefficient of the KL divergence; 0 disables the reference policy
    #[arg(long, value_name = "BETA", default_value_t = 0.01)]
    pub beta: f64,
    /// Number of measured steps
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub steps: usize,
    /// Whether to recompute layers in the backward pass: auto, always or never
    #[arg(long, value_name = "WHEN", default_value = "auto", value_parser = recompute)]
    pub recompute: Recompute,
    /// Arithmetic of products with the base model's matrices
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = compute())]
    pub compute: Compute,
    /// What computes the passes: cpu or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "cpu", value_parser = device)]
    pub device: DeviceChoice,
    /// Number of threads; 0 for one per core
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub threads: usize,
}

impl TrainBenchOptions {
    /// The shape of random samples: by default 64 completions in groups of 8 for the embedded model, else
    /// one group of 8 sequences of 512 tokens.
    fn shape(&self) -> Workload {
        let (groups, prompt, completion, spread) = match self.model {
            Subject::Embedded => (8, 20, 24, 0.5),
            _ => (1, 64, 448, 0.0),
        };
        Workload {
            groups: self.groups.unwrap_or(groups),
            group_size: self.group_size.unwrap_or(8),
            prompt: self.prompt.unwrap_or(prompt),
            common: self.common,
            completion: self.completion.unwrap_or(completion),
            spread: self.spread.unwrap_or(spread),
        }
    }
}

/// Steps before the timed ones; they fill the optimizer's moments and the allocator's pools.
const WARM_UP: usize = 2;

/// Parses `auto`, `always` or `never`.
fn recompute(text: &str) -> Result<Recompute, String> {
    serde_json::from_value(text.into()).map_err(|_| "not auto, always or never".to_owned())
}

/// The measurements. Times are of the fastest timed step; memory is the peak of the warm-up steps, which
/// do the same work.
pub(crate) fn run(options: &TrainBenchOptions) -> anyhow::Result<Value> {
    let threads = threads_or_cores(options.threads);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    pool.install(|| measure(options, threads))
}

fn measure(options: &TrainBenchOptions, threads: usize) -> anyhow::Result<Value> {
    let load = machine_load();
    let start_bytes = memory::resident();
    let config = TrainConfig {
        beta: options.beta,
        recompute: options.recompute,
        compute: options.compute,
        threads,
        learning_rate: PeakRate::Fixed(1e-5),
        warmup_steps: Some(0.0),
        // The whole step in one pass.
        micro_batch: usize::MAX,
        max_sampler_difference: 0.0,
        lora: LoraConfig { r: options.rank, ..LoraConfig::default() },
        ..TrainConfig::default()
    };
    let mut learner = Learner::with_model(options.model.load()?, &config)?;
    let spec = learner.spec().clone();
    let data = match &options.data {
        Some(path) => Data::read(path)?,
        None => Data::random(&options.shape(), spec.vocab_size),
    };
    let samples = data.samples(&learner)?;
    if let DeviceChoice::Cuda(ordinal) = options.device {
        let tokens = samples.iter().map(|sample| sample.prompt_ids.len() + sample.ids.len());
        let longest = tokens.max().unwrap_or(0);
        let kernels = std::env::temp_dir().join("hone-bench-kernels");
        let device = CudaDevice { ordinal, kernels };
        let base = device.load(learner.model(), options.compute, longest)?;
        learner.use_device(&base, longest)?;
    }
    let separate = match options.common {
        0 => Vec::new(),
        _ => {
            // As where the memory permits any shard.
            learner.set_longest_shard(usize::MAX);
            let shape = Workload { common: 0, ..options.shape() };
            Data::random(&shape, spec.vocab_size).samples(&learner)?
        }
    };
    let longest = samples.iter().map(|s| s.ids.len()).max().unwrap_or(0);
    // Excludes the memory of loading.
    memory::reset_peak();
    let mut first = None;
    // The duration, its parts, and the computed tokens with the tokens that have a loss for each.
    let mut step =
        |samples: &[TrainSample]| -> anyhow::Result<(Seconds, StepTiming, (usize, f64))> {
            let (stats, seconds) = timed(|| learner.step(samples, 1, longest));
            let stats = stats?;
            first.get_or_insert(stats.metrics.get("grad_norm").copied().unwrap_or_default());
            if let Some(reason) = stats.skipped {
                anyhow::bail!("a step was skipped: {reason}");
            }
            let metric = |name| stats.metrics.get(name).copied().unwrap_or_default();
            let (loss, fraction) = (metric("tokens"), metric("loss_token_fraction"));
            let computed = if fraction > 0.0 { (loss / fraction).round() as usize } else { 0 };
            Ok((seconds, learner.timing(), (computed, fraction)))
        };
    for _ in 0..WARM_UP {
        step(&samples)?;
    }
    let peak_bytes = memory::peak_resident();
    let (mut steps, mut others) = (Vec::new(), Vec::new());
    // In turn, so that other load disturbs both alike.
    for _ in 0..options.steps.max(1) {
        steps.push(step(&samples)?);
        if !separate.is_empty() {
            others.push(step(&separate)?);
        }
    }
    let dir = tempfile::tempdir()?;
    let snapshot = learner.snapshot()?;
    let (written, publish) = timed(|| snapshot.write(&dir.path().join("adapter"), "bench"));
    written?;
    let fastest = |steps: &[(Seconds, _, _)]| {
        steps.iter().min_by(|a, b| a.0.wall.total_cmp(&b.0.wall)).copied()
    };
    let Some((Seconds { wall, .. }, split, (computed_tokens, fraction))) = fastest(&steps) else {
        anyhow::bail!("no step was timed")
    };
    let processor = |steps: &[(Seconds, _, _)]| {
        steps.iter().map(|(took, ..)| took.processor).fold(f64::INFINITY, f64::min)
    };
    let separate = fastest(&others).map(|(seconds, _, (computed_tokens, _))| {
        json!({
            "computed_tokens": computed_tokens,
            "step_seconds": seconds.wall,
            "step_processor_seconds": processor(&others),
            "ratios": [wall / seconds.wall, processor(&steps) / processor(&others)],
        })
    });
    let durations: Vec<Seconds> = steps.iter().map(|(took, ..)| *took).collect();
    let tokens: usize = samples.iter().map(|s| s.prompt_ids.len() + s.ids.len()).sum();
    let rates = [tokens, computed_tokens].map(|count| count as f64 / wall);
    let (files, _folder) = options.model.open()?;
    let base = BaseMemory::read(&spec, &files.weights, BaseDtype::Auto)?;
    let tokens_of_a_shard = 0;
    let plan = MemoryPlan::new(&spec, base, &config, threads, tokens_of_a_shard);
    Ok(json!({
        "parameters": spec.parameters(),
        "completions": samples.len(),
        "tokens": tokens,
        "computed_tokens": computed_tokens,
        "tokens_per_second": rates,
        "loss_token_fraction": fraction,
        "threads": threads,
        // f32 where bf16 has no effect.
        "compute": learner.model().compute(),
        "device": options.device,
        // Of the first step, to compare devices.
        "gradient_norm": first,
        "steps": durations,
        "step_seconds": wall,
        "step_processor_seconds": processor(&steps),
        "split": split,
        "without_common_prefix": separate,
        "publish_seconds": publish.wall,
        "peak_bytes": peak_bytes,
        "start_bytes": start_bytes,
        "planned_bytes": plan.total(),
        "kept_layers": plan.kept_layers,
        "load": [load, machine_load()],
    }))
}

#[cfg(test)]
mod tests {
    use hone_model::kernels::compute::available;

    use super::*;

    const SMALL: &str = "--groups 1 --group-size 2 --prompt 4 --completion 4 --spread 0 --steps 1";

    /// A run on one thread.
    fn measured(flags: &str) -> Value {
        let flags: Vec<&str> = flags.split(' ').chain(["--threads", "1"]).collect();
        run(&crate::measure::tests::options(&flags)).unwrap()
    }

    #[test]
    fn a_small_run_measures_everything() {
        let report = measured("--groups 2 --group-size 4 --prompt 6 --completion 8 --steps 2");
        assert_eq!(report["completions"], 8);
        assert_eq!(report["steps"].as_array().unwrap().len(), 2);
        let number = |path: &str| report.pointer(path).and_then(Value::as_f64).unwrap();
        let parts = ["forward", "reference", "backward", "optimizer"]
            .map(|part| number(&format!("/split/{part}")));
        assert!(parts.iter().all(|part| *part > 0.0), "{report}");
        assert!(parts.iter().sum::<f64>() <= number("/step_seconds"), "{report}");
        assert!(number("/computed_tokens") < number("/tokens"));
    }

    #[test]
    fn a_common_prefix_is_compared_with_prompts_that_have_none() {
        let flags = "--groups 8 --group-size 1 --prompt 30 --common 25 --completion 4 --spread 0";
        let report = measured(&format!("{flags} --steps 1"));
        assert_eq!(report["computed_tokens"], 25 + 8 * (5 + 4 - 1));
        assert_eq!(report["without_common_prefix"]["computed_tokens"], 8 * (30 + 4 - 1));
        assert!(report["without_common_prefix"]["ratios"][0].as_f64().unwrap() > 0.0);
        assert!(measured(SMALL)["without_common_prefix"].is_null());
    }

    #[test]
    fn the_report_names_the_arithmetic_and_leaves_out_an_absent_reference() {
        let report = measured(&format!("{SMALL} --compute bf16 --beta 0"));
        assert_eq!(report["compute"], json!(available(Compute::Bf16)));
        // Only reading the clock takes time.
        let part = |name: &str| report["split"][name].as_f64().unwrap();
        assert!(
            part("reference") < 1e-3 * (part("forward") + part("backward")).max(1e-2),
            "{report}"
        );
    }
}
