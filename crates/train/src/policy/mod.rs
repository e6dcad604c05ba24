//! Policy versions: their files and lineage, the checks before their publication, and rollback.
//!
//! [`Policies::publish`] writes new weights as a candidate; the gate and, if configured, a canary decide
//! whether it becomes the active version. [`Policies::activate`] and [`Policies::withdraw`] return to an
//! earlier version.
//!
//! Invariants: a version number is used once; its files are complete before the ledger names them; the version
//! that the ledger calls active is the one that new requests get, or got before the last crash, except for the
//! requests of a canary; a version is promoted, rejected or rolled back from its canary exactly once.

mod canary;
mod config;
mod gate;
mod publish;
mod recall;
mod registry;

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::{fs, io};

use parking_lot::Mutex;

use hone_core::digest::sha256_file;
use hone_core::files::{FileError, FileStamp, at, replace_dir};
use hone_core::types::{PolicyRecord, PolicyState, PolicyVersion, TokenId, now_ms};
use hone_engine::EngineError;
use hone_model::adapter::peft::WEIGHTS_FILE;
use hone_model::kernels::compute::Compute;
use hone_store::{Op, StoreError};

use crate::error::{LearnError, Result};

pub use canary::{ArmCounts, CanaryPoint, CanaryStatus, VersionRating};
pub use config::{CanaryConfig, CanaryLimit, GateConfig, PolicyConfig, Promotion};
pub use gate::{ExamPrompt, Examiner, PARITY_TOLERANCE};
pub use registry::{Policies, PolicySetup, Suspension, VersionAuthority};

// Errors of policy versions.

