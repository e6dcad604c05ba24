//! How old the samples of a batch may be, in policy versions.

use std::sync::Arc;

use hone_core::types::{Lineage, PolicyVersion};

use crate::config::TrainConfig;

/// How many versions ago a sample's policy was the one that the trainer continues from.
#[derive(Clone, Debug)]
pub(crate) struct VersionAges {
    /// The tree of versions.
    pub(crate) lineage: Arc<Lineage>,
    /// The newest version that the trainer's weights descend from.
    pub(crate) head: PolicyVersion,
    /// Versions that are being published on top of `head`.
    pub(crate) ahead: u64,
}

impl VersionAges {
    /// The age of a version; `None` if the weights do not descend from it, for example because an
    /// operator activated one of its ancestors.
    pub(crate) fn of(&self, version: PolicyVersion) -> Option<u64> {
        Some(self.lineage.age(self.head, version)? + self.ahead)
    }
}

/// Reason of a dropped group with a sample of a version that the weights do not descend from.
pub(super) const ABANDONED: &str = "abandoned";
/// Reason of a dropped group with a sample of a version that is too many versions old, or from which
/// the policy has moved too far away.
pub(crate) const STALE: &str = "stale";

/// The limits on the age of samples, in versions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StalenessLimits {
    /// `train.max_staleness`, beyond which a sample is late.
    pub(crate) graded: u64,
    /// `train.feedback_max_staleness`, for groups of ratings alone.
    pub(crate) rated: u64,
}

impl StalenessLimits {
    /// The configured limits.
    pub(crate) fn new(config: &TrainConfig) -> Self {
        Self { graded: config.max_staleness, rated: config.feedback_max_staleness }
    }

    /// The limit of a group of ratings alone, or of another group.
    pub(super) fn of(self, is_rated: bool) -> u64 {
        if is_rated { self.rated } else { self.graded }
    }
}
