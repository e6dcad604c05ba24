//! `manifest.json`: who the active trainer is, and which policy version the fleet serves.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use hone_core::types::{PolicyRecord, PolicyState, PolicyVersion, UnixMillis, VersionProbe};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tokio::time::sleep;
use uuid::Uuid;

use crate::bucket::{Bucket, BucketError, Tag, failed};

const KEY: &str = "manifest.json";
const FORMAT: u32 = 1;
/// How long the manifest keeps an erasure. A process that was away for longer does not find it.
const ERASURES_KEPT: UnixMillis = 90 * 24 * 3_600_000;
/// Attempts of one change while other writers are first.
const ATTEMPTS: u64 = 50;

/// Why the manifest was not read or changed.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// A request failed, after which the change may have taken effect, or the manifest is wrong.
    #[error(transparent)]
    Bucket(#[from] BucketError),
    /// Another trainer took the lease.
    #[error("the lease with epoch {own} was lost: the manifest has epoch {found}")]
    Fenced {
        /// The epoch of the caller's lease.
        own: u64,
        /// The epoch in the manifest.
        found: u64,
    },
}

/// The right of one trainer to be the active one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseRecord {
    /// The trainer's id.
    pub holder: Uuid,
    /// The trainer's name, for people.
    pub name: String,
    /// Larger than that of each earlier lease; 0 before the first.
    pub epoch: u64,
    /// When it ends by the store's clock.
    pub expires: UnixMillis,
}

/// A copy of the trainer's ledger in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LedgerSnapshot {
    /// The digest under `snapshots/`.
    pub digest: String,
    /// The last sequence of the trainer's log that it contains.
    pub sequence: u64,
    /// When it was made, by the store's clock.
    #[serde(default)]
    pub created: UnixMillis,
}

/// A version together with its files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PublishedVersion {
    /// The ledger's record.
    pub record: PolicyRecord,
    /// The digest under `adapters/`; `None` for the base model.
    pub adapter: Option<String>,
    /// The digest under `states/` of the trainer's state after it.
    pub state: Option<String>,
    /// What a server compares its engine with; `None` if the trainer was restarted after it examined the version.
    #[serde(default)]
    pub probe: Option<VersionProbe>,
}

/// What every process of the fleet erases from its ledger.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FleetErasure {
    /// When an operator asked for it, by the store's clock. No two have the same time.
    pub at: UnixMillis,
    /// What is erased, in the ledger's form.
    pub selection: Value,
}

/// What is served under one name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PolicyEntry {
    /// The version that is served.
    pub active: PolicyVersion,
    /// The version that a share of the traffic gets.
    pub canary: Option<PolicyVersion>,
    /// That share, from 0 to 1.
    pub canary_share: f64,
    /// How often operators decided about versions.
    pub activation: u64,
    /// The last of these decisions that the trainer follows.
    pub applied: u64,
    /// The reason of the last activation.
    pub reason: Option<String>,
    /// Versions whose files are kept.
    pub pinned: BTreeSet<PolicyVersion>,
    /// All versions, ascending.
    pub versions: Vec<PublishedVersion>,
    /// Fields of later versions of Hone, which are kept.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// The content of `manifest.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FleetManifest {
    /// The format version.
    pub format: u32,
    /// The newest lease.
    pub lease: LeaseRecord,
    /// The copy of the ledger that the trainer's log continues.
    pub snapshot: Option<LedgerSnapshot>,
    /// By name; today only `default`.
    pub policies: BTreeMap<String, PolicyEntry>,
    /// What operators erased in the last 90 days, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub erasures: Vec<FleetErasure>,
    /// Fields of later versions of Hone, which are kept.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl Default for FleetManifest {
    fn default() -> Self {
        let (lease, snapshot, policies, erasures, other) = Default::default();
        Self { format: FORMAT, lease, snapshot, policies, erasures, other }
    }
}

impl FleetManifest {
    fn decode((bytes, tag): (Vec<u8>, Tag)) -> Result<(Self, Tag), BucketError> {
        let value: Value = serde_json::from_slice(&bytes).map_err(failed(KEY))?;
        if value["format"] != FORMAT {
            return Err(failed(KEY)("another version of Hone wrote this manifest"));
        }
        Ok((serde_json::from_value(value).map_err(failed(KEY))?, tag))
    }

    /// Reads the manifest; `None` if there is no fleet yet.
    pub async fn load(bucket: &Bucket) -> Result<Option<(Self, Tag)>, BucketError> {
        bucket.get(KEY, None).await?.map(Self::decode).transpose()
    }

