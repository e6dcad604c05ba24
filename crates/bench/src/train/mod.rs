//! `hone-bench train`: the duration of an optimizer step and its parts, and the speed of its products
//! relative to the machine's. Sampling and scoring are not included.

mod subject;
mod work;

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use hone_core::memory;
use hone_model::adapter::LoraConfig;
use hone_model::kernels::compute::Compute;
use hone_train::config::{PeakRate, Recompute, TrainConfig};
use hone_train::{Learner, MemoryPlan, StepTiming};

use super::measure::{Peak, Seconds, threads_or_cores};
use hone_config::flags::compute;
use subject::{Data, Workload};
use work::Work;

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
    /// Mean tokens per completion [default: 24 for the embedded model, else 448]
    #[arg(long, value_name = "N")]
    pub completion: Option<usize>,
    /// Largest relative deviation of a length from the mean [default: 0.5 for the embedded model,
    /// else 0]
    #[arg(long, value_name = "SHARE")]
    pub spread: Option<f64>,
    /// Read the samples from a JSON file: {"samples": [{prompt, completion, advantage, logprobs?}]}
    #[arg(long, value_name = "FILE", conflicts_with_all = ["groups", "group_size", "prompt", "completion", "spread"])]
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
    /// Number of threads; 0 for one per core
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub threads: usize,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
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
            completion: self.completion.unwrap_or(completion),
            spread: self.spread.unwrap_or(spread),
        }
    }
}

/// Steps before the timed ones; they fill the optimizer's moments and the allocator's pools.
const WARM_UP: usize = 2;

/// The measurements. Times are of the fastest timed step; memory is the peak of the warm-up steps,
/// which do the same work.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrainBenchReport {
    /// Parameters of the model.
    pub parameters: usize,
    /// Completions per step.
    pub completions: usize,
    /// Prompt and completion tokens per step; the prompt counts for each completion.
    pub tokens: usize,
    /// Tokens that a pass computes. Each shard computes its prompts.
    pub computed_tokens: usize,
    /// `tokens` and `computed_tokens` per second of the fastest step.
    pub tokens_per_second: [f64; 2],
    /// Completion tokens per computed token.
    pub loss_token_fraction: f64,
    /// Threads of the trainer.
    pub threads: usize,
    /// The arithmetic of products with the base, which is f32 where bf16 has no effect.
    pub compute: Compute,
    /// The timed steps.
    pub steps: Vec<Seconds>,
    /// Wall time of the fastest step.
    pub step_seconds: f64,
    /// Least processor time of a step.
    pub step_processor_seconds: f64,
    /// Parts of the fastest step, in seconds.
    pub split: StepTiming,
    /// Writing the adapter's PEFT files to disk, in seconds.
    pub publish_seconds: f64,
    /// Work of the forward, reference and backward passes in GFLOP.
    pub gflop: f64,
    /// Speed of large products, measured between the steps.
    pub peak: Peak,
    /// GFLOP/s of the forward and backward passes over `peak.wall`.
    pub peak_share: f64,
    /// GFLOP/s of the whole step by processor time over `peak.processor`, which other processes affect
    /// less.
    pub peak_share_processor: f64,
    /// Peak resident memory of the first steps, including the model.
    pub peak_bytes: u64,
    /// Resident memory before the model was loaded.
    pub start_bytes: u64,
    /// The total of [`MemoryPlan`].
    pub planned_bytes: usize,
    /// Layers kept for the backward pass, and all layers.
    pub kept_layers: (usize, usize),
    /// Load average before and after.
    pub load: (f64, f64),
}

/// Parses `auto`, `always` or `never`.
fn recompute(text: &str) -> Result<Recompute, String> {
    serde_json::from_value(text.into()).map_err(|_| "not auto, always or never".to_owned())
}

/// Runs the benchmark.
pub fn run(options: &TrainBenchOptions) -> anyhow::Result<TrainBenchReport> {
    let threads = threads_or_cores(options.threads);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    pool.install(|| measure(options, threads))
}

