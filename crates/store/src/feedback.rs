//! Feedback as it is handed to the ledger, and what became of it.

use hone_core::types::{InteractionId, Rating, SampleId, UnixMillis};

/// One piece of feedback, as a client posts it.
#[derive(Clone, Debug)]
pub struct FeedbackEntry {
    /// The completion it judges.
    pub interaction: InteractionId,
    /// Which served choice.
    pub choice: u32,
    /// The reward part.
    pub name: String,
    /// The value; `None` for a remark alone, which trains nothing.
    pub value: Option<f64>,
    /// A remark.
    pub comment: Option<String>,
    /// Not counted twice under the same key.
    pub idempotency_key: Option<String>,
    /// Which API key gave it.
    pub key_id: Option<String>,
    /// When it arrived.
    pub created: UnixMillis,
    /// What the raters of one sample and name come to: given each rater's newest rating, in no
    /// particular order. `None` is missing, not nought.
    pub join: fn(&[Rating]) -> Option<f64>,
}

/// Why a group was dropped that had nothing but feedback in quarantine.
pub const SET_ASIDE: &str = "quarantined";

/// An API key whose feedback is kept but not trained on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quarantined {
    /// The key.
    pub key_id: String,
    /// Why: JSON, for whoever reads it back.
    pub reason: String,
    /// Since when.
    pub since: UnixMillis,
}

/// What became of a [`Op::Feedback`](super::Op::Feedback) or [`Op::Conversation`](super::Op::Conversation).
#[derive(Clone, Debug, PartialEq)]
pub enum FeedbackOutcome {
    /// Recorded for this sample.
    Recorded(SampleId),
    /// The same idempotency key was recorded before, for this sample.
    Duplicate(SampleId),
    /// No such completion.
    UnknownCompletion,
    /// The completion has no such choice.
    UnknownChoice,
    /// Recorded for so many turns of the conversation.
    Credited(usize),
    /// The same idempotency key was recorded before, for so many turns.
    AlreadyCredited(usize),
}

impl FeedbackOutcome {
    /// Whether something was recorded.
    pub(super) fn is_news(&self) -> bool {
        match self {
            Self::Recorded(_) => true,
            Self::Credited(turns) => *turns > 0,
            _ => false,
        }
    }
}
