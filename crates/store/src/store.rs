//! The handle that the rest of Hone uses.

use std::ops::Bound;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use redb::{ReadTransaction, ReadableTable};
use tokio::sync::{oneshot, watch};
use uuid::Uuid;

use hone_core::metrics::Metrics;
use hone_core::types::{
    Group, GroupId, Interaction, InteractionId, Lineage, PolicyRecord, PolicyVersion, Rating,
    Reward, Sample, SampleId, StepRecord, UnixMillis, key_of_rater,
};

use crate::error::StoreError;
use crate::file::{LedgerFile, Opener, opener};
use crate::format;
use crate::format::Id;
use crate::format::codec::decode;
use crate::op::{Committed, Op, QuarantinedKey};
use crate::reader::StoreStats;
use crate::write::{StoreTrouble, WriteQueue, Writer, WriterEnd, WriterHealth};
use crate::{migrate, reader};

/// The ledger. Clones share it. [`Store::close`], or dropping the last clone, ends the writer
/// thread.
#[derive(Clone)]
pub struct Store {
    pub(crate) inner: Arc<StoreInner>,
}

pub(crate) struct StoreInner {
    pub(crate) file: Arc<LedgerFile>,
    queue: Arc<WriteQueue>,
    ready: watch::Receiver<usize>,
    feedback: watch::Receiver<u64>,
    lineage: watch::Receiver<Arc<Lineage>>,
    ended: watch::Receiver<WriterEnd>,
    health: Arc<WriterHealth>,
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

impl Store {
    /// Opens or creates the file, migrates it and starts the writer thread.
    ///
    /// # Errors
    /// `InUse`, `NewerSchema`, `Corrupt` if the file is a redb file but not a ledger, or the error
    /// of redb or the operating system.
    pub fn open(
        path: &Path,
        config: &StoreConfig,
        metrics: Arc<Metrics>,
    ) -> Result<Self, StoreError> {
        Self::start(opener(path), config, metrics, |_| {})
    }

    /// [`Self::open`] with another opener, and a writer that `adjust` may change, for tests.
    pub(crate) fn start(
        opener: Opener,
        config: &StoreConfig,
        metrics: Arc<Metrics>,
        adjust: impl FnOnce(&mut Writer),
    ) -> Result<Self, StoreError> {
        let file = Arc::new(LedgerFile::new(opener, migrate::to_current)?);
        let queue = Arc::new(WriteQueue::new(config.queue, metrics.clone()));
        let quarantined = file.read(reader::quarantined)?.len();
        metrics.reward_quarantined_keys.set(i64::try_from(quarantined).unwrap_or(i64::MAX));
        let ready_count = file.read(reader::ready_count)?;
        metrics.train.ready_groups.set(i64::try_from(ready_count).unwrap_or(i64::MAX));
        let waiting = file.read(reader::waiting_ratings)?;
        metrics.feedback_waiting.set(i64::try_from(waiting).unwrap_or(i64::MAX));
        let waiting = file.read(reader::waiting_corrections)?;
        metrics.corrections_waiting.set(i64::try_from(waiting).unwrap_or(i64::MAX));
        let (ready_sender, ready) = watch::channel(ready_count);
        let (feedback_sender, feedback) = watch::channel(0);
        let policies: Vec<PolicyRecord> =
            file.read(|tx| reader::from_number(tx, format::POLICIES, 0, usize::MAX))?;
        let lineage: Lineage = policies.iter().collect();
        let (lineage_sender, lineage) = watch::channel(Arc::new(lineage));
        let (ended_sender, ended) = watch::channel(None);
        let health = Arc::new(WriterHealth::default());
        let mut writer = Writer {
            file: file.clone(),
            queue: queue.clone(),
            metrics,
            gather: Duration::from_millis(config.group_commit_ms),
            limit: config.queue,
            ready: ready_sender,
            feedback: feedback_sender,
            lineage: lineage_sender,
            ended: ended_sender,
            health: health.clone(),
            #[cfg(test)]
            breakpoint: Box::new(|_| {}),
        };
        adjust(&mut writer);
        let thread = std::thread::Builder::new()
            .name("hone-ledger".to_owned())
            .spawn(move || writer.run())
            .map_err(StoreError::io("the writer cannot start"))?;
        let thread = Mutex::new(Some(thread));
        let inner = StoreInner { file, queue, ready, feedback, lineage, ended, health, thread };
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

    /// Waits until everything queued earlier is durable and visible to reads.
    pub async fn flush(&self) -> Result<(), StoreError> {
        self.commit(Vec::new()).await.map(|_| ())
    }

    /// Queues a batch without waiting. If the queue is full, sheds the batch's shadow samples
    /// together with their rewards and groups, and queues the rest.
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
            Err(_) => Err(StoreError::Writer("the writer ended early".to_owned())),
        }
    }
}