fn measure(options: &TrainBenchOptions, threads: usize) -> anyhow::Result<TrainBenchReport> {
    let load = super::measure::machine_load();
    let start_bytes = memory::resident();
    let config = TrainConfig {
        beta: options.beta,
        recompute: options.recompute,
        compute: options.compute,
        threads,
        learning_rate: PeakRate::Fixed(1e-5),
        warmup_steps: Some(0),
        // The whole step in one pass.
        micro_batch: usize::MAX,
        max_sampler_difference: 0.0,
        lora: LoraConfig { r: options.rank, ..LoraConfig::default() },
        ..TrainConfig::default()
    };
    let mut learner = Learner::with_model(options.model.load()?, &config)?;
    let compute = learner.model().compute();
    let spec = learner.spec().clone();
    let data = match &options.data {
        Some(path) => Data::read(path)?,
        None => Data::random(&options.shape(), spec.vocab_size),
    };
    let samples = data.samples(&learner)?;
    let work = Work::new(&spec, &samples, options.rank);
    let longest = samples.iter().map(|s| s.ids.len()).max().unwrap_or(0);
    // Excludes the memory of loading.
    memory::reset_peak();
    // The duration, its parts, the tokens with a loss, and those per computed token.
    let mut step = || -> anyhow::Result<(Seconds, StepTiming, [f64; 2])> {
        let (stats, seconds) = super::measure::timed(|| learner.step(&samples, 1, longest));
        let stats = stats?;
        if let Some(reason) = stats.skipped {
            anyhow::bail!("a step was skipped: {reason}");
        }
        let metric = |name| stats.metrics.get(name).copied().unwrap_or_default();
        let tokens = ["tokens", "loss_token_fraction"].map(metric);
        Ok((seconds, learner.timing(), tokens))
    };
    for _ in 0..WARM_UP {
        step()?;
    }
    // Read before `Peak` allocates its own buffers.
    let peak_bytes = memory::peak_resident();
    let mut peak = Peak::default();
    peak.measure(threads);
    let (mut steps, mut splits, mut tokens) = (Vec::new(), Vec::new(), [0.0; 2]);
    for _ in 0..options.steps.max(1) {
        let (seconds, split, counted) = step()?;
        steps.push(seconds);
        splits.push(split);
        tokens = counted;
        peak.measure(threads);
    }
    let publish_seconds = publish(&learner)?;
    let fastest = (0..steps.len()).min_by(|a, b| steps[*a].wall.total_cmp(&steps[*b].wall));
    let split = fastest.map(|i| splits[i]).unwrap_or_default();
    let least = |of: fn(&Seconds) -> f64| steps.iter().map(of).fold(f64::INFINITY, f64::min);
    let (wall, processor) = (least(|s| s.wall), least(|s| s.processor));
    let passes = split.forward + split.backward;
    let reference = if options.beta == 0.0 { 0.0 } else { work.reference };
    let gflop = work.forward + reference + work.backward;
    let share = |gflop: f64, seconds: f64, peak: f64| {
        if seconds > 0.0 && peak > 0.0 { gflop / seconds / peak } else { 0.0 }
    };
    let [loss, fraction] = tokens;
    let computed_tokens = if fraction > 0.0 { (loss / fraction).round() as usize } else { 0 };
    let tokens: usize = samples.iter().map(|s| s.prompt_ids.len() + s.ids.len()).sum();
    let tokens_of_a_shard = 0;
    let plan =
        MemoryPlan::new(&spec, options.model.base(&spec)?, &config, threads, tokens_of_a_shard);
    Ok(TrainBenchReport {
        parameters: spec.weight_shapes().iter().map(|(_, s)| s.iter().product::<usize>()).sum(),
        completions: samples.len(),
        tokens,
        computed_tokens,
        tokens_per_second: [tokens, computed_tokens].map(|count| count as f64 / wall),
        loss_token_fraction: fraction,
        threads,
        compute,
        step_seconds: wall,
        step_processor_seconds: processor,
        split,
        publish_seconds,
        gflop,
        peak,
        peak_share: share(work.forward + work.backward, passes, peak.wall),
        peak_share_processor: share(gflop * threads as f64, processor, peak.processor),
        peak_bytes,
        start_bytes,
        planned_bytes: plan.total(),
        kept_layers: plan.kept_layers,
        load: (load, super::measure::machine_load()),
        steps,
    })
}

/// Writes the adapter; returns the seconds it took.
fn publish(learner: &Learner) -> anyhow::Result<f64> {
    let dir = tempfile::tempdir()?;
    let snapshot = learner.snapshot()?;
    let (written, took) =
        super::measure::timed(|| snapshot.write(&dir.path().join("adapter"), "bench"));
    written?;
    Ok(took.wall)
}

#[cfg(test)]
mod tests {
    use hone_model::kernels::compute::available;

    use super::*;

    const SMALL: &str = "--groups 1 --group-size 2 --prompt 4 --completion 4 --spread 0 --steps 1";

    /// A run on one thread.
    fn measured(flags: &str) -> TrainBenchReport {
        let flags: Vec<&str> = flags.split(' ').chain(["--threads", "1"]).collect();
        run(&crate::measure::tests::options(&flags)).unwrap()
    }

    #[test]
    fn a_small_run_measures_everything() {
        let report = measured("--groups 2 --group-size 4 --prompt 6 --completion 8 --steps 2");
        assert_eq!((report.completions, report.steps.len()), (8, 2));
        let split = report.split;
        for part in [split.forward, split.reference, split.backward, split.optimizer] {
            assert!(part > 0.0, "{split:?}");
        }
        assert!(split.total() <= report.step_seconds, "{report:?}");
        // On a busy machine the peak may be measured when the processor is slower than during a step.
        assert!(report.gflop > 0.0 && report.peak_share > 0.0 && report.peak_share.is_finite());
        // Forward and backward are more than half of all: the reference has no backward pass.
        let passes = report.split.forward + report.split.backward;
        let products = report.peak_share * report.peak.wall * passes;
        assert!((0.5..1.0).contains(&(products / report.gflop)), "{report:?}");
        assert!(report.computed_tokens < report.tokens);
        let json = serde_json::to_value(&report).unwrap();
        assert!(json["split"]["optimizer"].is_number());
    }

    #[test]
    fn the_report_names_the_arithmetic_that_was_used() {
        let report = measured(&format!("{SMALL} --compute bf16"));
        assert_eq!(report.compute, available(Compute::Bf16));
    }

    #[test]
    fn recompute_is_parsed_as_in_the_configuration() {
        assert_eq!(recompute("always"), Ok(Recompute::Always));
        assert!(recompute("sometimes").is_err());
    }

    #[test]
    fn without_a_reference_its_pass_takes_no_time() {
        let report = measured(&format!("{SMALL} --beta 0"));
        // Only reading the clock takes time.
        assert!(report.split.reference < 1e-3 * report.split.total().max(1e-2), "{report:?}");
    }
}
