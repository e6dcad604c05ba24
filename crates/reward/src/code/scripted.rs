//! Runs Rhai test suites in this process: the language can only compute, so it needs no sandbox.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rhai::{Dynamic, Engine, Scope};

use super::params::CodeParams;
use super::suite::{SuiteError, TestCounts, TestSuite, same_output};
use crate::script::engine;

/// Operations that each evaluation may take.
const OPERATIONS: u64 = 10_000_000;

/// Runs a suite in a blocking task.
///
/// Each line of the tests is an expression that must be true, or a statement that must not throw. It
/// can call the solution's functions, but the solution's statements do not run. A pair runs the
/// solution with `input` set; its output is the printed text, or else its last value.
pub(super) async fn run(suite: TestSuite, params: CodeParams) -> Result<TestCounts, SuiteError> {
    tokio::task::spawn_blocking(move || evaluate(&suite, &params)).await?
}

fn evaluate(suite: &TestSuite, params: &CodeParams) -> Result<TestCounts, SuiteError> {
    let mut engine = engine::restricted(OPERATIONS);
    let lines = suite.tests.as_deref().unwrap_or_default().lines().map(str::trim);
    let tests: Vec<rhai::AST> = lines
        .filter(|line| !line.is_empty() && !line.starts_with("//"))
        .map(|line| engine.compile(line).map_err(|e| SuiteError::Tests(format!("`{line}`: {e}"))))
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
