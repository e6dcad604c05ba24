//! The sandbox's settings, requests and outcomes.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::limits::Limits;

/// The hidden subcommand under which the binary calls [`child_main`](super::child_main).
pub const SUBCOMMAND: &str = "sandbox-exec";

/// How a [`Sandbox`](super::Sandbox) starts runs.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The launcher: a binary whose [`SUBCOMMAND`] calls [`child_main`](super::child_main).
    /// `/proc/self/exe` is this binary, even after its file has been replaced.
    pub launcher: PathBuf,
    /// The Python interpreter: a path, or a name to look up on `PATH`.
    pub python: PathBuf,
    /// Runs at a time; at least 1.
    pub concurrency: usize,
    /// The user and group id of programs if the daemon is root; not 0. No other process should
    /// use it.
    pub uid: u32,
    /// Layers to treat as unsupported by the kernel; the remaining ones must still suffice.
    pub without: Vec<IsolationLayer>,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            launcher: PathBuf::from("/proc/self/exe"),
            python: PathBuf::from("python3"),
            concurrency: 2,
            uid: 65_534,
            without: Vec::new(),
        }
    }
}

/// A layer of the isolation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IsolationLayer {
    /// User, mount, pid, network, IPC and UTS namespaces.
    Namespaces,
    /// Landlock: the kernel's file and network access rules for unprivileged processes.
    Landlock,
    /// Filtered system calls.
    Seccomp,
}

/// The layers that confined a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Isolation {
    /// New mount, pid, network, IPC and UTS namespaces.
    pub namespaces: bool,
    /// A new user namespace, in which the kernel counts the run's threads separately.
    pub user_namespace: bool,
    /// Landlock's ABI version; 0 without Landlock.
    pub landlock_abi: u32,
    /// Filtered system calls.
    pub seccomp: bool,
    /// The id that the run switched to because the daemon is root.
    pub user_id: Option<u32>,
    /// The missing layers, each with the reason.
    pub missing: Vec<String>,
}

/// A program to run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunRequest {
    /// Python source, run as `__main__`.
    pub code: String,
    /// Its standard input.
    pub stdin: String,
    /// The resources that it may use.
    pub limits: Limits,
}

/// How a program ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Status {
    /// With exit code 0.
    Ok,
    /// With another exit code.
    Error {
        /// The exit code.
        exit: i32,
    },
    /// It reached its deadline or its processor time limit.
    Timeout,
    /// It ran out of memory.
    Memory,
    /// It was killed because it wrote more than its output limit.
    Output,
    /// Another signal killed it.
    Killed {
        /// The signal's number.
        signal: i32,
    },
}

impl Status {
    /// Why the program was stopped, as the rest of a sentence; `None` if it ended by itself.
    pub fn stopped(&self) -> Option<&'static str> {
        match self {
            Self::Ok | Self::Error { .. } => None,
            Self::Timeout => Some("it exceeded its time limit"),
            Self::Memory => Some("it exceeded its memory limit"),
            Self::Output => Some("it exceeded its output limit"),
            Self::Killed { .. } => Some("a signal ended it"),
        }
    }
}

/// The result of a program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunOutcome {
    /// How it ended.
    pub status: Status,
    /// Its standard output, up to the limit; invalid UTF-8 is replaced.
    pub stdout: String,
    /// Its standard error, likewise.
    pub stderr: String,
    /// The bytes it wrote to descriptor 4, up to 1 MiB: a channel that `print` does not share.
    pub report: String,
    /// Time from the child's start to its end.
    pub wall: Duration,
    /// Processor time of the child and its descendants.
    pub cpu: Duration,
    /// The layers that confined it.
    pub isolation: Isolation,
}

impl RunOutcome {
    /// The last `lines` lines of standard error, at most 500 characters.
    pub fn stderr_tail(&self, lines: usize) -> String {
        let text = self.stderr.trim_end();
        let start =
            text.rmatch_indices('\n').nth(lines.saturating_sub(1)).map_or(0, |(i, _)| i + 1);
        let tail = &text[start..];
        let skip = tail.chars().count().saturating_sub(500);
        tail.chars().skip(skip).collect()
    }
}
