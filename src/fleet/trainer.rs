//! The trainer of a fleet: its lease, its ledger, what it takes in and what it publishes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use tokio::sync::{Mutex, watch};
use tokio::time::{Instant, interval, sleep};
use uuid::Uuid;

use hone_core::files::remove_any;
use hone_core::metrics::Metrics;
use hone_core::types::{
    GroupState, Lineage, PolicyRecord, PolicyVersion, SampleId, UnixMillis, now_ms,
};
use hone_fleet::bucket::{Bucket, BucketError, Tag};
use hone_fleet::folder;
use hone_fleet::lease::{FleetLease, LeaseOutcome};
use hone_fleet::manifest::{
    FleetErasure, FleetManifest, ManifestError, PolicyEntry, PublishedVersion,
};
use hone_fleet::read::{Intake, LogReader, read_log};
use hone_fleet::segment::{LedgerError, LogError, LogSegment};
use hone_fleet::ship::Shipper;
use hone_store::{AnswerCounts, FeedbackEntry, LEDGER, Op, Outbox, Store, StoreConfig};
use hone_train::policy::Policies;

use super::link::{
    POLICY, POLL_INTERVAL, ProcessHealth, StoreOutbox, boxed, own_id, report, to_outbox,
};
use super::server::{fetch_adapters, list};

/// How long a lease lasts without a renewal.
const LEASE: Duration = Duration::from_secs(15);
/// How often the lease is renewed.
const RENEWAL: Duration = Duration::from_secs(4);
/// How often new logs are looked for.
const DISCOVERY: Duration = Duration::from_secs(5);
/// How often held feedback is looked through.
const HELD_INTERVAL: Duration = Duration::from_secs(60);
/// How long feedback is held for its completion.
const HELD_MILLIS: u64 = 24 * 3_600_000;
/// How many times [`POLL_INTERVAL`] the manifest waits for the state after a new version.
const STATE_TICKS: u32 = 20;
/// How often files of former versions are deleted from the store.
const COLLECTION: Duration = Duration::from_secs(3600);
/// How long the report of a process that ended is kept.
const REPORTS_KEPT: u64 = 7 * 24 * 3_600_000;
/// Versions before the active one that the manifest lists.
const LISTED: usize = 16;

/// Counts a rating of a server as evidence of a canary.
pub(crate) type Evidence = Arc<dyn Fn(&FeedbackEntry, SampleId) + Send + Sync>;

/// A lease that several tasks use.
pub(super) type SharedLease = Arc<Mutex<FleetLease>>;

/// The active trainer.
pub(super) struct ActiveTrainer {
    lease: SharedLease,
    entry: PolicyEntry,
    /// When the copy of the ledger in the store was made.
    pub snapshot: UnixMillis,
}

impl ActiveTrainer {
    /// Waits for the lease, and makes the ledger in `data` equal to the fleet's.
    pub async fn begin(
        bucket: &Bucket,
        data: &Path,
        name: &str,
        metrics: &Arc<Metrics>,
    ) -> anyhow::Result<Self> {
        if data.join(LEDGER).exists() && FleetManifest::load(bucket).await?.is_none() {
            bail!(
                "data.dir {}: begin the fleet with its records by `hone fleet init`",
                data.display()
            );
        }
        let holder = own_id(data)?;
        let standby = metrics.fleet_process.with_label_values(&["standby"]);
        let mut known = None;
        let lease = loop {
            match FleetLease::acquire(bucket, holder, name, LEASE).await {
                Ok(LeaseOutcome::Acquired(lease)) => break Arc::new(Mutex::new(lease)),
                Ok(LeaseOutcome::Held(record)) => {
                    standby.set(1);
                    if known.replace(record.epoch) != Some(record.epoch) {
                        tracing::info!(trainer = record.name, epoch = record.epoch, "standing by");
                    }
                }
                Err(error) => tracing::warn!(%error, "the lease cannot be acquired"),
            }
            sleep(POLL_INTERVAL).await;
        };
        standby.set(0);
        tracing::info!(epoch = lease.lock().await.epoch(), "this trainer holds the lease");
        tokio::select! {
            lost = renew(&lease) => bail!(lost),
            taken = take_over(bucket, data, metrics) => {
                let (entry, snapshot) = taken?;
                Ok(Self { lease, entry, snapshot })
            }
        }
    }

    pub fn lease(&self) -> SharedLease {
        Arc::clone(&self.lease)
    }

    /// Renews the lease, and reports its loss.
    pub async fn keep_lease(self, failed: watch::Sender<Option<String>>) {
        failed.send_replace(Some(renew(&self.lease).await));
    }

