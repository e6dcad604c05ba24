//! The object store and the ledger of a fleet's process, as the other files use them.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use uuid::Uuid;

use hone_core::files::replace_file;
use hone_core::types::{UnixMillis, new_uuid};
use hone_fleet::bucket::Bucket;
use hone_fleet::segment::{Batch, LedgerError};
use hone_fleet::ship::OutboxSource;
use hone_store::{Op, OutboxBatch, Store};

use crate::config::FleetConfig;
use crate::usage;

/// The name of the only policy in the manifest.
pub(super) const POLICY: &str = "default";
/// How often a server and the trainer look at the store.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Opens the configured store.
pub(super) fn open(config: &FleetConfig) -> anyhow::Result<Bucket> {
    let ca_file = Some(config.ca_file.as_path()).filter(|file| !file.as_os_str().is_empty());
    Bucket::open(&config.url, ca_file).context("fleet.url").map_err(usage)
}

/// The state that a process writes to the store every few seconds, at `servers/<id>.json`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct ProcessHealth {
    /// `server` or `trainer`.
    pub role: String,
    /// `fleet.name`, or the address.
    pub name: String,
    /// The id of its log.
    pub log: Uuid,
    /// When, by the store's clock.
    pub at: UnixMillis,
    /// The version that new requests get.
    pub version: u64,
    /// The last batch of its ledger, and the last one that the store has.
    pub head: u64,
    pub shipped: u64,
    /// Age of the oldest batch that the store lacks, in milliseconds.
    pub lag_ms: u64,
    /// Requests to the store since the start.
    pub requests: u64,
    /// Since the start, in seconds.
    pub uptime: u64,
    /// What does not work.
    pub error: Option<String>,
}

/// A ledger as what a shipper reads.
pub(super) struct StoreOutbox(pub Store);

pub(super) fn boxed(error: impl std::error::Error + Send + Sync + 'static) -> LedgerError {
    Box::new(error)
}

impl OutboxSource for StoreOutbox {
    async fn after(&self, sequence: u64, limit: usize) -> Result<Vec<Batch>, LedgerError> {
        let store = self.0.clone();
        let read = tokio::task::spawn_blocking(move || store.outbox(sequence, limit)).await;
        let batches = read.map_err(boxed)?.map_err(boxed)?.into_iter();
        Ok(batches.map(|batch| Batch { sequence: batch.sequence, bytes: batch.bytes }).collect())
    }

    async fn shipped(&self, sequence: u64) -> Result<(), LedgerError> {
        self.0.commit_now(vec![Op::Shipped(sequence)]).await.map(drop).map_err(boxed)
    }

    fn is_from(&self, own: &Batch, stored: &Batch) -> bool {
        let of =
            |batch: &Batch| OutboxBatch { sequence: batch.sequence, bytes: batch.bytes.clone() };
        own == stored || of(own).is_rest_of(&of(stored))
    }
}

pub(super) fn to_outbox(batches: Vec<Batch>) -> Vec<OutboxBatch> {
    let batches = batches.into_iter();
    batches.map(|batch| OutboxBatch { sequence: batch.sequence, bytes: batch.bytes }).collect()
}

/// The id of the process that owns a data directory, which outlives a restart.
pub(super) fn own_id(data: &Path) -> anyhow::Result<Uuid> {
    let file = data.join(".fleet-id");
    if let Ok(text) = std::fs::read_to_string(&file) {
        return Uuid::parse_str(text.trim()).with_context(|| file.display().to_string());
    }
    let id = new_uuid();
    replace_file(&file, id.to_string().as_bytes())?;
    Ok(id)
}

/// Reports a problem, or that there is none. Logs the first report of a problem only: its text may differ at each
/// attempt.
pub(super) fn report(
    problem: &watch::Sender<Option<String>>,
    found: Option<String>,
    what: &'static str,
) {
    problem.send_if_modified(|known| {
        let changed = *known != found;
        if let (None, Some(error)) = (&known, &found) {
            tracing::error!(error, "{what}");
        }
        *known = found;
        changed
    });
}
