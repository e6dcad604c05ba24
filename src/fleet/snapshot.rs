//! The copy of the trainer's ledger in the store, which bounds the trainer's log.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::task::spawn_blocking;
use tokio::time::sleep;
use uuid::Uuid;

use hone_core::files::remove_any;
use hone_core::metrics::Metrics;
use hone_core::types::UnixMillis;
use hone_fleet::bucket::Bucket;
use hone_fleet::manifest::{FleetManifest, LedgerSnapshot};
use hone_fleet::read::delete_before;
use hone_fleet::{folder, ship::Shipper};
use hone_store::{LEDGER, Ledger, StartedBackup, Store};
use hone_train::TrainHandle;

use super::link::StoreOutbox;
use super::trainer::SharedLease;

/// How often it is looked whether a new copy is due.
const CHECK: Duration = Duration::from_secs(10);
/// Age of a copy at which it is replaced.
const INTERVAL: Duration = Duration::from_secs(24 * 3600);
/// How long after a failure the next attempt follows.
const RETRY: Duration = Duration::from_secs(300);

/// Replaces the copy every day, and soon after an erasure, so that the store forgets what was erased.
pub(super) struct Snapshots {
    pub bucket: Bucket,
    pub data: PathBuf,
    pub store: Store,
    pub trainer: TrainHandle,
    pub shipper: Arc<Shipper<StoreOutbox>>,
    pub lease: SharedLease,
    pub metrics: Arc<Metrics>,
    /// When the copy in the store was made.
    pub created: UnixMillis,
}

impl Snapshots {
    pub async fn run(self) {
        let (mut created, mut erased) = (self.created, self.erased());
        loop {
            sleep(CHECK).await;
            let now = self.erased();
            let age = self.bucket.now().unwrap_or_default().saturating_sub(created);
            if Duration::from_millis(age) < INTERVAL && now == erased {
                continue;
            }
            match self.replace().await {
                Ok(of) => (created, erased) = (of, now),
                Err(error) => {
                    tracing::error!(
                        error = format!("{error:#}"),
                        "the ledger cannot be copied to the store"
                    );
                    sleep(RETRY).await;
                }
            }
        }
    }

    fn erased(&self) -> u64 {
        self.metrics.store_erasures.get()
    }

    /// Copies the ledger with the versions' files, then deletes what the copy replaces: the former copy, and the
    /// segments of all logs whose batches it has. Returns when it was made.
    async fn replace(&self) -> anyhow::Result<UnixMillis> {
        let copy = self.data.join(".fleet-snapshot");
        let snapshot = self.copy_to(copy.clone()).await;
        remove_any(&copy)?;
        let (snapshot, logs) = snapshot?;
        self.shipper.ship().await?;
        let sequence = snapshot.sequence;
        let replace =
            |manifest: &mut FleetManifest| Ok(manifest.snapshot.replace(snapshot.clone()));
        let (_, former) = self.lease.lock().await.update(replace).await?;
        for (log, position) in [(Uuid::nil(), sequence)].into_iter().chain(logs) {
            delete_before(&self.bucket, log, position + 1).await?;
        }
        if let Some(former) = former.filter(|former| former.digest != snapshot.digest) {
            folder::delete(&self.bucket, "snapshots", &former.digest).await?;
        }
        tracing::info!(
            sequence,
            digest = snapshot.digest,
            "the store has a new copy of the ledger"
        );
        Ok(snapshot.created)
    }

    /// Uploads a backup; also returns how far it took the logs of servers in.
    async fn copy_to(&self, to: PathBuf) -> anyhow::Result<(LedgerSnapshot, Vec<(Uuid, u64)>)> {
        remove_any(&to)?;
        let hold = self.trainer.hold().await.ok();
        let (store, data, copy) = (self.store.clone(), self.data.clone(), to.clone());
        let started = spawn_blocking(move || StartedBackup::begin(&store, &data, &copy)).await??;
        drop(hold);
        spawn_blocking(move || started.finish()).await??;
        let ledger = Ledger::open_read_only(&to.join(LEDGER))?;
        let sequence = ledger.outbox_state()?.context("the ledger has no outbox")?.last;
        let logs = ledger.intake_positions()?.into_iter().collect();
        drop(ledger);
        let digest = folder::upload(&self.bucket, "snapshots", &to).await?;
        let created = self.bucket.now()?;
        Ok((LedgerSnapshot { digest, sequence, created }, logs))
    }
}
