//! The log of a run: JSON lines, one object per step, suitable for `jq` and data frames.
//!
//! `{"step":3,"time_ms":1700000000000,"kl":0.01,"reward_mean":0.5,…}`: the step, its end in Unix
//! milliseconds, then the metrics in alphabetical order. A metric that could not be computed is absent.
//! One that is not finite is `null`, because JSON has no such numbers.
//!
//! Invariant: steps increase from line to line, also across resumed runs. Opening the log of a resumed
//! run drops the records after the step that it resumes from, and a last line that a crash tore.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};
use serde_json::{Map, Value};

use hone_core::files::{FileError, at};
use hone_core::types::{StepRecord, UnixMillis};

const STEP: &str = "step";
const TIME: &str = "time_ms";

/// A log that cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum JsonlError {
    /// An I/O error.
    #[error(transparent)]
    Io(#[from] FileError),
    /// A line before the last is not a record.
    #[error("{}, line {line}: {reason}", path.display())]
    Line {
        /// The log.
        path: PathBuf,
        /// The line's number, from 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// A metric has the name of another field.
    #[error("a metric may not be named \"{0}\"")]
    Reserved(String),
    /// A step that is not after the last one.
    #[error("step {step} does not come after step {last}, which {} ends with", path.display())]
    Order {
        /// The log.
        path: PathBuf,
        /// The rejected step.
        step: u64,
        /// The last step of the log.
        last: u64,
    },
}

/// A record of the log.
#[derive(Clone, Debug, PartialEq)]
pub struct LoggedStep {
    /// The optimizer step.
    pub step: u64,
    /// The end of the step.
    pub time_ms: UnixMillis,
    /// The metrics; those that were `null` are left out.
    pub metrics: BTreeMap<String, f64>,
}

/// A log opened for appending.
#[derive(Debug)]
pub struct JsonlLog {
    path: PathBuf,
    file: File,
    last: Option<u64>,
}

impl JsonlLog {
    /// Opens or creates a log and drops the records after `resumed`, the last step that the run keeps;
    /// 0 drops all.
    ///
    /// # Errors
    /// If the file cannot be read or truncated, or a line before the last is not a record.
    pub fn open(path: &Path, resumed: u64) -> Result<Self, JsonlError> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(path).map_err(at(path))?;
        let mut reader = BufReader::new(&file);
        let (mut keep, mut last) = (0, None);
        scan(path, &mut reader, |bytes, logged| {
            if logged.step > resumed {
                return false;
            }
            keep += bytes as u64;
            last = Some(logged.step);
            true
        })?;
        file.set_len(keep).map_err(at(path))?;
        (&file).seek(SeekFrom::Start(keep)).map_err(at(path))?;
        Ok(Self { path: path.to_owned(), file, last })
    }

    /// Appends a step. The file is not synced: a crash of the process loses nothing, one of the machine
    /// the last lines.
    ///
    /// # Errors
    /// If the file cannot be written, the step is not after the last one, or a metric is named `step`
    /// or `time_ms`.
    pub fn append(&mut self, record: &StepRecord) -> Result<(), JsonlError> {
        if let Some(last) = self.last.filter(|last| record.step <= *last) {
            return Err(JsonlError::Order { path: self.path.clone(), step: record.step, last });
        }
        if let Some(name) = [STEP, TIME].iter().find(|name| record.metrics.contains_key(**name)) {
            return Err(JsonlError::Reserved((*name).to_owned()));
        }
        let mut line = serde_json::to_vec(&Line(record)).map_err(|e| at(&self.path)(e.into()))?;
        line.push(b'\n');
        // One call, so that no reader sees half a line.
        self.file.write_all(&line).map_err(at(&self.path))?;
        self.last = Some(record.step);
        Ok(())
    }
}

/// The records of a log, without a torn last line.
///
/// # Errors
/// If the file cannot be read, or a line before the last is not a record.
pub fn read(path: &Path) -> Result<Vec<LoggedStep>, JsonlError> {
    let file = File::open(path).map_err(at(path))?;
    let mut all = Vec::new();
    scan(path, &mut BufReader::new(file), |_, logged| {
        all.push(logged);
        true
    })?;
    Ok(all)
}

struct Line<'a>(&'a StepRecord);

