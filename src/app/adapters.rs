//! `hone adapters`: lists and exports the versions of a data directory. Its daemon must be stopped.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use serde::Deserialize;

use hone_core::files::{FileError, at};
use hone_core::types::{Lineage, PolicyRecord, PolicyState, PolicyVersion};
use hone_model::adapter::merge::{Precision, merge};
use hone_store::LEDGER;
use hone_train::policy::adapter_digest;

use crate::app::open_model;
use crate::config::Config;
use hone_report::terminal::{MISSING, shown, table};

/// Format and target directory of an exported version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Export {
    /// A full Hugging Face directory with the adapter merged into the weights.
    Merged(PathBuf, Precision),
    /// A PEFT directory with the adapter alone.
    Peft(PathBuf),
}

pub fn list(data: &Path) -> anyhow::Result<Vec<PolicyRecord>> {
    Ok(hone_store::maintain::policies(&data.join(LEDGER))?)
}

/// A policy version of a data directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VersionChoice {
    /// The version that the daemon serves.
    Active,
    Number(u64),
    /// The copy of the best evaluation of `hone train`.
    Best,
}

/// A policy version whose files were found.
pub(super) struct FoundVersion {
    /// The version and, for [`VersionChoice::Best`], its step: "version 7".
    pub(super) label: String,
    pub(super) version: PolicyVersion,
    /// Its PEFT directory; `None` for the base model.
    pub(super) adapter: Option<PathBuf>,
}

/// The part of a version's manifest that identifies it.
#[derive(Deserialize)]
struct Manifest {
    version: PolicyVersion,
    step: u64,
    sha256: String,
}

/// Finds a version and checks that its weights are those that were published.
pub(super) fn find(data: &Path, choice: VersionChoice) -> anyhow::Result<FoundVersion> {
    let number = match choice {
        VersionChoice::Best => return find_best(&data.join("run/best")),
        VersionChoice::Number(version) => Some(version),
        VersionChoice::Active => None,
    };
    let records = list(data)?;
    let wanted = |record: &&PolicyRecord| match number {
        Some(version) => record.version.0 == version,
        None => record.state == PolicyState::Active,
    };
    let record = records.iter().find(wanted).with_context(|| match number {
        Some(version) => {
            let last = records.last().map_or(0, |record| record.version.0);
            format!("--version is {version}: the versions go from 0 to {last}")
        }
        None => "no version is active yet".to_owned(),
    })?;
    let version = record.version;
    let label = format!("version {version}");
    let Some(adapter) = &record.adapter else {
        return Ok(FoundVersion { label, version, adapter: None });
    };
    let adapter = data.join(adapter);
    let found = adapter_digest(&adapter).with_context(|| {
        format!(
            "the files of version {version} are missing: policy.keep_versions limits how many are kept"
        )
    })?;
    ensure!(
        record.sha256.as_deref() == Some(found.as_str()),
        "the adapter file of version {version} has changed since it was published"
    );
    Ok(FoundVersion { label, version, adapter: Some(adapter) })
}

fn find_best(best: &Path) -> anyhow::Result<FoundVersion> {
    let place = best.display();
    let manifest = std::fs::read(best.join("manifest.json")).with_context(|| {
        format!(
            "--best: {place} does not exist; `hone train` keeps the adapter of its best evaluation \
             there"
        )
    })?;
    let manifest: Manifest = serde_json::from_slice(&manifest)
        .with_context(|| format!("{place}: manifest.json is damaged"))?;
    let found =
        adapter_digest(best).with_context(|| format!("{place}: the weights are missing"))?;
    ensure!(manifest.sha256 == found, "{place}: the weights have changed since they were saved");
    let Manifest { version, step, .. } = manifest;
    let label = format!("version {version}, the best, of step {step}");
    Ok(FoundVersion { label, version, adapter: Some(best.to_owned()) })
}

/// Exports a version. Returns a sentence that describes the result.
///
/// # Errors
/// If the version does not exist or has no adapter, its files were changed, the target exists, or a
/// file cannot be read or written.
pub async fn export(config: &Config, choice: VersionChoice, to: &Export) -> anyhow::Result<String> {
    let data = &config.data.dir;
    let FoundVersion { label, version, adapter } = find(data, choice)?;
    let Some(adapter) = adapter else {
        bail!("version {version} is the base model itself: it has no adapter")
    };
    match to {
        Export::Merged(target, precision) => {
            let base = open_model(config, data).await?;
            let merged = merge(&base.path, &adapter, target, *precision)?;
            let (modules, mib) = (merged.modules, merged.bytes as f64 / f64::from(1 << 20));
            let target = target.display();
            Ok(format!("{label}: {modules} modules merged, {mib:.1} MiB in {target}"))
        }
        Export::Peft(target) => {
            std::fs::create_dir(target).map_err(at(target))?;
            copy_files(&adapter, target)?;
            Ok(format!("{label}: a PEFT adapter in {}", target.display()))
        }
    }
}

