//! Retention: how long the ledger keeps records, and how large the data directory may become.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};
use std::{fs, io};

use strum::{EnumString, IntoStaticStr, VariantNames};

use hone_core::config::Checked;
use hone_core::files::{at, tree_bytes};
use hone_core::types::{Interaction, PromptSource, UnixMillis, now_ms};

use crate::copy::{LEDGER, LEFT_OUT};
use crate::error::StoreError;
use crate::op::Op;
use crate::store::Store;

/// Whether records are removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, EnumString, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum RetentionKind {
    /// Never.
    #[default]
    All,
    /// Beyond an age or a size.
    Limits,
}

hone_core::choice! {
    /// `store.retention`.
    pub struct Retention of RetentionKind {
        for Limits {
            /// Days after which prompts of clients are removed with everything that belongs to them, and records of
            /// steps; 0 for never.
            pub days: u64 = 0 => between(0, 36_500),
            /// The same for prompts of datasets.
            pub dataset_days: u64 = 0 => between(0, 36_500),
            /// Size of the data directory without models and backups, in MiB, below which the oldest prompts are removed:
            /// at least 16, or 0 for no bound.
            pub mebibytes: u64 = 0 => between(0, 1 << 30),
        }
    }
}

impl Retention {
    /// Checks the ranges, that limits limit something, and that a bound leaves room for a ledger.
    ///
    /// # Errors
    /// The first invalid value.
    pub fn check_as(&self, key: &str) -> Checked {
        use hone_core::config::choice::ConfigChoice;
        self.check(key)?;
        if self.kind == RetentionKind::Limits && self.days + self.dataset_days + self.mebibytes == 0
        {
            let text = " is \"limits\" without a limit: set days, dataset_days or mebibytes";
            return Err(hone_core::config::Problem::new(key, text));
        }
        if (1..LEAST_BOUND).contains(&self.mebibytes) {
            let text = format!(
                ": mebibytes is {}: it must be 0 for no bound, or at least {LEAST_BOUND}",
                self.mebibytes
            );
            return Err(hone_core::config::Problem::new(key, text));
        }
        Ok(())
    }
}

/// Smallest bound of the data directory in MiB. An empty ledger has more than one, and a small one would be rewritten
/// all the time.
const LEAST_BOUND: u64 = 16;

/// Milliseconds of a day.
const DAY: u64 = 86_400_000;

/// Records of steps that are always kept, for curves and for the replay of samples.
const STEPS: u64 = 1000;

/// How often the size of the file is compared with the bound. Clients may write megabytes meanwhile.
const INTERVAL: Duration = Duration::from_millis(100);

/// How often ages are compared with the limits.
const AGE_INTERVAL: Duration = Duration::from_secs(600);

/// The file may take this share of the bound before rows are removed.
const FULL: f64 = 0.6;

/// The share of the bound that rows may take after they were removed, so that this happens seldom.
const LEFT: f64 = 0.3;

/// Beyond this share of the bound, the rows are copied to a new file. Below it, the pages of removed rows are used again,
/// and the bound holds without a copy.
const FRAGMENTED: f64 = 0.8;

/// The share of the bound that rows may always take.
const LEAST: f64 = 0.1;

/// Ends the thread that removes records when it is dropped.
pub struct Retainer {
    _stop: Option<Sender<()>>,
}

impl Retainer {
    /// Starts the thread for the data directory `data`; no thread if everything is kept. It also ends when the
    /// store closes.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(store: Store, retention: Retention, data: PathBuf) -> io::Result<Self> {
        if retention.kind == RetentionKind::All {
            return Ok(Self { _stop: None });
        }
        let (stop, stopped) = channel();
        std::thread::Builder::new().name("hone-retention".to_owned()).spawn(move || {
            run(&store, &retention, &data, &stopped);
        })?;
        Ok(Self { _stop: Some(stop) })
    }
}

fn run(store: &Store, retention: &Retention, data: &Path, stopped: &Receiver<()>) {
    let (mut wait, mut aged) = (INTERVAL, None::<Instant>);
    while stopped.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
        let started = Instant::now();
        let ages_are_due = aged.is_none_or(|last| last.elapsed() >= AGE_INTERVAL);
        if ages_are_due {
            aged = Some(started);
        }
        let keep = || {
            let found = store.keep_within_size(retention, data)?;
            if ages_are_due {
                store.keep_within_age(retention, now_ms())?;
            }
            Ok(found)
        };
        // Without the thread the directory would grow without a bound until the next start.
        let done = catch_unwind(AssertUnwindSafe(keep))
            .unwrap_or_else(|_| Err(StoreError::Failed("retention panicked".to_owned())));
        // In vain, at most a fifth of the time is spent here.
        wait = INTERVAL.max(started.elapsed() * 4);
        match done {
            Ok(true) => wait = INTERVAL,
            Ok(false) => {}
            Err(StoreError::Closed) => break,
            Err(error) => tracing::warn!(%error, "store.retention could not be applied"),
        }
    }
}

