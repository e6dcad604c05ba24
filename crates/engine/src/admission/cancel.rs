//! The end of a running sequence before its last token.

use std::sync::OnceLock;

/// Why a running sequence must end early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelReason {
    /// The reader dropped the generation.
    ReaderGone,
    /// A live request needs the slot.
    Preempted,
    /// The daemon is shutting down.
    ShuttingDown,
}

/// Asks the thread that runs a sequence to end it. The first reason wins.
#[derive(Debug, Default)]
pub struct CancelFlag(OnceLock<CancelReason>);

impl CancelFlag {
    /// Sets the reason; false if one is set already.
    pub fn set(&self, reason: CancelReason) -> bool {
        self.0.set(reason).is_ok()
    }

    /// The reason, if one is set.
    pub fn get(&self) -> Option<CancelReason> {
        self.0.get().copied()
    }
}
