//! Runs untrusted Python: solutions in completions and the sources of `python` graders.
//!
//! Each [`Sandbox::run`] starts a *launcher* process: this binary with the hidden subcommand
//! [`SUBCOMMAND`], which calls [`child_main`]. The launcher enters namespaces, forks the *child*,
//! enforces the deadline and the output limit (`child`), and reports to the daemon. The child
//! confines itself (`confine`) and executes the interpreter. In the daemon, `launch` does all work
//! in tokio tasks; at most [`Setup::concurrency`] runs exist at a time.
//!
//! Callers may rely on this: no process of a run outlives [`Sandbox::run`]; dropping its future
//! ends the run; what a program does is a [`RunOutcome`], never an error. `docs/rewards.md` has a table of the
//! layers against each attack, with and without namespaces.
//!
//! A launcher that is root enters the namespaces directly, and the child then switches to
//! user 65534; if it cannot switch the user, the run is refused. Other users enter them through a user namespace.
//! Seccomp is always required. If a layer and its substitute are both missing, nothing is run:
//! [`SandboxError::Unavailable`].
//!
//! Not covered: kernel vulnerabilities, timing side channels, and the files of the interpreter's
//! installation, which programs can read.

#[cfg(target_os = "linux")]
mod child;
#[cfg(target_os = "linux")]
mod confine;
mod launch;
#[cfg(target_os = "linux")]
mod namespaces;
#[cfg(target_os = "linux")]
mod sys;
#[cfg(target_os = "linux")]
mod syscalls;

use std::fmt::Display;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

#[cfg(target_os = "linux")]
pub use child::child_main;
pub use launch::Sandbox;

pub mod testing;

/// Fails: only Linux can confine a program.
#[cfg(not(target_os = "linux"))]
pub fn child_main() -> std::process::ExitCode {
    std::process::ExitCode::FAILURE
}

hone_core::parameters! {
    /// The sandbox for code from completions and graders.
    pub struct SandboxConfig {
        /// The Python interpreter: a path, or a name to look up on `PATH`.
        pub python: PathBuf = PathBuf::from("python3"),
    }
}

// The messages between daemon and launcher: one JSON line in, one JSON document out.

/// One run, on the launcher's standard input. The daemon keeps that pipe open until it has the
/// reply; when the pipe closes, the launcher ends the run.
#[derive(Debug, Serialize, Deserialize)]
struct LaunchSpec {
    /// The interpreter and its arguments.
    pub argv: Vec<String>,
    /// The files and directories that the interpreter may read, canonical.
    pub readable: Vec<PathBuf>,
    /// The resources that the run may use.
    pub limits: Limits,
    /// Layers to treat as unsupported by the kernel.
    pub without: Vec<IsolationLayer>,
    /// The content of descriptor 3.
    pub code: String,
    /// The content of descriptor 0.
    pub stdin: String,
}

/// Why a program was not run. The launcher's reply is a `Result<RunOutcome, SandboxError>`.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
pub enum SandboxError {
    /// This machine cannot confine it: a layer and its substitute are missing.
    #[error("code is not executed here: {0}")]
    Unavailable(String),
    /// The interpreter does not work.
    #[error("sandbox: {0}")]
    Setting(String),
    /// The launcher could not be started or asked, failed, or did not report.
    #[error("the sandbox's launcher failed: {0}")]
    Launcher(String),
}

fn failed<E: Display>(step: &str) -> impl Fn(E) -> SandboxError + '_ {
    move |error| SandboxError::Launcher(format!("{step}: {error}"))
}

hone_core::parameters! {
    /// The resources that one run may use.
    #[derive(Copy)]
    pub struct Limits {
        /// Time from the interpreter's start to its end, in milliseconds. Processor time is limited to the same, rounded
        /// up to seconds.
        pub wall_ms: u64 = 5_000,
        /// Address space of each process, in MiB. Python itself takes about 20.
        pub memory_mb: u64 = 256,
        /// Bytes kept of standard output, and of standard error. More ends the run.
        pub output_bytes: usize = 64 * 1024,
    }
}

impl Limits {
    fn wall(&self) -> Duration {
        Duration::from_millis(self.wall_ms)
    }

    /// Processor seconds: the wall time rounded up, plus one, so that normally the wall clock ends a
    /// run.
    fn cpu_seconds(&self) -> u64 {
        self.wall_ms.div_ceil(1_000) + 1
    }
}

/// The hidden subcommand under which the binary calls [`child_main`].
pub const SUBCOMMAND: &str = "sandbox-exec";

/// How a [`Sandbox`] starts runs.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The launcher: a binary whose [`SUBCOMMAND`] calls [`child_main`].
    /// `/proc/self/exe` is this binary, even after its file has been replaced.
    pub launcher: PathBuf,
    /// The Python interpreter: a path, or a name to look up on `PATH`.
    pub python: PathBuf,
    /// Runs at a time; at least 1.
    pub concurrency: usize,
    /// Layers to treat as unsupported by the kernel; the remaining ones must still suffice.
    pub without: Vec<IsolationLayer>,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            launcher: PathBuf::from("/proc/self/exe"),
            python: PathBuf::from("python3"),
            concurrency: 2,
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

#[cfg(test)]
mod tests;