    /// Reads the manifest; `None` if it is still the one that `tag` came with.
    pub async fn load_if_changed(
        bucket: &Bucket,
        tag: &Tag,
    ) -> Result<Option<(Self, Tag)>, BucketError> {
        bucket.get(KEY, Some(tag)).await?.map(Self::decode).transpose()
    }

    /// Applies `change` to the newest manifest by compare-and-swap, as often as other writers are first; to an empty
    /// one if there is none. A trainer passes the epoch of its lease, an operator `None`. Returns the written manifest
    /// and what `change` returned.
    ///
    /// `change` sees its own earlier effect if an attempt succeeds and its answer is lost.
    pub async fn update<T>(
        bucket: &Bucket,
        epoch: Option<u64>,
        mut change: impl FnMut(&mut Self) -> Result<T, ManifestError>,
    ) -> Result<(Self, T), ManifestError> {
        for attempt in 0..ATTEMPTS {
            sleep(Duration::from_millis(5 * attempt)).await;
            let (before, tag) = Self::load(bucket).await?.unzip();
            let before = before.unwrap_or_default();
            let found = before.lease.epoch;
            if let Some(own) = epoch.filter(|own| *own != found) {
                return Err(ManifestError::Fenced { own, found });
            }
            let mut manifest = before.clone();
            let value = change(&mut manifest)?;
            if manifest == before && tag.is_some() {
                return Ok((manifest, value));
            }
            let bytes = serde_json::to_vec_pretty(&manifest).map_err(failed(KEY))?;
            // Do not write what cannot be read: JSON has no number that is not finite.
            let _readable: Self = serde_json::from_slice(&bytes).map_err(failed(KEY))?;
            if bucket.swap(KEY, tag, &bytes).await?.is_some() {
                return Ok((manifest, value));
            }
        }
        Err(failed(KEY)("other writers were first each time").into())
    }

    /// Makes a version of a policy the active one, as an operator's decision; ends a canary. Returns the number of
    /// this activation.
    pub fn activate(
        &mut self,
        policy: &str,
        version: PolicyVersion,
        reason: &str,
    ) -> Result<u64, BucketError> {
        let entry = self.policies.get_mut(policy).filter(|entry| {
            entry.versions.iter().any(|PublishedVersion { record, adapter, .. }| {
                let has_files = adapter.is_some() || version == PolicyVersion::BASE;
                record.version == version && record.state.was_promoted() && has_files
            })
        });
        let unknown =
            || format!("policy {policy:?} has no version {version} that was active and has files");
        let entry = entry.ok_or_else(unknown).map_err(failed(KEY))?;
        for PublishedVersion { record, .. } in &mut entry.versions {
            record.state = match record.state {
                _ if record.version == version => PolicyState::Active,
                PolicyState::Active => PolicyState::Retired,
                PolicyState::Canary => PolicyState::RolledBack,
                other => other,
            };
        }
        (entry.active, entry.canary, entry.canary_share) = (version, None, 0.0);
        entry.reason = Some(reason.to_owned());
        entry.activation += 1;
        Ok(entry.activation)
    }

    /// Keeps the files of a version of a policy, or lets them be deleted again, as an operator's decision.
    ///
    /// # Errors
    /// If there is no such version.
    pub fn pin(
        &mut self,
        policy: &str,
        version: PolicyVersion,
        pinned: bool,
    ) -> Result<(), BucketError> {
        let entry = self.policies.get_mut(policy);
        let entry =
            entry.filter(|entry| entry.versions.iter().any(|v| v.record.version == version));
        let unknown = || format!("policy {policy:?} has no version {version}");
        let entry = entry.ok_or_else(unknown).map_err(failed(KEY))?;
        let changed =
            if pinned { entry.pinned.insert(version) } else { entry.pinned.remove(&version) };
        entry.activation += u64::from(changed);
        Ok(())
    }

    /// Has every process erase a selection. `now` is the time of the store's clock.
    pub fn erase(&mut self, selection: Value, now: UnixMillis) {
        self.erasures.retain(|erasure| erasure.at + ERASURES_KEPT > now);
        let last = self.erasures.last().map_or(0, |erasure| erasure.at);
        self.erasures.push(FleetErasure { at: now.max(last + 1), selection });
    }
}

#[cfg(test)]
mod tests {
    use futures::future::join_all;
    use hone_core::testing::policy;

