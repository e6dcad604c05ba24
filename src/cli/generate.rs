//! The arguments of `hone generate`.

use std::path::PathBuf;

use clap::{ArgGroup, Args};

use super::common::ConfigArgs;
use crate::app::adapters::VersionChoice;
use crate::app::generate::Weights;

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
