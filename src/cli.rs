//! The command line: clap only.

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

/// Serves a language model and keeps improving it from its own traffic.
///
/// Results go to standard output, logs and progress to standard error. Exit codes: 0 success,
/// 1 failure, 2 wrong usage or configuration.
#[derive(Debug, Parser)]
#[command(name = "hone", version, max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Every command.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Watch a model get better from its users' rewards: daemon, users and report in one
    Demo(DemoArgs),
    /// Serve a model and keep improving it
    Serve(ServeArgs),
    /// Train on a dataset, without serving: progress, evaluations, logs and a report
    Train(TrainArgs),
    /// Measure the active policy on a dataset, beside the base model
    Eval(EvalArgs),
    /// Check a configuration and say what is wrong
    Validate {
        /// The file; without it the defaults and the environment are checked
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
    /// Look after a ledger whose daemon is stopped
    Db {
        /// What to do.
        #[command(subcommand)]
        command: DbCommand,
    },
    /// Look at reward functions
    Rewards {
        /// What to do.
        #[command(subcommand)]
        command: RewardsCommand,
    },
    /// Look at the adapters that training has made, and take them elsewhere
    Adapters {
        /// What to do.
        #[command(subcommand)]
        command: AdaptersCommand,
    },
    /// Measure hone's parts on this machine
    Bench {
        /// What to measure.
        #[command(subcommand)]
        command: BenchCommand,
    },
}

/// `hone adapters`; the daemon of the data directory must be stopped.
#[derive(Debug, Subcommand)]
pub enum AdaptersCommand {
    /// Every policy version: its parent, step, state and mean reward
    List {
        /// As JSON
        #[arg(long)]
        json: bool,
        /// Data directory
        #[arg(long, value_name = "DIR", default_value = "hone-data")]
        data: PathBuf,
    },
    /// Write a version as files that transformers or peft load
    #[command(group = clap::ArgGroup::new("form").required(true).args(["merged", "peft"]))]
    Export {
        /// A full Hugging Face directory, the adapter merged into the base's weights
        #[arg(long, value_name = "DIR")]
        merged: Option<PathBuf>,
        /// The adapter alone, as a PEFT directory
        #[arg(long, value_name = "DIR")]
        peft: Option<PathBuf>,
        /// Which one [default: the active version]
        #[arg(long, value_name = "N")]
        version: Option<u64>,
        /// Store merged weights in 32 bits, whatever the base has
        #[arg(long, requires = "merged")]
        f32: bool,
        /// The base model [default: the configuration's]
        #[arg(long, value_name = "DIR|HUB_ID")]
        model: Option<String>,
        /// Configuration file
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// Data directory [default: ./hone-data]
        #[arg(long, value_name = "DIR")]
        data: Option<PathBuf>,
    },
}

/// `hone bench`.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// The worst time of each reward function; exit code 1 if one takes over 1 ms on 4 kB
    Rewards {
        /// Size of the completions
        #[arg(long, value_name = "BYTES", default_value_t = crate::bench::rewards::BYTES)]
        bytes: usize,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// An optimiser step: its parts' times, its speed beside the machine's own, its memory
    Train(BenchTrainArgs),
    /// How fast the native sampler generates, beside what memory and arithmetic allow
    Sample(BenchSampleArgs),
    /// What rollouts and training cost served clients: latencies idle against busy, in turns
    Interference(BenchInterferenceArgs),
}

