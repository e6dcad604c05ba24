//! The command line, as clap structures.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{ArgGroup, Args, Parser, Subcommand};

use hone_core::types::UnixMillis;
use hone_engine::EngineBackend;
use hone_model::weights::Quantize;
use hone_store::parse_moment;

use crate::app::adapters::VersionChoice;
use crate::app::generate::Weights;
use crate::ledger::row::TrlColumns;
use crate::ledger::trl::TableFormat;
use crate::runs::from_ledger::filter::LedgerFilter;
use crate::starter::Teacher;
use hone_config::FleetRole;
use hone_config::flags::{engine_backend, fleet_role, quantize};
use hone_demo::DemoOptions;

/// Serves a language model and keeps training it on its own traffic.
///
/// Results are written to standard output, logs and progress to standard error. Exit codes: 0 for
/// success, 1 for a failure, 2 for wrong usage or configuration.
#[derive(Debug, Parser)]
#[command(name = "hone", version, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Write a starter configuration for a model of one's own, from which a first run learns
    Init(InitArgs),
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
        #[command(subcommand)]
        command: DbCommand,
    },
    /// List and test reward functions
    Rewards {
        #[command(subcommand)]
        command: RewardsCommand,
    },
    /// List and export the trained adapters of a stopped daemon
    Adapters {
        #[command(subcommand)]
        command: AdaptersCommand,
    },
    /// Make, show and change a fleet: servers and trainers on several machines that share an object store
    Fleet {
        #[command(subcommand)]
        command: FleetCommand,
    },
    /// Show the NVIDIA GPU, its driver and libraries, and what is missing
    Device,
    /// Print the script with which a shell completes Hone's commands and flags
    Completions {
        /// The shell
        #[arg(value_name = "SHELL")]
        shell: clap_complete::Shell,
    },
    /// Write a manual page for each command
    Man {
        /// Directory of the pages, such as /usr/local/share/man/man1; it is created
        #[arg(long, value_name = "DIR")]
        to: PathBuf,
    },
}

/// What is not given is asked for if standard input is a terminal.
#[derive(Debug, Args)]
pub(crate) struct InitArgs {
    /// Directory to write hone.toml and example prompts into; it is created, and no file is replaced
    #[arg(value_name = "DIR", default_value = ".")]
    pub(crate) target: PathBuf,
    /// Model: a Hugging Face directory or hub id, or a GGUF file [default: the embedded model]
    #[arg(long, value_name = "DIR|HUB_ID|FILE")]
    pub(crate) model: Option<String>,
    /// What teaches the model [default: answers]
    #[arg(long, value_name = "TEACHER", value_enum)]
    pub(crate) learn_from: Option<Teacher>,
    /// Prompts with answers: JSONL, CSV or Parquet, or hf://OWNER/NAME [default: example prompts]
    #[arg(long, value_name = "FILE|HF_URL")]
    pub(crate) dataset: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum FleetCommand {
    /// Begin a fleet with the data directory of a stopped daemon
    Init(ConfigArgs),
    /// Show the servers, the trainers and the versions
    Status {
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        config: ConfigArgs,
    },
    /// Serve a version that was active before, on all servers; training continues from it
    Activate {
        /// The version
        #[arg(value_name = "VERSION")]
        version: u64,
        #[command(flatten)]
        config: ConfigArgs,
    },
    /// Make the trainer's ledger from the object store in an empty data directory
    Rebuild(ConfigArgs),
}

#[derive(Debug, Subcommand)]
pub(crate) enum AdaptersCommand {
    /// List every policy version with its parent, step, state and mean reward
    List {
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
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
        #[command(flatten)]
        config: ConfigArgs,
    },
}

#[derive(Clone, Debug, Args)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// Engine that answers clients [default: engine.backend]
    #[arg(long, value_name = "BACKEND", value_parser = engine_backend())]
    pub(crate) backend: Option<EngineBackend>,
    /// What this process does in the fleet of fleet.url
    #[arg(long, value_name = "ROLE", value_parser = fleet_role(), default_value = "all")]
    pub(crate) role: FleetRole,
    /// Address and port; port 0 picks a free one [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDR:PORT")]
    pub(crate) bind: Option<SocketAddr>,
    /// Accept every client at an address that others can reach, without any key
    #[arg(long)]
    pub(crate) insecure: bool,
    /// Only print the memory that the process needs, by part, without loading the model
    #[arg(long)]
    pub(crate) explain_memory: bool,
    /// Print the memory as JSON
    #[arg(long, requires = "explain_memory")]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ValidateArgs {
    /// Configuration file [default: only the defaults and the environment are checked]
    #[arg(value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// The same, as in other commands
    #[arg(long, value_name = "FILE", conflicts_with = "file")]
    pub(crate) config: Option<PathBuf>,
    /// Model whose tokenizer measures the prompts [default: model.path, or the embedded model]
    #[arg(long, value_name = "DIR|HUB_ID")]
    pub(crate) model: Option<String>,
    /// Dataset to read [default: dataset.path]
    #[arg(long, value_name = "FILE|hf://ID")]
    pub(crate) dataset: Option<PathBuf>,
    /// Read neither the dataset nor the model
    #[arg(long, conflicts_with_all = ["model", "dataset"])]
    pub(crate) config_only: bool,
}