impl Serialize for Line<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.metrics.len() + 2))?;
        map.serialize_entry(STEP, &self.0.step)?;
        map.serialize_entry(TIME, &self.0.created)?;
        for (name, value) in &self.0.metrics {
            // serde_json writes numbers that are not finite as null.
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

/// Passes each record and its length in bytes to `add` until that returns false. A last line that is
/// incomplete or invalid was torn by a crash and is ignored.
fn scan(
    path: &Path,
    reader: &mut impl BufRead,
    mut add: impl FnMut(usize, LoggedStep) -> bool,
) -> Result<(), JsonlError> {
    let (mut bytes, mut last, mut number) = (Vec::new(), None, 0);
    // The error of the line before: it counts only if another line follows.
    let mut invalid: Option<JsonlError> = None;
    loop {
        bytes.clear();
        if reader.read_until(b'\n', &mut bytes).map_err(at(path))? == 0 || !bytes.ends_with(b"\n") {
            return Ok(());
        }
        if let Some(error) = invalid {
            return Err(error);
        }
        number += 1;
        let wrong =
            |reason: String| JsonlError::Line { path: path.to_owned(), line: number, reason };
        match parse(&bytes) {
            Ok(logged) if last.is_some_and(|last| logged.step <= last) => {
                let step = logged.step;
                return Err(wrong(format!("step {step} does not come after the one above")));
            }
            Ok(logged) => {
                last = Some(logged.step);
                if !add(bytes.len(), logged) {
                    return Ok(());
                }
            }
            Err(reason) => invalid = Some(wrong(reason)),
        }
    }
}

fn parse(line: &[u8]) -> Result<LoggedStep, String> {
    let fields: Map<String, Value> =
        serde_json::from_slice(line).map_err(|e| format!("not a JSON object: {e}"))?;
    let whole = |name: &str| {
        let value = fields.get(name).and_then(Value::as_u64);
        value.ok_or_else(|| format!("\"{name}\" is not a whole number"))
    };
    let (step, time_ms) = (whole(STEP)?, whole(TIME)?);
    let other = fields.iter().filter(|(name, _)| *name != STEP && *name != TIME);
    let mut metrics = BTreeMap::new();
    for (name, value) in other {
        match value.as_f64() {
            Some(number) => _ = metrics.insert(name.clone(), number),
            None if value.is_null() => {}
            None => return Err(format!("\"{name}\" is not a number")),
        }
    }
    Ok(LoggedStep { step, time_ms, metrics })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record(step: u64, metrics: &[(&str, f64)]) -> StepRecord {
        let metrics = metrics.iter().map(|(n, v)| ((*n).to_owned(), *v)).collect();
        StepRecord { step, groups: Vec::new(), metrics, created: 1_700_000_000_000 + step }
    }

    fn steps(path: &Path) -> Vec<u64> {
        read(path).unwrap().iter().map(|logged| logged.step).collect()
    }

    #[test]
    fn a_line_is_flat_and_writes_null_for_numbers_that_are_not_finite() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log.jsonl");
        let mut log = JsonlLog::open(&path, 0).unwrap();
        log.append(&record(1, &[("reward_mean", 0.5), ("kl", f64::NAN), ("part/form", 1.0)]))
            .unwrap();
        log.append(&record(2, &[])).unwrap();
        insta::assert_snapshot!(std::fs::read_to_string(&path).unwrap(), @r#"
        {"step":1,"time_ms":1700000000001,"kl":null,"part/form":1.0,"reward_mean":0.5}
        {"step":2,"time_ms":1700000000002}
        "#);
        let logged = read(&path).unwrap();
        assert_eq!(logged[0].metrics.keys().collect::<Vec<_>>(), ["part/form", "reward_mean"]);
    }

    #[test]
    fn resuming_drops_later_records_and_a_torn_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log.jsonl");
        let mut log = JsonlLog::open(&path, 0).unwrap();
        (1..=5).for_each(|step| log.append(&record(step, &[("kl", 0.1)])).unwrap());
        write!(log.file, "{{\"step\":6,\"ti").unwrap();
        assert_eq!(steps(&path), [1, 2, 3, 4, 5]);
        let mut log = JsonlLog::open(&path, 3).unwrap();
        assert_eq!(steps(&path), [1, 2, 3]);
        log.append(&record(4, &[])).unwrap();
        assert_eq!(steps(&path), [1, 2, 3, 4]);
        // A checkpoint that is newer than the log keeps all of it.
        let mut log = JsonlLog::open(&path, 9).unwrap();
        assert_eq!(steps(&path), [1, 2, 3, 4]);
        insta::assert_snapshot!(log.append(&record(4, &[])).unwrap_err().to_string().replace(dir.path().to_str().unwrap(), ""), @"step 4 does not come after step 4, which /log.jsonl ends with");
        JsonlLog::open(&path, 0).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
    }

    #[test]
    fn an_invalid_log_is_rejected_and_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log.jsonl");
        let error = |text: &str| {
            std::fs::write(&path, text).unwrap();
            let error = JsonlLog::open(&path, 9).unwrap_err().to_string();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
            error.replace(dir.path().to_str().unwrap(), "")
        };
        insta::assert_snapshot!(error("hello\nyou\n"), @"/log.jsonl, line 1: not a JSON object: expected value at line 1 column 1");
        insta::assert_snapshot!(error("{\"step\":1}\n{}\n"), @r#"/log.jsonl, line 1: "time_ms" is not a whole number"#);
        let line = |step: u64| format!("{{\"step\":{step},\"time_ms\":1}}\n");
        insta::assert_snapshot!(error(&line(2).repeat(2)), @"/log.jsonl, line 2: step 2 does not come after the one above");
    }

    #[test]
    fn reserved_names_are_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = JsonlLog::open(&dir.path().join("log.jsonl"), 0).unwrap();
        let error = log.append(&record(1, &[("time_ms", 1.0)])).unwrap_err();
        assert_eq!(error.to_string(), "a metric may not be named \"time_ms\"");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn metrics_survive_and_any_tear_keeps_whole_lines(
            values in prop::collection::vec(any::<f64>(), 1..12), tear in 0.0..1.0f64,
        ) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("log.jsonl");
            let mut log = JsonlLog::open(&path, 0).unwrap();
            for (i, value) in values.iter().enumerate() {
                log.append(&record(i as u64 + 1, &[("v", *value)])).unwrap();
            }
            for (logged, value) in read(&path).unwrap().iter().zip(&values) {
                // serde_json reads numbers to the last digit only with a feature that is off.
                match logged.metrics.get("v") {
                    Some(read) => prop_assert!((read - value).abs() <= value.abs() * 1e-15),
                    None => prop_assert!(!value.is_finite()),
                }
            }
            let bytes = std::fs::read(&path).unwrap();
            let cut = (bytes.len() as f64 * tear) as usize;
            std::fs::write(&path, &bytes[..cut]).unwrap();
            let whole = bytes[..cut].iter().filter(|b| **b == b'\n').count();
            JsonlLog::open(&path, u64::MAX).unwrap();
            prop_assert_eq!(steps(&path).len(), whole);
        }
    }
}
