//! Runs Python test suites: executes `driver.py` in the sandbox and reads its signed report.

use std::collections::BTreeMap;

use rand::Rng;
use serde_json::{Value, json};

use hone_core::digest::{hex, sha256};

use super::calls::{FunctionCall, same_value};
use super::params::CodeParams;
use super::suite::{IoCase, SuiteError, TestCounts, TestSuite, same_output};
use crate::sandbox::{Limits, RunRequest, Sandbox};

const DRIVER: &str = include_str!("driver.py");

/// Runs the tests, the pairs and the calls, each in a sandbox run of its own.
pub(super) async fn run(
    suite: TestSuite,
    params: &CodeParams,
    sandbox: &Sandbox,
) -> Result<TestCounts, SuiteError> {
    let mut counts = TestCounts::default();
    let TestSuite { code, tests, cases, calls } = &suite;
    if let Some(tests) = tests {
        let job = json!({ "tests": tests });
        let report = drive(code, job, tests.lines().count(), params, sandbox).await?;
        counts.total += report.count;
        counts.passed += report.results.values().filter(|text| *text == "1").count();
    }
    if !cases.is_empty() {
        let inputs: Vec<&str> = cases.iter().map(|case| case.input.as_str()).collect();
        let job = json!({ "inputs": inputs });
        let report = drive(code, job, cases.len(), params, sandbox).await?;
        counts.total += cases.len();
        let passes = |(number, case): &(usize, &IoCase)| {
            let output = report.results.get(number).and_then(|text| unhex(text));
            output.is_some_and(|output| same_output(&output, &case.output))
        };
        counts.passed += cases.iter().enumerate().filter(passes).count();
    }
    if !calls.is_empty() {
        let inputs: Vec<&Value> = calls.iter().map(|call| &call.input).collect();
        let job = json!({ "calls": inputs, "function": params.function });
        let report = drive(code, job, calls.len(), params, sandbox).await?;
        counts.total += calls.len();
        let passes = |(number, call): &(usize, &FunctionCall)| {
            let value = report.results.get(number).and_then(|text| unhex(text));
            let value = value.and_then(|text| serde_json::from_str(&text).ok());
            value.is_some_and(|value: Value| same_value(&value, &call.expected))
        };
        counts.passed += calls.iter().enumerate().filter(passes).count();
    }
    Ok(counts)
}

/// The signed lines of the driver's report.
struct DriverReport {
    /// The number of tests.
    count: usize,
    /// Results by test number: `1` or `0`, or in hexadecimal a pair's output or a call's value.
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
    let limits = Limits {
        wall_ms: params.timeout_ms,
        memory_mb: params.memory_mb,
        output_bytes: params.max_output_bytes,
        ..Limits::default()
    };
    let request = RunRequest { code: DRIVER.to_owned(), stdin: job.to_string(), limits };
    let outcome = sandbox.run(request).await?;
    let (mut count, mut results) = (None, BTreeMap::new());
    for line in outcome.report.lines() {
        let Some((mac, signed)) = line.split_once(' ') else { continue };
        if sha256(format!("{nonce} {signed}")) != mac {
            continue;
        }
        match signed.split_once(' ') {
            Some(("broken", reason)) => return Err(SuiteError::Tests(reason.to_owned())),
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
        SuiteError::Driver(format!("{:?}: {}", outcome.status, outcome.stderr_tail(1)))
    })?;
    Ok(DriverReport { count, results })
}

fn unhex(text: &str) -> Option<String> {
    let digits = text.as_bytes().chunks(2);
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    let bytes: Option<Vec<u8>> = digits.map(byte).collect();
    Some(String::from_utf8_lossy(&bytes?).into_owned())
}
