//! The arguments of `hone bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum as _};

use hone_engine::EngineBackend;
use hone_model::kernels::compute::Compute;
use hone_model::weights::Quantize;
use hone_rollout::SamplerKind;
use hone_train::config::Recompute;
use hone_train::policy::Promotion;

use super::values::{compute, engine_backend, promotion, quantize, sampler_kind};
use crate::bench::http::HttpBenchOptions;
use crate::bench::interference::InterferenceOptions;
use crate::bench::safety::{SafetyOptions, SafetyScenario};
use crate::bench::sample::SampleOptions;
use crate::bench::train::{Subject, TrainBenchOptions, Workload};
use crate::bench::{rewards, train};

/// `hone bench`.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Worst time of each reward function; exit code 1 if one needs more than 1 ms for 4 kB, or more
    /// than in proportion to size^1.5
    Rewards {
        /// Size of each completion
        #[arg(long, value_name = "BYTES", default_value_t = rewards::BYTES)]
        bytes: usize,
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
    },
    /// Time, throughput and memory of an optimizer step, compared with the machine's limits
    Train(BenchTrainArgs),
    /// Throughput of the native sampler, compared with the limits of memory and arithmetic
    Sample(BenchSampleArgs),
    /// Latency of served clients while Hone is idle and while it samples and trains
    Interference(BenchInterferenceArgs),
    /// Latency and throughput over HTTP, with recording, compared with the engine alone
    Http(BenchHttpArgs),
    /// Satisfaction of simulated users when learning goes wrong, by how versions are published
    Safety(BenchSafetyArgs),
}

/// `hone bench safety`.
#[derive(Debug, Args)]
pub struct BenchSafetyArgs {
    /// Number of seeds
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub seeds: u64,
    /// Scenarios, separated by commas [default: all]
    #[arg(long, value_name = "NAMES", value_enum, value_delimiter = ',')]
    pub scenarios: Vec<SafetyScenario>,
    /// How versions are published, separated by commas [default: all]
    #[arg(long, value_name = "MODES", value_delimiter = ',', value_parser = promotion())]
    pub modes: Vec<Promotion>,
    /// Requests of a run; scenarios with late or few ratings have more, and honest ones twice as many
    /// with a canary
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub requests: u64,
    /// Answers between an answer and its rating in the scenario late-feedback, whose runs then have at
    /// least 2.5 times as many requests [default: a sixth of the requests]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub late: Option<u64>,
    /// Engine that answers the users; mistralrs takes twice as long
    #[arg(long, value_name = "BACKEND", default_value = "native", value_parser = engine_backend())]
    pub backend: EngineBackend,
    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write the results and their plots as HTML
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Exit code 1 if a canary does not keep its promise
    #[arg(long)]
    pub check: bool,
}

impl From<&BenchSafetyArgs> for SafetyOptions {
    fn from(args: &BenchSafetyArgs) -> Self {
        let (mut scenarios, mut modes) = (args.scenarios.clone(), args.modes.clone());
        if scenarios.is_empty() {
            scenarios = SafetyScenario::value_variants().to_vec();
        }
        if modes.is_empty() {
            modes = vec![Promotion::Direct, Promotion::Gate, Promotion::Canary];
        }
        let BenchSafetyArgs { seeds, requests, late, backend, .. } = *args;
        Self { seeds, scenarios, modes, requests, late, backend }
    }
}

