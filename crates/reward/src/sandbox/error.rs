//! Why the sandbox does not run a program.

use std::error::Error;

/// Why a program was not run.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// This machine cannot confine it.
    #[error("code is not executed here: {0}")]
    Unavailable(String),
    /// The interpreter does not work.
    #[error("sandbox: python = `{python}` cannot be used: {reason}")]
    Interpreter {
        /// The configured interpreter.
        python: String,
        /// The failure, with the interpreter's own message if it has one.
        reason: String,
    },
    /// A limit is out of range.
    #[error("sandbox: {key} = {value} is not from {least} to {most}")]
    Limit {
        /// The limit's name.
        key: &'static str,
        /// Its value.
        value: u64,
        /// The smallest allowed value.
        least: u64,
        /// The largest allowed value.
        most: u64,
    },
    /// The launcher failed, or did not report, before or while the interpreter ran.
    #[error("the sandbox's launcher failed: {0}")]
    Launcher(String),
    /// The daemon could not start the launcher or exchange data with it.
    #[error("the sandbox's launcher failed: {step}: {source}")]
    Exchange {
        /// The step that failed.
        step: &'static str,
        /// The cause.
        source: Box<dyn Error + Send + Sync>,
    },
}
