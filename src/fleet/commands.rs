//! `hone fleet`: makes, shows and changes a fleet.

use std::sync::Arc;

use anyhow::{Context, ensure};
use serde::Serialize;

use hone_core::files::remove_any;
use hone_core::metrics::Metrics;
use hone_core::types::PolicyVersion;
use hone_fleet::bucket::Bucket;
use hone_fleet::folder;
use hone_fleet::manifest::{FleetManifest, LeaseRecord, LedgerSnapshot};
use hone_report::terminal::{MISSING, shown, table};
use hone_store::LEDGER;

use super::link::{POLICY, ProcessHealth, open};
use super::trainer;
use crate::config::Config;

/// Processes whose last report is older are not shown as running.
const SILENT_MILLIS: u64 = 20_000;

/// Makes the data directory of a stopped daemon the beginning of a fleet. Returns a sentence that describes it.
///
/// # Errors
/// If the store cannot hold a fleet or has one, or the directory cannot be copied.
pub(crate) async fn init(config: &Config) -> anyhow::Result<String> {
    let bucket = reached(config).await?;
    let url = &config.fleet.url;
    ensure!(
        FleetManifest::load(&bucket).await?.is_none(),
        "fleet.url {url}: there is a fleet already"
    );
    let data = &config.data.dir;
    let snapshot = if data.join(LEDGER).exists() {
        let copy = data.join(".fleet-init");
        remove_any(&copy)?;
        hone_store::backup(data, &copy)?;
        let digest = folder::upload(&bucket, "snapshots", &copy).await;
        remove_any(&copy)?;
        Some(LedgerSnapshot { digest: digest?, sequence: 0, created: bucket.now()? })
    } else {
        None
    };
    let begins = if snapshot.is_some() { "the records and versions of" } else { "an empty" };
    let begin = |manifest: &mut FleetManifest| {
        manifest.snapshot.clone_from(&snapshot);
        Ok(())
    };
    FleetManifest::update(&bucket, Some(0), begin).await?;
    Ok(format!("{url}: the fleet begins with {begins} {}", data.display()))
}

/// Makes the ledger and the versions of a fleet's trainer in an empty data directory.
///
/// # Errors
/// If the directory is not empty, or an object is missing or corrupted.
pub(crate) async fn rebuild(config: &Config) -> anyhow::Result<String> {
    let bucket = reached(config).await?;
    let data = &config.data.dir;
    std::fs::create_dir_all(data).with_context(|| format!("data.dir {}", data.display()))?;
    ensure!(!data.join(LEDGER).exists(), "data.dir {}: there is a ledger", data.display());
    trainer::rebuild(&bucket, data, &Arc::new(Metrics::new()?)).await?;
    let check = hone_store::maintain::check(&data.join(LEDGER))?;
    let (rows, problems) = (check.rows.interactions, check.problem_count);
    Ok(format!("{}: a ledger with {rows} completions, {problems} problems", data.display()))
}

/// Makes a version the active one on all servers.
///
/// # Errors
/// If there is no such version, or it was never active.
pub(crate) async fn activate(config: &Config, version: u64) -> anyhow::Result<String> {
    let bucket = reached(config).await?;
    let reason = "activated by an operator";
    let activate = |manifest: &mut FleetManifest| {
        Ok(manifest.activate(POLICY, PolicyVersion(version), reason)?)
    };
    FleetManifest::update(&bucket, None, activate).await?;
    Ok(format!("version {version} is the active version of the fleet"))
}

async fn reached(config: &Config) -> anyhow::Result<Bucket> {
    ensure!(
        !config.fleet.url.is_empty(),
        "fleet.url is \"\": it must name the fleet's object store"
    );
    let bucket = open(&config.fleet)?;
    bucket.probe().await.with_context(|| format!("fleet.url {}", config.fleet.url))?;
    Ok(bucket)
}

