//! Segments of logs: immutable objects with consecutive batches.
//!
//! A segment is `HONESEG1`, the SHA-256 of the rest, and the rest: a [`LogSegment`] as postcard, compressed with zstd.
//! A later format gets another magic number.

use std::error::Error;

use hone_core::digest::Digest;
use hone_core::types::UnixMillis;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::bucket::{BucketError, failed};

const MAGIC: &[u8; 8] = b"HONESEG1";
/// The most bytes before compression.
const LONGEST: usize = 1 << 30;
/// zstd's default.
const LEVEL: i32 = 3;

/// An error of a ledger.
pub type LedgerError = Box<dyn Error + Send + Sync>;

/// Why a log is not written or read further.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// A request failed, or another request writes the segment at the same time.
    #[error(transparent)]
    Bucket(#[from] BucketError),
    /// The ledger does not give or take batches of the log.
    #[error("log {0}: {1}")]
    Ledger(Uuid, LedgerError),
    /// The object is not the segment that its key promises, or the batches cannot become a segment.
    #[error("{0}")]
    Segment(BucketError),
    /// Another trainer continued the log, or the ledger was copied or restored.
    #[error("{0} has other batches than this ledger: another process continued its log")]
    Diverged(String),
}

impl LogError {
    /// Whether a further attempt cannot help.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Segment(_) | Self::Diverged(_))
    }
}

/// What one transaction of a ledger committed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Batch {
    /// The number in its log, from 1 without gaps.
    pub sequence: u64,
    /// The operations.
    pub bytes: Vec<u8>,
}

/// Consecutive batches of one log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogSegment {
    /// The log's id: the server's, or nil for the log of the trainers.
    pub log: Uuid,
    /// When it was made, by the clock of its maker; for people.
    pub created: UnixMillis,
    /// At least one.
    pub batches: Vec<Batch>,
}

impl LogSegment {
    /// The key of the segment whose first batch is `first`. Keys sort as the sequences do.
    pub fn key(log: Uuid, first: u64) -> String {
        format!("log/{log}/{first:020}.seg")
    }

    /// The first batch's sequence; 0 without batches.
    pub fn first(&self) -> u64 {
        self.batches.first().map_or(0, |batch| batch.sequence)
    }

    /// The last batch's sequence; 0 without batches.
    pub fn last(&self) -> u64 {
        self.batches.last().map_or(0, |batch| batch.sequence)
    }

    /// The bytes of the object.
    pub fn encode(&self) -> Result<Vec<u8>, BucketError> {
        let key = self.check(self.log, self.first())?;
        let body = postcard::to_stdvec(self).map_err(failed(&key))?;
        if body.len() > LONGEST {
            return Err(failed(&key)("the batches have more than 1 GiB"));
        }
        let compressed = zstd::bulk::compress(&body, LEVEL).map_err(failed(&key))?;
        let checksum = Digest::new().bytes(&compressed).finish();
        Ok([MAGIC.as_slice(), &checksum, &compressed].concat())
    }

    /// Reads the bytes of the object whose key has `log` and `first`.
    pub fn decode(bytes: &[u8], log: Uuid, first: u64) -> Result<Self, BucketError> {
        let key = Self::key(log, first);
        let rest = bytes.strip_prefix(MAGIC).ok_or("is no segment of the format HONESEG1");
        let parts = rest.and_then(|rest| rest.split_first_chunk::<32>().ok_or("is too short"));
        let (checksum, compressed) = parts.map_err(failed(&key))?;
        if Digest::new().bytes(compressed).finish() != *checksum {
            return Err(failed(&key)("is corrupted: its SHA-256 is not that of its content"));
        }
        let body = zstd::bulk::decompress(compressed, LONGEST).map_err(failed(&key))?;
        let segment: Self = postcard::from_bytes(&body).map_err(failed(&key))?;
        segment.check(log, first)?;
        Ok(segment)
    }

