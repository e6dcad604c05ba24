//! From the segments of logs to a ledger, and the deletion of segments.

use std::collections::BTreeMap;

use futures::{StreamExt, stream};
use uuid::Uuid;

use crate::bucket::{Bucket, BucketError};
use crate::segment::{LedgerError, LogError, LogSegment};

/// The most segments of one log in one [`LogReader::poll`], so that no log waits long for another.
const MOST_SEGMENTS: usize = 32;
/// Segments that are read at the same time.
const READS: usize = 64;

/// What takes the batches of logs in.
pub trait Intake: Send + Sync {
    /// Applies the batches after the log's position, and the new position, in one transaction.
    fn take_in(&self, segment: LogSegment) -> impl Future<Output = Result<(), LedgerError>> + Send;
}

/// Reads the segments of the logs of all servers, each log in order.
///
/// The next segment's key follows from the position, so that a read costs a get and not a list. A list finds logs that
/// are new.
pub struct LogReader {
    bucket: Bucket,
    /// The last sequence of each log that was taken in.
    pub positions: BTreeMap<Uuid, u64>,
}

impl LogReader {
    /// Reads after `positions`, the last sequence of each log that was taken in.
    pub fn new(bucket: Bucket, positions: BTreeMap<Uuid, u64>) -> Self {
        Self { bucket, positions }
    }

    /// Finds the logs that are new, except that of the trainers. Call it at the start and some times a minute.
    pub async fn discover(&mut self) -> Result<(), BucketError> {
        for folder in self.bucket.list_folders("log").await? {
            let id = folder.rsplit('/').next().and_then(|id| Uuid::try_parse(id).ok());
            if let Some(log) = id.filter(|id| !id.is_nil()) {
                self.positions.entry(log).or_insert(0);
            }
        }
        Ok(())
    }

    /// Reads the next segments of each known log and passes them to `intake`.
    pub async fn poll(&mut self, intake: &impl Intake) -> Polled {
        let bucket = &self.bucket;
        let reads = self.positions.iter_mut().map(|(log, position)| async move {
            for taken in 0..MOST_SEGMENTS {
                let key = LogSegment::key(*log, position.saturating_add(1));
                let Some((bytes, _)) = bucket.get(&key, None).await? else { return Ok(taken) };
                take_in(intake, *log, position, &bytes).await?;
            }
            Ok(MOST_SEGMENTS)
        });
        let reads = stream::iter(reads.collect::<Vec<_>>()).buffer_unordered(READS);
        let results: Vec<Result<usize, LogError>> = reads.collect().await;
        let at_end =
            |result: &Result<usize, _>| matches!(result, Ok(taken) if *taken < MOST_SEGMENTS);
        Polled {
            segments: results.iter().flatten().sum(),
            is_at_end: results.iter().all(at_end),
            errors: results.into_iter().filter_map(Result::err).collect(),
        }
    }
}

/// What one [`LogReader::poll`] did.
#[derive(Debug)]
pub struct Polled {
    /// Segments that were taken in.
    pub segments: usize,
    /// Whether each log was read to its end.
    pub is_at_end: bool,
    /// Why a log was not read or taken in.
    pub errors: Vec<LogError>,
}

/// Passes the segments of one log after `position` to `intake`, in order, and returns the last sequence. A segment that
/// is missing before another one is an error.
pub async fn read_log(
    bucket: &Bucket,
    log: Uuid,
    mut position: u64,
    intake: &impl Intake,
) -> Result<u64, LogError> {
    loop {
        let after = LogSegment::key(log, position);
        let keys = bucket.list(&format!("log/{log}"), Some(&after)).await?;
        if keys.is_empty() {
            return Ok(position);
        }
        let gets = keys.iter().map(|key| bucket.get(key, None)).collect::<Vec<_>>();
        let mut objects = stream::iter(gets).buffered(READS);
        while let Some(object) = objects.next().await {
            let bytes = object?.map_or_else(Vec::new, |(bytes, _)| bytes);
            take_in(intake, log, &mut position, &bytes).await?;
        }
    }
}

/// Takes the segment after `position` in.
async fn take_in(
    intake: &impl Intake,
    log: Uuid,
    position: &mut u64,
    bytes: &[u8],
) -> Result<(), LogError> {
    let segment = LogSegment::decode(bytes, log, position.saturating_add(1));
    let segment = segment.map_err(LogError::Segment)?;
    let last = segment.last();
    intake.take_in(segment).await.map_err(|source| LogError::Ledger(log, source))?;
    *position = last;
    Ok(())
}

