//! Python's exam: the driver in the sandbox, its signed report read here.

use std::collections::BTreeMap;
use std::fmt::Write;

use rand::Rng;
use serde_json::json;
use sha2::{Digest, Sha256};

use super::params::CodeParams;
use super::{Case, Exam, ExamError, Score, same_output};
use crate::sandbox::{Limits, RunRequest, Sandbox};

const DRIVER: &str = include_str!("driver.py");

/// Tests and pairs, each in a run of their own.
pub(super) async fn examine(
    exam: &Exam<'_>,
    params: &CodeParams,
    sandbox: &Sandbox,
) -> Result<Score, ExamError> {
    let mut score = Score::default();
    if let Some(tests) = exam.tests {
        let report = drive(exam.code, Some(tests), &[], params, sandbox).await?;
        score.of += report.count;
        score.passed += report.lines.values().filter(|text| *text == "1").count();
    }
    if !exam.cases.is_empty() {
        let report = drive(exam.code, None, &exam.cases, params, sandbox).await?;
        score.of += exam.cases.len();
        let right = |(number, case): &(usize, &Case)| {
            let given = report.lines.get(number).and_then(|text| unhex(text));
            given.is_some_and(|given| same_output(&given, &case.output))
        };
        score.passed += exam.cases.iter().enumerate().filter(right).count();
    }
    Ok(score)
}

/// What the driver signed.
struct Report {
    /// How many tests there are.
    count: usize,
    /// Their results.
    lines: BTreeMap<usize, String>,
}

async fn drive(
    code: &str,
    tests: Option<&str>,
    cases: &[Case],
    params: &CodeParams,
    sandbox: &Sandbox,
) -> Result<Report, ExamError> {
    let nonce: [u8; 32] = rand::rng().random();
    let nonce = hex(&nonce);
    // A loop without end in one test leaves time for others, and a single one has nearly all.
    let parts = cases.len().max(tests.map_or(0, |t| t.lines().count())).clamp(1, 8);
    let seconds = 0.9 * params.timeout_ms as f64 / 1e3 / parts as f64;
    let inputs: Vec<&str> = cases.iter().map(|case| case.input.as_str()).collect();
    let job = json!({
        "nonce": nonce, "solution": code, "tests": tests, "inputs": inputs,
        "keep": params.max_output_bytes, "seconds": seconds,
    });
    let limits = Limits {
        wall_ms: params.timeout_ms,
        memory_mb: params.memory_mb,
        output_bytes: params.max_output_bytes,
        ..Limits::default()
    };
    let request = RunRequest { code: DRIVER.to_owned(), stdin: job.to_string(), limits };
    let outcome = sandbox.run(request).await?;
    let (mut count, mut lines) = (None, BTreeMap::new());
    for line in outcome.report.lines() {
        let Some((mac, signed)) = line.split_once(' ') else { continue };
        if hex(&Sha256::digest(format!("{nonce} {signed}"))) != mac {
            continue;
        }
        match signed.split_once(' ') {
            Some(("broken", reason)) => return Err(ExamError::Tests(reason.to_owned())),
            Some(("count", number)) => count = number.parse().ok(),
            Some((number, text)) => {
                if let Ok(number) = number.parse() {
                    lines.insert(number, text.to_owned());
                }
            }
            None => {}
        }
    }
    // It is reported before the solution has run: without it the solution is not to blame.
    let count = count.ok_or_else(|| {
        ExamError::Driver(format!("{:?}: {}", outcome.status, outcome.stderr_tail(1)))
    })?;
    Ok(Report { count, lines })
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn unhex(text: &str) -> Option<String> {
    let digits = text.as_bytes().chunks(2);
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    let bytes: Option<Vec<u8>> = digits.map(byte).collect();
    Some(String::from_utf8_lossy(&bytes?).into_owned())
}
