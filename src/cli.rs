//! The command line: clap only.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

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
        let DemoArgs { steps, seed, rewards, data, keep_serving, report } = args;
        Self { steps, seed, data, keep_serving, report, rewards }
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
}
