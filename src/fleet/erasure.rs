//! What an operator erases at one process, every process erases from its own ledger: the manifest lists it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use serde_json::json;
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use hone_core::files::replace_file;
use hone_core::types::UnixMillis;
use hone_fleet::bucket::Bucket;
use hone_fleet::manifest::{FleetErasure, FleetManifest};
use hone_http::ShareErasure;
use hone_store::{AuditRecord, Erasure, ErasureFilter, Op, Store};

/// How long after a failure the next attempt follows.
const RETRY: Duration = Duration::from_secs(10);
/// How much later than an erasure the rows that it finds may be, because clocks differ.
const SKEW_MILLIS: u64 = 60_000;

/// Adds erasures to the manifest.
pub(super) fn sharer(bucket: &Bucket) -> ShareErasure {
    let bucket = bucket.clone();
    Arc::new(move |selection: &ErasureFilter| {
        let (bucket, selection) = (bucket.clone(), serde_json::to_value(selection));
        Box::pin(async move {
            let selection = selection.map_err(|error| error.to_string())?;
            let now = bucket.now().map_err(|error| error.to_string())?;
            let erase = |manifest: &mut FleetManifest| {
                manifest.erase(selection.clone(), now);
                Ok(())
            };
            let updated = FleetManifest::update(&bucket, None, erase).await;
            updated.map(drop).map_err(|error| error.to_string())
        })
    })
}

/// Erases what the manifest lists, each entry once, until the task is aborted.
pub(super) async fn follow(
    data: PathBuf,
    store: Store,
    mut listed: watch::Receiver<Vec<FleetErasure>>,
) {
    loop {
        let erasures = listed.borrow_and_update().clone();
        if let Err(error) = apply(&data, &store, erasures).await {
            let error = format!("{error:#}");
            tracing::error!(error, "what was erased elsewhere cannot be erased here");
            sleep(RETRY).await;
        } else if listed.changed().await.is_err() {
            return;
        }
    }
}

/// Erases what is newer than the file with the time of the last one.
async fn apply(data: &Path, store: &Store, erasures: Vec<FleetErasure>) -> anyhow::Result<()> {
    let file = data.join(".fleet-erased");
    let known = std::fs::read_to_string(&file).unwrap_or_default();
    let known: UnixMillis = known.trim().parse().unwrap_or_default();
    let new: Vec<_> = erasures.into_iter().filter(|erasure| erasure.at > known).collect();
    let Some(last) = new.last().map(|erasure| erasure.at) else { return Ok(()) };
    // What is still queued is erased too.
    store.flush().await?;
    let ledger = store.clone();
    spawn_blocking(move || {
        let mut records = Vec::new();
        for erasure in new {
            let selection: ErasureFilter = serde_json::from_value(erasure.selection)
                .context("the selection is of a later version of Hone")?;
            let found = ledger.erase(&selection, erasure.at + SKEW_MILLIS, false)?;
            if found != Erasure::default() {
                let detail = json!({"completions": found.completions, "feedback": found.feedback});
                let record = AuditRecord::new("fleet", "erase", "", detail, "ok");
                records.push(Op::Audit(Box::new(record)));
            }
        }
        if !records.is_empty() {
            tracing::warn!(erasures = records.len(), "data is erased, as at another process");
            ledger.commit_blocking(records)?;
            ledger.rewrite()?;
        }
        anyhow::Ok(())
    })
    .await??;
    Ok(replace_file(&file, last.to_string().as_bytes())?)
}