impl Store {
    /// Removes what is older than the limits at `now`.
    ///
    /// # Errors
    /// If the ledger cannot be read or written.
    pub fn keep_within_age(
        &self,
        retention: &Retention,
        now: UnixMillis,
    ) -> Result<(), StoreError> {
        let oldest = |days: u64| if days == 0 { 0 } else { now.saturating_sub(days * DAY) };
        let (live, dataset) = (oldest(retention.days), oldest(retention.dataset_days));
        let end = live.max(dataset);
        if end == 0 {
            return Ok(());
        }
        let is_due = |row: &Interaction| match row.source {
            PromptSource::Live => row.created < live,
            PromptSource::Dataset => row.created < dataset,
        };
        let removed = self.expire(usize::MAX, is_due, |row| row.created >= end)?;
        self.count_expired("age", removed);
        let last = self.last_step()?.map_or(0, |last| last.step);
        let steps = self.steps(0, usize::MAX)?;
        let old = steps.iter().filter(|step| step.created < live && step.step + STEPS <= last);
        match old.map(|step| step.step).max() {
            Some(old) => self.commit_blocking(vec![Op::ExpireSteps(old)]).map(drop),
            None => Ok(()),
        }
    }

    /// Removes old records of steps and the oldest prompts if the directory `data` comes near its bound. The space that
    /// they leave is used again for new records; if that is not enough, the rows are copied to a new file while there is
    /// room for both. The ledger keeps a quarter of the bound even if adapters and checkpoints need more than the rest. Returns
    /// whether there was something to do.
    ///
    /// # Errors
    /// If the ledger or the directory cannot be read, or the ledger cannot be written.
    pub fn keep_within_size(&self, retention: &Retention, data: &Path) -> Result<bool, StoreError> {
        if retention.mebibytes == 0 {
            return Ok(false);
        }
        let file = self.file_bytes()?;
        let whole = retention.mebibytes << 20;
        let least = whole / 4;
        // The other files cannot matter, and are not looked at.
        if file as f64 <= least as f64 * FULL {
            return Ok(false);
        }
        let bound = whole.saturating_sub(other_bytes(data)?).max(least);
        let share = |share: f64| (bound as f64 * share) as u64;
        if file <= share(FULL) {
            return Ok(false);
        }
        let (live, history) = (self.live_bytes()?, self.history_bytes()?);
        let is_fragmented = file > share(FRAGMENTED);
        // A copy needs room for both files.
        let room = bound.saturating_sub(file).max(share(LEAST));
        let left = if is_fragmented { room.min(share(LEFT)) } else { share(LEFT) };
        if live > left * 4 / 3 && self.expire_history()? {
            return Ok(true);
        }
        // Removed prompts do not make room for the history, so some always stay.
        let (rows, kept) =
            (live.saturating_sub(history), left.saturating_sub(history).max(share(LEAST)));
        if rows > kept * 4 / 3 {
            let prompts = self.stats()?.interactions.max(1);
            let each = (rows / prompts).max(1);
            let count = (rows - kept).div_ceil(each).min(prompts);
            let removed = self.expire(count as usize, |_| true, |_| false)?;
            self.count_expired("size", removed);
            return Ok(removed > 0);
        }
        // Too long a file is copied although both need more than the bound, if that frees more.
        let may_copy = live <= room * 4 / 3 || (file > bound && live < file / 2);
        if is_fragmented && may_copy {
            self.rewrite()?;
        }
        Ok(is_fragmented && may_copy)
    }

    /// Removes old records of steps and versions if there are twice as many steps as are always kept. Returns whether
    /// there were.
    fn expire_history(&self) -> Result<bool, StoreError> {
        let first = self.steps(0, 1)?.first().map_or(0, |first| first.step);
        let last = self.last_step()?.map_or(0, |last| last.step);
        if last < first + 2 * STEPS {
            return Ok(false);
        }
        self.commit_blocking(vec![Op::ExpireSteps(last - STEPS)])?;
        Ok(true)
    }

    fn count_expired(&self, reason: &str, prompts: usize) {
        if prompts > 0 {
            tracing::info!(prompts, reason, "store.retention removed the oldest prompts");
            let expired = &self.inner.metrics.store_expired;
            expired.with_label_values(&[reason]).inc_by(prompts as u64);
        }
    }
}

/// Bytes of a data directory without its ledger, models and backups.
fn other_bytes(data: &Path) -> Result<u64, StoreError> {
    let mut bytes = 0;
    for entry in fs::read_dir(data).map_err(at(data))? {
        let entry = entry.map_err(at(data))?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if !name.starts_with(LEDGER) && !LEFT_OUT.contains(&&*name) {
            bytes += tree_bytes(&entry.path())?;
        }
    }
    Ok(bytes)
}
