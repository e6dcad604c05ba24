//! `code`: executes a completion's code and counts the tests it passes.
//!
//! Value: passed tests / tests, from 0 to 1 (or all or nothing); typical weight 1 to 2. Code that is
//! missing, does not compile, is stopped by a limit or attacks what runs it passes fewer tests, or
//! none. Without tests, with tests that do not compile, and where code cannot be confined the part
//! is missing.
//!
//! Tests are either assertions in the code's own language (`metadata[tests]`) or pairs of input and
//! output (`metadata[cases]`, `[{"input": "…", "output": "…"}]`, white space at line ends and at the
//! end ignored). Both may be given.
//!
//! How far results can be trusted: of the pairs only the inputs enter the sandbox, so outputs cannot
//! be copied. Python's assertions run in the solution's process, which reports each result with a
//! MAC (see `driver.py`). A solution can still make an assertion pass by what it returns (an object
//! equal to everything), and one that is written against this very driver and the interpreter's
//! internals may find the nonce; prefer pairs where that matters.

mod extract;
mod grader;
mod params;
mod python;
mod scripted;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use serde::Deserialize;

use super::sandbox::{Sandbox, SandboxError};
use super::{RewardFn, ScoreInput};

pub use extract::last_block;
pub use grader::{PythonGrader, PythonGraderError};
pub use params::{CodeLanguage, CodeParams};

/// A pair of `metadata[cases]`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    input: String,
    output: String,
}

/// What a completion is tested by.
struct Exam<'a> {
    code: &'a str,
    tests: Option<&'a str>,
    cases: Vec<Case>,
}

/// Passed tests, of how many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Score {
    passed: usize,
    of: usize,
}

/// Why there is no score.
#[derive(Debug, thiserror::Error)]
enum ExamError {
    #[error("metadata[{key}] is not a list of {{\"input\": …, \"output\": …}}: {reason}")]
    Cases { key: String, reason: serde_json::Error },
    #[error("the tests do not compile: {0}")]
    Tests(String),
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    #[error("the driver reported nothing: {0}")]
    Driver(String),
}

/// The part `kind = "code"`.
pub struct CodeReward {
    params: CodeParams,
    sandbox: Option<Arc<Sandbox>>,
    warned: AtomicBool,
}

impl CodeReward {
    /// `sandbox` is needed for Python.
    ///
    /// # Errors
    /// If it is needed and missing.
    pub fn new(params: CodeParams, sandbox: Option<Arc<Sandbox>>) -> Result<Self, SandboxError> {
        if params.language == CodeLanguage::Python && sandbox.is_none() {
            let reason = "language = \"python\" needs the sandbox, which is not set up".to_owned();
            return Err(SandboxError::Unavailable(reason));
        }
        Ok(Self { params, sandbox, warned: AtomicBool::new(false) })
    }

    async fn one(&self, input: &ScoreInput) -> Option<f64> {
        match self.examine(input).await {
            Ok(score) if score.of == 0 => None,
            Ok(score) if self.params.partial => Some(score.passed as f64 / score.of as f64),
            Ok(score) => Some(f64::from(u8::from(score.passed == score.of))),
            Err(error) => {
                // Once: a run of a thousand completions has one cause, not a thousand.
                if !self.warned.swap(true, Ordering::Relaxed) {
                    tracing::warn!(%error, "code was not scored; further such cases stay silent");
                }
                None
            }
        }
    }

    async fn examine(&self, input: &ScoreInput) -> Result<Score, ExamError> {
        let CodeParams { tests, cases, .. } = &self.params;
        let cases: Vec<Case> = match input.metadata.get(cases) {
            None => Vec::new(),
            Some(text) => serde_json::from_str(text)
                .map_err(|reason| ExamError::Cases { key: cases.clone(), reason })?,
        };
        let tests = input.metadata.get(tests).map(String::as_str).filter(|t| !t.trim().is_empty());
        let exam = Exam { code: last_block(&input.text), tests, cases };
        if exam.tests.is_none() && exam.cases.is_empty() {
            return Ok(Score::default());
        }
        match (self.params.language, &self.sandbox) {
            (CodeLanguage::Python, Some(sandbox)) => {
                python::examine(&exam, &self.params, sandbox).await
            }
            (CodeLanguage::Rhai, _) => scripted::examine(&exam, &self.params).await,
            (CodeLanguage::Python, None) => Ok(Score::default()),
        }
    }
}

#[async_trait]
impl RewardFn for CodeReward {
    async fn score(&self, samples: &[ScoreInput]) -> Vec<Option<f64>> {
        futures::future::join_all(samples.iter().map(|input| self.one(input))).await
    }
}

/// Whether an output is the wanted one: line by line, white space at ends of lines ignored, as well
/// as empty lines at the end.
fn same_output(given: &str, wanted: &str) -> bool {
    let lines = |text: &str| -> Vec<String> {
        text.trim_end().lines().map(|line| line.trim_end().to_owned()).collect()
    };
    lines(given) == lines(wanted)
}

#[cfg(test)]
mod tests;
