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

mod params;
mod python;
mod suite;
mod syntax;
mod trl;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use rhai::{Dynamic, Engine, Scope};
use serde_json::{Value, json};

use crate::grader::CodeFailure;
use crate::sandbox::{Limits, RunRequest, Sandbox, SandboxError, Status};
use crate::script::engine;
use crate::text::{FencedBlock, fenced_blocks};
use crate::{RewardFn, ScoreInput};
use suite::{IoCase, SuiteError, TestCounts, TestSuite, same_output};

pub use params::{BlockChoice, CodeLanguage, CodeParams, CodeSyntax};
pub use syntax::SyntaxReward;
pub use trl::{ColumnType, PromptForm, PythonFunction, PythonFunctionError, PythonParams};

/// The sandbox of a language: Python needs it, and Rhai runs without.
fn sandbox_of(
    language: CodeLanguage,
    sandbox: Option<Arc<Sandbox>>,
) -> Result<Option<Arc<Sandbox>>, SandboxError> {
    match (language, sandbox) {
        (CodeLanguage::Rhai, _) => Ok(None),
        (CodeLanguage::Python, Some(sandbox)) => Ok(Some(sandbox)),
        (CodeLanguage::Python, None) => {
            let reason = "language = \"python\" needs the sandbox, which is not set up";
            Err(SandboxError::Unavailable(reason.to_owned()))
        }
    }
}

/// The part `kind = "code"`.
pub struct CodeReward {
    params: CodeParams,
    sandbox: Option<Arc<Sandbox>>,
    warned: AtomicBool,
}

impl CodeReward {
    /// Prepares the part; Python needs `sandbox`.
    /// Errors: if the language is Python and `sandbox` is `None`.
    pub fn new(params: CodeParams, sandbox: Option<Arc<Sandbox>>) -> Result<Self, SandboxError> {
        let sandbox = sandbox_of(params.language, sandbox)?;
        Ok(Self { params, sandbox, warned: AtomicBool::new(false) })
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
            Some(text) => serde_json::from_str(text).map_err(|error| {
                let wanted = "a list of {\"input\": …, \"output\": …}";
                format!("metadata[{cases}] is not {wanted}: {error}")
            })?,
        };
        let tests = input.metadata.get(tests).map(|text| suite::tests(text));
        let tests = tests.filter(|text| !text.trim().is_empty());
        let calls = match (&self.sandbox, input.metadata.get(calls)) {
            (Some(_), Some(text)) => serde_json::from_str(text).map_err(|error| {
                format!("metadata[{calls}] is not a list of [input, expected]: {error}")
            })?,
            _ => Vec::new(),
        };
        if tests.is_none() && cases.is_empty() && calls.is_empty() {
            return Ok(TestCounts::default());
        }
        let code = extract_block(&input.text, self.params.block, self.params.language);
        let code = code.unwrap_or(&input.text).to_owned();
        let entry = input.metadata.get("entry_point").cloned();
        let suite = TestSuite { code, tests, entry, cases, calls };
        match &self.sandbox {
            Some(sandbox) => python::run(suite, &self.params, sandbox).await,
            None => run(suite, self.params.clone()).await,
        }
    }
}

#[async_trait]
impl RewardFn for CodeReward {
    async fn score(&self, samples: &[ScoreInput]) -> Vec<Option<f64>> {
        futures::future::join_all(samples.iter().map(|input| self.score_one(input))).await
    }
}

// Runs Rhai test suites in this process: the language can only compute, so it needs no sandbox.

/// Operations that each evaluation may take.
const OPERATIONS: u64 = 10_000_000;

/// Runs a suite in a blocking task.
///
/// Each line of the tests is an expression that must be true, or a statement that must not throw. It
/// can call the solution's functions, but the solution's statements do not run. A pair runs the
/// solution with `input` set; its output is the printed text, or else its last value.
async fn run(suite: TestSuite, params: CodeParams) -> Result<TestCounts, SuiteError> {
    let evaluated = tokio::task::spawn_blocking(move || evaluate(&suite, &params)).await;
    evaluated.map_err(|error| format!("the driver failed: {error}"))?
}