/// Why a version cannot be listed, published or activated.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// The ledger has no version of this number.
    #[error("there is no policy version {0}")]
    Unknown(PolicyVersion),
    /// The version was rejected, or its files are missing or altered.
    #[error("policy version {version} cannot be served: {reason}")]
    Unservable {
        /// The version that was asked for.
        version: PolicyVersion,
        /// A clause without a period.
        reason: String,
    },
    /// The fleet did not take an operator's decision.
    #[error("the fleet's versions were not changed: {0}")]
    Authority(String),
    /// The version's files cannot be written.
    #[error(transparent)]
    Files(#[from] FileError),
    /// The candidate cannot be written or scored.
    #[error(transparent)]
    Candidate(#[from] LearnError),
    /// The engine cannot load, probe or activate the version.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The ledger cannot be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
}

// The directory of a version: PEFT files and a manifest.

/// The directory of all versions, relative to the data directory.
const ADAPTERS: &str = "adapters";

pub(crate) fn version_name(version: PolicyVersion) -> String {
    format!("v{:06}", version.0)
}

/// A version's directory relative to the data directory.
pub(crate) fn relative_dir(version: PolicyVersion) -> String {
    format!("{ADAPTERS}/{}", version_name(version))
}

/// SHA-256 of the weights in a version's directory, in hexadecimal.
///
/// # Errors
/// If the file cannot be read.
pub fn adapter_digest(dir: &Path) -> io::Result<String> {
    sha256_file(&dir.join(WEIGHTS_FILE))
}

const REMEMBERED: usize = 64;

/// The digests of weights files that were read last, each with the stamp of the file then.
#[derive(Default)]
struct KnownDigests(Mutex<VecDeque<(PathBuf, FileStamp, String)>>);

impl KnownDigests {
    /// [`adapter_digest`], from memory if the file did not change since it was read.
    fn of(&self, dir: &Path) -> io::Result<String> {
        let file = dir.join(WEIGHTS_FILE);
        let stamp = FileStamp::of(&file)?;
        let known = |(known, at, _): &&(PathBuf, FileStamp, _)| *known == file && *at == stamp;
        if let Some((_, _, digest)) = self.0.lock().iter().find(known) {
            return Ok(digest.clone());
        }
        let digest = sha256_file(&file)?;
        // What was read while the file changed is not remembered.
        if FileStamp::of(&file)? == stamp {
            let mut all = self.0.lock();
            all.retain(|(known, ..)| *known != file);
            all.push_back((file, stamp, digest.clone()));
            let surplus = all.len().saturating_sub(REMEMBERED);
            all.drain(..surplus);
        }
        Ok(digest)
    }
}

/// Writes PEFT files and a manifest to `dir`, which is complete or absent after a crash. Returns the weights'
/// SHA-256.
pub(crate) fn write_version(
    dir: &Path,
    write_adapter: impl FnOnce(&Path) -> Result<()>,
    record: &PolicyRecord,
) -> std::result::Result<String, PolicyError> {
    let mut digest = String::new();
    replace_dir(dir, |new| {
        write_adapter(new)?;
        digest = adapter_digest(new).map_err(at(&new.join(WEIGHTS_FILE)))?;
        let manifest = serde_json::json!({
            "version": record.version,
            "parent": record.parent,
            "step": record.step,
            "sha256": digest,
            "metrics": record.metrics,
            "created": record.created,
        });
        let path = new.join("manifest.json");
        fs::write(&path, format!("{manifest:#}\n")).map_err(at(&path))?;
        Ok::<_, PolicyError>(())
    })?;
    Ok(digest)
}

pub(crate) fn base_record() -> PolicyRecord {
    PolicyRecord {
        version: PolicyVersion::BASE,
        parent: None,
        step: 0,
        adapter: None,
        sha256: None,
        metrics: BTreeMap::new(),
        state: PolicyState::Active,
        reason: None,
        created: now_ms(),
        pinned: false,
        checks: Vec::new(),
    }
}

// New weights before their publication, and its outcome.

/// The policy that scores tokens.
#[derive(Clone, Copy, Debug)]
pub enum ScoredBy<'a> {
    /// The new weights.
    Candidate,
    /// The base model.
    Base,
    /// The adapter in a PEFT directory.
    Adapter(&'a Path),
}

/// Weights that [`Policies::publish`] can make a version of.
pub trait Candidate: Send + Sync {
    /// Writes `adapter_config.json` and `adapter_model.safetensors` into an existing directory.
    fn write(&self, dir: &Path) -> Result<()>;

    /// The arithmetic of [`Self::score`], which decides how far an engine's log-probabilities may differ.
    fn compute(&self) -> Compute {
        Compute::F32
    }

    /// Natural-log probabilities of `ids` after `prompt_ids` under a policy at `temperature`, one for
    /// each of `ids`. Blocks while it computes.
    fn score(
        &self,
        policy: ScoredBy<'_>,
        prompt_ids: &[TokenId],
        ids: &[TokenId],
        temperature: f32,
    ) -> Result<Vec<f32>>;
}

/// Result of a publication that did not fail.
#[derive(Clone, Debug)]
pub enum PublishOutcome {
    /// New requests get the version.
    Published(PolicyRecord),
    /// A check failed, or the canary was rolled back; `checks` and `reason` in its record explain why.
    Rejected(PolicyRecord),
    /// Another version than the candidate's parent is active.
    Superseded,
    /// The process ends during the canary, which the next start continues.
    Suspended,
}

impl PublishOutcome {
    /// Its name, and the number of the version, if there is one.
    pub fn summary(&self) -> (&'static str, Option<u64>) {
        match self {
            Self::Published(record) => ("published", Some(record.version.0)),
            Self::Rejected(record) => ("rejected", Some(record.version.0)),
            Self::Superseded => ("superseded", None),
            Self::Suspended => ("suspended", None),
        }
    }
}

// What an activation of an existing version changes.

/// Reason of an operator's activation after which the trainer learns again from what the versions that are left were
/// trained on.
pub const RELEARN: &str =
    "an operator's return to an earlier version, to learn again from the groups of the later ones";

/// Reason of a version that is served because the files of its successor are unusable.
const RECOVERED: &str = "its successor's files are unusable";

/// Start of the reason of a version that is served because a warning withdrew its successor.
const WITHDRAWN: &str = "its successor was rolled back";

/// What follows in that reason after a recall, which pauses training.
const FOUND_WORSE: &str = "found worse than the anchor, version";

/// The last activation of an existing version. The trainer then continues from that version.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rollback {
    /// Number of such activations since the process started; 0 before the first.
    pub count: u64,
    /// The version that is served now.
    pub version: PolicyVersion,
    /// Whether an operator activated it, which pauses training.
    pub by_operator: bool,
}

/// Whether an operator activated the version, after which training pauses.
pub(crate) fn is_activated(record: &PolicyRecord) -> bool {
    let reason = record.reason.as_deref();
    record.state == PolicyState::Active
        && reason.is_some_and(|reason| reason != RECOVERED && !reason.starts_with(WITHDRAWN))
}

/// Why training pauses, if what came after the version was found worse and it is active again.
pub(crate) fn recalled(record: &PolicyRecord) -> Option<&str> {
    let reason = record.reason.as_deref().filter(|_| record.state == PolicyState::Active)?;
    reason.strip_prefix(WITHDRAWN)?.strip_prefix(": ").filter(|why| why.starts_with(FOUND_WORSE))
}

/// Ledger writes that make `version` the only active one among `records`, and the state of the last one `left`.
fn activation_ops(
    records: &[PolicyRecord],
    version: PolicyVersion,
    reason: &str,
    left: PolicyState,
) -> Vec<Op> {
    let mut ops = Vec::new();
    for record in records {
        let mut changed = record.clone();
        if record.version == version {
            changed.state = PolicyState::Active;
            changed.reason = (!reason.is_empty()).then(|| reason.to_owned());
        } else if record.state == PolicyState::Active {
            changed.state = left;
            if left == PolicyState::RolledBack {
                changed.reason =
                    Some(reason.trim_start_matches(WITHDRAWN).trim_matches([':', ' ']).to_owned());
            }
        } else {
            continue;
        }
        ops.push(Op::Policy(Box::new(changed)));
    }
    ops
}

#[cfg(test)]
mod tests;
