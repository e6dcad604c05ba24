//! The weights of policy versions, and the adapters that stay in memory after other versions were activated, so that a version that was used
//! before is activated without reading or copying its weights.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hone_core::files::FileStamp;
use hone_core::types::PolicyVersion;
use hone_model::adapter::peft::{CONFIG_FILE, WEIGHTS_FILE};

use crate::kv_cache::WeightsId;
use crate::weights::AdapterWeights;

/// The weights of one policy version. The default is the base model as version 0.
#[derive(Clone, Default)]
pub(crate) struct PolicyWeights {
    pub version: PolicyVersion,
    /// `None` is the base model.
    pub adapter: Option<Arc<AdapterWeights>>,
    /// Differs between all adapters that this process has read, also between those of one version. A
    /// version that fails a check can be replaced by another one with its number.
    pub id: WeightsId,
}

impl PolicyWeights {
    pub fn new(version: PolicyVersion, adapter: Option<AdapterWeights>) -> Self {
        static ADAPTERS: AtomicU64 = AtomicU64::new(0);
        let id = match adapter {
            None => WeightsId::default(),
            Some(_) => WeightsId(1 + ADAPTERS.fetch_add(1, Ordering::Relaxed)),
        };
        Self { version, adapter: adapter.map(Arc::new), id }
    }
}

/// Which adapter a PEFT directory holds: the version that it was published as, and the state of its files. If
/// a number is used for a second adapter, the files differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AdapterFiles {
    version: PolicyVersion,
    dir: PathBuf,
    stamps: [FileStamp; 2],
}

impl AdapterFiles {
    /// The adapter in `dir`. Reads no content.
    pub fn of(version: PolicyVersion, dir: &Path) -> io::Result<Self> {
        let stamp = |name| FileStamp::of(&dir.join(name));
        let stamps = [stamp(CONFIG_FILE)?, stamp(WEIGHTS_FILE)?];
        Ok(Self { version, dir: dir.to_path_buf(), stamps })
    }
}

/// The adapters that were used last.
#[derive(Default)]
pub(crate) struct KeptAdapters {
    limit: usize,
    /// The one that was used last is the last.
    kept: Vec<(AdapterFiles, PolicyWeights)>,
}

impl KeptAdapters {
    pub fn new(limit: usize) -> Self {
        Self { limit, kept: Vec::new() }
    }

    pub(super) fn get(&mut self, files: &AdapterFiles) -> Option<PolicyWeights> {
        let at = self.kept.iter().position(|(other, _)| other == files)?;
        self.kept[at..].rotate_left(1);
        self.kept.last().map(|(_, weights)| weights.clone())
    }

    /// Keeps an adapter that was read, or finds that another caller has read it meanwhile. Returns the
    /// weights to use, and those that are no longer kept, which the caller drops without a lock.
    #[must_use]
    pub(super) fn keep(
        &mut self,
        files: AdapterFiles,
        read: PolicyWeights,
    ) -> (PolicyWeights, Vec<PolicyWeights>) {
        if let Some(kept) = self.get(&files) {
            return (kept, vec![read]);
        }
        // At most one adapter of a directory is current.
        let mut dropped = Vec::new();
        if let Some(at) = self.kept.iter().position(|(other, _)| other.dir == files.dir) {
            dropped.push(self.kept.remove(at).1);
        }
        self.kept.push((files, read.clone()));
        let excess = self.kept.len().saturating_sub(self.limit);
        dropped.extend(self.kept.drain(..excess).map(|(_, weights)| weights));
        (read, dropped)
    }

    /// Removes the adapters of a policy, which the caller drops without a lock.
    #[must_use]
    pub fn forget(&mut self, policy: u32) -> Vec<PolicyWeights> {
        let of_policy = |files: &AdapterFiles| files.version.0 >> 32 == u64::from(policy);
        let removed = self.kept.extract_if(.., |(files, _)| of_policy(files));
        removed.map(|(_, weights)| weights).collect()
    }

    /// Makes an adapter the one that was used last, if it is kept.
    pub fn touch(&mut self, id: WeightsId) {
        if let Some(at) = self.kept.iter().position(|(_, weights)| weights.id == id) {
            self.kept[at..].rotate_left(1);
        }
    }

    pub fn ids(&self) -> impl Iterator<Item = WeightsId> {
        self.kept.iter().map(|(_, weights)| weights.id)
    }
}