    /// What keeps the manifest equal to the trainer's versions.
    pub fn mirror(
        &self,
        bucket: &Bucket,
        data: &Path,
        store: &Store,
        policies: &Arc<Policies>,
        shipper: &Arc<Shipper<StoreOutbox>>,
        erasures: watch::Sender<Vec<FleetErasure>>,
    ) -> Mirror {
        Mirror {
            bucket: bucket.clone(),
            data: data.to_owned(),
            store: store.clone(),
            policies: Arc::clone(policies),
            shipper: Arc::clone(shipper),
            lease: self.lease(),
            tag: None,
            awaited: 0,
            entry: self.entry.clone(),
            erasures,
        }
    }
}

/// Renews the lease until another trainer has it. While the store is away the trainer goes on: it cannot publish.
async fn renew(lease: &Mutex<FleetLease>) -> String {
    loop {
        sleep(RENEWAL).await;
        match lease.lock().await.renew().await {
            Ok(()) => {}
            Err(error @ ManifestError::Fenced { .. }) => return error.to_string(),
            Err(error) => tracing::warn!(%error, "the lease cannot be renewed"),
        }
    }
}

// The ledger of a trainer that takes over.

/// Makes the ledger equal to the fleet's: what it has not shipped is shipped, and what other trainers shipped is
/// replayed. A ledger that the log cannot continue is set aside.
async fn take_over(
    bucket: &Bucket,
    data: &Path,
    metrics: &Arc<Metrics>,
) -> anyhow::Result<(PolicyEntry, UnixMillis)> {
    let manifest = FleetManifest::load(bucket).await?.context("the fleet has no manifest")?.0;
    let ledger = data.join(LEDGER);
    if ledger.exists() {
        let store = open_trainer(&ledger, metrics)?;
        let snapshot = manifest.snapshot.as_ref().map_or(0, |snapshot| snapshot.sequence);
        let continued = go_on(bucket, &store, snapshot).await;
        store.close().await?;
        if let Some(reason) = continued? {
            let aside = data.join(format!(".diverged-{}", now_ms()));
            std::fs::create_dir(&aside)?;
            for name in [LEDGER, "adapters", "checkpoints"] {
                let (from, to) = (data.join(name), aside.join(name));
                if from.exists() {
                    std::fs::rename(from, to)?;
                }
            }
            tracing::error!(reason, aside = %aside.display(), "this ledger is not the fleet's: it is set aside and made from the store");
        }
    }
    if !ledger.exists() {
        rebuild(bucket, data, metrics).await?;
    }
    let entry = manifest.policies.get(POLICY).cloned().unwrap_or_default();
    fetch_adapters(bucket, data, &entry).await?;
    fetch_state(bucket, data, &entry, metrics).await?;
    Ok((entry, manifest.snapshot.map_or(bucket.now()?, |snapshot| snapshot.created)))
}

/// Ships what the ledger has and replays what it lacks. Returns why it cannot go on, if the log does not continue it.
async fn go_on(bucket: &Bucket, store: &Store, snapshot: u64) -> anyhow::Result<Option<String>> {
    let shipper = Shipper::new(bucket.clone(), Uuid::nil(), StoreOutbox(store.clone()));
    let state = store.outbox_state()?.context("the ledger has no outbox")?;
    if state.last < snapshot {
        return Ok(Some(format!(
            "it ends at batch {}, and the log begins after {snapshot}",
            state.last
        )));
    }
    match shipper.ship().await {
        Err(error @ LogError::Diverged(_)) => return Ok(Some(error.to_string())),
        shipped => shipped?,
    }
    replay(bucket, store).await.map(|()| None)
}

fn open_trainer(ledger: &Path, metrics: &Arc<Metrics>) -> anyhow::Result<Store> {
    let config = StoreConfig { outbox: Some(Outbox::Trainer), ..StoreConfig::default() };
    Ok(Store::open(ledger, &config, Arc::clone(metrics))?)
}