/// Queries. Each runs on its own snapshot of the last commit.
///
/// # Errors
/// Every query fails if the file or a record cannot be read, and after [`Store::close`].
impl Store {
    fn read<T>(
        &self,
        f: impl FnOnce(&ReadTransaction) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        self.inner.file.read(f)
    }

    /// One prompt.
    pub fn interaction(&self, id: InteractionId) -> Result<Option<Interaction>, StoreError> {
        self.read(|tx| reader::find(tx, format::INTERACTIONS, id.0.as_bytes()))
    }

    /// One completion.
    pub fn sample(&self, id: SampleId) -> Result<Option<Sample>, StoreError> {
        self.read(|tx| reader::find(tx, format::SAMPLES, id.0.as_bytes()))
    }

    /// Every completion of a prompt, in key order.
    pub fn samples_of(&self, id: InteractionId) -> Result<Vec<Sample>, StoreError> {
        self.read(|tx| reader::indexed(tx, format::SAMPLES_OF, format::SAMPLES, id))
    }

    /// At most `limit` prompts of an API key's conversation, oldest first.
    pub fn turns_of(
        &self,
        key_id: Option<&str>,
        session: &str,
        limit: usize,
    ) -> Result<Vec<InteractionId>, StoreError> {
        self.read(|tx| {
            let sessions = tx.open_table(format::SESSIONS)?;
            let (first, last) = (Id::default(), [u8::MAX; 16]);
            let entries = sessions.range((key_id, session, &first)..=(key_id, session, &last))?;
            let turns = entries.take(limit).map(|entry| {
                let key = entry?.0;
                Ok(InteractionId(Uuid::from_bytes(*key.value().2)))
            });
            turns.collect()
        })
    }

    /// At most `limit` chat completions of an API key, oldest or newest first; those after `after`, if
    /// that is given.
    pub fn completions_of(
        &self,
        key_id: Option<&str>,
        after: Option<InteractionId>,
        newest_first: bool,
        limit: usize,
    ) -> Result<Vec<InteractionId>, StoreError> {
        self.read(|tx| {
            let index = tx.open_table(format::BY_KEY)?;
            let (mut low, mut high) =
                (Bound::Included(Id::default()), Bound::Included([u8::MAX; 16]));
            if let Some(after) = after {
                let end = if newest_first { &mut high } else { &mut low };
                *end = Bound::Excluded(*after.0.as_bytes());
            }
            let key = |id| (key_id, id);
            let range = (low.as_ref().map(key), high.as_ref().map(key));
            let entries = index.range::<(Option<&str>, &Id)>(range)?;
            let ids = entries.map(|entry| Ok(InteractionId(Uuid::from_bytes(*entry?.0.value().1))));
            if newest_first { ids.rev().take(limit).collect() } else { ids.take(limit).collect() }
        })
    }

    /// At most `limit` live interactions with the same prompt, newest first, itself included.
    pub fn same_prompt(
        &self,
        interaction: &Interaction,
        limit: usize,
    ) -> Result<Vec<InteractionId>, StoreError> {
        self.read(|tx| {
            let digest = interaction.prompt_digest();
            let index = tx.open_table(format::SAME_PROMPT)?;
            let entries = reader::entries_of(&index, &digest)?.rev().take(limit);
            let ids = entries.map(|entry| Ok(InteractionId(Uuid::from_bytes(*entry?.0.value().1))));
            ids.collect()
        })
    }

    /// The newest recorded conversations with a digest ([`Op::Turn`]), at most `limit`: each with its
    /// prompt, and with the served choice that ends it, or `None` if it is the prompt alone.
    pub fn turns(
        &self,
        digest: [u8; 16],
        limit: usize,
    ) -> Result<Vec<(InteractionId, Option<u32>)>, StoreError> {
        self.read(|tx| {
            let index = tx.open_table(format::TURNS)?;
            let mut found = Vec::new();
            for entry in reader::entries_of(&index, &digest)?.rev().take(limit) {
                let (key, choice) = entry?;
                found.push((InteractionId(Uuid::from_bytes(*key.value().1)), choice.value()));
            }
            Ok(found)
        })
    }

    /// At most `limit` prompts that only the exams of a route use, newest first.
    pub fn held_out(&self, route: &str, limit: usize) -> Result<Vec<Interaction>, StoreError> {
        self.read(|tx| {
            let rows = tx.open_table(format::INTERACTIONS)?;
            let index = tx.open_table(format::HELD_OUT)?;
            let (first, last) = (Id::default(), [u8::MAX; 16]);
            let mut found = Vec::new();
            for entry in index.range((route, &first)..=(route, &last))?.rev().take(limit) {
                found.extend(reader::get(&rows, entry?.0.value().1)?);
            }
            Ok(found)
        })
    }

    /// Every reward part of a completion, by name.
    pub fn rewards_of(&self, id: SampleId) -> Result<Vec<Reward>, StoreError> {
        self.read(|tx| reader::rewards_of(&tx.open_table(format::REWARDS)?, id))
    }

