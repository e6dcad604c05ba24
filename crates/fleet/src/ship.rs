//! From a ledger's outbox to segments in the store.

use std::pin::pin;
use std::time::Duration;

use hone_core::types::now_ms;
use tokio::sync::{Mutex, watch};
use tokio::time::sleep;
use uuid::Uuid;

use crate::bucket::{Bucket, failed};
use crate::segment::{Batch, LedgerError, LogError, LogSegment};

/// The most bytes of batches in one segment, unless one batch has more. It may only grow: see `Shipper::write`.
pub const SEGMENT_BYTES: usize = 8 << 20;
/// Longest time between two attempts while the store is away.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// The batches of a ledger that are not in the store yet.
pub trait OutboxSource: Send + Sync {
    /// The batches after `sequence`, in order: as many as `limit` bytes hold, but at least one if there is one.
    fn after(
        &self,
        sequence: u64,
        limit: usize,
    ) -> impl Future<Output = Result<Vec<Batch>, LedgerError>> + Send;

    /// Removes the batches up to `sequence`, which the store has. Calls with the same sequence may repeat.
    fn shipped(&self, sequence: u64) -> impl Future<Output = Result<(), LedgerError>> + Send;

    /// Whether `stored`, with the same sequence, was written from `own`, which may have lost operations to an erasure
    /// since.
    fn is_from(&self, own: &Batch, stored: &Batch) -> bool {
        own == stored
    }
}

/// How far the shipper is.
#[derive(Clone, Debug, Default)]
pub struct ShipperState {
    /// The last batch that this process knows to be in the store.
    pub shipped: u64,
    /// Why the last attempt failed; `None` if it succeeded.
    pub error: Option<String>,
}

/// Writes the batches of one outbox to its log.
pub struct Shipper<O> {
    bucket: Bucket,
    log: Uuid,
    outbox: O,
    /// The last sequence that is in the store. Locked during an attempt.
    position: Mutex<u64>,
    state: watch::Sender<ShipperState>,
}

impl<O: OutboxSource> Shipper<O> {
    /// A shipper of the outbox with the id `log`. It makes no request yet.
    pub fn new(bucket: Bucket, log: Uuid, outbox: O) -> Self {
        Self { bucket, log, outbox, position: Mutex::new(0), state: watch::Sender::default() }
    }

    /// How far it is, now and later.
    pub fn state(&self) -> watch::Receiver<ShipperState> {
        self.state.subscribe()
    }

    /// Ships what the outbox has each `interval`, until `stop` ends. While the store or the ledger fails, it waits and
    /// tries again; batches stay in the outbox. Ends early only with an error that is [final](LogError::is_final).
    pub async fn run(
        &self,
        interval: Duration,
        stop: impl Future<Output = ()>,
    ) -> Result<(), LogError> {
        let (mut stop, mut wait) = (pin!(stop), interval);
        loop {
            // Dropping the attempt is safe: the next one finds the segment in the store.
            let shipped = tokio::select! {
                biased;
                () = &mut stop => return Ok(()),
                shipped = async { sleep(wait).await; self.ship().await } => shipped,
            };
            match shipped {
                Ok(()) => wait = interval,
                Err(error) if error.is_final() => return Err(error),
                Err(_) => wait = (wait * 2).clamp(interval, LONGEST_WAIT.max(interval)),
            }
        }
    }

    /// Ships all that was recorded in the outbox before the call. Several tasks may call it at the same time, also
    /// while [`Shipper::run`] is active.
    pub async fn ship(&self) -> Result<(), LogError> {
        let mut position = self.position.lock().await;
        let result = self.ship_after(&mut position).await;
        if let Err(error) = &result {
            tracing::warn!(log = %self.log, %error, "shipping to the object store failed");
        }
        self.state.send_replace(ShipperState {
            shipped: *position,
            error: result.as_ref().err().map(ToString::to_string),
        });
        result
    }

    async fn ship_after(&self, position: &mut u64) -> Result<(), LogError> {
        let failed = |source| LogError::Ledger(self.log, source);
        loop {
            let batches = self.outbox.after(*position, SEGMENT_BYTES).await.map_err(failed)?;
            if batches.is_empty() {
                return Ok(());
            }
            let bytes: usize = batches.iter().map(|batch| batch.bytes.len()).sum();
            let read = batches.last().map_or(0, |batch| batch.sequence);
            let last = self.write(batches).await?;
            self.outbox.shipped(last).await.map_err(failed)?;
            *position = last;
            // What was recorded meanwhile goes into the next segment, because each costs a put.
            if last == read && bytes < SEGMENT_BYTES / 2 {
                return Ok(());
            }
        }
    }

    /// Writes the next segment; returns the last sequence of the one that the store has then.
    async fn write(&self, batches: Vec<Batch>) -> Result<u64, LogError> {
        let segment = LogSegment { log: self.log, created: now_ms(), batches };
        let (first, key) = (segment.first(), LogSegment::key(self.log, segment.first()));
        let bytes = segment.encode().map_err(LogError::Segment)?;
        if self.bucket.swap(&key, None, &bytes).await?.is_some() {
            return Ok(segment.last());
        }
        // An earlier attempt, perhaps of a process before this one, wrote a segment from the same sequence on. It may
        // have fewer batches, because there were fewer then.
        let found = self.bucket.get(&key, None).await?;
        let (bytes, _) = found.ok_or("another request writes it").map_err(failed(&key))?;
        let found = LogSegment::decode(&bytes, self.log, first).map_err(LogError::Segment)?;
        let pairs = segment.batches.iter().zip(&found.batches);
        let is_own = found.batches.len() <= segment.batches.len()
            && pairs.into_iter().all(|(own, stored)| {
                own.sequence == stored.sequence && self.outbox.is_from(own, stored)
            });
        if !is_own {
            return Err(LogError::Diverged(key));
        }
        Ok(found.last())
    }
}
