//! The handle that the rest of Hone uses.

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{oneshot, watch};

use hone_core::files::{remove_any, sibling};
use hone_core::metrics::Metrics;
use hone_core::types::Lineage;

use crate::error::StoreError;
use crate::file::{COPY_SUFFIX, Ledger, Opener, guarded, opener};
use crate::health::{PATIENCE, StoreTrouble, WriterHealth};
use crate::migrate;
use crate::op::{Committed, Op, Outbox};
use crate::write::{Applier, TransactionLog, WriteQueue, Writer, WriterEnd};

/// The ledger with its writer: [`Ledger`] has the queries. Clones share it. [`Store::close`], or dropping the
/// last clone, ends the writer thread.
#[derive(Clone)]
pub struct Store {
    pub(crate) inner: Arc<StoreInner>,
}

pub(crate) struct StoreInner {
    /// The ledger's file.
    pub(crate) path: PathBuf,
    pub(crate) file: Arc<Ledger>,
    queue: Arc<WriteQueue>,
    ready: watch::Receiver<usize>,
    feedback: watch::Receiver<u64>,
    lineage: watch::Receiver<Arc<Lineage>>,
    ended: watch::Receiver<WriterEnd>,
    health: Arc<WriterHealth>,
    /// The transactions while the file is copied.
    pub(crate) log: Arc<TransactionLog>,
    /// Held while the file is copied, so that one copy runs at a time.
    pub(crate) copying: Mutex<()>,
    pub(crate) metrics: Arc<Metrics>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Drop for StoreInner {
    /// Waits for the writer, so that the file can be opened again when the last clone is gone.
    fn drop(&mut self) {
        self.queue.close();
        let thread = self.thread.get_mut().take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the ledger's writer panicked");
        }
    }
}

impl Deref for Store {
    type Target = Ledger;

    fn deref(&self) -> &Ledger {
        &self.inner.file
    }
}

impl Store {
    /// Opens or creates the file, migrates it and starts the writer thread.
    ///
    /// # Errors
    /// `InUse`, a newer schema, `Corrupt` if the file is a redb file but not a ledger, or the error
    /// of redb or the operating system.
    pub fn open(
        path: &Path,
        config: &StoreConfig,
        metrics: Arc<Metrics>,
    ) -> Result<Self, StoreError> {
        let start = || Self::start(path, opener(path), config, metrics, |_| {});
        let store = guarded(path, start)?;
        // A process that ended during a copy left it.
        remove_any(&sibling(path, COPY_SUFFIX))?;
        Ok(store)
    }