/// Deletes the segments of a log that have only batches before `sequence`, except the last segment.
pub async fn delete_before(bucket: &Bucket, log: Uuid, sequence: u64) -> Result<(), BucketError> {
    let keys = bucket.list(&format!("log/{log}"), None).await?;
    let bound = LogSegment::key(log, sequence);
    for (key, _) in keys.iter().zip(keys.iter().skip(1)).take_while(|(_, next)| **next <= bound) {
        bucket.delete(key).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use parking_lot::Mutex;
    use tokio::sync::oneshot;

    use super::*;
    use crate::segment::Batch;
    use crate::ship::{OutboxSource, Shipper};

    /// An outbox and an intake in memory.
    #[derive(Clone, Default)]
    struct Ledger {
        rows: Arc<Mutex<Vec<Batch>>>,
        taken: Arc<Mutex<Vec<(Uuid, u64)>>>,
        fails: Arc<AtomicBool>,
    }

    impl Ledger {
        fn commit(&self, sequences: std::ops::RangeInclusive<u64>, size: usize) {
            let batch = |sequence| Batch { sequence, bytes: vec![sequence as u8; size] };
            self.rows.lock().extend(sequences.map(batch));
        }
    }

    impl OutboxSource for Ledger {
        async fn after(&self, sequence: u64, limit: usize) -> Result<Vec<Batch>, LedgerError> {
            let (mut found, mut size) = (Vec::new(), 0);
            for batch in self.rows.lock().iter().filter(|batch| batch.sequence > sequence) {
                size += batch.bytes.len();
                if size > limit && !found.is_empty() {
                    break;
                }
                found.push(batch.clone());
            }
            Ok(found)
        }

        async fn shipped(&self, sequence: u64) -> Result<(), LedgerError> {
            if self.fails.load(Ordering::Relaxed) {
                return Err("planned".into());
            }
            self.rows.lock().retain(|batch| batch.sequence > sequence);
            Ok(())
        }
    }

    impl Intake for Ledger {
        async fn take_in(&self, segment: LogSegment) -> Result<(), LedgerError> {
            let batches = segment.batches.iter().map(|batch| (segment.log, batch.sequence));
            self.taken.lock().extend(batches);
            Ok(())
        }
    }

    fn reader(bucket: &Bucket) -> LogReader {
        LogReader::new(bucket.clone(), BTreeMap::new())
    }

    async fn read_all(reader: &mut LogReader, ledger: &Ledger) -> Vec<LogError> {
        reader.discover().await.unwrap();
        let mut all = Vec::new();
        loop {
            let polled = reader.poll(ledger).await;
            assert_eq!(polled.is_at_end, polled.errors.is_empty());
            all.extend(polled.errors);
            if polled.segments == 0 {
                return all;
            }
        }
    }

    /// Writes segments with one batch each.
    async fn write(bucket: &Bucket, log: Uuid, sequences: std::ops::RangeInclusive<u64>) {
        let ledger = Ledger::default();
        let shipper = Shipper::new(bucket.clone(), log, ledger.clone());
        for sequence in sequences {
            ledger.commit(sequence..=sequence, 10);
            shipper.ship().await.unwrap();
        }
    }

    #[tokio::test]
    async fn batches_arrive_in_order_and_once() {
        let (bucket, trainer) = (Bucket::memory(), Ledger::default());
        let logs = [Uuid::now_v7(), Uuid::now_v7(), Uuid::nil()];
        let mut reader = reader(&bucket);
        for log in logs {
            let ledger = Ledger::default();
            let shipper = Shipper::new(bucket.clone(), log, ledger.clone());
            ledger.commit(1..=5, 3 << 20);
            shipper.ship().await.unwrap();
            ledger.commit(6..=6, 20 << 20);
            ledger.commit(7..=7, 1);
            let (first, second) = tokio::join!(shipper.ship(), shipper.ship());
            first.and(second).unwrap();
            assert_eq!(shipper.state().borrow().shipped, 7);
            assert_eq!(bucket.list(&format!("log/{log}"), None).await.unwrap().len(), 5);
        }
        assert!(read_all(&mut reader, &trainer).await.is_empty());
        assert!(read_all(&mut reader, &trainer).await.is_empty());
        for log in &logs[..2] {
            let taken = trainer.taken.lock().clone();
            let own = taken.iter().filter(|(of, _)| of == log).map(|(_, sequence)| *sequence);
            assert_eq!(own.collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6, 7]);
            assert_eq!(reader.positions[log], 7);
        }
        assert_eq!(reader.positions.len(), 2);
    }

    #[tokio::test]
    async fn a_restart_after_the_put_continues_and_another_writer_stops() {
        let (bucket, log, ledger) = (Bucket::memory(), Uuid::nil(), Ledger::default());
        ledger.commit(1..=2, 10);
        ledger.fails.store(true, Ordering::Relaxed);
        let failed = Shipper::new(bucket.clone(), log, ledger.clone()).ship().await;
        assert!(matches!(failed, Err(LogError::Ledger(..))));
        ledger.fails.store(false, Ordering::Relaxed);
        // Meanwhile there are more batches than in the segment.
        ledger.commit(3..=4, 10);
        Shipper::new(bucket.clone(), log, ledger.clone()).ship().await.unwrap();
        let trainer = Ledger::default();
        assert_eq!(read_log(&bucket, log, 0, &trainer).await.unwrap(), 4);
        assert_eq!(trainer.taken.lock().len(), 4);
        let former = Ledger::default();
        former.commit(1..=2, 11);
        let shipper = Shipper::new(bucket, log, former);
        let stopped = shipper.run(Duration::from_millis(1), std::future::pending()).await;
        assert!(matches!(stopped, Err(LogError::Diverged(_))));
        assert!(shipper.state().borrow().error.is_some());
    }

    #[tokio::test]
    async fn the_loop_outlasts_errors_and_stops() {
        let (bucket, ledger) = (Bucket::memory(), Ledger::default());
        ledger.commit(1..=3, 10);
        ledger.fails.store(true, Ordering::Relaxed);
        let shipper = Arc::new(Shipper::new(bucket, Uuid::now_v7(), ledger.clone()));
        let mut state = shipper.state();
        let (stop, stopped) = oneshot::channel::<()>();
        let running = tokio::spawn({
            let shipper = Arc::clone(&shipper);
            async move { shipper.run(Duration::from_millis(1), async { drop(stopped.await) }).await }
        });
        let failed = state.wait_for(|state| state.error.is_some()).await.unwrap().clone();
        assert!(failed.error.is_some_and(|error| error.ends_with(": planned")));
        assert!(shipper.ship().await.is_err());
        ledger.fails.store(false, Ordering::Relaxed);
        state.wait_for(|state| state.shipped == 3 && state.error.is_none()).await.unwrap();
        ledger.commit(4..=4, 10);
        shipper.ship().await.unwrap();
        assert_eq!(state.borrow().shipped, 4);
        stop.send(()).unwrap();
        running.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_corrupted_segment_stops_only_its_log() {
        let (bucket, trainer) = (Bucket::memory(), Ledger::default());
        let logs = [Uuid::now_v7(), Uuid::now_v7()];
        for log in logs {
            write(&bucket, log, 1..=3).await;
        }
        let corrupted = LogSegment::key(logs[0], 2);
        bucket.put(&corrupted, b"HONESEG1").await.unwrap();
        let mut reader = reader(&bucket);
        let errors = read_all(&mut reader, &trainer).await;
        let named =
            |error: &LogError| matches!(error, LogError::Segment(wrong) if wrong.key == corrupted);
        assert!(!errors.is_empty() && errors.iter().all(named), "{errors:?}");
        assert_eq!(logs.map(|log| reader.positions[&log]), [1, 3]);
        let error = read_log(&bucket, logs[0], 0, &trainer).await.unwrap_err();
        assert!(named(&error), "{error}");
        bucket.delete(&corrupted).await.unwrap();
        let error = read_log(&bucket, logs[0], 0, &trainer).await.unwrap_err();
        assert!(named(&error), "{error}");
    }

    #[tokio::test]
    async fn old_segments_are_deleted_and_the_last_one_is_kept() {
        let (bucket, log) = (Bucket::memory(), Uuid::nil());
        write(&bucket, log, 1..=2).await;
        let ledger = Ledger::default();
        ledger.commit(3..=5, 10);
        Shipper::new(bucket.clone(), log, ledger).ship().await.unwrap();
        write(&bucket, log, 6..=7).await;
        for (before, kept) in [(2, 2), (5, 3), (6, 6), (100, 7)] {
            delete_before(&bucket, log, before).await.unwrap();
            let first = bucket.list("log", None).await.unwrap().remove(0);
            assert_eq!(first, LogSegment::key(log, kept));
            let trainer = Ledger::default();
            assert_eq!(read_log(&bucket, log, kept - 1, &trainer).await.unwrap(), 7);
        }
    }
}