/// What `hone fleet status` shows.
#[derive(Serialize)]
pub(crate) struct FleetStatus {
    active: Option<PolicyVersion>,
    canary: Option<PolicyVersion>,
    canary_share: f64,
    lease: LeaseRecord,
    /// Seconds until the lease ends; 0 if no trainer holds it.
    lease_seconds: u64,
    /// The copy of the trainer's ledger in the store: the last batch of the trainer's log that it has.
    snapshot: Option<u64>,
    processes: Vec<ProcessStatus>,
}

#[derive(Serialize)]
struct ProcessStatus {
    #[serde(flatten)]
    health: ProcessHealth,
    /// Since its last report.
    silent_seconds: u64,
    running: bool,
    requests_per_minute: f64,
}

/// Reads what every process of the fleet reported.
///
/// # Errors
/// If the store cannot be read or has no fleet.
pub(crate) async fn status(config: &Config) -> anyhow::Result<FleetStatus> {
    let bucket = reached(config).await?;
    let loaded = FleetManifest::load(&bucket).await?;
    let (manifest, _) =
        loaded.with_context(|| format!("fleet.url {}: there is no fleet", config.fleet.url))?;
    let now = bucket.now().unwrap_or_default();
    let mut processes = Vec::new();
    for key in bucket.list("servers", None).await? {
        let Some((bytes, _)) = bucket.get(&key, None).await? else { continue };
        let health: ProcessHealth = serde_json::from_slice(&bytes).context(key)?;
        let silent = now.saturating_sub(health.at);
        #[expect(clippy::cast_precision_loss, reason = "a rate to one digit")]
        let requests_per_minute = health.requests as f64 * 60.0 / health.uptime.max(1) as f64;
        processes.push(ProcessStatus {
            silent_seconds: silent / 1000,
            running: silent < SILENT_MILLIS,
            requests_per_minute,
            health,
        });
    }
    let entry = manifest.policies.get(POLICY);
    Ok(FleetStatus {
        active: entry.map(|entry| entry.active),
        canary: entry.and_then(|entry| entry.canary),
        canary_share: entry.map_or(0.0, |entry| entry.canary_share),
        lease_seconds: manifest.lease.expires.saturating_sub(now) / 1000,
        lease: manifest.lease,
        snapshot: manifest.snapshot.as_ref().map(|snapshot| snapshot.sequence),
        processes,
    })
}

impl FleetStatus {
    /// The report as text.
    pub fn text(&self) -> String {
        let version = |version: Option<PolicyVersion>| {
            version.map_or_else(|| MISSING.to_owned(), |version| version.to_string())
        };
        let trainer = match self.lease_seconds {
            0 => "no trainer holds the lease".to_owned(),
            left => format!("{} holds the lease for {left} s", self.lease.name),
        };
        let rows = self.processes.iter().map(|process| {
            let health = &process.health;
            let state = match (&health.error, process.running) {
                (_, false) => format!("silent for {} s", process.silent_seconds),
                (Some(error), true) => error.clone(),
                (None, true) => "ok".to_owned(),
            };
            [
                health.name.clone(),
                health.role.clone(),
                health.version.to_string(),
                (health.head.saturating_sub(health.shipped)).to_string(),
                format!("{:.1}", health.lag_ms as f64 / 1000.0),
                format!("{:.0}", process.requests_per_minute),
                state,
            ]
        });
        let columns = ["process", "role", "version", "unshipped", "lag s", "requests/min", "state"];
        format!(
            "active version  {}\ncanary          {} ({:.0} %)\ntrainer         {trainer}, epoch {}\nsnapshot        {}, replaced every day\n\n{}\n",
            version(self.active),
            version(self.canary),
            100.0 * self.canary_share,
            self.lease.epoch,
            self.snapshot.map_or_else(|| MISSING.to_owned(), |last| format!("up to batch {last}")),
            shown(&table(columns, rows, 2)),
        )
    }
}
