//! The tests of one completion, and their result.

use serde::Deserialize;

use super::calls::FunctionCall;
use crate::sandbox::SandboxError;

/// A pair of `metadata[cases]`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct IoCase {
    pub input: String,
    pub output: String,
}

/// A completion's code and its tests.
pub(super) struct TestSuite {
    /// The code, without fences.
    pub code: String,
    /// Assertions in the code's own language.
    pub tests: Option<String>,
    /// The function that `check(candidate)` of the tests gets.
    pub entry: Option<String>,
    /// Inputs with their expected outputs.
    pub cases: Vec<IoCase>,
    /// Calls with their expected values.
    pub calls: Vec<FunctionCall>,
}

/// The result of a suite.
#[derive(Clone, Copy, Default)]
pub(super) struct TestCounts {
    /// Tests that passed.
    pub passed: usize,
    /// All tests.
    pub total: usize,
}

/// Why a suite has no result.
#[derive(Debug, thiserror::Error)]
pub(super) enum SuiteError {
    #[error("metadata[{key}] is not a list of {{\"input\": …, \"output\": …}}: {source}")]
    Cases { key: String, source: serde_json::Error },
    #[error("metadata[{key}] is not a list of [input, expected]: {source}")]
    Calls { key: String, source: serde_json::Error },
    #[error("the tests cannot run: {0}")]
    Tests(String),
    #[error("the tests checked nothing: no assertion was reached")]
    Unchecked,
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    #[error("the driver reported nothing: {0}")]
    Driver(String),
    #[error("the driver failed: {0}")]
    Panic(#[from] tokio::task::JoinError),
}

/// The source of tests that are a text, or a JSON list of texts.
pub(super) fn tests(text: &str) -> String {
    serde_json::from_str::<Vec<String>>(text).map_or_else(|_| text.to_owned(), |t| t.join("\n"))
}

/// Compares outputs line by line, without white space at line ends and empty lines at the end.
pub(super) fn same_output(actual: &str, expected: &str) -> bool {
    actual.trim_end().lines().map(str::trim_end).eq(expected.trim_end().lines().map(str::trim_end))
}
