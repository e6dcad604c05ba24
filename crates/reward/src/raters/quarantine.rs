//! Why a key's feedback is set aside.

use serde::{Deserialize, Serialize};

/// Why a key's feedback does not count.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "rule", rename_all = "snake_case")]
pub enum Reason {
    /// Somebody said so.
    ByHand {
        /// What they wrote.
        note: String,
    },
}