/// `hone bench interference`.
#[derive(Debug, Args)]
pub struct BenchInterferenceArgs {
    /// Rounds, each with an idle and a busy phase
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// Duration of each phase in seconds
    #[arg(long, value_name = "S", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pub seconds: u32,
    /// Number of clients, each with one request at a time
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub users: u16,
    /// Mean pause of a client between requests, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 50)]
    pub pause: u32,
    /// Model: a Hugging Face directory or hub id [default: the embedded model]
    #[arg(long, value_name = "DIR|HUB_ID")]
    pub model: Option<String>,
    /// Engine that answers the clients
    #[arg(long, value_name = "BACKEND", default_value = "mistralrs", value_parser = engine_backend())]
    pub backend: EngineBackend,
    /// Sampler of the rollouts
    #[arg(long, value_name = "SAMPLER", default_value = "auto", value_parser = sampler_kind())]
    pub sampler: SamplerKind,
    /// Changes of the active version in all rounds together, during a third phase of each round; 0 leaves
    /// out the phase
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub changes: u32,
    /// Format that the frozen weights are converted to [default: as they are stored]
    #[arg(long, value_name = "FORMAT", value_parser = quantize(), default_value = "none")]
    pub quantize: Quantize,
    /// Time that training gets while the native engine serves [default: train.serving_share]
    #[arg(long, value_name = "SHARE")]
    pub serving_share: Option<f64>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

impl From<BenchInterferenceArgs> for InterferenceOptions {
    fn from(args: BenchInterferenceArgs) -> Self {
        let BenchInterferenceArgs { rounds, seconds, users, pause, .. } = args;
        let BenchInterferenceArgs { model, backend, sampler, changes, .. } = args;
        let BenchInterferenceArgs { quantize, serving_share, .. } = args;
        let (users, pause_ms) = (users.into(), pause.into());
        let seconds = seconds.into();
        Self {
            rounds,
            seconds,
            users,
            pause_ms,
            model,
            backend,
            sampler,
            changes,
            quantize,
            serving_share,
        }
    }
}

/// `hone bench http`.
#[derive(Debug, Args)]
pub struct BenchHttpArgs {
    /// Seconds of the engine alone, of responses and of streams, first for one client and then for several
    #[arg(long, value_name = "S", default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    pub seconds: u32,
    /// Number of clients, each with one request at a time
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..))]
    pub users: u16,
    /// Mean tokens per completion; lengths are spread evenly from half of it to one and a half times it
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: u32,
    /// Model: a Hugging Face directory or hub id [default: the embedded model]
    #[arg(long, value_name = "DIR|HUB_ID")]
    pub model: Option<String>,
    /// Engine
    #[arg(long, value_name = "BACKEND", default_value = "native", value_parser = engine_backend())]
    pub backend: EngineBackend,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    /// Exit code 1 if HTTP adds more than 1 ms to a completion or takes more than 3 % of the throughput
    #[arg(long)]
    pub check: bool,
}

impl From<BenchHttpArgs> for HttpBenchOptions {
    fn from(args: BenchHttpArgs) -> Self {
        let BenchHttpArgs { seconds, users, tokens, model, backend, json: _, check: _ } = args;
        Self { seconds: seconds.into(), users: users.into(), tokens, model, backend }
    }
}

/// `hone bench sample`.
#[derive(Debug, Args)]
pub struct BenchSampleArgs {
    /// `embedded`, `100m` or `100m-bf16` (random weights), or a Hugging Face directory
    #[arg(long, value_name = "MODEL", default_value = "embedded")]
    pub model: Subject,
    /// Number of concurrent sequences
    #[arg(long, value_name = "N", default_value_t = 64,
          value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub batch: u16,
    /// Sequences per prompt
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub group: usize,
    /// Tokens per prompt
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub prompt: usize,
    /// Tokens per completion
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub tokens: usize,
    /// Rank of an adapter on all linear layers; 0 for the base alone
    #[arg(long, value_name = "R", default_value_t = 0)]
    pub rank: usize,
    /// Number of measurements
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub runs: usize,
    /// Number of threads [default: one per core]
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub threads: usize,
    /// JSON schema that the completions follow, to measure the time for masks
    #[arg(long, value_name = "FILE")]
    pub schema: Option<PathBuf>,
    /// Arithmetic of products with weights in bf16
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = compute())]
    pub compute: Compute,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

impl From<BenchSampleArgs> for SampleOptions {
    fn from(args: BenchSampleArgs) -> Self {
        let BenchSampleArgs {
            model,
            batch,
            group,
            prompt,
            tokens,
            rank,
            runs,
            threads,
            schema,
            compute,
            json: _,
        } = args;
        let batch = batch.into();
        Self { model, batch, group, prompt, tokens, rank, runs, threads, schema, compute }
    }
}

/// `hone bench train`, which measures neither sampling nor scoring.
#[derive(Debug, Args)]
pub struct BenchTrainArgs {
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
    #[arg(long, value_name = "WHEN", default_value = "auto", value_parser = train::recompute)]
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

impl From<BenchTrainArgs> for TrainBenchOptions {
    fn from(args: BenchTrainArgs) -> Self {
        let usual = Self::usual(args.model);
        let shape = Workload {
            groups: args.groups.unwrap_or(usual.shape.groups),
            group_size: args.group_size.unwrap_or(usual.shape.group_size),
            prompt: args.prompt.unwrap_or(usual.shape.prompt),
            completion: args.completion.unwrap_or(usual.shape.completion),
            spread: args.spread.unwrap_or(usual.shape.spread),
        };
        Self {
            shape,
            data: args.data,
            rank: args.rank,
            beta: args.beta,
            steps: args.steps,
            recompute: args.recompute,
            compute: args.compute,
            threads: args.threads,
            ..usual
        }
    }
}
