//! The command line, as clap structures.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::Error as ValueError;

use hone_rollout::SamplerKind;
use hone_train::config::Recompute;

use crate::bench::train::{Subject, Workload};
use crate::bench::{
    interference as bench_interference, sample as bench_sample, train as bench_train,
};
use crate::demo::{DEFAULT_STEPS, DemoOptions, RewardsMode};

/// Serves a language model and keeps training it on its own traffic.
///
/// Results are written to standard output, logs and progress to standard error. Exit codes: 0 for
/// success, 1 for a failure, 2 for wrong usage or configuration.
#[derive(Debug, Parser)]
#[command(name = "hone", version, max_term_width = 100)]
pub struct Cli {
    /// Command to run.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show how a model improves from the rewards of simulated users, and report the result
    Demo(DemoArgs),
    /// Serve a model and keep training it
    Serve(ServeArgs),
    /// Train on a dataset without serving, with evaluations and a final report
    Train(TrainArgs),
    /// Evaluate the active policy and the base model on a dataset
    Eval(EvalArgs),
    /// Check a configuration, its rewards and its dataset, and report errors
    Validate(ValidateArgs),
    /// Inspect and maintain the ledger of a stopped daemon
    Db {
        /// Operation on the ledger.
        #[command(subcommand)]
        command: DbCommand,
    },
    /// List and test reward functions
    Rewards {
        /// Operation on reward functions.
        #[command(subcommand)]
        command: RewardsCommand,
    },
    /// List and export the trained adapters of a stopped daemon
    Adapters {
        /// Operation on adapters.
        #[command(subcommand)]
        command: AdaptersCommand,
    },
    /// Measure the performance of Hone on this machine
    Bench {
        /// Benchmark to run.
        #[command(subcommand)]
        command: BenchCommand,
    },
}

/// `hone adapters`. The daemon of the data directory must be stopped.
#[derive(Debug, Subcommand)]
pub enum AdaptersCommand {
    /// List every policy version with its parent, step, state and mean reward
    List {
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
        /// Data directory.
        #[command(flatten)]
        data: DataArgs,
    },
    /// Export a version as files that transformers or peft can load
    #[command(group = clap::ArgGroup::new("form").required(true).args(["merged", "peft"]))]
    Export {
        /// Write a full Hugging Face directory, with the adapter merged into the base weights
        #[arg(long, value_name = "DIR")]
        merged: Option<PathBuf>,
        /// Write the adapter alone, as a PEFT directory
        #[arg(long, value_name = "DIR")]
        peft: Option<PathBuf>,
        /// Version to export [default: the active version]
        #[arg(long, value_name = "N")]
        version: Option<u64>,
        /// Store merged weights as 32-bit floats instead of the base's type
        #[arg(long, requires = "merged")]
        f32: bool,
        /// Common arguments.
        #[command(flatten)]
        config: ConfigArgs,
    },
}

