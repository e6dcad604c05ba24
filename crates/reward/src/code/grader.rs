//! Graders written in Python: `grade(sample, item) -> float`, as in OpenAI's `python` grader.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::sandbox::{Limits, RunOutcome, RunRequest, Sandbox, SandboxError, Status};

/// Why a Python grader returned no value.
#[derive(Debug, thiserror::Error)]
pub enum PythonGraderError {
    /// The sandbox did not run it.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// It was killed for the named reason.
    #[error("the grader's source was stopped: {0}")]
    Stopped(&'static str),
    /// It raised an exception; contains the last line of the traceback.
    #[error("the grader's source failed: {0}")]
    Raised(String),
    /// It returned infinity or NaN.
    #[error("the grader's source returned {0}, not a finite number")]
    NotFinite(String),
}

/// Runs a grader's source, each call in a new process.
#[derive(Clone, Debug)]
pub struct PythonGrader {
    source: String,
    sandbox: Arc<Sandbox>,
    limits: Limits,
}

impl PythonGrader {
    /// Prepares a grader. The source must define `grade(sample, item)`; the first call checks this.
    pub fn new(source: impl Into<String>, sandbox: Arc<Sandbox>, limits: Limits) -> Self {
        Self { source: source.into(), sandbox, limits }
    }

    /// Returns `float(grade(sample, item))`; Python sees both arguments as `json.loads` reads them.
    ///
    /// # Errors
    /// If the source cannot be confined, hits a limit, raises, or returns no finite number.
    pub async fn grade(&self, sample: &Value, item: &Value) -> Result<f64, PythonGraderError> {
        let stdin = json!({"source": self.source, "sample": sample, "item": item}).to_string();
        let code = include_str!("grader.py").to_owned();
        let outcome = self.sandbox.run(RunRequest { code, stdin, limits: self.limits }).await?;
        match (outcome.status.stopped(), &outcome.status) {
            (Some(reason), _) => Err(PythonGraderError::Stopped(reason)),
            (None, Status::Ok) => finite(&outcome),
            (None, _) => Err(PythonGraderError::Raised(outcome.stderr_tail(1))),
        }
    }
}

/// Parses the value as Python's `repr` printed it.
fn finite(outcome: &RunOutcome) -> Result<f64, PythonGraderError> {
    let text: String = serde_json::from_str(&outcome.report).unwrap_or_default();
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() => Ok(value),
        // The source called `exit(0)`.
        _ if text.is_empty() => Err(PythonGraderError::Raised("it ended without a value".into())),
        _ => Err(PythonGraderError::NotFinite(text)),
    }
}
