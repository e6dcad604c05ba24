//! `code`: executes a completion's code and counts the tests that it passes.
//!
//! Value: passed tests / tests, from 0 to 1 (or all or nothing); typical weight 1 to 2. Code that is
//! missing, does not compile, hits a limit or attacks its environment passes fewer tests, or no
//! test. The value is missing without tests, with tests that cannot run or check nothing, and where
//! code cannot be confined.
//!
//! Tests are assertions (`metadata[tests]`), pairs of input and output
//! (`metadata[cases]`, `[{"input": "…", "output": "…"}]`; white space at line ends and at the end is
//! ignored), or calls of a function (`metadata[calls]`, `[[input, expected], …]`), or several of these. A
//! [`Sandbox`] process runs all assertions, and another one each pair and each call.
//!
//! How far results can be trusted: only the inputs of pairs and calls enter the sandbox, so expected
//! results cannot be copied. Assertions run in the solution's process, which reports each result with a MAC
//! (see `driver.py`). A solution can still make an assertion pass by its return value (an object
//! equal to everything), and one written against this very driver and the interpreter's internals
//! may find the nonce. Prefer pairs or calls if that matters.

mod syntax;
mod trl;

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use rand::Rng;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use hone_core::digest::{hex, sha256};

use crate::grader::CodeFailure;
use crate::kinds::define::define_kind;
use crate::reward_fn::indicator;
use crate::sandbox::{Limits, RunRequest, Sandbox, Status};
use crate::text::{FencedBlock, fenced_blocks};
use crate::{RewardFn, ScoreInput};

pub use syntax::SyntaxReward;
pub use trl::{ColumnType, PromptForm, PythonFunction, PythonParams};

const DRIVER: &str = include_str!("driver.py");

/// The part `kind = "code"`.
pub struct CodeReward {
    params: CodeParams,
    sandbox: Arc<Sandbox>,
    warned: AtomicBool,
}

/// A pair of `metadata[cases]`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct IoCase {
    input: String,
    output: String,
}

/// The only argument of a call, and the value that the function must return, which never enters the sandbox.
type FunctionCall = (Value, Value);

/// Why the tests of a completion have no result.
type SuiteError = Box<dyn Error + Send + Sync>;

/// The number of tests, and their results by number: `1`, `0` or `-`, or in hexadecimal a call's value.
type DriverReport = (usize, BTreeMap<usize, String>);

impl CodeReward {
    /// The part with these parameters.
    pub fn new(params: CodeParams, sandbox: Arc<Sandbox>) -> Self {
        Self { params, sandbox, warned: AtomicBool::new(false) }
    }

    async fn score_one(&self, input: &ScoreInput) -> Option<f64> {
        self.run_tests(input).await.unwrap_or_else(|error| {
            // Logged once: a run of a thousand completions has one cause, not a thousand.
            if !self.warned.swap(true, Ordering::Relaxed) {
                tracing::warn!(%error, "code was not scored; later failures are not logged");
            }
            None
        })
    }

    /// Runs the assertions in one sandbox run, and each pair and each call in a run of its own. Where only full
    /// success counts, the first pair or call that fails is the last one that runs. `None` without tests.
    async fn run_tests(&self, input: &ScoreInput) -> Result<Option<f64>, SuiteError> {
        let CodeParams { tests, cases, calls, function, partial, .. } = &self.params;
        let cases: Vec<IoCase> = listed(input, cases, "{\"input\": …, \"output\": …}")?;
        let calls: Vec<FunctionCall> = listed(input, calls, "[input, expected]")?;
        let tests = input.metadata.get(tests).map(|text| source_of(text));
        let tests = tests.filter(|text| !text.trim().is_empty());
        let (mut passed, mut total) = (0, cases.len() + calls.len());
        if tests.is_none() && total == 0 {
            return Ok(None);
        }
        let code = extract_block(&input.text, self.params.block).unwrap_or(&input.text);
        if let Some(tests) = tests {
            let entry = input.metadata.get("entry_point");
            let job = json!({ "tests": tests, "entry": entry, "function": function });
            let (count, results) = self.drive(code, job, tests.lines().count()).await?;
            let with = |wanted: &str| results.values().filter(|text| *text == wanted).count();
            // `-`: a statement that passed without an assertion is no test.
            let reached = count.saturating_sub(with("-"));
            if reached == 0 {
                return Err("the tests checked nothing: no assertion was reached".into());
            }
            (passed, total) = (with("1"), total + reached);
        }
        for case in &cases {
            match self.passes_case(code, case).await? {
                true => passed += 1,
                false if *partial => {}
                false => return Ok(Some(0.0)),
            }
        }
        for (input, expected) in &calls {
            let job = json!({ "calls": [input], "function": function });
            let (_, results) = self.drive(code, job, 1).await?;
            let value = results.get(&0).and_then(|text| unhex(text));
            let value = value.and_then(|text| serde_json::from_str(&text).ok());
            match value.is_some_and(|value: Value| same_value(&value, expected)) {
                true => passed += 1,
                false if *partial => {}
                false => return Ok(Some(0.0)),
            }
        }
        let share = passed as f64 / total as f64;
        Ok(Some(if *partial { share } else { indicator(passed == total) }))
    }

