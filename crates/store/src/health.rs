//! Whether the writer can write, for readiness checks and for clients that would wait in vain.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How long a client waits for the ledger, and how long a commit takes before the disk counts as hung.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// Why writes to the ledger do not succeed at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreTrouble {
    /// The writer's thread has ended.
    #[error("the ledger's writer has ended")]
    Ended,
    /// The disk refused the last write. Those without a waiting caller are tried again.
    #[error("the last write to the ledger failed")]
    Failing,
    /// A write has not ended for 10 seconds.
    #[error("a write to the ledger has not ended for {} seconds", PATIENCE.as_secs())]
    Hung,
}

#[derive(Default)]
pub(crate) struct WriterHealth(Mutex<HealthState>);

#[derive(Default)]
struct HealthState {
    /// Beginning of the transaction that is being written.
    writing_since: Option<Instant>,
    failing: bool,
}

impl WriterHealth {
    pub(crate) fn begin(&self) {
        self.0.lock().writing_since = Some(Instant::now());
    }

    /// The transaction ended. `failed` is whether the disk refused it.
    pub(crate) fn end(&self, failed: bool) {
        *self.0.lock() = HealthState { writing_since: None, failing: failed };
    }

    /// Why the running or the last transaction does not succeed.
    pub(crate) fn trouble(&self) -> Option<StoreTrouble> {
        self.trouble_after(PATIENCE)
    }

    pub(crate) fn trouble_after(&self, patience: Duration) -> Option<StoreTrouble> {
        let state = self.0.lock();
        if state.writing_since.is_some_and(|since| since.elapsed() >= patience) {
            return Some(StoreTrouble::Hung);
        }
        state.failing.then_some(StoreTrouble::Failing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_and_hung_writes_are_troubles() {
        let health = WriterHealth::default();
        assert_eq!(health.trouble(), None);
        health.begin();
        assert_eq!(health.trouble(), None);
        assert_eq!(health.trouble_after(Duration::ZERO), Some(StoreTrouble::Hung));
        health.end(true);
        assert_eq!(health.trouble(), Some(StoreTrouble::Failing));
        health.begin();
        assert_eq!(health.trouble(), Some(StoreTrouble::Failing));
        health.end(false);
        assert_eq!(health.trouble(), None);
    }
}
