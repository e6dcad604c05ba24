//! Writer of TensorBoard event files, for scalars and histograms.
//!
//! A file is a sequence of TFRecords: the length as a little-endian `u64`, the masked CRC-32C of those
//! eight bytes, the data, and its masked CRC-32C, where `mask(c) = rotate_right(c, 15) +
//! 0xa282ead8` modulo 2^32 (TensorFlow, `lib/io/record_writer`, `lib/hash/crc32c`). Each contains
//! one protobuf message `Event` (TensorFlow, `event.proto`, `summary.proto`) with these fields:
//!
//! ```text
//! Event           1 wall_time: double (seconds)   2 step: int64   3 file_version: string
//!                 5 summary: Summary              7 session_log: SessionLog
//! Summary         1 value: repeated Value
//! Value           1 tag: string                   2 simple_value: float
//!                 5 histo: HistogramProto
//! HistogramProto  1 min   2 max   3 num   4 sum   5 sum_squares: double
//!                 6 bucket_limit: packed double   7 bucket: packed double (counts)
//! SessionLog      1 status: enum (START = 1)
//! ```
//!
//! TensorBoard reads the files of a directory in the order of their names. A resumed run begins a new
//! file with a `START` at its first step; TensorBoard then drops that step and later ones of earlier
//! files.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use hone_core::files::{FileError, at};
use hone_core::types::{StepRecord, UnixMillis};

/// Buckets of a histogram.
const BUCKETS: usize = 30;

/// One event file.
#[derive(Debug)]
pub struct EventWriter {
    path: PathBuf,
    file: File,
}

impl EventWriter {
    /// Creates `events.out.tfevents.<unix seconds>.<host>` in `dir`, which is created if necessary.
    /// Characters of `host` other than letters, digits, `-` and `.` become `_`. `resumed` is the last
    /// step that a resumed run keeps.
    ///
    /// # Errors
    /// If the file exists or cannot be written.
    pub fn create(
        dir: &Path,
        host: &str,
        now: UnixMillis,
        resumed: Option<u64>,
    ) -> Result<Self, FileError> {
        let plain = |c: char| if c.is_ascii_alphanumeric() || "-.".contains(c) { c } else { '_' };
        let host: String = host.chars().map(plain).collect();
        let path = dir.join(format!("events.out.tfevents.{}.{host}", now / 1000));
        let created = std::fs::create_dir_all(dir).and_then(|()| File::create_new(&path));
        let file = created.map_err(at(&path))?;
        let mut writer = Self { path, file };
        writer.write(&event(now, 0, |e| bytes(e, 3, b"brain.Event:2")))?;
        if let Some(kept) = resumed {
            let start = |e: &mut Vec<u8>| message(e, 7, |log| varint_field(log, 1, 1));
            writer.write(&event(now, kept + 1, start))?;
        }
        Ok(writer)
    }

    /// Writes a step's metrics as one event. A metric named `a/b` keeps its name as its tag, so that
    /// TensorBoard groups it under `a`; others are grouped under `train`. Values become `f32`.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn scalars(&mut self, record: &StepRecord) -> Result<(), FileError> {
        let summary = |summary: &mut Vec<u8>| {
            for (name, value) in &record.metrics {
                let tag = if name.contains('/') { name.clone() } else { format!("train/{name}") };
                #[expect(clippy::cast_possible_truncation, reason = "the format has f32")]
                let value = *value as f32;
                message(summary, 1, |v| {
                    bytes(v, 1, tag.as_bytes());
                    key(v, 2, FIXED32);
                    v.extend(value.to_le_bytes());
                });
            }
        };
        self.write(&event(record.created, record.step, |e| message(e, 5, summary)))
    }

    /// Writes the distribution of each list of values as one event. Values that are not finite are left
    /// out, and so are lists without any other.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn histograms(
        &mut self,
        step: u64,
        time: UnixMillis,
        values: &BTreeMap<String, Vec<f64>>,
    ) -> Result<(), FileError> {
        let mut summary = Vec::new();
        for (tag, values) in values {
            let finite: Vec<f64> = values.iter().copied().filter(|v| v.is_finite()).collect();
            if !finite.is_empty() {
                message(&mut summary, 1, |value| {
                    bytes(value, 1, tag.as_bytes());
                    message(value, 5, |histogram| fill_histogram(histogram, &finite));
                });
            }
        }
        if summary.is_empty() {
            return Ok(());
        }
        self.write(&event(time, step, |e| bytes(e, 5, &summary)))
    }

    fn write(&mut self, data: &[u8]) -> Result<(), FileError> {
        let length = (data.len() as u64).to_le_bytes();
        let mut record = Vec::with_capacity(data.len() + 16);
        record.extend(length);
        record.extend(masked_crc(&length).to_le_bytes());
        record.extend(data);
        record.extend(masked_crc(data).to_le_bytes());
        self.file.write_all(&record).map_err(at(&self.path))
    }
}

