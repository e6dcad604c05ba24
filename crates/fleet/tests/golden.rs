//! The committed segment of this format stays readable.

use std::fs;
use std::path::PathBuf;

use hone_fleet::segment::{Batch, LogSegment};
use uuid::Uuid;

fn path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/format1.seg")
}

fn segment() -> LogSegment {
    let batches = (41..).zip([&b"first"[..], b"", &[7; 300]]);
    LogSegment {
        log: Uuid::from_u128(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef),
        created: 1_764_374_400_000,
        batches: batches
            .map(|(sequence, bytes)| Batch { sequence, bytes: bytes.to_vec() })
            .collect(),
    }
}

#[test]
fn the_golden_segment_is_read() {
    let (bytes, expected) = (fs::read(path()).unwrap(), segment());
    assert_eq!(LogSegment::decode(&bytes, expected.log, expected.first()).unwrap(), expected);
    let key = "log/01234567-89ab-cdef-0123-456789abcdef/00000000000000000041.seg";
    assert_eq!(LogSegment::key(segment().log, segment().first()), key);
}

/// Only for a new format, under a new name.
#[test]
#[ignore = "writes the golden segment"]
fn write_the_golden_segment() {
    fs::create_dir_all(path().parent().unwrap()).unwrap();
    fs::write(path(), segment().encode().unwrap()).unwrap();
    assert!(path().exists());
}
