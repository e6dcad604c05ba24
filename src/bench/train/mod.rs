//! `hone bench train`: the duration of an optimizer step and its parts, and the speed of its products
//! relative to the machine's. Sampling and scoring are not included.

mod subject;
mod work;

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

use hone_core::memory;
use hone_model::kernels::compute::Compute;
use hone_train::config::{PeakRate, Recompute, TrainConfig};
use hone_train::{Learner, MemoryPlan, StepTiming};

use super::Folder;
use super::{Peak, Seconds};

pub(crate) use hone_model::adapter::LoraConfig;
pub use subject::{Data, Row, Subject, Workload};
pub use work::Work;

/// The options of `hone bench train`.
#[derive(Clone, Debug)]
pub struct TrainBenchOptions {
    /// The model.
    pub model: Subject,
    /// The shape of random samples, which `data` replaces.
    pub shape: Workload,
    /// A file of samples.
    pub data: Option<PathBuf>,
    /// Rank of the adapter on all linears.
    pub rank: usize,
    /// Coefficient of the KL; 0 skips the reference pass.
    pub beta: f64,
    /// Timed steps, after [`WARM_UP`] others.
    pub steps: usize,
    /// Whether the backward pass recomputes layers.
    pub recompute: Recompute,
    /// The arithmetic of products with the base.
    pub compute: Compute,
    /// Threads; 0 for all cores.
    pub threads: usize,
}

impl TrainBenchOptions {
    /// The default for a model: 64 completions in groups of 8 for the embedded model, else one group of
    /// 8 sequences of 512 tokens.
    pub fn usual(model: Subject) -> Self {
        let shape = match model {
            Subject::Embedded => {
                Workload { groups: 8, group_size: 8, prompt: 20, completion: 24, spread: 0.5 }
            }
            _ => Workload { groups: 1, group_size: 8, prompt: 64, completion: 448, spread: 0.0 },
        };
        Self {
            model,
            shape,
            data: None,
            rank: 16,
            beta: 0.01,
            steps: 5,
            recompute: Recompute::Auto,
            compute: Compute::default(),
            threads: 0,
        }
    }
}

/// Steps before the timed ones; they fill the optimizer's moments and the allocator's pools.
pub const WARM_UP: usize = 2;

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
    /// [`Work`] of the forward, reference and backward passes in GFLOP.
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
///
/// # Errors
/// For any other text.
pub fn recompute(text: &str) -> Result<Recompute, String> {
    serde_json::from_value(text.into()).map_err(|_| "not auto, always or never".to_owned())
}

/// Runs the benchmark.
///
/// # Errors
/// If the model or the samples cannot be read, a step fails or is skipped, or the adapter cannot be
/// written.
pub fn run(options: &TrainBenchOptions) -> anyhow::Result<TrainBenchReport> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = if options.threads == 0 { cores } else { options.threads };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    pool.install(|| measure(options, threads))
}

fn measure(options: &TrainBenchOptions, threads: usize) -> anyhow::Result<TrainBenchReport> {
    let load = super::machine_load();
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
        None => Data::random(&options.shape, spec.vocab_size),
    };
    let samples = data.samples(&learner)?;
    let work = Work::new(&spec, &samples, options.rank);
    let longest = samples.iter().map(|s| s.ids.len()).max().unwrap_or(0);
    // Excludes the memory of loading.
    memory::reset_peak();
    let mut step = || -> anyhow::Result<(Seconds, StepTiming, StepTokens)> {
        let (stats, seconds) = super::timed(|| learner.step(&samples, 1, longest));
        let stats = stats?;
        if let Some(reason) = stats.skipped {
            anyhow::bail!("a step was skipped: {reason}");
        }
        let metric = |name| stats.metrics.get(name).copied().unwrap_or_default();
        let tokens = StepTokens { loss: metric("tokens"), fraction: metric("loss_token_fraction") };
        Ok((seconds, learner.timing(), tokens))
    };
    for _ in 0..WARM_UP {
        step()?;
    }
    // Read before `Peak` allocates its own buffers.
    let peak_bytes = memory::peak_resident();
    let mut peak = Peak::default();
    peak.measure(threads);
    let (mut steps, mut splits, mut tokens) = (Vec::new(), Vec::new(), StepTokens::default());
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
    let tokens_of_a_shard = 0;
    let plan =
        MemoryPlan::new(&spec, options.model.base(&spec)?, &config, threads, tokens_of_a_shard);
    Ok(TrainBenchReport {
        parameters: spec.weight_shapes().iter().map(|(_, s)| s.iter().product::<usize>()).sum(),
        completions: samples.len(),
        tokens: samples.iter().map(|s| s.prompt_ids.len() + s.ids.len()).sum(),
        computed_tokens: tokens.computed(),
        loss_token_fraction: tokens.fraction,
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
        load: (load, super::machine_load()),
        steps,
    })
}

/// Tokens of one step.
#[derive(Clone, Copy, Debug, Default)]
struct StepTokens {
    /// Tokens with a loss.
    loss: f64,
    /// Tokens with a loss per computed token.
    fraction: f64,
}

impl StepTokens {
    fn computed(self) -> usize {
        if self.fraction > 0.0 { (self.loss / self.fraction).round() as usize } else { 0 }
    }
}

/// Writes the adapter; returns the seconds it took.
fn publish(learner: &Learner) -> anyhow::Result<f64> {
    let dir = Folder::temporary()?;
    let snapshot = learner.snapshot()?;
    let (written, took) = super::timed(|| snapshot.write(&dir.0.join("adapter"), "bench"));
    written?;
    Ok(took.wall)
}