fn masked_crc(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

// The protobuf wire format: a key is `field << 3 | wire type`.
const VARINT: u64 = 0;
const FIXED64: u64 = 1;
const LENGTH: u64 = 2;
const FIXED32: u64 = 5;

fn event(time: UnixMillis, step: u64, content: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut event = Vec::new();
    key(&mut event, 1, FIXED64);
    event.extend((time as f64 / 1000.0).to_le_bytes());
    varint_field(&mut event, 2, step);
    content(&mut event);
    event
}

/// A `HistogramProto` of buckets of equal width, one of which contains each value. TensorBoard takes
/// the smallest and the largest value as the outer limits.
fn fill_histogram(out: &mut Vec<u8>, values: &[f64]) {
    let min = values.iter().copied().fold(f64::INFINITY, f64::min);
    let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let width = (max - min) / BUCKETS as f64;
    let mut counts = vec![0.0; if width > 0.0 { BUCKETS } else { 1 }];
    let last = counts.len() - 1;
    for value in values {
        // The largest value belongs to the last bucket.
        let bucket = if width > 0.0 { ((value - min) / width) as usize } else { 0 };
        counts[bucket.min(last)] += 1.0;
    }
    let limit =
        |bucket: usize| if bucket == last { max } else { min + width * (bucket + 1) as f64 };
    let limits: Vec<f64> = (0..counts.len()).map(limit).collect();
    let sum: f64 = values.iter().sum();
    let squares = values.iter().map(|v| v * v).sum();
    for (field, value) in (1..).zip([min, max, values.len() as f64, sum, squares]) {
        key(out, field, FIXED64);
        out.extend(f64::to_le_bytes(value));
    }
    for (field, list) in [(6, limits), (7, counts)] {
        let packed: Vec<u8> = list.into_iter().flat_map(f64::to_le_bytes).collect();
        bytes(out, field, &packed);
    }
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn key(out: &mut Vec<u8>, field: u64, wire: u64) {
    varint(out, field << 3 | wire);
}

fn varint_field(out: &mut Vec<u8>, field: u64, value: u64) {
    key(out, field, VARINT);
    varint(out, value);
}

fn bytes(out: &mut Vec<u8>, field: u64, data: &[u8]) {
    key(out, field, LENGTH);
    varint(out, data.len() as u64);
    out.extend(data);
}

fn message(out: &mut Vec<u8>, field: u64, fill: impl FnOnce(&mut Vec<u8>)) {
    let mut inner = Vec::new();
    fill(&mut inner);
    bytes(out, field, &inner);
}

#[cfg(test)]
mod tests {
    use std::io;

    use serde_json::Value;

    use super::*;

    fn record(step: u64, metrics: &[(&str, f64)]) -> StepRecord {
        let metrics = metrics.iter().map(|(n, v)| ((*n).to_owned(), *v)).collect();
        StepRecord { step, groups: Vec::new(), metrics, created: 1_700_000_000_000 + step * 250 }
    }

    /// Writes the reference script's input: a run that was killed after step 300 and resumed from 200,
    /// so that its second file drops step 300.
    fn write(dir: &Path) -> [PathBuf; 2] {
        let start = 1_700_000_000_000;
        let mut first = EventWriter::create(dir, "a host!", start, None).unwrap();
        first.scalars(&record(1, &[("reward_mean", 0.25), ("part/form", -1.5)])).unwrap();
        let rewards = [
            ("rewards/total", vec![0.5, 1.25, 2.0, 2.0, f64::NAN]),
            ("rewards/equal", vec![-1.0; 3]),
            ("rewards/absent", vec![f64::INFINITY]),
        ];
        let rewards = rewards.map(|(tag, values)| (tag.to_owned(), values)).into();
        first.histograms(1, start + 250, &rewards).unwrap();
        first.histograms(1, start + 250, &BTreeMap::new()).unwrap();
        first.scalars(&record(200, &[("reward_mean", 1e-3), ("kl", f64::INFINITY)])).unwrap();
        first.scalars(&record(300, &[("reward_mean", 9.0)])).unwrap();
        let mut second = EventWriter::create(dir, "a host!", start + 60_000, Some(200)).unwrap();
        second.scalars(&record(201, &[("reward_mean", 0.75)])).unwrap();
        [first.path, second.path]
    }

    /// TensorBoard's reader parsed exactly these bytes (`tests/reference/runs/tensorboard_read.py`).
    #[test]
    fn tensorboard_reads_the_bytes() {
        let path =
            concat!(env!("CARGO_MANIFEST_DIR"), "/tests/reference/runs/tensorboard_read.json");
        let text = std::fs::read_to_string(path).unwrap();
        let reference: Value = serde_json::from_str(&text).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let files = reference["files"].as_object().unwrap();
        for path in write(dir.path()) {
            let name = path.file_name().unwrap().to_str().unwrap();
            let hex: String =
                std::fs::read(&path).unwrap().iter().map(|b| format!("{b:02x}")).collect();
            assert_eq!(files[name], hex.as_str(), "{name}: run the script again");
        }
        assert_eq!(files.len(), 2);
        let read = &reference["scalars"];
        assert_eq!(
            read["train/reward_mean"],
            serde_json::json!([
                [1, 1_700_000_000.25, 0.25],
                [200, 1_700_000_050.0, 0.0010000000474974513],
                [201, 1_700_000_050.25, 0.75],
            ])
        );
        assert_eq!(read["part/form"], serde_json::json!([[1, 1_700_000_000.25, -1.5]]));
        assert_eq!(read["train/kl"], serde_json::json!([[200, 1_700_000_050.0, "inf"]]));
        // `[left, right, count]` of each bucket that is not empty, as TensorBoard shows them.
        let histograms = &reference["histograms"];
        assert_eq!(
            histograms["rewards/total"],
            serde_json::json!([[1, [[0.5, 0.55, 1.0], [1.25, 1.3, 1.0], [1.95, 2.0, 2.0]]]])
        );
        assert_eq!(histograms["rewards/equal"], serde_json::json!([[1, [[-1.0, -1.0, 3.0]]]]));
        assert_eq!(histograms.as_object().unwrap().len(), 2);
    }

    #[test]
    #[ignore = "writes the files that tests/reference/runs/tensorboard_read.py reads"]
    fn write_the_files_for_the_reference() {
        write(&Path::new(env!("CARGO_MANIFEST_DIR")).join("target/tensorboard"));
    }

    #[test]
    fn crc_of_rfc_3720_and_its_mask() {
        assert_eq!(crc32c::crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(masked_crc(b""), 0xa282_ead8);
    }

    #[test]
    fn an_existing_file_is_never_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let writer = EventWriter::create(dir.path(), "h", 5_000, None).unwrap();
        assert_eq!(writer.path, dir.path().join("events.out.tfevents.5.h"));
        let error = EventWriter::create(dir.path(), "h", 5_999, None).unwrap_err();
        assert_eq!(error.source.kind(), io::ErrorKind::AlreadyExists);
    }

    #[test]
    fn varints_are_base_128() {
        let encoded = |value| {
            let mut out = Vec::new();
            varint(&mut out, value);
            out
        };
        assert_eq!(encoded(0), [0]);
        assert_eq!(encoded(300), [0xac, 0x02]);
        assert_eq!(encoded(u64::MAX).len(), 10);
    }
}