/// Makes a trainer's ledger in a data directory without one from the store.
pub(super) async fn rebuild(
    bucket: &Bucket,
    data: &Path,
    metrics: &Arc<Metrics>,
) -> anyhow::Result<()> {
    let manifest = FleetManifest::load(bucket).await?.context("the fleet has no manifest")?.0;
    if let Some(snapshot) = &manifest.snapshot {
        let copy = data.join(".snapshot");
        folder::download(bucket, "snapshots", &snapshot.digest, &copy).await?;
        let mut names = std::fs::read_dir(&copy)?
            .map(|entry| Ok(entry?.file_name()))
            .collect::<std::io::Result<Vec<_>>>()?;
        // The ledger last, so that a start after an interruption begins again.
        names.sort_by_key(|name| name == LEDGER);
        for name in names {
            remove_any(&data.join(&name))?;
            std::fs::rename(copy.join(&name), data.join(&name))?;
        }
        std::fs::remove_dir(&copy)?;
    }
    let store = open_trainer(&data.join(LEDGER), metrics)?;
    let replayed = async {
        if let Some(snapshot) = &manifest.snapshot {
            store.commit_now(vec![Op::Shipped(snapshot.sequence)]).await?;
        }
        replay(bucket, &store).await
    };
    let replayed = replayed.await;
    store.close().await?;
    replayed
}

/// Applies what other trainers shipped after this ledger's last batch.
async fn replay(bucket: &Bucket, store: &Store) -> anyhow::Result<()> {
    let last = store.outbox_state()?.context("the ledger has no outbox")?.last;
    read_log(bucket, Uuid::nil(), last, &Replay(store)).await?;
    Ok(())
}

struct Replay<'a>(&'a Store);

impl Intake for Replay<'_> {
    async fn take_in(&self, segment: LogSegment) -> Result<(), LedgerError> {
        self.0.replay(to_outbox(segment.batches)).await.map(drop).map_err(boxed)
    }
}

/// Brings the trainer's state to that after the active version, or else after the newest one with a state, unless there
/// is a newer checkpoint. Undoes the steps after it that are not in the active version.
async fn fetch_state(
    bucket: &Bucket,
    data: &Path,
    entry: &PolicyEntry,
    metrics: &Arc<Metrics>,
) -> anyhow::Result<()> {
    let own = checkpoints(data)?;
    let mut newest = own.last().map_or(0, |(step, _)| *step);
    let with_state = entry.versions.iter().filter(|version| version.state.is_some());
    let best = with_state.max_by_key(|PublishedVersion { record, .. }| {
        (record.version == entry.active, record.step)
    });
    if let Some(PublishedVersion { record, state: Some(digest), .. }) = best
        && newest < record.step
    {
        folder::download(bucket, "states", digest, &state_dir(data, record.version)).await?;
        for (_, dir) in own {
            remove_any(&dir)?;
        }
        newest = record.step;
    }
    let store = open_trainer(&data.join(LEDGER), metrics)?;
    let active = entry.versions.iter().find(|version| version.record.version == entry.active);
    let learned = active.map_or(0, |active| active.record.step).max(newest);
    let undone = store.steps(learned + 1, usize::MAX)?;
    let groups = undone.iter().flat_map(|step| &step.groups);
    let mut ops: Vec<_> = groups.map(|id| Op::GroupState(*id, GroupState::Ready)).collect();
    if let Some(last) = undone.last() {
        tracing::warn!(
            steps = undone.len(),
            groups = ops.len(),
            step = newest,
            "training continues from the last checkpoint in the store"
        );
        if newest == 0 {
            // Without a checkpoint, it begins with step 1.
            ops.push(Op::ExpireSteps(last.step));
        }
    }
    store.commit_now(ops).await?;
    Ok(store.close().await?)
}

/// The checkpoints of steps in a data directory, in order.
fn checkpoints(data: &Path) -> anyhow::Result<Vec<(u64, PathBuf)>> {
    let Ok(entries) = std::fs::read_dir(data.join("checkpoints")) else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let step = name.strip_prefix("step-").and_then(|step| step.parse().ok());
        found.extend(step.map(|step| (step, path.clone())));
    }
    found.sort();
    Ok(found)
}

fn state_dir(data: &Path, version: PolicyVersion) -> PathBuf {
    data.join(format!("checkpoints/versions/v{:06}", version.0))
}

// What other processes recorded.

pub(super) struct LedgerIntake {
    pub store: Store,
    pub policies: Arc<Policies>,
    pub evidence: Evidence,
}

impl Intake for LedgerIntake {
    async fn take_in(&self, segment: LogSegment) -> Result<(), LedgerError> {
        let taken = self.store.take_in(segment.log, to_outbox(segment.batches)).await;
        let taken = taken.map_err(boxed)?;
        for (entry, sample, _) in taken.ratings {
            (self.evidence)(&entry, sample);
        }
        for (version, AnswerCounts { requests, failures }) in taken.answers {
            for request in 0..requests {
                self.policies.answered(version, request < failures);
            }
        }
        Ok(())
    }
}