    /// [`Self::open`] with another opener, and a writer that `adjust` may change, for tests.
    pub(crate) fn start(
        path: &Path,
        opener: Opener,
        config: &StoreConfig,
        metrics: Arc<Metrics>,
        adjust: impl FnOnce(&mut Writer),
    ) -> Result<Self, StoreError> {
        let database = opener()?;
        migrate::to_current(&database)?;
        let file = Arc::new(Ledger::from(database));
        if let Some(outbox) = config.outbox {
            file.write(|tx| Applier::new(tx)?.open_log(outbox))?;
        }
        let queue = Arc::new(WriteQueue::new(config.queue_bytes, metrics.clone()));
        let ready_count = file.ready_count()?;
        let count = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        metrics.reward_quarantined_keys.set(count(file.quarantined()?.len()));
        metrics.train.ready_groups.set(count(ready_count));
        metrics.feedback_waiting.set(count(file.waiting_ratings()?));
        metrics.corrections_waiting.set(count(file.waiting_corrections()?));
        let (ready_sender, ready) = watch::channel(ready_count);
        let (feedback_sender, feedback) = watch::channel(0);
        let lineage: Lineage = file.policies()?.iter().collect();
        let (lineage_sender, lineage) = watch::channel(Arc::new(lineage));
        let (ended_sender, ended) = watch::channel(None);
        let health = Arc::new(WriterHealth::default());
        let log = Arc::<TransactionLog>::default();
        let mut writer = Writer {
            file: file.clone(),
            opener,
            queue: queue.clone(),
            metrics: metrics.clone(),
            gather: Duration::from_millis(config.group_commit_ms),
            ready: ready_sender,
            feedback: feedback_sender,
            lineage: lineage_sender,
            ended: ended_sender,
            health: health.clone(),
            log: log.clone(),
            #[cfg(test)]
            breakpoint: Box::new(|_| {}),
        };
        adjust(&mut writer);
        let thread = std::thread::Builder::new()
            .name("hone-ledger".to_owned())
            .spawn(move || writer.run())
            .map_err(StoreError::io("the writer cannot start"))?;
        let thread = Mutex::new(Some(thread));
        let copying = Mutex::default();
        let inner = StoreInner {
            path: path.to_owned(),
            file,
            queue,
            ready,
            feedback,
            lineage,
            ended,
            health,
            log,
            copying,
            metrics,
            thread,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Writes a batch in one transaction and waits until it is durable.
    ///
    /// # Errors
    /// `Closed`, or why the commit failed. After an I/O error the batch may be in the file as a
    /// whole, or not at all.
    pub async fn commit(&self, ops: Vec<Op>) -> Result<Committed, StoreError> {
        self.push(ops, false).await
    }

    /// [`Self::commit`] for a client, which does not wait longer than 10 seconds.
    ///
    /// # Errors
    /// `Unavailable` without a try while the disk hangs, or `TimedOut`, after which the batch may still be
    /// recorded.
    pub async fn commit_in_time(&self, ops: Vec<Op>) -> Result<Committed, StoreError> {
        self.in_time(PATIENCE, ops).await
    }

    pub(crate) async fn in_time(
        &self,
        patience: Duration,
        ops: Vec<Op>,
    ) -> Result<Committed, StoreError> {
        let late = &self.inner.metrics.store_late_writes;
        // The write that an earlier caller waited for in vain began somewhat after that caller's commit.
        if self.inner.health.trouble_after(patience * 9 / 10) == Some(StoreTrouble::Hung) {
            late.inc();
            return Err(StoreTrouble::Hung.into());
        }
        let answer = tokio::time::timeout(patience, self.commit(ops)).await;
        answer.unwrap_or_else(|_| {
            late.inc();
            Err(StoreError::TimedOut)
        })
    }

    /// [`Self::commit`] without the wait of [`StoreConfig::group_commit_ms`], for writes that block other
    /// work.
    pub async fn commit_now(&self, ops: Vec<Op>) -> Result<Committed, StoreError> {
        self.push(ops, true).await
    }

    /// [`Self::commit_now`] for threads outside the async runtime.
    pub fn commit_blocking(&self, ops: Vec<Op>) -> Result<Committed, StoreError> {
        futures::executor::block_on(self.commit_now(ops))
    }

    async fn push(&self, ops: Vec<Op>, urgent: bool) -> Result<Committed, StoreError> {
        let (reply, answer) = oneshot::channel();
        self.inner.queue.push(ops, reply, urgent)?;
        answer.await.unwrap_or(Err(StoreError::Closed))
    }

    /// Waits until everything queued earlier is durable and visible to reads, with the errors of
    /// [`Self::commit_in_time`].
    pub async fn flush(&self) -> Result<(), StoreError> {
        self.commit_in_time(Vec::new()).await.map(|_| ())
    }

    /// Queues a batch without waiting. If the queue is half full, sheds the batch's shadow samples
    /// together with their rewards and groups, and queues the rest; if it is full, sheds everything.
    ///
    /// # Errors
    /// `Overloaded` if it shed operations, or `Closed`.
    pub fn enqueue(&self, ops: Vec<Op>) -> Result<(), StoreError> {
        self.inner.queue.push_or_shed(ops)
    }

    /// Why writes do not succeed at the moment; `None` if they do. After [`StoreTrouble::Failing`] the next
    /// successful write ends it, such as [`Self::flush`].
    pub fn trouble(&self) -> Option<StoreTrouble> {
        let ended = &self.inner.ended;
        // A writer that panicked has dropped its end without a result.
        if ended.borrow().is_some() || ended.has_changed().is_err() {
            return Some(StoreTrouble::Ended);
        }
        self.inner.health.trouble()
    }

    /// The number of groups in state `Ready`, updated after each commit.
    pub fn watch_ready(&self) -> watch::Receiver<usize> {
        self.inner.ready.clone()
    }

    /// A counter that increases after each commit that recorded feedback.
    pub fn watch_feedback(&self) -> watch::Receiver<u64> {
        self.inner.feedback.clone()
    }

    /// The tree of the committed policy versions.
    pub fn lineage(&self) -> Arc<Lineage> {
        self.inner.lineage.borrow().clone()
    }

    /// Commits everything queued, ends the writer thread and closes the file. Later calls return
    /// `Closed`.
    pub async fn close(&self) -> Result<(), StoreError> {
        self.inner.queue.close();
        let mut ended = self.inner.ended.clone();
        match ended.wait_for(Option::is_some).await {
            Ok(result) => result.clone().unwrap_or(Ok(())),
            Err(_) => Err(StoreError::Failed("the writer ended early".to_owned())),
        }
    }
}

/// Group commit and queue of the ledger.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// Milliseconds that a commit waits for more writes, so that they share one sync of the disk.
    pub group_commit_ms: u64,
    /// About the memory of the batches without a waiting caller that are not written yet. Beyond half of it, shadow
    /// samples are shed and counted; beyond it, all of them; beyond twice of it, commits fail with `Overloaded`.
    pub queue_bytes: usize,
    /// What is recorded for other processes; `None` for the outbox that the ledger has. `Off` removes it, because the
    /// ledger left its fleet.
    pub outbox: Option<Outbox>,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self { group_commit_ms: 2, queue_bytes: 32 << 20, outbox: None }
    }
}
