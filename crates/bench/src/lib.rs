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

use clap::{Parser, Subcommand};
use serde::Serialize;
use serde_json::Value;
use tokio::runtime::Builder;

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
}

#[derive(Debug, Subcommand)]
enum BenchCommand {
    /// Worst time of each reward function; exit code 1 if one needs more than 1 ms for 4 kB, or more
    /// than in proportion to size^1.5
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
    /// Runs the benchmark and writes its report to `out`. Returns whether it passed its checks.
    ///
    /// # Errors
    /// If something could not be measured.
    pub fn run(self, out: &mut dyn Write) -> anyhow::Result<bool> {
        // As in `hone serve`: the cores compute tokens too.
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let mut runtime = Builder::new_multi_thread();
        let runtime = runtime.worker_threads(cores.div_ceil(2)).enable_all().build()?;
        match self.command {
            BenchCommand::Rewards(options) => {
                let all = runtime.block_on(rewards::run(options.bytes))?;
                write_report(&all, options.json, out)?;
                rewards::check(&all, options.bytes)?;
                Ok(true)
            }
            BenchCommand::Train(options) => {
                match &options.write_model {
                    Some(dir) => options.model.write(dir)?,
                    None => write_report(&train::run(&options)?, options.json, out)?,
                }
                Ok(true)
            }
            BenchCommand::Sample(options) => {
                write_report(&sample::run(&options)?, options.json, out)?;
                Ok(true)
            }
            BenchCommand::Interference(options) => {
                let report = runtime.block_on(interference::run(&options))?;
                write_report(&report, options.json, out)?;
                Ok(report.failed() == 0)
            }
            BenchCommand::Http(options) => {
                let report = runtime.block_on(http::run(&options))?;
                write_report(&report, options.json, out)?;
                Ok(!options.check || report.passed())
            }
            BenchCommand::Safety(options) => {
                let report = runtime.block_on(safety::run(&options))?;
                writeln!(out, "{report}")?;
                Ok(!options.check || report.passed())
            }
        }
    }
}

/// Writes a report as JSON or as a table.
fn write_report(report: &impl Serialize, json: bool, out: &mut dyn Write) -> anyhow::Result<()> {
    let report = serde_json::to_value(report)?;
    match json {
        true => writeln!(out, "{report}")?,
        false => write!(out, "{}", as_table(&report))?,
    }
    Ok(())
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
