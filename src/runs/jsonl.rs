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
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{bail, ensure};
use serde::{Deserialize, Serialize};

use hone_core::files::at;
use hone_core::types::UnixMillis;

/// A line to write. serde_json writes numbers that are not finite as null.
#[derive(Serialize)]
struct LogLine<'a> {
    step: u64,
    time_ms: UnixMillis,
    #[serde(flatten)]
    metrics: &'a BTreeMap<String, f64>,
}

/// What a line of a log must have.
#[derive(Deserialize)]
struct LoggedStep {
    step: u64,
    #[serde(rename = "time_ms")]
    _time: UnixMillis,
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
    pub fn open(path: &Path, resumed: u64) -> anyhow::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let mut file = options.open(path).map_err(at(path))?;
        let mut text = Vec::new();
        file.read_to_end(&mut text).map_err(at(path))?;
        text.truncate(text.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1));
        let (mut keep, mut last) = (0, None);
        let mut lines = (1..).zip(text.split_inclusive(|byte| *byte == b'\n')).peekable();
        while let Some((number, line)) = lines.next() {
            let step = match serde_json::from_slice(line) {
                Ok(LoggedStep { step, .. }) => step,
                // A crash tore the last line.
                Err(_) if lines.peek().is_none() => break,
                Err(error) => bail!("{}, line {number}: not a step: {error}", path.display()),
            };
            ensure!(
                last.is_none_or(|last| step > last),
                "{}, line {number}: step {step} does not come after the one above",
                path.display()
            );
            if step > resumed {
                break;
            }
            keep += line.len() as u64;
            last = Some(step);
        }
        file.set_len(keep).map_err(at(path))?;
        file.seek(SeekFrom::Start(keep)).map_err(at(path))?;
        Ok(Self { path: path.to_owned(), file, last })
    }

    /// Appends a step that ended at `time_ms`. The file is not synced: a crash of the process loses nothing,
    /// one of the machine the last lines.
    ///
    /// # Errors
    /// If the file cannot be written, or the step is not after the last one.
    pub fn append(
        &mut self,
        step: u64,
        time_ms: UnixMillis,
        metrics: &BTreeMap<String, f64>,
    ) -> anyhow::Result<()> {
        if let Some(last) = self.last.filter(|last| step <= *last) {
            let path = self.path.display();
            bail!("step {step} does not come after step {last}, which {path} ends with");
        }
        let mut line = serde_json::to_vec(&LogLine { step, time_ms, metrics })?;
        line.push(b'\n');
        // One call, so that no reader sees half a line.
        self.file.write_all(&line).map_err(at(&self.path))?;
        self.last = Some(step);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn append(log: &mut JsonlLog, step: u64, metrics: &[(&str, f64)]) -> anyhow::Result<()> {
        let metrics = metrics.iter().map(|(n, v)| ((*n).to_owned(), *v)).collect();
        log.append(step, 1_700_000_000_000 + step, &metrics)
    }

    fn read(path: &Path) -> Vec<serde_json::Value> {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn steps(path: &Path) -> Vec<u64> {
        read(path).iter().map(|logged| logged["step"].as_u64().unwrap()).collect()
    }

    #[test]
    fn a_line_is_flat_and_writes_null_for_numbers_that_are_not_finite() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log.jsonl");
        let mut log = JsonlLog::open(&path, 0).unwrap();
        append(&mut log, 1, &[("reward_mean", 0.5), ("kl", f64::NAN), ("part/form", 1.0)]).unwrap();
        append(&mut log, 2, &[]).unwrap();
        insta::assert_snapshot!(std::fs::read_to_string(&path).unwrap(), @r#"
        {"step":1,"time_ms":1700000000001,"kl":null,"part/form":1.0,"reward_mean":0.5}
        {"step":2,"time_ms":1700000000002}
        "#);
    }

    #[test]
    fn resuming_drops_later_records_and_a_torn_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log.jsonl");
        let mut log = JsonlLog::open(&path, 0).unwrap();
        (1..=5).for_each(|step| append(&mut log, step, &[("kl", 0.1)]).unwrap());
        write!(log.file, "{{\"step\":6,\"ti").unwrap();
        JsonlLog::open(&path, 9).unwrap();
        assert_eq!(steps(&path), [1, 2, 3, 4, 5]);
        let mut log = JsonlLog::open(&path, 3).unwrap();
        assert_eq!(steps(&path), [1, 2, 3]);
        append(&mut log, 4, &[]).unwrap();
        assert_eq!(steps(&path), [1, 2, 3, 4]);
        // A checkpoint that is newer than the log keeps all of it.
        let mut log = JsonlLog::open(&path, 9).unwrap();
        assert_eq!(steps(&path), [1, 2, 3, 4]);
        insta::assert_snapshot!(append(&mut log, 4, &[]).unwrap_err().to_string().replace(dir.path().to_str().unwrap(), ""), @"step 4 does not come after step 4, which /log.jsonl ends with");
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
        insta::assert_snapshot!(error("hello\nyou\n"), @"/log.jsonl, line 1: not a step: expected value at line 1 column 1");
        insta::assert_snapshot!(error("{\"step\":1}\n{}\n"), @"/log.jsonl, line 1: not a step: missing field `time_ms` at line 1 column 10");
        let line = |step: u64| format!("{{\"step\":{step},\"time_ms\":1}}\n");
        insta::assert_snapshot!(error(&line(2).repeat(2)), @"/log.jsonl, line 2: step 2 does not come after the one above");
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
                append(&mut log, i as u64 + 1, &[("v", *value)]).unwrap();
            }
            for (logged, value) in read(&path).iter().zip(&values) {
                // serde_json reads numbers to the last digit only with a feature that is off.
                match logged["v"].as_f64() {
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