    use super::*;
    #[tokio::test]
    async fn concurrent_updates_all_count_and_a_former_holder_is_fenced() {
        let bucket = Bucket::memory();
        let change = |manifest: &mut FleetManifest| {
            manifest.policies.entry("default".to_owned()).or_default().activation += 1;
            Ok(())
        };
        let all = (0..16).map(|_| FleetManifest::update(&bucket, None, change));
        assert!(join_all(all).await.iter().all(Result::is_ok));
        let (manifest, tag) = FleetManifest::load(&bucket).await.unwrap().unwrap();
        assert_eq!(manifest.policies["default"].activation, 16);
        FleetManifest::update(&bucket, Some(0), |_| Ok(())).await.unwrap();
        assert_eq!(FleetManifest::load_if_changed(&bucket, &tag).await.unwrap(), None);
        let raise = |manifest: &mut FleetManifest| {
            manifest.lease.epoch = 3;
            Ok(())
        };
        FleetManifest::update(&bucket, Some(0), raise).await.unwrap();
        assert!(FleetManifest::load_if_changed(&bucket, &tag).await.unwrap().is_some());
        let fenced = FleetManifest::update(&bucket, Some(2), change).await;
        assert!(matches!(fenced, Err(ManifestError::Fenced { own: 2, found: 3 })));
    }

    #[test]
    fn an_operator_activates_a_version_that_was_active() {
        let version = |number, state| {
            let record = PolicyRecord { state, ..policy(number, 0) };
            PublishedVersion {
                record,
                adapter: Some(format!("{number}")),
                state: None,
                probe: None,
            }
        };
        let states = [PolicyState::Retired, PolicyState::Active, PolicyState::Canary];
        let versions = (1..).zip(states).map(|(number, state)| version(number, state)).collect();
        let canary = Some(PolicyVersion(3));
        let entry =
            PolicyEntry { active: PolicyVersion(2), canary, versions, ..PolicyEntry::default() };
        let mut manifest = FleetManifest::default();
        manifest.policies.insert("default".to_owned(), entry);
        let mut activate = |policy, version| manifest.activate(policy, PolicyVersion(version), "r");
        for (policy, version) in [("other", 1), ("default", 9), ("default", 3)] {
            let refused = activate(policy, version).unwrap_err().to_string();
            assert!(refused.contains("has no version"), "{refused}");
        }
        assert_eq!(activate("default", 1).unwrap(), 1);
        let entry = &manifest.policies["default"];
        assert_eq!((entry.active, entry.canary), (PolicyVersion(1), None));
        assert_eq!(entry.reason.as_deref(), Some("r"));
        let states: Vec<_> = entry.versions.iter().map(|v| v.record.state).collect();
        assert_eq!(states, [PolicyState::Active, PolicyState::Retired, PolicyState::RolledBack]);
    }

    #[test]
    fn erasures_have_different_times_and_old_ones_are_forgotten() {
        let mut manifest = FleetManifest::default();
        for now in [1_000, 1_000, 900, ERASURES_KEPT + 1_000] {
            manifest.erase(now.into(), now);
        }
        let times: Vec<_> = manifest.erasures.iter().map(|erasure| erasure.at).collect();
        assert_eq!(times, [1_001, 1_002, ERASURES_KEPT + 1_000]);
    }

    #[tokio::test]
    async fn unknown_fields_are_kept_and_other_formats_refused() {
        let text = r#"{"format":1,"policies":{"default":{"active":0,"later":[1]}},"new":true,
            "lease":{"holder":"00000000-0000-0000-0000-000000000001","name":"a","epoch":4,"expires":9},
            "snapshot":{"digest":"d","sequence":7}}"#;
        let bucket = Bucket::memory();
        bucket.put(KEY, text.as_bytes()).await.unwrap();
        let (manifest, _) = FleetManifest::load(&bucket).await.unwrap().unwrap();
        assert_eq!((manifest.lease.epoch, manifest.snapshot.as_ref().unwrap().sequence), (4, 7));
        let written = serde_json::to_value(&manifest).unwrap();
        assert_eq!(written["new"], true);
        assert_eq!(written["policies"]["default"]["later"][0], 1);
        assert_eq!(serde_json::from_value::<FleetManifest>(written).unwrap(), manifest);
        bucket.put(KEY, br#"{"format":2}"#).await.unwrap();
        let later = FleetManifest::load(&bucket).await.unwrap_err().to_string();
        assert!(later.contains("another version of Hone"), "{later}");
    }
}
