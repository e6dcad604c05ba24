//! What the daemon and its launcher say to each other: one JSON line in, one JSON document out.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{Isolation, IsolationLayer, Limits};

/// One run, on the launcher's standard input. The daemon keeps that pipe open until it has the
/// report; the launcher takes its closing as an order to end the run.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct LaunchSpec {
    /// The interpreter and its arguments.
    pub argv: Vec<String>,
    /// What the interpreter may read: files and directories, canonical.
    pub readable: Vec<PathBuf>,
    /// What it may use.
    pub limits: Limits,
    /// The id to take where the launcher is root.
    pub uid: u32,
    /// Layers to do without, as if the kernel had none.
    pub without: Vec<IsolationLayer>,
    /// On descriptor 3.
    pub code: String,
    /// On descriptor 0.
    pub stdin: String,
}

/// How the run ended.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Ended {
    /// By itself with this code.
    Exit(i32),
    /// By this signal.
    Signal(i32),
    /// At its deadline.
    Deadline,
    /// Having written too much.
    Output,
}

/// What came of it, on the launcher's standard output.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum LaunchReply {
    /// It ran.
    Ran {
        /// How it ended.
        ended: Ended,
        /// Processor seconds used.
        cpu: f64,
        /// Wall time in seconds.
        wall: f64,
        /// Its standard output.
        stdout: String,
        /// Its standard error.
        stderr: String,
        /// What it wrote to descriptor 4.
        report: String,
        /// What it ran under.
        isolation: Isolation,
    },
    /// An isolation that has no equivalent here is missing.
    Unavailable(String),
    /// Something else failed before the interpreter ran.
    Failed(String),
}