    /// Whether a program prints what a pair expects and ends with status 0. It is the only program of
    /// its process, so descriptors 0 and 1 are its own and it may end in any way.
    async fn passes_case(&self, code: &str, case: &IoCase) -> Result<bool, SuiteError> {
        // JSON's strings are Python's. Without `site`, `exit` and `quit` are missing.
        let builtins = "__import__('builtins')";
        let code = format!(
            "{builtins}.exit = {builtins}.quit = __import__('sys').exit\n\
             exec(compile({}, '<solution>', 'exec'))",
            Value::from(code)
        );
        let request = RunRequest { code, stdin: case.input.clone(), limits: self.limits() };
        let outcome = self.sandbox.run(request).await?;
        Ok(outcome.status == Status::Ok && same_output(&outcome.stdout, &case.output))
    }

    fn limits(&self) -> Limits {
        let CodeParams { timeout_ms, memory_mb, max_output_bytes, .. } = self.params;
        Limits { wall_ms: timeout_ms, memory_mb, output_bytes: max_output_bytes }
    }

    /// Runs `driver.py` on `job`, which contains one kind of test, of about `size` tests, and reads the signed
    /// lines of its report.
    async fn drive(
        &self,
        code: &str,
        mut job: Value,
        size: usize,
    ) -> Result<DriverReport, SuiteError> {
        let nonce = hex(&rand::rng().random::<[u8; 32]>());
        // An endless loop in one test leaves time for the others; a single test has nearly all of it.
        let seconds = 0.9 * self.params.timeout_ms as f64 / 1e3 / size.clamp(1, 8) as f64;
        job["nonce"] = nonce.as_str().into();
        job["solution"] = code.into();
        job["keep"] = self.params.max_output_bytes.into();
        job["seconds"] = seconds.into();
        let (code, limits) = (DRIVER.to_owned(), self.limits());
        let outcome = self.sandbox.run(RunRequest { code, stdin: job.to_string(), limits }).await?;
        let (mut count, mut results) = (None, BTreeMap::new());
        for line in outcome.report.lines() {
            let Some((mac, signed)) = line.split_once(' ') else { continue };
            if sha256(format!("{nonce} {signed}")) != mac {
                continue;
            }
            match signed.split_once(' ') {
                Some(("broken", reason)) => {
                    return Err(format!("the tests cannot run: {reason}").into());
                }
                Some(("count", number)) => count = number.parse().ok(),
                Some((number, text)) => {
                    results.extend(number.parse().ok().map(|number| (number, text.to_owned())));
                }
                None => {}
            }
        }
        // The driver reports the count before it runs the solution, so the solution cannot be the
        // reason why it is missing.
        let count = count.ok_or_else(|| {
            let (status, tail) = (&outcome.status, outcome.stderr_tail(1));
            format!("the driver reported nothing: {status:?}: {tail}")
        })?;
        Ok((count, results))
    }
}

#[async_trait]
impl RewardFn for CodeReward {
    async fn score(&self, samples: &[ScoreInput]) -> Vec<Option<f64>> {
        futures::future::join_all(samples.iter().map(|input| self.score_one(input))).await
    }
}

/// The JSON list of a metadata value; empty without one.
fn listed<T: DeserializeOwned>(
    input: &ScoreInput,
    key: &str,
    items: &str,
) -> Result<Vec<T>, SuiteError> {
    let Some(text) = input.metadata.get(key) else { return Ok(Vec::new()) };
    serde_json::from_str(text)
        .map_err(|error| format!("metadata[{key}] is not a list of {items}: {error}").into())
}

