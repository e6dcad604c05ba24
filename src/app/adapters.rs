//! `hone adapters`: lists and exports the versions of a data directory. Its daemon must be stopped.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};

use hone_core::types::{PolicyRecord, PolicyState};
use hone_model::adapter::merge::{Precision, merge};
use hone_train::policy::adapter_digest;

use super::core::LEDGER;
use super::model::open_model;
use crate::config::Config;

/// Format and target directory of an exported version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Export {
    /// A full Hugging Face directory with the adapter merged into the weights.
    Merged(PathBuf, Precision),
    /// A PEFT directory with the adapter alone.
    Peft(PathBuf),
}

/// Every version, in ascending order.
///
/// # Errors
/// If the ledger is missing, in use or damaged.
pub fn list(data: &Path) -> anyhow::Result<Vec<PolicyRecord>> {
    Ok(hone_store::maintain::policies(&data.join(LEDGER))?)
}

/// Exports `version`, or the active version if it is `None`. Returns a sentence that describes the
/// result.
///
/// # Errors
/// If the version does not exist or has no adapter, its files were changed, the target exists, or a
/// file cannot be read or written.
pub async fn export(config: &Config, version: Option<u64>, to: &Export) -> anyhow::Result<String> {
    let data = &config.data.dir;
    let records = list(data)?;
    let wanted = |record: &&PolicyRecord| match version {
        Some(version) => record.version.0 == version,
        None => record.state == PolicyState::Active,
    };
    let record = records.iter().find(wanted).with_context(|| match version {
        Some(version) => {
            let last = records.last().map_or(0, |record| record.version.0);
            format!("--version is {version}: the versions go from 0 to {last}")
        }
        None => "no version is active yet".to_owned(),
    })?;
    let version = record.version;
    let Some(adapter) = &record.adapter else {
        bail!("version {version} is the base model itself: it has no adapter")
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
    match to {
        Export::Merged(target, precision) => {
            let base = open_model(config, data).await?;
            let merged = merge(&base.path, &adapter, target, *precision)?;
            let (modules, mib) = (merged.modules, merged.bytes as f64 / f64::from(1 << 20));
            let target = target.display();
            Ok(format!("version {version}: {modules} modules merged, {mib:.1} MiB in {target}"))
        }
        Export::Peft(target) => {
            copy_dir(&adapter, target).with_context(|| format!("{}", target.display()))?;
            Ok(format!("version {version}: a PEFT adapter in {}", target.display()))
        }
    }
}

/// Copies a directory without subdirectories. `to` must not exist.
fn copy_dir(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::create_dir(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        std::fs::copy(entry.path(), to.join(entry.file_name()))?;
    }
    Ok(())
}
