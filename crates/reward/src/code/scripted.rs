//! Rhai's exam: no interpreter and no process needed, the language can do nothing but compute.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rhai::{Dynamic, Engine, Scope};

use super::params::CodeParams;
use super::{Case, Exam, ExamError, Score, same_output};
use crate::script::engine;

/// Operations that all tests of a completion may take, each.
const OPERATIONS: u64 = 10_000_000;

/// Each line of the tests is an expression that must be true (or a statement that must not throw);
/// it sees the solution's functions, not its statements. A pair runs the solution with `input` set;
/// its output is what it prints, or else its last value.
pub(super) async fn examine(exam: &Exam<'_>, params: &CodeParams) -> Result<Score, ExamError> {
    let (code, tests) = (exam.code.to_owned(), exam.tests.map(str::to_owned));
    let (cases, params) = (exam.cases.clone(), params.clone());
    tokio::task::spawn_blocking(move || examine_here(&code, tests.as_deref(), &cases, &params))
        .await
        .map_err(|error| ExamError::Driver(error.to_string()))?
}

fn examine_here(
    code: &str,
    tests: Option<&str>,
    cases: &[Case],
    params: &CodeParams,
) -> Result<Score, ExamError> {
    let mut engine = engine::restricted(OPERATIONS);
    let lines = tests.unwrap_or_default().lines().map(str::trim);
    let tests: Vec<rhai::AST> = lines
        .filter(|line| !line.is_empty() && !line.starts_with("//"))
        .map(|line| engine.compile(line).map_err(|e| ExamError::Tests(format!("`{line}`: {e}"))))
        .collect::<Result<_, _>>()?;
    let mut score = Score { passed: 0, of: tests.len() + cases.len() };
    let Ok(solution) = engine.compile(code) else { return Ok(score) };
    let deadline = Instant::now() + Duration::from_millis(params.timeout_ms);
    let functions = solution.clone_functions_only();
    for test in &tests {
        // Functions of the test line itself would win over the solution's; they are the tests'.
        let merged = functions.merge(test);
        let passed = engine::until(deadline, || engine.eval_ast::<Dynamic>(&merged));
        score.passed += usize::from(passed.is_ok_and(|v| v.is_unit() || v.as_bool() == Ok(true)));
    }
    let printed = keep_prints(&mut engine, params.max_output_bytes);
    for case in cases {
        clear(&printed);
        let mut scope = Scope::new();
        scope.push_constant("input", case.input.clone());
        let ended = engine::until(deadline, || {
            engine.eval_ast_with_scope::<Dynamic>(&mut scope, &solution)
        });
        let Ok(value) = ended else { continue };
        let text = clear(&printed);
        let given = if text.is_empty() { value.to_string() } else { text };
        score.passed += usize::from(same_output(&given, &case.output));
    }
    Ok(score)
}

/// Collects what is printed, up to `bound` bytes; the rest is lost and the output wrong.
fn keep_prints(engine: &mut Engine, bound: usize) -> Arc<Mutex<String>> {
    let printed = Arc::new(Mutex::new(String::new()));
    let target = Arc::clone(&printed);
    engine.on_print(move |line| {
        if let Ok(mut text) = target.lock()
            && text.len() + line.len() < bound
        {
            text.push_str(line);
            text.push('\n');
        }
    });
    printed
}

fn clear(printed: &Mutex<String>) -> String {
    printed.lock().map(|mut text| std::mem::take(&mut *text)).unwrap_or_default()
}