/// Copies the files of a directory to another.
pub fn copy_files(from: &Path, to: &Path) -> Result<(), FileError> {
    for entry in std::fs::read_dir(from).map_err(at(from))? {
        let path = entry.map_err(at(from))?.path();
        if let (true, Some(name)) = (path.is_file(), path.file_name()) {
            std::fs::copy(&path, to.join(name)).map_err(at(&path))?;
        }
    }
    Ok(())
}

// The tree of policy versions as text.

/// One line for each version, with a header. A version follows its parent. Branches that the active
/// version does not descend from are indented below the version at which they begin.
pub fn policy_tree(records: &[PolicyRecord], data: &Path) -> String {
    let rows = in_order(records).into_iter().map(|(depth, record)| {
        let reward = record.metrics.get("reward_mean");
        let files = match &record.adapter {
            None => "base",
            Some(adapter) if data.join(adapter).exists() => "yes",
            Some(_) => "no",
        };
        [
            format!("{}{}", "  ".repeat(depth), record.version),
            record.step.to_string(),
            record.state.as_str().to_owned(),
            files.to_owned(),
            reward.map_or_else(|| MISSING.to_owned(), |reward| format!("{reward:.3}")),
            if record.pinned { "pinned" } else { "" }.to_owned(),
        ]
    });
    shown(&table(["version", "step", "state", "files", "reward", ""], rows, 1))
}

/// Every version with the number of abandoned branches that contain it.
fn in_order(records: &[PolicyRecord]) -> Vec<(usize, &PolicyRecord)> {
    let lineage: Lineage = records.iter().collect();
    let active = records.iter().rev().find(|record| record.state == PolicyState::Active);
    let active = active.map_or(PolicyVersion::BASE, |record| record.version);
    let main: BTreeSet<PolicyVersion> = lineage.chain(active).collect();
    let mut children: BTreeMap<Option<PolicyVersion>, Vec<&PolicyRecord>> = BTreeMap::new();
    for record in records {
        children.entry(record.parent).or_default().push(record);
    }
    let mut waiting: Vec<(usize, &PolicyRecord)> =
        children.remove(&None).unwrap_or_default().into_iter().map(|record| (0, record)).collect();
    let mut ordered = Vec::with_capacity(records.len());
    while let Some((depth, record)) = waiting.pop() {
        ordered.push((depth, record));
        let mut branches = children.remove(&Some(record.version)).unwrap_or_default();
        let straight = branches.iter().position(|child| main.contains(&child.version));
        // In an abandoned branch, the newest child continues it.
        let straight = straight.or_else(|| branches.len().checked_sub(1));
        if let Some(at) = straight {
            waiting.push((depth, branches.remove(at)));
        }
        waiting.extend(branches.into_iter().rev().map(|child| (depth + 1, child)));
    }
    ordered
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use hone_core::testing::policy;

    use super::*;

    fn record(version: u64, parent: u64, state: PolicyState) -> PolicyRecord {
        PolicyRecord {
            adapter: (version > 0).then(|| format!("adapters/v{version:06}")),
            metrics: [("reward_mean".to_owned(), version as f64 / 8.0)].into(),
            state,
            ..policy(version, parent)
        }
    }

    #[test]
    fn abandoned_branches_are_below_their_first_parent() {
        use PolicyState::{Active, Rejected, Retired, RolledBack};
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("adapters/v000006")).unwrap();
        let versions = [
            (0, 0, Retired),
            (1, 0, Retired),
            (2, 1, Retired),
            (3, 2, Retired),
            (4, 1, Rejected),
            (5, 2, RolledBack),
            (6, 1, Active),
        ];
        let mut records = versions.map(|(version, parent, state)| record(version, parent, state));
        records[2].pinned = true;
        assert_snapshot!(policy_tree(&records, dir.path()), @r"
        version  step        state  files  reward
        0           0      retired   base   0.000
        1           1      retired     no   0.125
          2         2      retired     no   0.250  pinned
            3       3      retired     no   0.375
          5         5  rolled_back     no   0.625
          4         4     rejected     no   0.500
        6           6       active    yes   0.750
        ");
    }
}