/// The source of tests that are a text, or a JSON list of texts.
fn source_of(text: &str) -> String {
    serde_json::from_str::<Vec<String>>(text).map_or_else(|_| text.to_owned(), |t| t.join("\n"))
}

/// Compares outputs line by line, without white space at line ends and empty lines at the end.
fn same_output(actual: &str, expected: &str) -> bool {
    actual.trim_end().lines().map(str::trim_end).eq(expected.trim_end().lines().map(str::trim_end))
}

/// Whether two JSON values are equal in Python: numbers and booleans by value, objects without
/// regard to order. Integers beyond 64 bits are compared as 64-bit floats.
fn same_value(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same_value(a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            let same = |(key, value): (&String, &Value)| {
                b.get(key).is_some_and(|other| same_value(value, other))
            };
            a.len() == b.len() && a.iter().all(same)
        }
        (Value::Number(_) | Value::Bool(_), Value::Number(_) | Value::Bool(_)) => {
            match (integer(a), integer(b)) {
                (Some(a), Some(b)) => a == b,
                _ => number(a).is_some() && number(a) == number(b),
            }
        }
        _ => a == b,
    }
}

fn integer(value: &Value) -> Option<i128> {
    let unsigned = value.as_u64().map(i128::from);
    unsigned.or(value.as_i64().map(i128::from)).or(value.as_bool().map(i128::from))
}

fn number(value: &Value) -> Option<f64> {
    value.as_f64().or(value.as_bool().map(indicator))
}

fn unhex(text: &str) -> Option<String> {
    let digits = text.as_bytes().chunks(2);
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    let bytes: Option<Vec<u8>> = digits.map(byte).collect();
    Some(String::from_utf8_lossy(&bytes?).into_owned())
}

/// The first or last fenced block of a completion that names Python, or if no block does, that
/// names no language; `None` without such a block.
fn extract_block(text: &str, choice: BlockChoice) -> Option<&str> {
    let names_it = |block: &&FencedBlock<'_>| {
        let name = block.info.trim_start_matches(['{', '.', ' ']);
        let name = name.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
        ["python", "python3", "py", "py3"].contains(&name.to_lowercase().as_str())
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

// The parameters of `kind = "code"` and of `kind = "code_syntax"`.

/// The fenced block of a completion that counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockChoice {
    /// The last one, usually the final version.
    #[default]
    Last,
    /// The first one, as in the guides to GRPO.
    First,
}

define_kind! {
    pub struct CodeParams {
        /// The fenced block that contains the code.
        pub block: BlockChoice = BlockChoice::Last,
        /// Metadata key of the tests: lines of assertions.
        pub tests: String = "tests".to_owned(),
        /// Metadata key of the cases: a JSON list of `{"input": …, "output": …}`.
        pub cases: String = "cases".to_owned(),
        /// Metadata key of the calls: a JSON list of `[input, expected]`.
        pub calls: String = "test_cases".to_owned(),
        /// The function that the calls call with one argument.
        pub function: String = "solution".to_owned(),
        /// Time of each case and each call, and of all assertions of one completion together, in
        /// milliseconds.
        pub timeout_ms: u64 = 5_000 => between(10, 600_000),
        /// Memory of the program, in MiB.
        pub memory_mb: u64 = 256 => between(32, 65_536),
        /// Most bytes that the program may write, per case and in total.
        pub max_output_bytes: usize = 64 * 1024 => between(1_024, 16 << 20),
        /// Whether the value is the share of passed tests; otherwise 1 if all pass, else 0.
        pub partial: bool = true,
    }
    kind: "code",
    typical_weight: "2.0",
    calls_out: true,
    formula: "the share of the tests in metadata[tests] (lines of assertions), \
              metadata[cases] ([{input, output}]) and metadata[calls] ([[input, expected]] of \
              the function) that the last fenced block of Python passes, run in sandbox \
              processes; missing without tests or assertions",
}

define_kind! {
    pub struct CodeSyntax {
        /// The fenced block that counts.
        pub block: BlockChoice = BlockChoice::Last,
        /// Whether a completion without a fenced block earns 0; otherwise all of it is the code.
        pub require_block: bool = true,
    }
    kind: "code_syntax",
    typical_weight: "0.2 to 0.5",
    calls_out: true,
    formula: "1 if the code of the last (block = \"first\": first) fenced block compiles and is not \
              blank, else 0; the code does not run",
}

#[cfg(test)]
mod tests;
