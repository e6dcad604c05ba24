//! Runs Python test suites: executes `driver.py` in the sandbox and reads its signed report.

use std::collections::BTreeMap;

use rand::Rng;
use serde_json::{Value, json};

use hone_core::digest::{hex, sha256};

use super::params::CodeParams;
use super::suite::{IoCase, SuiteError, TestCounts, TestSuite, same_output, same_value};
use crate::sandbox::{Limits, RunRequest, Sandbox, Status};

const DRIVER: &str = include_str!("driver.py");

/// Runs the tests in one sandbox run, and each pair and each call in a run of its own. Where only full
/// success counts, the first pair or call that fails is the last one that runs.
pub(super) async fn run(
    suite: TestSuite,
    params: &CodeParams,
    sandbox: &Sandbox,
) -> Result<TestCounts, SuiteError> {
    let mut counts = TestCounts::default();
    let TestSuite { code, tests, entry, cases, calls } = &suite;
    if let Some(tests) = tests {
        let job = json!({ "tests": tests, "entry": entry, "function": params.function });
        let report = drive(code, job, tests.lines().count(), params, sandbox).await?;
        let results = |wanted: &str| report.results.values().filter(|text| *text == wanted).count();
        // `-`: a statement that passed without an assertion is no test.
        counts.total += report.count.saturating_sub(results("-"));
        counts.passed += results("1");
        if counts.total == 0 {
            return Err("the tests checked nothing: no assertion was reached".into());
        }
    }
    counts.total += cases.len() + calls.len();
    let goes_on = |passed: bool| passed || params.partial;
    for case in cases {
        let passed = passes_case(code, case, params, sandbox).await?;
        counts.passed += usize::from(passed);
        if !goes_on(passed) {
            return Ok(counts);
        }
    }
    for (input, expected) in calls {
        let job = json!({ "calls": [input], "function": params.function });
        let report = drive(code, job, 1, params, sandbox).await?;
        let value = report.results.get(&0).and_then(|text| unhex(text));
        let value = value.and_then(|text| serde_json::from_str(&text).ok());
        let passed = value.is_some_and(|value: Value| same_value(&value, expected));
        counts.passed += usize::from(passed);
        if !goes_on(passed) {
            return Ok(counts);
        }
    }
    Ok(counts)
}

/// Whether a program prints what a pair expects and ends with status 0. It is the only program of
/// its process, so descriptors 0 and 1 are its own and it may end in any way.
async fn passes_case(
    code: &str,
    case: &IoCase,
    params: &CodeParams,
    sandbox: &Sandbox,
) -> Result<bool, SuiteError> {
    // JSON's strings are Python's. Without `site`, `exit` and `quit` are missing.
    let builtins = "__import__('builtins')";
    let code = format!(
        "{builtins}.exit = {builtins}.quit = __import__('sys').exit\n\
         exec(compile({}, '<solution>', 'exec'))",
        Value::from(code)
    );
    let request = RunRequest { code, stdin: case.input.clone(), limits: limits(params) };
    let outcome = sandbox.run(request).await?;
    Ok(outcome.status == Status::Ok && same_output(&outcome.stdout, &case.output))
}

fn limits(params: &CodeParams) -> Limits {
    Limits {
        wall_ms: params.timeout_ms,
        memory_mb: params.memory_mb,
        output_bytes: params.max_output_bytes,
    }
}

/// The signed lines of the driver's report.
struct DriverReport {
    /// The number of tests.
    count: usize,
    /// Results by test number: `1`, `0` or `-`, or in hexadecimal a call's value.
    results: BTreeMap<usize, String>,
}

/// Runs the driver on `job`, which contains one kind of test, of about `size` tests.
async fn drive(
    code: &str,
    mut job: Value,
    size: usize,
    params: &CodeParams,
    sandbox: &Sandbox,
) -> Result<DriverReport, SuiteError> {
    let nonce = hex(&rand::rng().random::<[u8; 32]>());
    // An endless loop in one test leaves time for the others; a single test has nearly all of it.
    let seconds = 0.9 * params.timeout_ms as f64 / 1e3 / size.clamp(1, 8) as f64;
    job["nonce"] = nonce.as_str().into();
    job["solution"] = code.into();
    job["keep"] = params.max_output_bytes.into();
    job["seconds"] = seconds.into();
    let limits = limits(params);
    let request = RunRequest { code: DRIVER.to_owned(), stdin: job.to_string(), limits };
    let outcome = sandbox.run(request).await?;
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
                if let Ok(number) = number.parse() {
                    results.insert(number, text.to_owned());
                }
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
    Ok(DriverReport { count, results })
}

fn unhex(text: &str) -> Option<String> {
    let digits = text.as_bytes().chunks(2);
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    let bytes: Option<Vec<u8>> = digits.map(byte).collect();
    Some(String::from_utf8_lossy(&bytes?).into_owned())
}
