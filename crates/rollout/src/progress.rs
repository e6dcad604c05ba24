//! Counts of the groups since the start, from which a run sees that it cannot learn.

use std::time::Instant;

use hone_reward::MissingPart;

/// The groups since the start.
#[derive(Clone, Debug, Default)]
pub struct RolloutProgress {
    /// Number of groups that the trainer can use.
    pub ready: u64,
    /// Number of groups without any value.
    pub unscored: u64,
    /// When the first of them ended.
    pub unscored_since: Option<Instant>,
    /// The parts of the last of them, all of which were missing.
    pub missing: Vec<MissingPart>,
}