    /// Each rater's newest rating of a completion and part.
    pub fn ratings_of(&self, id: SampleId, name: &str) -> Result<Vec<Rating>, StoreError> {
        self.read(|tx| {
            let feedback = tx.open_table(format::FEEDBACK)?;
            reader::ratings(&tx.open_table(format::RATINGS)?, &feedback, id, name)
        })
    }

    /// The newest rating of a completion by each rater of one API key for each part, by the part's name,
    /// with the comment that was posted with it.
    pub fn ratings_by(
        &self,
        id: SampleId,
        key_id: Option<&str>,
    ) -> Result<Vec<Reward>, StoreError> {
        self.read(|tx| {
            let (ratings, feedback) =
                (tx.open_table(format::RATINGS)?, tx.open_table(format::FEEDBACK)?);
            let sample = id.0.as_bytes();
            let mut found = Vec::new();
            for entry in ratings.range((sample, "", None::<&str>)..)? {
                let (key, reward) = entry?;
                let (rated, _, rater) = key.value();
                if rated != sample {
                    break;
                }
                if rater.and_then(key_of_rater) == key_id {
                    found.extend(reader::get::<_, Reward>(&feedback, reward.value())?);
                }
            }
            Ok(found)
        })
    }

    /// The row of feedback that recorded a correction, with the client's API key, by the correction's
    /// sample.
    pub fn correction(&self, id: SampleId) -> Result<Option<Reward>, StoreError> {
        self.read(|tx| reader::find(tx, format::FEEDBACK, id.0.as_bytes()))
    }

    /// Quarantined API keys, by id.
    pub fn quarantined(&self) -> Result<Vec<QuarantinedKey>, StoreError> {
        self.read(reader::quarantined)
    }

    /// One group.
    pub fn group(&self, id: GroupId) -> Result<Option<Group>, StoreError> {
        self.read(|tx| reader::find(tx, format::GROUPS, id.0.as_bytes()))
    }

    /// Every group of a prompt, in key order.
    pub fn groups_of(&self, id: InteractionId) -> Result<Vec<Group>, StoreError> {
        self.read(|tx| reader::indexed(tx, format::GROUPS_OF, format::GROUPS, id))
    }

    /// At most `limit` groups in state `Ready`, oldest first.
    pub fn ready_groups(&self, limit: usize) -> Result<Vec<Group>, StoreError> {
        self.read(|tx| reader::ready_groups(tx, limit))
    }

    /// Feedback that waits for a group, as `(sample, part name)`: at most `limit` entries, oldest
    /// first, recorded at or before `until`. A committed group removes the entries of its members
    /// and parts. A value that changes after that group was trained on is added again.
    pub fn ungrouped_feedback(
        &self,
        until: UnixMillis,
        limit: usize,
    ) -> Result<Vec<(SampleId, String)>, StoreError> {
        self.read(|tx| {
            let table = tx.open_table(format::UNGROUPED)?;
            let mut found = Vec::new();
            for entry in table.iter()?.take(limit) {
                let key = entry?.0;
                let (created, sample, name) = key.value();
                if created > until {
                    break;
                }
                found.push((SampleId(Uuid::from_bytes(*sample)), name.to_owned()));
            }
            Ok(found)
        })
    }

    /// One policy version.
    pub fn policy(&self, version: PolicyVersion) -> Result<Option<PolicyRecord>, StoreError> {
        self.read(|tx| reader::find(tx, format::POLICIES, version.0))
    }

    /// Every policy version, in order.
    pub fn policies(&self) -> Result<Vec<PolicyRecord>, StoreError> {
        self.read(|tx| reader::from_number(tx, format::POLICIES, 0, usize::MAX))
    }

    /// The last optimizer step.
    pub fn last_step(&self) -> Result<Option<StepRecord>, StoreError> {
        self.read(|tx| {
            let steps = tx.open_table(format::STEPS)?;
            steps.last()?.map(|(_, bytes)| decode(bytes.value())).transpose()
        })
    }

    /// At most `limit` optimizer steps from `first` on.
    pub fn steps(&self, first: u64, limit: usize) -> Result<Vec<StepRecord>, StoreError> {
        self.read(|tx| reader::from_number(tx, format::STEPS, first, limit))
    }

    /// Number of rows in each table.
    pub fn stats(&self) -> Result<StoreStats, StoreError> {
        self.read(reader::stats)
    }
}

// The settings of the writer.

/// Group commit and queue of the ledger.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// Milliseconds that a commit waits for more writes, so that they share one sync of the disk.
    pub group_commit_ms: u64,
    /// Operations that may wait for the writer. Beyond it, shadow samples are shed and counted.
    pub queue: usize,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self { group_commit_ms: 2, queue: 8192 }
    }
}
