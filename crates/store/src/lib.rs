//! The ledger: one redb file with every prompt, completion, reward, group, optimizer step and
//! policy version, so that a crash loses nothing that was acknowledged.
//!
//! # Threads
//!
//! [`Store::open`] starts one thread, `hone-ledger`, which makes every change. A call that queues a
//! batch of [`Op`]s wakes it. It waits up to [`StoreConfig::group_commit_ms`] for more batches, then commits
//! all queued batches in one transaction, so that they share one sync of the disk (group commit).
//! [`Store::commit_now`] ends the wait. Without work the thread sleeps.
//!
//! Queries run on the caller's thread, on a snapshot of the last commit. They never wait for a
//! commit, only while the file is reopened after an I/O error.
//!
//! # Guarantees
//!
//! - Acknowledged means durable: [`Store::commit`] returns after its transaction is on disk, and
//!   later queries see it. [`Store::enqueue`] acknowledges nothing; [`Store::flush`] waits for what
//!   it queued.
//! - A batch is written as a whole or not at all.
//! - Batches are applied in the order of the calls that queued them, whichever method queued them.
//! - What is not written yet takes a bounded memory, also while the disk hangs. From half of
//!   [`StoreConfig::queue_bytes`] on, [`Store::enqueue`] sheds shadow samples with their rewards and groups, and
//!   from all of it on everything; `hone_store_dropped_records_total` counts it. [`Store::commit`] never sheds:
//!   it fails.
//! - If the disk fails, the file is reopened and the batches are tried one by one. After the next
//!   failure, batches with a waiting caller fail; the others are kept and tried again every second.
//! - With [`StoreConfig::outbox`], what other processes need of a batch is recorded in its transaction, in the order of
//!   the commits, until [`Op::Shipped`] removes it.
//! - Files of earlier versions of Hone are migrated when they are opened; newer ones are refused.
//!
//! [`maintain`] has the offline operations of `hone db`. [`Ledger::open_read_only`] reads a file without ever
//! writing to it.

mod copy;
mod erasure;
mod error;
mod file;
mod format;
mod health;
mod import;
pub mod maintain;
mod migrate;
mod op;
mod outbox;
mod reader;
mod retention;
mod store;
mod write;

pub use copy::{BACKUPS, Backup, LEDGER, StartedBackup, backup, restore};
pub use erasure::{Erasure, ErasureFilter, parse_moment};
pub use error::StoreError;
pub use file::{CACHE_BYTES, Ledger};
pub use health::StoreTrouble;
pub use import::{ImportReport, import};
pub use op::{
    AnswerCounts, AuditRecord, Committed, CorrectionEntry, ERASED, Elsewhere, FeedbackEntry,
    FeedbackOutcome, MERGED, Op, Outbox, QUARANTINED, QuarantinedKey, SHIPPED, TakeIn,
};
pub use outbox::{OutboxBatch, OutboxState};
pub use reader::StoreStats;
pub use retention::{Retainer, Retention, RetentionKind};
pub use store::{Store, StoreConfig};

#[cfg(test)]
mod tests;