/// `hone bench interference`
#[derive(Debug, Args)]
pub struct BenchInterferenceArgs {
    /// Turns of idle and busy
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// Seconds of each of the two in a turn
    #[arg(long, value_name = "S", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pub seconds: u32,
    /// Clients, each with one request at a time
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub users: u16,
    /// What a client pauses between requests in the mean
    #[arg(long, value_name = "MS", default_value_t = 50)]
    pub pause: u32,
    /// What samples the rollouts
    #[arg(long, value_name = "WHAT", default_value = "auto", value_parser = sampler_kind())]
    pub sampler: SamplerKind,
    /// As JSON
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

/// `hone bench sample`
#[derive(Debug, Args)]
pub struct BenchSampleArgs {
    /// `embedded`, `100m` or `100m-bf16` (random weights), or a Hugging Face directory
    #[arg(long, value_name = "MODEL", default_value = "embedded")]
    pub model: Subject,
    /// Sequences at once
    #[arg(long, value_name = "N", default_value_t = 64,
          value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub batch: u16,
    /// Sequences on one prompt
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub group: usize,
    /// Tokens of a prompt
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub prompt: usize,
    /// Tokens of a completion
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub tokens: usize,
    /// Rank of an adapter on all linears; 0 is the base alone
    #[arg(long, value_name = "R", default_value_t = 0)]
    pub rank: usize,
    /// How often everything is measured
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub runs: usize,
    /// Threads [default: every core]
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub threads: usize,
    /// As JSON
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

/// `hone bench train`; sampling and scoring are not measured.
#[derive(Debug, Args)]
pub struct BenchTrainArgs {
    /// embedded, 100m or 100m-bf16 (a random Qwen2), or a Hugging Face directory
    #[arg(long, value_name = "MODEL", default_value = "embedded")]
    pub model: Subject,
    /// Only write the model (one that is none yet) as a Hugging Face directory
    #[arg(long, value_name = "DIR")]
    pub write_model: Option<PathBuf>,
    /// Prompts [default: 8; of other models than the embedded one 1]
    #[arg(long, value_name = "N")]
    pub groups: Option<usize>,
    /// Completions of each prompt [default: 8]
    #[arg(long, value_name = "N")]
    pub group_size: Option<usize>,
    /// Tokens of a prompt [default: 20; of other models 64]
    #[arg(long, value_name = "N")]
    pub prompt: Option<usize>,
    /// Tokens of a completion in the mean [default: 24; of other models 448]
    #[arg(long, value_name = "N")]
    pub completion: Option<usize>,
    /// Lengths are uniform within this share of the mean [default: 0.5; of other models 0]
    #[arg(long, value_name = "SHARE")]
    pub spread: Option<f64>,
    /// Samples from a JSON file instead: {"samples": [{prompt, completion, advantage, logprobs?}]}
    #[arg(long, value_name = "FILE", conflicts_with_all = ["groups", "group_size", "prompt", "completion", "spread"])]
    pub data: Option<PathBuf>,
    /// Rank of the adapter, which is on all linears
    #[arg(long, value_name = "R", default_value_t = 16)]
    pub rank: usize,
    /// Coefficient of the KL; 0 leaves the reference out
    #[arg(long, value_name = "BETA", default_value_t = 0.01)]
    pub beta: f64,
    /// Timed steps
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub steps: usize,
    /// Whether layers are computed again: auto, always or never
    #[arg(long, value_name = "WHEN", default_value = "auto", value_parser = bench_train::recompute)]
    pub recompute: Recompute,
    /// Threads; 0 takes every core
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub threads: usize,
    /// As JSON
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

/// `hone serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Model: a Hugging Face directory or hub id [default: the embedded model]
    #[arg(long, value_name = "DIR|HUB_ID")]
    pub model: Option<String>,
    /// Configuration file (see configs/default.toml)
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Data directory: ledger, adapters, checkpoints [default: ./hone-data]
    #[arg(long, value_name = "DIR")]
    pub data: Option<PathBuf>,
    /// Address and port; port 0 picks a free one [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDR:PORT")]
    pub bind: Option<SocketAddr>,
}

/// What `hone train` and `hone eval` have in common.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Model: a Hugging Face directory or hub id [default: the embedded model]
    #[arg(long, value_name = "DIR|HUB_ID")]
    pub model: Option<String>,
    /// Configuration file (see configs/default.toml and configs/examples)
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Dataset: JSONL, CSV or Parquet
    #[arg(long, value_name = "FILE")]
    pub dataset: Option<PathBuf>,
    /// Data directory: ledger, adapters, checkpoints, logs [default: ./hone-data]
    #[arg(long, value_name = "DIR")]
    pub data: Option<PathBuf>,
}

/// `hone train`.
#[derive(Debug, Args)]
pub struct TrainArgs {
    /// Where from and where to.
    #[command(flatten)]
    pub run: RunArgs,
    /// Optimiser steps in all, those of earlier runs in the data directory included
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub steps: Option<u64>,
    /// Folder of the final report [default: run/report in the data directory]
    #[arg(long, value_name = "DIR")]
    pub report: Option<PathBuf>,
    /// Print the report as JSON
    #[arg(long)]
    pub json: bool,
    /// Only tell what memory the trainer would need, by part
    #[arg(long)]
    pub explain_memory: bool,
}

/// `hone eval`.
#[derive(Debug, Args)]
pub struct EvalArgs {
    /// Where from.
    #[command(flatten)]
    pub run: RunArgs,
    /// Completions of each prompt [default: run.eval_samples]
    #[arg(long, value_name = "N")]
    pub samples: Option<usize>,
    /// The k of pass@k, separated by commas
    #[arg(long, value_name = "K", value_delimiter = ',')]
    pub pass_at: Vec<u64>,
    /// Part whose value of 1 counts as passed [default: the first that rewards a right answer]
    #[arg(long, value_name = "NAME")]
    pub part: Option<String>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// `hone demo`.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Optimiser steps
    #[arg(long, value_name = "N", default_value_t = DEFAULT_STEPS,
          value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub steps: u64,
    /// Seed of users, samples and trainer
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// What the model learns from
    #[arg(long, value_enum, default_value_t = RewardsMode::Both)]
    pub rewards: RewardsMode,
    /// What samples the shadow siblings
    #[arg(long, value_name = "WHAT", default_value = "auto", value_parser = sampler_kind())]
    pub sampler: SamplerKind,
    /// Data directory, kept [default: a temporary one, removed at the end]
    #[arg(long, value_name = "DIR")]
    pub data: Option<PathBuf>,
    /// Go on serving the improved model until Ctrl-C
    #[arg(long)]
    pub keep_serving: bool,
    /// Write the figures as JSON
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
}

impl From<DemoArgs> for DemoOptions {
    fn from(args: DemoArgs) -> Self {
        let DemoArgs { steps, seed, rewards, sampler, data, keep_serving, report } = args;
        Self { steps, seed, data, keep_serving, report, rewards, sampler }
    }
}

/// `hone db …`.
#[derive(Debug, Subcommand)]
pub enum DbCommand {
    /// Count the rows of each table
    Stats {
        /// One JSON object
        #[arg(long)]
        json: bool,
        /// Data directory
        #[arg(long, value_name = "DIR", default_value = "hone-data")]
        data: PathBuf,
    },
    /// Verify the file and its cross-references
    Check {
        /// Data directory
        #[arg(long, value_name = "DIR", default_value = "hone-data")]
        data: PathBuf,
    },
    /// Give unused space back
    Compact {
        /// Data directory
        #[arg(long, value_name = "DIR", default_value = "hone-data")]
        data: PathBuf,
    },
    /// Write every record as JSON lines to standard output
    Export {
        /// Data directory
        #[arg(long, value_name = "DIR", default_value = "hone-data")]
        data: PathBuf,
    },
}

/// `hone rewards …`.
#[derive(Debug, Subcommand)]
pub enum RewardsCommand {
    /// List the built-in functions with formula, range and parameters
    List,
    /// Score completions from a file, without training: JSON lines of {completion, prompt, ...}
    Test {
        /// The file
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Configuration file whose rewards are tried
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// Route whose rewards are tried [default: rollout.dataset_route]
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
        ("auto", "The native sampler on the CPU, else the engine"),
        ("engine", "The engine that serves, in slots that no client needs"),
        ("native", "The trainer's own model, in batches"),
    ];
    let values = values.map(|(name, help)| PossibleValue::new(name).help(help));
    PossibleValuesParser::new(values).try_map(|name| {
        SamplerKind::deserialize(IntoDeserializer::<ValueError>::into_deserializer(name))
    })
}