/// `hone bench`.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Worst time of each reward function; exit code 1 if one needs more than 1 ms for 4 kB, or more
    /// than in proportion to size^1.5
    Rewards {
        /// Size of each completion
        #[arg(long, value_name = "BYTES", default_value_t = crate::bench::rewards::BYTES)]
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
    /// Sampler of the rollouts
    #[arg(long, value_name = "SAMPLER", default_value = "auto", value_parser = sampler_kind())]
    pub sampler: SamplerKind,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

impl From<BenchInterferenceArgs> for bench_interference::InterferenceOptions {
    fn from(args: BenchInterferenceArgs) -> Self {
        let BenchInterferenceArgs { rounds, seconds, users, pause, sampler, json: _ } = args;
        let (users, pause_ms) = (users.into(), pause.into());
        Self { rounds, seconds: seconds.into(), users, pause_ms, sampler }
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
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

impl From<BenchSampleArgs> for bench_sample::SampleOptions {
    fn from(args: BenchSampleArgs) -> Self {
        let BenchSampleArgs { model, batch, group, prompt, tokens, rank, runs, threads, json: _ } =
            args;
        Self { model, batch: batch.into(), group, prompt, tokens, rank, runs, threads }
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
    #[arg(long, value_name = "WHEN", default_value = "auto", value_parser = bench_train::recompute)]
    pub recompute: Recompute,
    /// Number of threads; 0 for one per core
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub threads: usize,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

impl From<BenchTrainArgs> for bench_train::TrainBenchOptions {
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
            threads: args.threads,
            ..usual
        }
    }
}

/// The arguments of every command that loads a model.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// Model: a Hugging Face directory or hub id [default: model.path, or the embedded model]
    #[arg(long, value_name = "DIR|HUB_ID")]
    pub model: Option<String>,
    /// Configuration file (see configs/default.toml and configs/examples)
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Data directory: ledger, adapters, checkpoints, logs [default: ./hone-data]
    #[arg(long, value_name = "DIR")]
    pub data: Option<PathBuf>,
}

/// `hone serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Common arguments.
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Address and port; port 0 picks a free one [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDR:PORT")]
    pub bind: Option<SocketAddr>,
}

/// Arguments that `hone train` and `hone eval` share.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Common arguments.
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Dataset: JSONL, JSON, CSV or Parquet
    #[arg(long, value_name = "FILE")]
    pub dataset: Option<PathBuf>,
}

/// `hone validate`.
#[derive(Debug, Args)]
pub struct ValidateArgs {
    /// Configuration file [default: only the defaults and the environment are checked]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Model whose tokenizer measures the prompts [default: model.path, or the embedded model]
    #[arg(long, value_name = "DIR|HUB_ID")]
    pub model: Option<String>,
    /// Dataset to read [default: dataset.path]
    #[arg(long, value_name = "FILE")]
    pub dataset: Option<PathBuf>,
    /// Read neither the dataset nor the model
    #[arg(long, conflicts_with_all = ["model", "dataset"])]
    pub config_only: bool,
}

/// `hone train`.
#[derive(Debug, Args)]
pub struct TrainArgs {
    /// Common arguments.
    #[command(flatten)]
    pub run: RunArgs,
    /// Total optimizer steps, including those of earlier runs in the data directory
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub steps: Option<u64>,
    /// Directory of the final report [default: run/report in the data directory]
    #[arg(long, value_name = "DIR")]
    pub report: Option<PathBuf>,
    /// Print the report as JSON
    #[arg(long)]
    pub json: bool,
    /// Only print the memory that the trainer needs, by part
    #[arg(long)]
    pub explain_memory: bool,
}

/// `hone eval`.
#[derive(Debug, Args)]
pub struct EvalArgs {
    /// Common arguments.
    #[command(flatten)]
    pub run: RunArgs,
    /// Completions per prompt [default: run.eval_samples]
    #[arg(long, value_name = "N")]
    pub samples: Option<usize>,
    /// Values of k for pass@k, separated by commas
    #[arg(long, value_name = "K", value_delimiter = ',')]
    pub pass_at: Vec<u64>,
    /// Reward part whose value 1 counts as a pass [default: the first that scores correctness]
    #[arg(long, value_name = "NAME")]
    pub part: Option<String>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// `hone demo`.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Optimizer steps
    #[arg(long, value_name = "N", default_value_t = DEFAULT_STEPS,
          value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub steps: u64,
    /// Seed of the users, the samples and the trainer
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Source of the rewards
    #[arg(long, value_enum, default_value_t = RewardsMode::Both)]
    pub rewards: RewardsMode,
    /// Sampler of the shadow completions
    #[arg(long, value_name = "SAMPLER", default_value = "auto", value_parser = sampler_kind())]
    pub sampler: SamplerKind,
    /// Data directory, which is kept [default: a temporary one]
    #[arg(long, value_name = "DIR")]
    pub data: Option<PathBuf>,
    /// Keep serving the trained model until Ctrl-C
    #[arg(long)]
    pub keep_serving: bool,
    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
}

impl From<DemoArgs> for DemoOptions {
    fn from(args: DemoArgs) -> Self {
        let DemoArgs { steps, seed, rewards, sampler, data, keep_serving, report } = args;
        Self { steps, seed, data, keep_serving, report, rewards, sampler }
    }
}

/// The data directory of a stopped daemon.
#[derive(Debug, Args)]
pub struct DataArgs {
    /// Data directory
    #[arg(long, value_name = "DIR", default_value = "hone-data")]
    pub data: PathBuf,
}

/// `hone db`.
#[derive(Debug, Subcommand)]
pub enum DbCommand {
    /// Count the rows of each table
    Stats {
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
        /// Data directory.
        #[command(flatten)]
        data: DataArgs,
    },
    /// Verify the file and its cross-references; exit code 1 if it is damaged
    Check(DataArgs),
    /// Release unused space
    Compact(DataArgs),
    /// Print every record as a line of JSON
    Export(DataArgs),
}

/// `hone rewards`.
#[derive(Debug, Subcommand)]
pub enum RewardsCommand {
    /// List the built-in reward functions with formula, range and parameters
    List,
    /// Score completions from a file with JSON lines of {completion, prompt, ...}
    Test {
        /// File to score
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Configuration file with the rewards
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// Route with the rewards [default: rollout.dataset_route]
        #[arg(long, value_name = "NAME")]
        route: Option<String>,
        /// Print samples and statistics as JSON
        #[arg(long)]
        json: bool,
    },
}

/// The values of `--sampler`.
fn sampler_kind() -> impl TypedValueParser<Value = SamplerKind> {
    let values = [
        ("auto", "The native sampler on a CPU, else the serving engine"),
        ("engine", "The serving engine, in slots that no client uses"),
        ("native", "The native sampler, which batches sequences on the trainer's weights"),
    ];
    let values = values.map(|(name, help)| PossibleValue::new(name).help(help));
    PossibleValuesParser::new(values).try_map(|name| {
        SamplerKind::deserialize(IntoDeserializer::<ValueError>::into_deserializer(name))
    })
}
