//! `code`: executes a completion's code and counts the tests that it passes.
//!
//! Value: passed tests / tests, from 0 to 1 (or all or nothing); typical weight 1 to 2. Code that is
//! missing, does not compile, hits a limit or attacks its environment passes fewer tests, or no
//! test. The value is missing without tests, with tests that cannot run or check nothing, and where
//! code cannot be confined.
//!
//! Tests are assertions in the code's own language (`metadata[tests]`), pairs of input and output
//! (`metadata[cases]`, `[{"input": "…", "output": "…"}]`; white space at line ends and at the end is
//! ignored), or calls of a function (`metadata[calls]`, `[[input, expected], …]`, in Python), or
//! several of these. Python runs in a [`Sandbox`] process for all assertions, and in one for each pair
//! and each call; Rhai in a blocking tokio task.
//!
//! How far results can be trusted: only the inputs of pairs and calls enter the sandbox, so expected
//! results cannot be copied. Python's assertions run in the solution's process, which reports each result with a MAC
//! (see `driver.py`). A solution can still make an assertion pass by its return value (an object
//! equal to everything), and one written against this very driver and the interpreter's internals
//! may find the nonce. Prefer pairs or calls if that matters.

mod calls;
mod extract;
mod grader;
mod params;
mod python;
mod scripted;
mod suite;
mod syntax;
mod trl;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use suite::{IoCase, SuiteError, TestCounts, TestSuite};

use crate::sandbox::{Sandbox, SandboxError};
use crate::{RewardFn, ScoreInput};

pub use grader::{PythonGrader, PythonGraderError};
pub use params::{BlockChoice, CodeLanguage, CodeParams};
pub use syntax::SyntaxReward;
pub use trl::{ColumnType, PromptForm, PythonFunction, PythonFunctionError, PythonParams};

enum Runner {
    Python(Arc<Sandbox>),
    Rhai,
}

/// What runs a language; Python needs `sandbox`.
fn runner(language: CodeLanguage, sandbox: Option<Arc<Sandbox>>) -> Result<Runner, SandboxError> {
    match (language, sandbox) {
        (CodeLanguage::Rhai, _) => Ok(Runner::Rhai),
        (CodeLanguage::Python, Some(sandbox)) => Ok(Runner::Python(sandbox)),
        (CodeLanguage::Python, None) => {
            let reason = "language = \"python\" needs the sandbox, which is not set up";
            Err(SandboxError::Unavailable(reason.to_owned()))
        }
    }
}

/// The part `kind = "code"`.
pub struct CodeReward {
    params: CodeParams,
    runner: Runner,
    warned: AtomicBool,
}

impl CodeReward {
    /// Prepares the part; Python needs `sandbox`.
    ///
    /// # Errors
    /// If the language is Python and `sandbox` is `None`.
    pub fn new(params: CodeParams, sandbox: Option<Arc<Sandbox>>) -> Result<Self, SandboxError> {
        let runner = runner(params.language, sandbox)?;
        Ok(Self { params, runner, warned: AtomicBool::new(false) })
    }

    async fn score_one(&self, input: &ScoreInput) -> Option<f64> {
        match self.run_tests(input).await {
            Ok(counts) if counts.total == 0 => None,
            Ok(counts) if self.params.partial => Some(counts.passed as f64 / counts.total as f64),
            Ok(counts) => Some(f64::from(u8::from(counts.passed == counts.total))),
            Err(error) => {
                // Logged once: a run of a thousand completions has one cause, not a thousand.
                if !self.warned.swap(true, Ordering::Relaxed) {
                    tracing::warn!(%error, "code was not scored; later failures are not logged");
                }
                None
            }
        }
    }

    async fn run_tests(&self, input: &ScoreInput) -> Result<TestCounts, SuiteError> {
        let CodeParams { tests, cases, calls, .. } = &self.params;
        let cases: Vec<IoCase> = match input.metadata.get(cases) {
            None => Vec::new(),
            Some(text) => serde_json::from_str(text)
                .map_err(|source| SuiteError::Cases { key: cases.clone(), source })?,
        };
        let tests = input.metadata.get(tests).map(|text| suite::tests(text));
        let tests = tests.filter(|text| !text.trim().is_empty());
        let calls = match (&self.runner, input.metadata.get(calls)) {
            (Runner::Python(_), Some(text)) => calls::parse(text)
                .map_err(|source| SuiteError::Calls { key: calls.clone(), source })?,
            _ => Vec::new(),
        };
        if tests.is_none() && cases.is_empty() && calls.is_empty() {
            return Ok(TestCounts::default());
        }
        let code = extract::block(&input.text, self.params.block, self.params.language);
        let code = code.unwrap_or(&input.text).to_owned();
        let entry = input.metadata.get("entry_point").cloned();
        let suite = TestSuite { code, tests, entry, cases, calls };
        match &self.runner {
            Runner::Python(sandbox) => python::run(suite, &self.params, sandbox).await,
            Runner::Rhai => scripted::run(suite, self.params.clone()).await,
        }
    }
}

#[async_trait]
impl RewardFn for CodeReward {
    async fn score(&self, samples: &[ScoreInput]) -> Vec<Option<f64>> {
        futures::future::join_all(samples.iter().map(|input| self.score_one(input))).await
    }
}

#[cfg(test)]
mod tests;