fn evaluate(suite: &TestSuite, params: &CodeParams) -> Result<TestCounts, SuiteError> {
    let mut engine = engine::restricted(OPERATIONS);
    let lines = suite.tests.as_deref().unwrap_or_default().lines().map(str::trim);
    let tests: Vec<rhai::AST> = lines
        .filter(|line| !line.is_empty() && !line.starts_with("//"))
        .map(|line| {
            let error = |error| format!("the tests cannot run: `{line}`: {error}");
            engine.compile(line).map_err(error)
        })
        .collect::<Result<_, _>>()?;
    let mut counts = TestCounts { passed: 0, total: tests.len() + suite.cases.len() };
    let Ok(solution) = engine.compile(&suite.code) else { return Ok(counts) };
    let deadline = Instant::now() + Duration::from_millis(params.timeout_ms);
    let functions = solution.clone_functions_only();
    for test in &tests {
        // Functions of the test line override the solution's.
        let merged = functions.merge(test);
        let value = engine::until(deadline, || engine.eval_ast::<Dynamic>(&merged));
        let passed = value.is_ok_and(|v| v.is_unit() || v.as_bool() == Ok(true));
        counts.passed += usize::from(passed);
    }
    let printed = keep_prints(&mut engine, params.max_output_bytes);
    for case in &suite.cases {
        take(&printed);
        let mut scope = Scope::new();
        scope.push_constant("input", case.input.clone());
        let value = engine::until(deadline, || {
            engine.eval_ast_with_scope::<Dynamic>(&mut scope, &solution)
        });
        let Ok(value) = value else { continue };
        let text = take(&printed);
        let output = if text.is_empty() { value.to_string() } else { text };
        counts.passed += usize::from(same_output(&output, &case.output));
    }
    Ok(counts)
}

/// Collects printed lines, up to `limit` bytes. Further lines are dropped, so that the output is
/// wrong.
fn keep_prints(engine: &mut Engine, limit: usize) -> Arc<Mutex<String>> {
    let printed = Arc::new(Mutex::new(String::new()));
    let target = Arc::clone(&printed);
    engine.on_print(move |line| {
        if let Ok(mut text) = target.lock()
            && text.len() + line.len() < limit
        {
            text.push_str(line);
            text.push('\n');
        }
    });
    printed
}

fn take(printed: &Mutex<String>) -> String {
    printed.lock().map(|mut text| std::mem::take(&mut *text)).unwrap_or_default()
}

/// The first or last fenced block of a completion that names `language`, or if no block does, that
/// names none; `None` without such a block.
fn extract_block(text: &str, choice: BlockChoice, language: CodeLanguage) -> Option<&str> {
    let own: &[&str] = match language {
        CodeLanguage::Python => &["python", "python3", "py", "py3"],
        CodeLanguage::Rhai => &["rhai"],
    };
    let names_it = |block: &&FencedBlock<'_>| {
        let name = block.info.trim_start_matches(['{', '.', ' ']);
        let name = name.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
        own.contains(&name.to_lowercase().as_str())
    };
    let blocks = fenced_blocks(text);
    let mut found: Vec<&FencedBlock<'_>> = blocks.iter().filter(names_it).collect();
    if found.is_empty() {
        found = blocks.iter().filter(|block| block.info.is_empty()).collect();
    }
    let chosen = match choice {
        BlockChoice::First => found.first(),
        BlockChoice::Last => found.last(),
    };
    chosen.map(|block| block.content)
}

// Graders written in Python: `grade(sample, item) -> float`, as in OpenAI's `python` grader.

/// Returns `float(grade(sample, item))` of a grader's source, run in a new process; Python sees both arguments as
/// `json.loads` reads them.
/// Errors: if the source cannot be confined, hits a limit, raises, defines no `grade`, or returns no finite number.
pub async fn grade_python(
    source: &str,
    sandbox: &Sandbox,
    limits: Limits,
    sample: &Value,
    item: &Value,
) -> Result<f64, CodeFailure> {
    let stdin = json!({"source": source, "sample": sample, "item": item}).to_string();
    let code = include_str!("grader.py").to_owned();
    let outcome = sandbox.run(RunRequest { code, stdin, limits }).await;
    let outcome = outcome.map_err(|error| CodeFailure::Server(error.to_string()))?;
    let failed = |how: String| Err(CodeFailure::Runtime(format!("the grader's source {how}")));
    match (outcome.status.stopped(), &outcome.status) {
        (Some(reason), _) => return failed(format!("was stopped: {reason}")),
        (None, Status::Ok) => {}
        (None, _) => return failed(format!("failed: {}", outcome.stderr_tail(1))),
    }
    // The value as Python's `repr` printed it.
    let text: String = serde_json::from_str(&outcome.report).unwrap_or_default();
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() => Ok(value),
        // The source called `exit(0)`.
        _ if text.is_empty() => failed("failed: it ended without a value".to_owned()),
        _ => failed(format!("returned {text}, not a finite number")),
    }
}

#[cfg(test)]
mod tests;