/// Takes all servers' logs in, until the task is aborted.
pub(super) async fn take_in(
    bucket: Bucket,
    intake: LedgerIntake,
    problem: watch::Sender<Option<String>>,
    metrics: Arc<Metrics>,
) {
    let positions = intake.store.intake_positions().unwrap_or_default();
    let mut reader = LogReader::new(bucket, positions);
    let (mut discovered, mut expired) = (None::<Instant>, Instant::now());
    let mut at_end = Instant::now();
    let mut ticks = interval(POLL_INTERVAL);
    loop {
        ticks.tick().await;
        if discovered.is_none_or(|at| at.elapsed() >= DISCOVERY) {
            match reader.discover().await {
                Ok(()) => discovered = Some(Instant::now()),
                Err(error) => tracing::warn!(%error, "the logs of the fleet cannot be listed"),
            }
        }
        let polled = reader.poll(&intake).await;
        report(&problem, polled.errors.first().map(ToString::to_string), "a log cannot be read");
        if polled.is_at_end {
            at_end = Instant::now();
        }
        metrics.fleet_intake_lag.set(at_end.elapsed().as_secs_f64());
        if expired.elapsed() >= HELD_INTERVAL {
            expired = Instant::now();
            let before = now_ms().saturating_sub(HELD_MILLIS);
            let expire = Op::ExpireHeld(before);
            if let Err(error) = intake.store.commit_now(vec![expire]).await {
                tracing::warn!(%error, "held feedback cannot be removed");
            }
        }
    }
}

// What the trainer publishes.

/// Keeps the manifest equal to the trainer's ledger, and applies what operators change in it.
pub(super) struct Mirror {
    bucket: Bucket,
    data: PathBuf,
    store: Store,
    policies: Arc<Policies>,
    shipper: Arc<Shipper<StoreOutbox>>,
    lease: SharedLease,
    /// The manifest that was read last.
    tag: Option<Tag>,
    /// What was written last.
    entry: PolicyEntry,
    /// For how many ticks the state after the active version has been missing.
    awaited: u32,
    /// What the manifest lists as erased.
    erasures: watch::Sender<Vec<FleetErasure>>,
}

impl Mirror {
    pub async fn run(mut self, failed: watch::Sender<Option<String>>) {
        let (mut written, mut ticks) = (None::<Arc<Lineage>>, interval(POLL_INTERVAL));
        let mut collected = Instant::now();
        loop {
            ticks.tick().await;
            let lineage = self.store.lineage();
            let same = written.as_ref().is_some_and(|written| Arc::ptr_eq(written, &lineage));
            let result = match self.apply_decisions().await {
                Ok(()) => self.write(same).await,
                Err(error) => Err(error),
            };
            match result {
                Ok(true) => {
                    written = Some(lineage);
                    if collected.elapsed() >= COLLECTION {
                        collected = Instant::now();
                        if let Err(error) = self.collect().await {
                            tracing::warn!(%error, "files of former versions cannot be deleted");
                        }
                    }
                }
                Ok(false) => {}
                Err(error) => match error.downcast_ref() {
                    Some(ManifestError::Fenced { .. }) => {
                        failed.send_replace(Some(error.to_string()));
                        return;
                    }
                    _ => {
                        let error = format!("{error:#}");
                        tracing::warn!(error, "the manifest cannot be written");
                    }
                },
            }
        }
    }

    /// Applies what operators changed in the manifest since the last time.
    async fn apply_decisions(&mut self) -> anyhow::Result<()> {
        let loaded = match &self.tag {
            Some(tag) => FleetManifest::load_if_changed(&self.bucket, tag).await?,
            None => FleetManifest::load(&self.bucket).await?,
        };
        let Some((manifest, tag)) = loaded else { return Ok(()) };
        list(&self.erasures, &manifest.erasures);
        let entry = manifest.policies.get(POLICY);
        let Some(entry) = entry.filter(|entry| entry.activation != self.entry.applied) else {
            self.tag = Some(tag);
            return Ok(());
        };
        for record in self.policies.list()? {
            let pinned = entry.pinned.contains(&record.version);
            if record.pinned != pinned && (pinned || self.entry.pinned.contains(&record.version)) {
                self.policies.pin(record.version, pinned).await?;
            }
        }
        if entry.active != self.policies.active() {
            let reason = entry.reason.as_deref().unwrap_or("activated by an operator");
            self.policies.activate(entry.active, reason).await?;
        }
        self.entry.applied = entry.activation;
        self.tag = Some(tag);
        Ok(())
    }

