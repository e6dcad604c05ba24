//! Runs untrusted Python: solutions in completions and the sources of `python` graders.
//!
//! Each [`Sandbox::run`] starts a *launcher* process: this binary with the hidden subcommand
//! [`SUBCOMMAND`], which calls [`child_main`]. The launcher enters namespaces, forks the *child*,
//! enforces the deadline and the output limit (`child`), and reports to the daemon. The child
//! confines itself (`confine`) and executes the interpreter. In the daemon, `launch` does all work
//! in tokio tasks; at most [`Setup::concurrency`] runs exist at a time.
//!
//! Callers may rely on this: no process of a run outlives [`Sandbox::run`]; dropping its future
//! ends the run; what a program does is a [`RunOutcome`], never an error. The layers against each
//! attack:
//!
//! | attack | with namespaces | without namespaces | in both cases |
//! | --- | --- | --- | --- |
//! | fork bomb | `RLIMIT_NPROC`, counted in the run's own user namespace; the pid namespace ends with its first process | - | seccomp: no new process unless [`Limits::processes`], and no new thread where the run's threads cannot be counted separately |
//! | endless loop | the launcher kills the first process, the kernel kills the rest | no other process can exist | wall clock in launcher and daemon; `RLIMIT_CPU`; parent-death signal |
//! | memory | the scratch directory is a tmpfs of limited size | nothing is writable | `RLIMIT_AS`; no memfd, no shared memory; limited output |
//! | files | a read-only root with only the interpreter's files | Landlock 3 or later is required | Landlock if available; `RLIMIT_FSIZE`; only the scratch directory is writable |
//! | network | a network namespace without interfaces | - | seccomp: no socket but local pairs, no destination addresses; Landlock 4: no TCP |
//! | other processes, secrets | own pid namespace, no `/proc` | Landlock hides `/proc`, seccomp blocks signals | empty environment, no inherited descriptors, no ptrace, no privileges gained by exec |
//!
//! A launcher that is root enters the namespaces directly, and the child then switches to
//! [`Setup::uid`]. If root may not enter namespaces, the column "without namespaces" applies; if it
//! cannot switch the user, the run is refused. Other users enter them through a user namespace.
//! Seccomp is always required. If a layer and its substitute are both missing, nothing is run:
//! [`SandboxError::Unavailable`].
//!
//! Not covered: kernel vulnerabilities, timing side channels, and the files of the interpreter's
//! installation, which programs can read.

#[cfg(target_os = "linux")]
mod child;
mod config;
#[cfg(target_os = "linux")]
mod confine;
mod error;
mod launch;
mod limits;
#[cfg(target_os = "linux")]
mod namespaces;
mod spec;
#[cfg(target_os = "linux")]
mod sys;
#[cfg(target_os = "linux")]
mod syscalls;
pub mod testing;
mod types;

#[cfg(target_os = "linux")]
pub use child::child_main;
pub use config::SandboxConfig;
pub use error::SandboxError;
pub use launch::Sandbox;
pub use limits::Limits;
pub use types::{Isolation, IsolationLayer, RunOutcome, RunRequest, SUBCOMMAND, Setup, Status};

/// Fails: only Linux can confine a program.
#[cfg(not(target_os = "linux"))]
pub fn child_main() -> std::process::ExitCode {
    std::process::ExitCode::FAILURE
}

#[cfg(test)]
mod tests;
