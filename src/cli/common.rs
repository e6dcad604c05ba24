//! Arguments that several commands have.

use std::path::PathBuf;

use clap::Args;
use hone_engine::EngineBackend;
use hone_model::weights::Quantize;

use super::values::{engine_backend, quantize};

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