    /// Writes what changed. `same` says that no version did. Returns whether everything is written.
    async fn write(&mut self, same: bool) -> anyhow::Result<bool> {
        let canary = self.policies.canary_status();
        let share = canary.as_ref().map_or(0.0, |canary| canary.share);
        let canary = canary.map(|canary| canary.version);
        let active = self.policies.active();
        let lacks_state = |version: &PublishedVersion| {
            version.record.version == active
                && version.state.is_none()
                && state_dir(&self.data, active).exists()
        };
        let is_written = same
            && (self.entry.active, self.entry.canary) == (active, canary)
            && self.entry.canary_share.to_bits() == share.to_bits()
            && !self.entry.versions.iter().any(lacks_state);
        if is_written {
            return Ok(true);
        }
        // A trainer that takes over needs the state after the version, which follows the promotion shortly.
        let is_new = !self.entry.versions.iter().any(|known| known.record.version == active);
        if is_new && active != PolicyVersion::BASE && !state_dir(&self.data, active).exists() {
            self.awaited += 1;
            if self.awaited < STATE_TICKS {
                return Ok(false);
            }
        }
        self.awaited = 0;
        let records = self.policies.list()?;
        let listed = records.len().saturating_sub(LISTED);
        let mut versions = Vec::new();
        for (place, record) in records.iter().enumerate() {
            let is_served = record.version == active || Some(record.version) == canary;
            if place >= listed || is_served || record.pinned || record.adapter.is_none() {
                versions.push(self.published(record, is_served).await?);
            }
        }
        // The log has each version before the manifest names it, so that the next trainer has it too.
        self.shipper.ship().await?;
        let pinned = records.iter().filter(|record| record.pinned).map(|record| record.version);
        let entry = PolicyEntry {
            active,
            canary,
            canary_share: share,
            activation: self.entry.applied,
            pinned: pinned.collect(),
            versions,
            ..self.entry.clone()
        };
        let update = |manifest: &mut FleetManifest| {
            let known = manifest.policies.entry(POLICY.to_owned()).or_default();
            // Otherwise an operator was first, whose decision is applied before the next attempt.
            let is_current = known.activation == entry.activation;
            if is_current {
                *known = entry.clone();
            }
            Ok(is_current)
        };
        let (_, is_current) = self.lease.lock().await.update(update).await?;
        ensure!(is_current, "an operator changed the manifest at the same time");
        self.entry = entry;
        Ok(true)
    }

    /// Deletes the files of versions that the manifest does not list from the store, and old reports of processes.
    async fn collect(&self) -> Result<(), BucketError> {
        let now = self.bucket.now()?;
        for key in self.bucket.list("servers", None).await? {
            let Some((bytes, _)) = self.bucket.get(&key, None).await? else { continue };
            let report = serde_json::from_slice::<ProcessHealth>(&bytes);
            if report.is_ok_and(|report| report.at + REPORTS_KEPT < now) {
                self.bucket.delete(&key).await?;
            }
        }
        let versions = &self.entry.versions;
        let adapters: Vec<_> = versions.iter().filter_map(|v| v.adapter.as_deref()).collect();
        let states: Vec<_> = versions.iter().filter_map(|v| v.state.as_deref()).collect();
        for (kind, listed) in [("adapters", adapters), ("states", states)] {
            for found in self.bucket.list_folders(kind).await? {
                let digest = found.rsplit('/').next().unwrap_or_default();
                if !listed.contains(&digest) {
                    folder::delete(&self.bucket, kind, digest).await?;
                }
            }
        }
        Ok(())
    }

    /// A version with its files in the store.
    async fn published(
        &self,
        record: &PolicyRecord,
        is_served: bool,
    ) -> anyhow::Result<PublishedVersion> {
        let known = self.entry.versions.iter().find(|v| v.record.version == record.version);
        let known =
            known.map(|known| (known.adapter.clone(), known.state.clone(), known.probe.clone()));
        let (mut adapter, mut state, probe) = known.unwrap_or_default();
        let probe = probe.or_else(|| self.policies.probe_of(record.version));
        if let (Some(relative), None, true) = (&record.adapter, &adapter, is_served) {
            let digest = folder::upload(&self.bucket, "adapters", &self.data.join(relative)).await;
            adapter = Some(digest?);
        }
        let dir = state_dir(&self.data, record.version);
        if state.is_none() && is_served && dir.exists() {
            state = Some(folder::upload(&self.bucket, "states", &dir).await?);
        }
        Ok(PublishedVersion { record: record.clone(), adapter, state, probe })
    }
}
