//! What benchmarks share: a daemon, processor time and load. Values that the system does not provide are 0.

use std::fs;
use std::path::Path;
use std::time::Instant;

use serde::Serialize;
use serde_json::{Value, json};

use hone_demo::users::percentile;
use hone_report::terminal::{MISSING, shown, table};

use hone::app::{self, Service};
use hone::logging;
use hone_config::Config;

/// The result of a benchmark.
pub(crate) struct BenchOutcome {
    /// The measurements, which docs/benchmarks.md explains.
    pub report: Value,
    /// The check that failed.
    pub failure: Option<String>,
}

impl BenchOutcome {
    pub fn of(report: Value) -> Self {
        Self { report, failure: None }
    }
}

/// Starts a daemon in this process, runs `f` with it, and shuts it down.
pub(crate) async fn with_daemon<T>(
    config: Config,
    f: impl AsyncFnOnce(&Service) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    logging::init(&config.log);
    let daemon = app::start(config).await?;
    let done = f(&daemon).await;
    let ended = daemon.shutdown().await;
    let done = done?;
    ended.map(|()| done)
}

/// Measures a daemon with a configuration whose data is in a temporary directory. `f` returns the report, to which the
/// machine's load is added, and the failed check.
pub(crate) async fn measured(
    config: impl FnOnce(&Path) -> anyhow::Result<Config>,
    f: impl AsyncFnOnce(&Service) -> anyhow::Result<(Value, Option<String>)>,
) -> anyhow::Result<BenchOutcome> {
    let dir = tempfile::tempdir()?;
    let before = machine_load();
    let (mut report, failure) = with_daemon(config(dir.path())?, f).await?;
    report["load"] = json!([before, machine_load()]);
    Ok(BenchOutcome { report, failure })
}

/// The number of cores.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The median and the 99th percentile (nearest rank); NaN without values.
pub(crate) fn quantiles(mut values: Vec<f64>) -> [f64; 2] {
    values.sort_by(f64::total_cmp);
    [0.5, 0.99].map(|q| percentile(&values, q).unwrap_or(f64::NAN))
}

/// The load average of the last minute: the mean number of runnable processes.
pub(crate) fn machine_load() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().and_then(|load| load.parse().ok()).unwrap_or_default()
}

/// Durations in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Seconds {
    /// Wall time.
    pub wall: f64,
    /// Processor time of all threads, in hundredths.
    pub processor: f64,
}

/// Runs `f` and measures its duration.
pub(crate) fn timed<R>(f: impl FnOnce() -> R) -> (R, Seconds) {
    let (start, before) = (Instant::now(), processor_seconds());
    let result = f();
    let wall = start.elapsed().as_secs_f64();
    (result, Seconds { wall, processor: processor_seconds() - before })
}

/// Processor time of this process in seconds, in hundredths.
pub(crate) fn processor_seconds() -> f64 {
    let text = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // Fields 14 and 15 are user and system time in ticks of 1/100 s. The name, field 2, ends in `)`.
    let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}

/// The number of threads that an option chooses; 0 chooses one per core.
pub(crate) fn threads_or_cores(threads: usize) -> usize {
    if threads == 0 { cores() } else { threads }
}

/// A list of objects as a table with a row for each, an object of lists as such tables, and any other object as a
/// table with a row for each value.
pub(crate) fn as_table(report: &Value) -> String {
    let items = match report {
        Value::Array(items) => items,
        Value::Object(lists) if lists.values().all(Value::is_array) => {
            let lists = lists.values().filter(|list| **list != json!([]));
            return lists.map(as_table).collect::<Vec<_>>().join("\n");
        }
        _ => return shown(&table(["name", "value"], fields("", report), 2)),
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
pub(crate) mod tests {
    use super::*;

    /// The options of a benchmark with these flags.
    pub(crate) fn options<T: clap::Args>(flags: &[&str]) -> T {
        let command = T::augment_args(clap::Command::new("bench"));
        let matches = command.get_matches_from([&["bench"][..], flags].concat());
        T::from_arg_matches(&matches).unwrap()
    }

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
        let lists =
            json!({"kinds": [{"kind": "a", "p": 1.5}, {"kind": "bc", "p": null}], "none": []});
        insta::assert_snapshot!(as_table(&lists), @"
        kind      p
        a     1.500
        bc        –
        ");
    }
}
