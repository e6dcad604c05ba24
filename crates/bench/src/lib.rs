//! `hone-bench`: speed of Hone's components on this machine, and safety of what they learn. Other
//! processes change the times, so numbers that are compared are measured in turns within one run.

mod http;
mod interference;
mod measure;
mod rewards;
mod safety;
mod sample;
mod train;

use std::io::Write;

use anyhow::bail;
use clap::{Parser, Subcommand};
use serde_json::Value;
use tokio::runtime::Builder;

use measure::BenchOutcome;

use hone_report::terminal::{MISSING, shown, table};

/// Measures the performance of Hone on this machine, and what users notice when learning goes wrong.
///
/// Results are written to standard output, logs and progress to standard error. Exit codes: 0 for
/// success, 1 for a failure or a failed check, 2 for wrong usage.
#[derive(Debug, Parser)]
#[command(name = "hone-bench", version, max_term_width = 100)]
pub struct Bench {
    #[command(subcommand)]
    command: BenchCommand,
    /// Print the result as JSON
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum BenchCommand {
    /// Worst time of each reward function; exit code 1 if one needs more than 1 ms for 4 kB
    Rewards(rewards::RewardsOptions),
    /// Time, throughput and memory of an optimizer step, compared with the machine's limits
    Train(train::TrainBenchOptions),
    /// Throughput of the native sampler, compared with the limits of memory and arithmetic
    Sample(sample::SampleOptions),
    /// Latency of served clients while Hone is idle and while it samples and trains
    Interference(interference::InterferenceOptions),
    /// Latency and throughput over HTTP, with recording, compared with the engine alone
    Http(http::HttpBenchOptions),
    /// Satisfaction of simulated users when learning goes wrong, by how versions are published
    Safety(safety::SafetyOptions),
}

impl Bench {
    /// Runs the benchmark and writes its report to `out`.
    ///
    /// # Errors
    /// If something could not be measured, or a check failed.
    pub fn run(self, out: &mut dyn Write) -> anyhow::Result<()> {
        // As in `hone serve`: the cores compute tokens too.
        let mut runtime = Builder::new_multi_thread();
        let runtime = runtime.worker_threads(measure::cores().div_ceil(2)).enable_all().build()?;
        let outcome = match self.command {
            BenchCommand::Rewards(options) => runtime.block_on(rewards::run(options.bytes))?,
            BenchCommand::Train(train::TrainBenchOptions {
                model, write_model: Some(dir), ..
            }) => {
                return model.write(&dir);
            }
            BenchCommand::Train(options) => BenchOutcome::of(train::run(&options)?),
            BenchCommand::Sample(options) => BenchOutcome::of(sample::run(&options)?),
            BenchCommand::Interference(options) => runtime.block_on(interference::run(&options))?,
            BenchCommand::Http(options) => runtime.block_on(http::run(&options))?,
            BenchCommand::Safety(options) => runtime.block_on(safety::run(&options))?,
        };
        match outcome.text {
            _ if self.json => writeln!(out, "{}", outcome.report)?,
            Some(text) => writeln!(out, "{text}")?,
            None => write!(out, "{}", as_table(&outcome.report))?,
        }
        outcome.failure.map_or(Ok(()), |failure| bail!("{failure}"))
    }
}

/// A list of objects as a table with a row for each, and an object as one with a row for each value.
fn as_table(report: &Value) -> String {
    let Value::Array(items) = report else {
        return shown(&table(["name", "value"], fields("", report), 2));
    };
    let rows: Vec<_> = items.iter().map(|item| fields("", item)).collect();
    let column = |row: &Vec<[String; 2]>, at: usize| -> Vec<String> {
        row.iter().map(|field| field[at].clone()).collect()
    };
    let head = rows.first().map(|row| column(row, 0)).unwrap_or_default();
    shown(&table(head, rows.iter().map(|row| column(row, 1)), 1))
}

/// The values of an object, each with its path. Objects in a list share the rows of their values.
fn fields(path: &str, value: &Value) -> Vec<[String; 2]> {
    match value {
        Value::Object(inner) => {
            let dot = if path.is_empty() { "" } else { "." };
            inner.iter().flat_map(|(name, v)| fields(&format!("{path}{dot}{name}"), v)).collect()
        }
        Value::Array(items) if items.iter().any(Value::is_object) => {
            let mut columns = items.iter().map(|item| fields(path, item));
            let mut rows = columns.next().unwrap_or_default();
            for column in columns {
                for ([_, row], [_, value]) in rows.iter_mut().zip(column) {
                    *row += &format!(" | {value}");
                }
            }
            rows
        }
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(cell).collect();
            vec![[path.to_owned(), items.join(", ")]]
        }
        other => vec![[path.to_owned(), cell(other)]],
    }
}

/// A value with four significant digits.
fn cell(value: &Value) -> String {
    match value {
        Value::Null => MISSING.to_owned(),
        Value::String(text) => text.clone(),
        Value::Number(number) if number.is_f64() => {
            let number = number.as_f64().unwrap_or_default();
            if number == 0.0 {
                return "0".to_owned();
            }
            let digits = 3.0 - number.abs().log10().floor();
            format!("{number:.*}", digits.clamp(0.0, 12.0) as usize)
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn reports_are_tables_of_their_values() {
        let report = json!({
            "model": null, "tokens": 64, "share": 0.000_123_46, "speed": 1_234.56, "zero": 0.0,
            "load": [0.5, 12.0], "idle": {"failed": 0},
            "loads": [{"users": 1, "ms": {"p50": 2.25}}, {"users": 8, "ms": {"p50": 33.333}}],
        });
        insta::assert_snapshot!(as_table(&report), @"
        name          value
        model         –
        tokens        64
        share         0.0001235
        speed         1235
        zero          0
        load          0.5000, 12.00
        idle.failed   0
        loads.users   1 | 8
        loads.ms.p50  2.250 | 33.33
        ");
        insta::assert_snapshot!(as_table(&json!([{"kind": "a", "p": 1.5}, {"kind": "bc", "p": null}])), @"
        kind      p
        a     1.500
        bc        –
        ");
    }
}
