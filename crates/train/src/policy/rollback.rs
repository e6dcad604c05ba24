//! What an activation of an existing version changes.

use std::path::PathBuf;

use hone_core::types::{PolicyRecord, PolicyState, PolicyVersion};
use hone_store::Op;

/// Reason of a version that is served because the files of its successor are unusable.
pub(super) const RECOVERED: &str = "its successor's files are unusable";

/// Start of the reason of a version that is served because a rule withdrew its successor.
pub(super) const WITHDRAWN: &str = "its successor was rolled back";

/// The last activation of an existing version. The trainer then continues from that version.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rollback {
    /// Number of such activations since the process started; 0 before the first.
    pub count: u64,
    /// The version that is served now.
    pub version: PolicyVersion,
    /// Its PEFT directory; `None` for the base.
    pub adapter: Option<PathBuf>,
    /// Whether an operator activated it, which pauses training.
    pub by_operator: bool,
}

/// Whether an operator activated the version, after which training pauses.
pub(crate) fn is_activated(record: &PolicyRecord) -> bool {
    let reason = record.reason.as_deref();
    record.state == PolicyState::Active
        && reason.is_some_and(|reason| reason != RECOVERED && !reason.starts_with(WITHDRAWN))
}

/// Ledger writes that make `version` the only active one among `records`, and change the state of the
/// one that was active to `left`.
pub(super) fn activation_ops(
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
