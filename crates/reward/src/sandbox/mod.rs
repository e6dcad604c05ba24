//! Runs Python that nobody trusts: a completion that is said to be a solution, a grader's source.
//!
//! [`Sandbox::run`] starts a launcher (this binary with a hidden subcommand that calls
//! [`child_main`]), which confines a child of its own and becomes the interpreter in it. Layers:
//!
//! | attack | with namespaces | without | in both |
//! | --- | --- | --- | --- |
//! | fork bomb | `RLIMIT_NPROC` counted in a user namespace of its own; the pid namespace ends with its first process | - | seccomp: no process can be started unless [`Limits::processes`]; no thread either where threads cannot be counted apart |
//! | endless loop | the launcher kills the first process, the kernel the rest | nothing else can be running | wall clock in launcher and daemon; `RLIMIT_CPU`; parent's death signal |
//! | memory | scratch directory is a tmpfs of bounded size | nothing can be written | `RLIMIT_AS`; no memfd, no shared memory; bounded output |
//! | files | a root with only the interpreter's own files, read-only | landlock 3 or later is required | landlock where it exists; `RLIMIT_FSIZE`; nothing writable but the scratch directory |
//! | network | a network namespace without interfaces | - | seccomp: no socket but unconnected local pairs; landlock 4: no TCP |
//! | others' processes and secrets | own pid namespace, no `/proc` | landlock hides `/proc`, seccomp has no signals | empty environment, no inherited descriptor, no ptrace, no privileges gained by exec |
//!
//! As root the namespaces are entered directly and root is given up for [`Setup::uid`] afterwards;
//! if root cannot be given up, or may not enter namespaces, the rules are those of the column
//! "without". Other users enter them through a user namespace. Seccomp is required everywhere.
//! Where an isolation and what stands in for it are both missing, nothing is run:
//! [`SandboxError::Unavailable`].
//!
//! Limits of this: a kernel hole is a hole; times can be observed; the files of the interpreter's
//! installation can be read.

#[cfg(target_os = "linux")]
mod child;
mod config;
#[cfg(target_os = "linux")]
mod confine;
mod launch;
mod limits;
#[cfg(target_os = "linux")]
mod namespaces;
mod spec;
#[cfg(target_os = "linux")]
mod sys;
#[cfg(target_os = "linux")]
mod syscalls;

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use child::child_main;

#[cfg(target_os = "linux")]
pub use config::SandboxConfig;
pub use launch::Sandbox;
pub use limits::Limits;

/// The hidden subcommand under which the binary calls [`child_main`].
pub const SUBCOMMAND: &str = "sandbox-exec";

/// On other systems nothing can be confined.
#[cfg(not(target_os = "linux"))]
pub fn child_main() -> std::process::ExitCode {
    std::process::ExitCode::FAILURE
}

/// How to start runs.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The launcher: a binary whose [`SUBCOMMAND`] calls [`child_main`].
    /// `/proc/self/exe` is this binary, even after the file has been replaced.
    pub launcher: PathBuf,
    /// The interpreter: a path, or a name to be found on `PATH`.
    pub python: PathBuf,
    /// How many runs at once; at least 1.
    pub concurrency: usize,
    /// The id to take where the daemon is root; not 0. Nothing else should run under it.
    pub uid: u32,
    /// Layers to do without, as if the kernel had none: what is left must still suffice.
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
    /// Landlock.
    Landlock,
    /// Filtered system calls.
    Seccomp,
}

/// What a run was confined by.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Isolation {
    /// In mount, pid, network, IPC and UTS namespaces of its own.
    pub namespaces: bool,
    /// In a user namespace of its own, where its threads are counted apart.
    pub user_namespace: bool,
    /// Version of Landlock's interface; 0 without.
    pub landlock_abi: u32,
    /// With filtered system calls.
    pub seccomp: bool,
    /// The id it took because the daemon is root.
    pub user_id: Option<u32>,
    /// The layers that are missing, each with why.
    pub missing: Vec<String>,
}

/// A program to run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunRequest {
    /// Python source, run as `__main__`.
    pub code: String,
    /// Its standard input.
    pub stdin: String,
    /// What it may use.
    pub limits: Limits,
}

/// How a program ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Status {
    /// With exit code 0.
    Ok,
    /// With another exit code.
    Error {
        /// The code.
        exit: i32,
    },
    /// It was ended at its deadline, or had used its processor time.
    Timeout,
    /// It ran out of memory.
    Memory,
    /// It was ended because it wrote more than it may.
    Output,
    /// It was ended by this signal.
    Killed {
        /// The signal's number.
        signal: i32,
    },
}

/// What came of a program.
#[derive(Clone, Debug, PartialEq)]
pub struct RunOutcome {
    /// How it ended.
    pub status: Status,
    /// Its standard output, up to the bound; what is not UTF-8 is replaced.
    pub stdout: String,
    /// Its standard error, likewise.
    pub stderr: String,
    /// What it wrote to descriptor 4, up to 1 MiB: results that printing cannot disturb.
    pub report: String,
    /// From the child's start to its end.
    pub wall: Duration,
    /// Processor time of it and what it started.
    pub cpu: Duration,
    /// What it was confined by.
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

/// Why a program was not run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SandboxError {
    /// It cannot be confined here.
    #[error("code is not executed here: {0}")]
    Unavailable(String),
    /// There is nothing to run it with.
    #[error("sandbox: python = `{python}` cannot be used: {reason}")]
    Interpreter {
        /// What was to be the interpreter.
        python: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A limit is out of range.
    #[error("sandbox: {key} = {value} is not from {least} to {most}")]
    Limit {
        /// The limit.
        key: &'static str,
        /// What it was to be.
        value: u64,
        /// The least allowed.
        least: u64,
        /// The most allowed.
        most: u64,
    },
    /// The launcher did not do its part.
    #[error("the sandbox's launcher failed: {0}")]
    Launcher(String),
}

#[cfg(test)]
mod tests;