    /// Whether there are consecutive batches of `log` from `first` on, at least one. Returns the key.
    fn check(&self, log: Uuid, first: u64) -> Result<String, BucketError> {
        let key = Self::key(log, first);
        let mut batches = (first..).zip(&self.batches);
        let are_consecutive = batches.all(|(expected, batch)| batch.sequence == expected);
        if self.log == log && first > 0 && self.first() == first && are_consecutive {
            return Ok(key);
        }
        Err(failed(&key)("does not have consecutive batches from its key's sequence on"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn segments() -> impl Strategy<Value = LogSegment> {
        let bytes = proptest::collection::vec(any::<u8>(), 0..200);
        let batches = proptest::collection::vec(bytes, 1..8);
        (any::<u128>(), any::<u64>(), 1..u64::MAX - 8, batches).prop_map(
            |(log, created, first, all)| {
                let batches = (first..).zip(all).map(|(sequence, bytes)| Batch { sequence, bytes });
                LogSegment { log: Uuid::from_u128(log), created, batches: batches.collect() }
            },
        )
    }

    proptest! {
        #[test]
        fn a_segment_is_read_as_it_was_written(segment in segments()) {
            let bytes = segment.encode().unwrap();
            prop_assert_eq!(LogSegment::decode(&bytes, segment.log, segment.first()).unwrap(), segment);
        }

        #[test]
        fn changed_and_cut_bytes_are_errors(
            segment in segments(),
            at in any::<prop::sample::Index>(),
            flip in 1..=255_u8,
        ) {
            let mut bytes = segment.encode().unwrap();
            let at = at.index(bytes.len());
            let decode = |bytes: &[u8]| LogSegment::decode(bytes, segment.log, segment.first());
            prop_assert!(decode(&bytes[..at]).is_err());
            bytes[at] ^= flip;
            prop_assert!(decode(&bytes).is_err());
        }

        #[test]
        fn any_body_with_a_valid_checksum_is_read_or_refused(
            body in proptest::collection::vec(any::<u8>(), 0..100),
            compress in any::<bool>(),
        ) {
            let body = if compress { zstd::bulk::compress(&body, LEVEL).unwrap() } else { body };
            let checksum = Digest::new().bytes(&body).finish();
            let _refused = LogSegment::decode(&[MAGIC.as_slice(), &checksum, &body].concat(), Uuid::nil(), 1);
        }
    }

    #[test]
    fn reasons_are_named() {
        let segment = |sequences: &[u64]| LogSegment {
            log: Uuid::nil(),
            created: 1,
            batches: sequences
                .iter()
                .map(|sequence| Batch { sequence: *sequence, bytes: b"abc".to_vec() })
                .collect(),
        };
        let good = segment(&[3]).encode().unwrap();
        let reason = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = good.clone();
            change(&mut bytes);
            LogSegment::decode(&bytes, Uuid::nil(), 3).unwrap_err().to_string()
        };
        assert!(reason(&Vec::clear).contains("no segment"));
        assert!(reason(&|bytes| bytes[7] = b'2').contains("no segment"));
        assert!(reason(&|bytes| bytes[10] ^= 1).contains("corrupted"));
        assert!(reason(&|bytes| bytes.truncate(45)).contains("corrupted"));
        assert!(reason(&|bytes| bytes.truncate(20)).contains("too short"));
        for sequences in [&[3, 5][..], &[], &[0, 1]] {
            let wrong = segment(sequences);
            assert!(wrong.encode().unwrap_err().to_string().contains("consecutive"));
            let body = zstd::bulk::compress(&postcard::to_stdvec(&wrong).unwrap(), LEVEL).unwrap();
            let checksum = Digest::new().bytes(&body).finish();
            let bytes = [MAGIC.as_slice(), &checksum, &body].concat();
            let refused = LogSegment::decode(&bytes, Uuid::nil(), wrong.first());
            assert!(refused.unwrap_err().to_string().contains("consecutive"));
        }
        for (log, first) in [(Uuid::nil(), 2), (Uuid::max(), 3)] {
            let misplaced = LogSegment::decode(&good, log, first);
            assert!(misplaced.unwrap_err().to_string().contains("consecutive"));
        }
    }

    #[test]
    fn a_body_that_is_too_long_is_refused_before_it_is_decompressed() {
        // A frame of 2 GiB of zeros, written in blocks of 128 KiB of one byte each.
        let mut frame = vec![0x28, 0xb5, 0x2f, 0xfd, 0xe0];
        frame.extend((2_u64 << 30).to_le_bytes());
        for block in 0..(2_u32 << 30 >> 17) {
            let last = u32::from(block + 1 == 2 << 30 >> 17);
            frame.extend(&((128 << 10) << 3 | 1 << 1 | last).to_le_bytes()[..3]);
            frame.push(0);
        }
        let checksum = Digest::new().bytes(&frame).finish();
        let refused =
            LogSegment::decode(&[MAGIC.as_slice(), &checksum, &frame].concat(), Uuid::nil(), 1);
        assert!(refused.unwrap_err().to_string().contains("too small"));
    }
}
