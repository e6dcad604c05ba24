//! Graders that are written in Python: `grade(sample, item) -> float`, as OpenAI's `python` grader.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::sandbox::{Limits, RunOutcome, RunRequest, Sandbox, SandboxError, Status};

/// Why a Python grader gave no value.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PythonGraderError {
    /// It was not run.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// It was stopped.
    #[error("the grader's source was stopped: {0}")]
    Stopped(&'static str),
    /// It raised an exception: the exception's last line.
    #[error("the grader's source failed: {0}")]
    Raised(String),
    /// It returned infinity or NaN.
    #[error("the grader's source returned {0}, not a finite number")]
    NotFinite(String),
}

/// Runs a grader's source, each call in a fresh process.
#[derive(Clone, Debug)]
pub struct PythonGrader {
    source: String,
    sandbox: Arc<Sandbox>,
    limits: Limits,
}

impl PythonGrader {
    /// The source must define `grade(sample, item)`; that is found out by the first call.
    pub fn new(source: impl Into<String>, sandbox: Arc<Sandbox>, limits: Limits) -> Self {
        Self { source: source.into(), sandbox, limits }
    }

    /// `float(grade(sample, item))`, both given as what `json.loads` makes of them.
    ///
    /// # Errors
    /// If it cannot be confined, is stopped by a limit, raises, or returns no finite number.
    pub async fn grade(&self, sample: &Value, item: &Value) -> Result<f64, PythonGraderError> {
        let stdin = json!({"source": self.source, "sample": sample, "item": item}).to_string();
        let code = include_str!("grader.py").to_owned();
        let outcome = self.sandbox.run(RunRequest { code, stdin, limits: self.limits }).await?;
        let stopped = |reason| Err(PythonGraderError::Stopped(reason));
        match outcome.status {
            Status::Ok => finite(&outcome),
            Status::Error { .. } => Err(PythonGraderError::Raised(outcome.stderr_tail(1))),
            Status::Timeout => stopped("it took longer than it may"),
            Status::Memory => stopped("it took more memory than it may"),
            Status::Output => stopped("it wrote more than it may"),
            Status::Killed { .. } => stopped("it was ended by a signal"),
        }
    }
}

/// The value as Python's `repr` wrote it.
fn finite(outcome: &RunOutcome) -> Result<f64, PythonGraderError> {
    let text: String = serde_json::from_str(&outcome.report).unwrap_or_default();
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() => Ok(value),
        // `exit(0)` within the source ends it without a value.
        _ if text.is_empty() => Err(PythonGraderError::Raised("it ended without a value".into())),
        _ => Err(PythonGraderError::NotFinite(text)),
    }
}