#[derive(Debug, Args)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(crate) run: RunArgs,
    /// Total optimizer steps, including those of earlier runs in the data directory
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) steps: Option<u64>,
    /// Passes over the prompts to train on, which determine the total steps
    #[arg(long, value_name = "E", conflicts_with = "steps")]
    pub(crate) epochs: Option<f64>,
    /// Directory of the final report [default: run/report in the data directory]
    #[arg(long, value_name = "DIR")]
    pub(crate) report: Option<PathBuf>,
    /// Print the report, or the memory, as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Only print the memory that the process needs, by part, without loading the model
    #[arg(long)]
    pub(crate) explain_memory: bool,
    #[command(flatten)]
    pub(crate) ledger: FromLedgerArgs,
}

#[derive(Debug, Args)]
pub(crate) struct EvalArgs {
    #[command(flatten)]
    pub(crate) run: RunArgs,
    /// Completions per prompt [default: run.eval_samples]
    #[arg(long, value_name = "N")]
    pub(crate) samples: Option<usize>,
    /// Values of k for pass@k, separated by commas
    #[arg(long, value_name = "K", value_delimiter = ',')]
    pub(crate) pass_at: Vec<u64>,
    /// Number of prompts whose completions are printed [default: 4]
    #[arg(long, value_name = "N")]
    pub(crate) show: Option<usize>,
    /// Reward part whose value 1 counts as a pass [default: the first that scores correctness]
    #[arg(long, value_name = "NAME")]
    pub(crate) part: Option<String>,
    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DbCommand {
    /// Count the rows of each table
    Stats {
        /// Print the result as JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        data: DataArgs,
    },
    /// Verify the file and its cross-references; exit code 1 if it is damaged
    Check(DataArgs),
    /// Release unused space
    Compact(DataArgs),
    /// Erase completions with everything that belongs to them, and print what was erased as JSON
    Erase(EraseArgs),
    /// Copy the data directory as of one moment. A running daemon does so with POST /admin/backup
    Backup {
        /// Directory of the backup, which must not exist
        #[arg(long, value_name = "DIR")]
        to: PathBuf,
        #[command(flatten)]
        data: DataArgs,
    },
    /// Copy a backup to an empty data directory and check it
    Restore {
        /// Directory of the backup
        #[arg(long, value_name = "DIR")]
        from: PathBuf,
        #[command(flatten)]
        data: DataArgs,
    },
    /// Browse versions, steps and completions in the terminal
    Inspect(DataArgs),
    /// Print every record as a line of JSON, or completions in the columns of TRL
    Export(ExportArgs),
    /// Make a new ledger from a file that `hone db export` wrote
    Import {
        /// The file: every record as a line of JSON
        #[arg(value_name = "FILE")]
        file: PathBuf,
        #[command(flatten)]
        data: DataArgs,
    },
}

#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// Completions in these columns, which TRL and `datasets` read [default: every record as it is]
    #[arg(long, value_name = "COLUMNS", value_enum)]
    pub(crate) columns: Option<TrlColumns>,
    /// Form of the columns
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t, requires = "columns")]
    pub(crate) format: TableFormat,
    /// Reward part that counts [default: the sum of all parts]
    #[arg(long, value_name = "NAME", requires = "columns")]
    pub(crate) part: Option<String>,
    /// A completion with a larger reward has the label true
    #[arg(long, value_name = "REWARD", requires = "columns", default_value_t = 0.5)]
    pub(crate) threshold: f64,
    /// Write a file, which must not exist [default: standard output]
    #[arg(long, value_name = "FILE", required_if_eq("format", "parquet"))]
    pub(crate) output: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) data: DataArgs,
}

/// What `hone db erase` erases.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("selection").required(true))]
pub(crate) struct EraseArgs {
    /// One completion
    #[arg(long, value_name = "ID", group = "selection")]
    pub(crate) completion: Option<String>,
    /// Conversations with this metadata.session_id
    #[arg(long, value_name = "ID", group = "selection")]
    pub(crate) session: Option<String>,
    /// Completions and feedback of an end user, by the name in the field `user` of requests
    #[arg(long, value_name = "NAME", group = "selection")]
    pub(crate) end_user: Option<String>,
    /// Completions and feedback of an API key with its end users, or of one end user, by id
    #[arg(long, value_name = "ID", group = "selection")]
    pub(crate) key: Option<String>,
    /// Completions of before a date or a time, such as 2026-01-31 or 2026-01-31T12:00:00Z
    #[arg(long, value_name = "DATE", group = "selection", value_parser = moment)]
    pub(crate) before: Option<UnixMillis>,
    /// Only print what would be erased
    #[arg(long)]
    pub(crate) dry_run: bool,
    #[command(flatten)]
    pub(crate) data: DataArgs,
}

