//! The messages between daemon and launcher: one JSON line in, one JSON document out.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::limits::Limits;
use super::types::IsolationLayer;

/// One run, on the launcher's standard input. The daemon keeps that pipe open until it has the
/// reply; when the pipe closes, the launcher ends the run.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct LaunchSpec {
    /// The interpreter and its arguments.
    pub argv: Vec<String>,
    /// The files and directories that the interpreter may read, canonical.
    pub readable: Vec<PathBuf>,
    /// The resources that the run may use.
    pub limits: Limits,
    /// The id to switch to if the launcher is root.
    pub uid: u32,
    /// Layers to treat as unsupported by the kernel.
    pub without: Vec<IsolationLayer>,
    /// The content of descriptor 3.
    pub code: String,
    /// The content of descriptor 0.
    pub stdin: String,
}

/// Why the launcher did not run the interpreter. Its reply is a `Result<RunOutcome, LaunchFailure>`.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum LaunchFailure {
    /// A layer and its substitute are missing.
    Unavailable(String),
    /// Another step failed.
    Failed(String),
}
