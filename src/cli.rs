//! The command line, as clap structures.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{ArgGroup, Args, Parser, Subcommand};

use hone_engine::EngineBackend;
use hone_model::weights::Quantize;

use crate::app::adapters::VersionChoice;
use crate::app::generate::Weights;
use crate::runs::from_ledger::filter::LedgerFilter;
use hone_config::flags::{engine_backend, quantize};
use hone_demo::DemoOptions;

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
    Demo(DemoOptions),
    /// Serve a model and keep training it
    Serve(ServeArgs),
    /// Train on a dataset or on a daemon's records without serving, with a final report
    Train(TrainArgs),
    /// Evaluate the active policy and the base model on a dataset
    Eval(EvalArgs),
    /// Generate completions of a prompt from the base model or an adapter
    Generate(GenerateArgs),
    /// Check a configuration, its rewards and its dataset, and report errors
    Validate(ValidateArgs),
    /// Convert a configuration of TRL's GRPOTrainer, and list what has no counterpart
    ImportTrl {
        /// File with a GRPOConfig: JSON, YAML, or a Python script, which is not run
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Write the configuration to a file [default: standard output]
        #[arg(long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
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
        /// Export the adapter of the best evaluation of `hone train`
        #[arg(long, conflicts_with = "version")]
        best: bool,
        /// Store merged weights as 32-bit floats instead of the base's type
        #[arg(long, requires = "merged")]
        f32: bool,
        /// Common arguments.
        #[command(flatten)]
        config: ConfigArgs,
    },
}

/// `hone serve`.
#[derive(Clone, Debug, Args)]
pub struct ServeArgs {
    /// Common arguments.
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Engine that answers clients [default: engine.backend]
    #[arg(long, value_name = "BACKEND", value_parser = engine_backend())]
    pub backend: Option<EngineBackend>,
    /// Address and port; port 0 picks a free one [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDR:PORT")]
    pub bind: Option<SocketAddr>,
    /// Accept every client at an address that others can reach, without any key
    #[arg(long)]
    pub insecure: bool,
    /// Only print the memory that the process needs, by part, without loading the model
    #[arg(long)]
    pub explain_memory: bool,
    /// Print the memory as JSON
    #[arg(long, requires = "explain_memory")]
    pub json: bool,
}

/// `hone validate`.
#[derive(Debug, Args)]
pub struct ValidateArgs {
    /// Configuration file [default: only the defaults and the environment are checked]
    #[arg(value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// The same, as in other commands
    #[arg(long, value_name = "FILE", conflicts_with = "file")]
    pub config: Option<PathBuf>,
    /// Model whose tokenizer measures the prompts [default: model.path, or the embedded model]
    #[arg(long, value_name = "DIR|HUB_ID")]
    pub model: Option<String>,
    /// Dataset to read [default: dataset.path]
    #[arg(long, value_name = "FILE|hf://ID")]
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
    /// Passes over the prompts to train on, which determine the total steps
    #[arg(long, value_name = "E", conflicts_with = "steps")]
    pub epochs: Option<f64>,
    /// Directory of the final report [default: run/report in the data directory]
    #[arg(long, value_name = "DIR")]
    pub report: Option<PathBuf>,
    /// Print the report, or the memory, as JSON
    #[arg(long)]
    pub json: bool,
    /// Only print the memory that the process needs, by part, without loading the model
    #[arg(long)]
    pub explain_memory: bool,
    /// Arguments for recorded completions.
    #[command(flatten)]
    pub ledger: FromLedgerArgs,
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
    /// Number of prompts whose completions are printed [default: run.samples_shown]
    #[arg(long, value_name = "N")]
    pub show: Option<usize>,
    /// Reward part whose value 1 counts as a pass [default: the first that scores correctness]
    #[arg(long, value_name = "NAME")]
    pub part: Option<String>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
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
    /// Score completions from a file with JSON of {completion, prompt, ...}, texts or TRL's messages
    Test(TestRewardsArgs),
}

/// `hone rewards test`.
#[derive(Debug, Args)]
pub struct TestRewardsArgs {
    /// File to score: JSON lines or a JSON array
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Configuration file with the rewards [default: those of --preset and --kind]
    #[arg(long, value_name = "FILE", conflicts_with_all = ["preset", "kinds"])]
    pub config: Option<PathBuf>,
    /// Route with the rewards [default: rollout.dataset_route]
    #[arg(long, value_name = "NAME", requires = "config")]
    pub route: Option<String>,
    /// Preset with the rewards
    #[arg(long, value_name = "NAME")]
    pub preset: Option<String>,
    /// A kind of reward, or a part as TOML such as '{ kind = "length", ideal = 20, spread = 20 }';
    /// repeatable [default: numeric_match, format_soft and format_incremental, if there is no --preset]
    #[arg(long = "kind", value_name = "KIND")]
    pub kinds: Vec<String>,
    /// Print samples and statistics as JSON
    #[arg(long)]
    pub json: bool,
}