fn moment(text: &str) -> Result<UnixMillis, String> {
    parse_moment(text).ok_or_else(|| "it must be a date or a time of RFC 3339".to_owned())
}

#[derive(Debug, Subcommand)]
pub(crate) enum RewardsCommand {
    /// List the built-in reward functions with formula, range and parameters
    List,
    /// Score completions from a file with JSON of {completion, prompt, ...}, texts or TRL's messages
    Test(TestRewardsArgs),
}

#[derive(Debug, Args)]
pub(crate) struct TestRewardsArgs {
    /// File to score: JSON lines or a JSON array
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Configuration file with the rewards [default: those of --preset and --kind]
    #[arg(long, value_name = "FILE", conflicts_with_all = ["preset", "kinds"])]
    pub(crate) config: Option<PathBuf>,
    /// Route with the rewards [default: rollout.dataset_route]
    #[arg(long, value_name = "NAME", requires = "config")]
    pub(crate) route: Option<String>,
    /// Preset with the rewards
    #[arg(long, value_name = "NAME")]
    pub(crate) preset: Option<String>,
    /// A kind of reward, or a part as TOML such as '{ kind = "length", ideal = 20, spread = 20 }';
    /// repeatable [default: numeric_match, format_soft and format_incremental, if there is no --preset]
    #[arg(long = "kind", value_name = "KIND")]
    pub(crate) kinds: Vec<String>,
    /// Print samples and statistics as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

// Arguments that several commands have.

/// The arguments of every command that loads a model.
#[derive(Clone, Debug, Args)]
pub(crate) struct ConfigArgs {
    /// Model: a Hugging Face directory or hub id, or a GGUF file [default: model.path, or the embedded
    /// model]
    #[arg(long, value_name = "DIR|HUB_ID|FILE")]
    pub(crate) model: Option<String>,
    /// Format that the frozen weights are converted to [default: model.quantize]
    #[arg(long, value_name = "FORMAT", value_parser = quantize())]
    pub(crate) quantize: Option<Quantize>,
    /// Configuration file (see configs/default.toml and configs/examples)
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Data directory: ledger, adapters, checkpoints, logs [default: ./hone-data]
    #[arg(long, value_name = "DIR")]
    pub(crate) data: Option<PathBuf>,
}

/// Arguments that `hone train` and `hone eval` share.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
    /// Engine that generates and judges [default: engine.backend]
    #[arg(long, value_name = "BACKEND", value_parser = engine_backend())]
    pub(crate) backend: Option<EngineBackend>,
    /// Dataset: JSONL, CSV or Parquet, or hf://OWNER/NAME
    #[arg(long, value_name = "FILE|HF_URL")]
    pub(crate) dataset: Option<PathBuf>,
}

/// The data directory of a stopped daemon.
#[derive(Debug, Args)]
pub(crate) struct DataArgs {
    /// Data directory
    #[arg(long, value_name = "DIR", default_value = "hone-data")]
    pub(crate) data: PathBuf,
}

// The arguments of `hone generate`.

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("weights").args(["version", "best", "base", "adapter"]))]
pub(crate) struct GenerateArgs {
    /// The user's message [default: standard input]
    #[arg(value_name = "PROMPT", conflicts_with = "messages")]
    pub(crate) prompt: Option<String>,
    /// Conversation, as a JSON list of {role, content}
    #[arg(long, value_name = "FILE")]
    pub(crate) messages: Option<PathBuf>,
    /// System message [default: dataset.system_prompt]
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// Use a policy version of the data directory [default: the active one, if there is one]
    #[arg(long, value_name = "N")]
    pub(crate) version: Option<u64>,
    /// Use the adapter of the best evaluation of `hone train`
    #[arg(long)]
    pub(crate) best: bool,
    /// Use the model without an adapter
    #[arg(long)]
    pub(crate) base: bool,
    /// Use an adapter in a PEFT directory, such as one that `hone adapters export --peft` writes
    #[arg(long, value_name = "DIR")]
    pub(crate) adapter: Option<PathBuf>,
    /// Divides the logits; 0 is greedy decoding
    #[arg(long, value_name = "T", default_value_t = 1.0)]
    pub(crate) temperature: f32,
    /// Samples from the smallest set of tokens with at least this probability
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    pub(crate) top_p: f32,
    /// Longest completion, in tokens
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub(crate) max_tokens: u32,
    /// Seed of the first completion; each further one adds 1
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
    /// Number of completions
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub(crate) samples: u64,
    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) config: ConfigArgs,
}

impl GenerateArgs {
    /// The weights that the flags choose.
    pub(crate) fn weights(&self) -> Weights {
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
pub(crate) struct FromLedgerArgs {
    /// Train on the records of a stopped daemon, its data directory or ledger file, instead of a dataset
    #[arg(long, value_name = "DIR", conflicts_with = "dataset")]
    pub(crate) from_ledger: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) filter: LedgerFilter,
    /// Share of the recorded prompts to hold out
    #[arg(long, value_name = "SHARE", requires = "from_ledger", default_value_t = 0.1)]
    pub(crate) holdout: f64,
}
