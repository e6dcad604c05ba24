//! Runs on a dataset or on recorded completions: the commands, and data directories of earlier commits.

#![expect(clippy::unwrap_used, reason = "tests may fail loudly")]

mod commands;
mod data;
#[path = "../../crates/cuda/tests/kernels/fake.rs"]
#[expect(dead_code, reason = "the kernels' tests use all of it")]
mod fake;
mod from_ledger;
mod generate;
mod hub;
mod starter;
mod upgrade;

use std::path::Path;

use serde_json::Value;

/// The values in a file with one JSON value per line.
fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}