// Arguments that several commands have.

/// The arguments of every command that loads a model.
#[derive(Clone, Debug, Args)]
pub struct ConfigArgs {
    /// Model: a Hugging Face directory or hub id, or a GGUF file [default: model.path, or the embedded
    /// model]
    #[arg(long, value_name = "DIR|HUB_ID|FILE")]
    pub model: Option<String>,
    /// Format that the frozen weights are converted to [default: model.quantize]
    #[arg(long, value_name = "FORMAT", value_parser = quantize())]
    pub quantize: Option<Quantize>,
    /// Configuration file (see configs/default.toml and configs/examples)
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Data directory: ledger, adapters, checkpoints, logs [default: ./hone-data]
    #[arg(long, value_name = "DIR")]
    pub data: Option<PathBuf>,
}

/// Arguments that `hone train` and `hone eval` share.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Common arguments.
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Engine that generates and judges [default: engine.backend]
    #[arg(long, value_name = "BACKEND", value_parser = engine_backend())]
    pub backend: Option<EngineBackend>,
    /// Dataset: JSONL, CSV or Parquet, or hf://OWNER/NAME
    #[arg(long, value_name = "FILE|HF_URL")]
    pub dataset: Option<PathBuf>,
}

/// The data directory of a stopped daemon.
#[derive(Debug, Args)]
pub struct DataArgs {
    /// Data directory
    #[arg(long, value_name = "DIR", default_value = "hone-data")]
    pub data: PathBuf,
}

// The arguments of `hone generate`.

/// `hone generate`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("weights").args(["version", "best", "base", "adapter"]))]
pub struct GenerateArgs {
    /// The user's message [default: standard input]
    #[arg(value_name = "PROMPT", conflicts_with = "messages")]
    pub prompt: Option<String>,
    /// Conversation, as a JSON list of {role, content}
    #[arg(long, value_name = "FILE")]
    pub messages: Option<PathBuf>,
    /// System message [default: dataset.system_prompt]
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Use a policy version of the data directory [default: the active one, if there is one]
    #[arg(long, value_name = "N")]
    pub version: Option<u64>,
    /// Use the adapter of the best evaluation of `hone train`
    #[arg(long)]
    pub best: bool,
    /// Use the model without an adapter
    #[arg(long)]
    pub base: bool,
    /// Use an adapter in a PEFT directory, such as one that `hone adapters export --peft` writes
    #[arg(long, value_name = "DIR")]
    pub adapter: Option<PathBuf>,
    /// Divides the logits; 0 is greedy decoding
    #[arg(long, value_name = "T", default_value_t = 1.0)]
    pub temperature: f32,
    /// Samples from the smallest set of tokens with at least this probability
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    pub top_p: f32,
    /// Longest completion, in tokens
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub max_tokens: u32,
    /// Seed of the first completion; each further one adds 1
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Number of completions
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub samples: u64,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    /// Common arguments.
    #[command(flatten)]
    pub config: ConfigArgs,
}

impl GenerateArgs {
    /// The weights that the flags choose.
    pub fn weights(&self) -> Weights {
        match (&self.adapter, self.version) {
            _ if self.base => Weights::Base,
            _ if self.best => Weights::Version(VersionChoice::Best),
            (Some(adapter), _) => Weights::Adapter(adapter.clone()),
            (None, Some(version)) => Weights::Version(VersionChoice::Number(version)),
            (None, None) => Weights::Default,
        }
    }
}

// The arguments of `hone train` for recorded completions.

/// The part of `hone train` that is for recorded completions.
#[derive(Debug, Args)]
pub struct FromLedgerArgs {
    /// Train on the records of a stopped daemon, its data directory or ledger file, instead of a dataset
    #[arg(long, value_name = "DIR", conflicts_with = "dataset")]
    pub from_ledger: Option<PathBuf>,
    /// The records to use.
    #[command(flatten)]
    pub filter: LedgerFilter,
    /// Share of the recorded prompts to hold out
    #[arg(long, value_name = "SHARE", requires = "from_ledger", default_value_t = 0.1)]
    pub holdout: f64,
}
