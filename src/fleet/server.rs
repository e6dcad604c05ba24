//! A server of a fleet: it follows the manifest.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use async_trait::async_trait;
use tokio::sync::watch;
use tokio::time::sleep;

use hone_core::types::{PolicyRecord, PolicyVersion};
use hone_fleet::bucket::{Bucket, BucketError, Tag};
use hone_fleet::folder;
use hone_fleet::manifest::{FleetErasure, FleetManifest, PolicyEntry};
use hone_train::policy::{Policies, VersionAuthority, adapter_digest};

use super::link::{POLICY, POLL_INTERVAL, report};

/// How long after the manifest's last change a server looks at it less often.
const IDLE_AFTER: Duration = Duration::from_secs(600);
/// How often it looks then.
const IDLE_INTERVAL: Duration = Duration::from_secs(2);

/// Serves the versions that the manifest names.
pub(super) struct Follower {
    bucket: Bucket,
    data: PathBuf,
    policies: Arc<Policies>,
    /// Whether it never served a version.
    is_new: bool,
    /// Which manifest was followed last.
    tag: Option<Tag>,
    /// What the manifest lists as erased.
    erasures: watch::Sender<Vec<FleetErasure>>,
}

impl Follower {
    pub fn new(
        bucket: Bucket,
        data: PathBuf,
        policies: Arc<Policies>,
        is_new: bool,
        erasures: watch::Sender<Vec<FleetErasure>>,
    ) -> Self {
        Self { bucket, data, policies, is_new, tag: None, erasures }
    }

    /// Serves the fleet's active version, which a server without a version of its own waits for.
    pub async fn join(&mut self) -> anyhow::Result<()> {
        let (mut waits, mut fails) = (false, false);
        loop {
            match self.follow().await {
                Ok(()) if self.tag.is_some() => return Ok(()),
                Err(error) if !self.is_new => {
                    tracing::error!(
                        error = format!("{error:#}"),
                        "the version of the last start is served"
                    );
                    return Ok(());
                }
                Ok(()) if !waits => tracing::info!("waiting for the first trainer of the fleet"),
                Err(error) if !fails => {
                    tracing::error!(
                        error = format!("{error:#}"),
                        "waiting for the fleet's version"
                    );
                    fails = true;
                }
                _ => {}
            }
            waits = true;
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Follows the manifest until the task is aborted. The problem, if there is one, is reported.
    pub async fn run(mut self, problem: watch::Sender<Option<String>>) {
        let mut changed = Instant::now();
        loop {
            // Each look costs a request.
            let is_idle = changed.elapsed() > IDLE_AFTER;
            sleep(if is_idle { IDLE_INTERVAL } else { POLL_INTERVAL }).await;
            let known = self.tag.clone();
            let failed = self.follow().await.err().map(|error| format!("{error:#}"));
            if self.tag != known {
                changed = Instant::now();
            }
            report(&problem, failed, "the fleet's versions cannot be followed");
        }
    }

    async fn follow(&mut self) -> anyhow::Result<()> {
        let loaded = match &self.tag {
            Some(tag) => FleetManifest::load_if_changed(&self.bucket, tag).await?,
            None => FleetManifest::load(&self.bucket).await?,
        };
        let Some((manifest, tag)) = loaded else { return Ok(()) };
        list(&self.erasures, &manifest.erasures);
        if let Some(entry) = manifest.policies.get(POLICY) {
            let canary = entry.canary.map(|version| (version, entry.canary_share));
            fetch_adapters(&self.bucket, &self.data, entry).await?;
            let known = self.policies.list()?;
            let mut records: Vec<PolicyRecord> =
                entry.versions.iter().map(|version| version.record.clone()).collect();
            records.retain(|record| !known.contains(record));
            let probes = entry.versions.iter();
            let probes =
                probes.filter_map(|known| Some((known.record.version, known.probe.clone()?)));
            self.policies.follow(records, entry.active, canary, &probes.collect()).await?;
            self.tag = Some(tag);
        }
        Ok(())
    }
}

/// Passes on what the manifest lists as erased, if it changed.
pub(super) fn list(erasures: &watch::Sender<Vec<FleetErasure>>, listed: &[FleetErasure]) {
    erasures.send_if_modified(|known| {
        let changed = known != listed;
        if changed {
            listed.clone_into(known);
        }
        changed
    });
}

/// Makes the adapters of the versions that are served present in the data directory.
pub(super) async fn fetch_adapters(
    bucket: &Bucket,
    data: &Path,
    entry: &PolicyEntry,
) -> anyhow::Result<()> {
    let served = [Some(entry.active), entry.canary].into_iter().flatten();
    for version in served.filter(|version| *version != PolicyVersion::BASE) {
        let found = entry.versions.iter().find(|known| known.record.version == version);
        let found = found.with_context(|| format!("the manifest has no version {version}"))?;
        let (Some(relative), Some(digest)) = (&found.record.adapter, &found.adapter) else {
            continue;
        };
        let dir = data.join(relative);
        let is_here = || adapter_digest(&dir).ok() == found.record.sha256;
        if !is_here() {
            folder::download(bucket, "adapters", digest, &dir).await?;
            ensure!(
                is_here(),
                "the adapter of version {version} is not the one that was published"
            );
        }
    }
    Ok(())
}

/// Takes an operator's decisions to the manifest.
pub(super) struct Authority(pub Bucket);

impl Authority {
    async fn change(
        &self,
        mut change: impl FnMut(&mut FleetManifest) -> Result<(), BucketError>,
    ) -> Result<(), String> {
        let updated = FleetManifest::update(&self.0, None, |manifest| Ok(change(manifest)?)).await;
        updated.map(drop).map_err(|error| error.to_string())
    }
}

#[async_trait]
impl VersionAuthority for Authority {
    async fn activate(&self, version: PolicyVersion, reason: &str) -> Result<(), String> {
        self.change(|manifest| manifest.activate(POLICY, version, reason).map(drop)).await
    }

    async fn pin(&self, version: PolicyVersion, pinned: bool) -> Result<(), String> {
        self.change(|manifest| manifest.pin(POLICY, version, pinned)).await
    }
}