impl fmt::Display for TrainBenchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MIB: f64 = (1 << 20) as f64;
        let ms = 1e3;
        writeln!(
            f,
            "{:.1} M parameters, {} completions per step, {} thread(s), products in {}, {} timed steps \
             after {WARM_UP}",
            self.parameters as f64 / 1e6,
            self.completions,
            self.threads,
            self.compute.as_str(),
            self.steps.len()
        )?;
        writeln!(
            f,
            "tokens        {:>9} per step, prompts counted for each completion",
            self.tokens
        )?;
        writeln!(
            f,
            "computed      {:>9} of them, {:.2} tokens with a loss per computed token",
            self.computed_tokens, self.loss_token_fraction
        )?;
        writeln!(
            f,
            "step          {:>9.1} ms wall (fastest), {:.1} ms processor (least)",
            self.step_seconds * ms,
            self.step_processor_seconds * ms
        )?;
        let rest = self.step_seconds - self.split.total();
        for (name, seconds) in [
            ("forward", self.split.forward),
            ("reference", self.split.reference),
            ("backward", self.split.backward),
            ("optimizer", self.split.optimizer),
            ("other", rest),
            ("publish", self.publish_seconds),
        ] {
            let share = 100.0 * seconds / self.step_seconds;
            writeln!(f, "  {name:<11} {:>9.1} ms {share:>6.1} %", seconds * ms)?;
        }
        writeln!(f, "  (without sampling and scoring)")?;
        writeln!(
            f,
            "speed         {:>9.0} tokens/s, {:.0} computed tokens/s",
            self.tokens as f64 / self.step_seconds,
            self.computed_tokens as f64 / self.step_seconds
        )?;
        writeln!(
            f,
            "products      {:>9.1} GFLOP needed; {:.0} % of the peak of {:.0} GFLOP/s in forward and \
             backward; by processor time {:.0} % of {:.0} GFLOP/s in the whole step",
            self.gflop,
            100.0 * self.peak_share,
            self.peak.wall,
            100.0 * self.peak_share_processor,
            self.peak.processor
        )?;
        writeln!(
            f,
            "memory        {:>9.1} MiB peak, {:.1} before the model was loaded; planned {:.1} \
             with {} of {} layers kept",
            self.peak_bytes as f64 / MIB,
            self.start_bytes as f64 / MIB,
            self.planned_bytes as f64 / MIB,
            self.kept_layers.0,
            self.kept_layers.1
        )?;
        write!(f, "load          {:>9.2} before, {:.2} after", self.load.0, self.load.1)
    }
}

#[cfg(test)]
mod tests {
    use hone_model::kernels::compute::available;

    use super::*;

    #[test]
    fn a_small_run_measures_everything() {
        let shape = Workload { groups: 2, group_size: 4, prompt: 6, completion: 8, spread: 0.5 };
        let options = TrainBenchOptions {
            shape,
            steps: 2,
            threads: 1,
            ..TrainBenchOptions::usual(Subject::Embedded)
        };
        let report = run(&options).unwrap();
        assert_eq!((report.completions, report.steps.len()), (8, 2));
        let split = report.split;
        for part in [split.forward, split.reference, split.backward, split.optimizer] {
            assert!(part > 0.0, "{split:?}");
        }
        assert!(split.total() <= report.step_seconds, "{report}");
        // On a busy machine the peak may be measured when the processor is slower than during a step.
        assert!(report.gflop > 0.0 && report.peak_share > 0.0 && report.peak_share.is_finite());
        // Forward and backward are more than half of all: the reference has no backward pass.
        let passes = report.split.forward + report.split.backward;
        let products = report.peak_share * report.peak.wall * passes;
        assert!((0.5..1.0).contains(&(products / report.gflop)), "{report}");
        assert!(report.computed_tokens < report.tokens);
        let text = report.to_string();
        assert!(text.contains("backward") && text.contains("planned"), "{text}");
        let json = serde_json::to_value(&report).unwrap();
        assert!(json["split"]["optimizer"].is_number());
    }

    #[test]
    fn the_report_names_the_arithmetic_that_was_used() {
        let shape = Workload { groups: 1, group_size: 2, prompt: 4, completion: 4, spread: 0.0 };
        let usual = TrainBenchOptions::usual(Subject::Embedded);
        let compute = Compute::Bf16;
        let report =
            run(&TrainBenchOptions { shape, compute, steps: 1, threads: 1, ..usual }).unwrap();
        assert_eq!(report.compute, available(compute));
        let named = format!("products in {}", report.compute.as_str());
        assert!(report.to_string().contains(&named), "{report}");
    }

    #[test]
    fn recompute_is_parsed_as_in_the_configuration() {
        assert_eq!(recompute("always"), Ok(Recompute::Always));
        assert!(recompute("sometimes").is_err());
    }

    #[test]
    fn without_a_reference_its_pass_takes_no_time() {
        let shape = Workload { groups: 1, group_size: 2, prompt: 4, completion: 4, spread: 0.0 };
        let usual = TrainBenchOptions::usual(Subject::Embedded);
        let report =
            run(&TrainBenchOptions { shape, beta: 0.0, steps: 1, threads: 1, ..usual }).unwrap();
        // Only reading the clock takes time.
        assert!(report.split.reference < 1e-3 * report.split.total().max(1e-2), "{report}");
    }
}
