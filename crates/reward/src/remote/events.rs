//! Logs and counts the events of calls.

use std::time::Duration;

use hone_core::metrics::CallMetrics;

/// Logs and counts the calls of one part.
pub(crate) struct CallEvents {
    metrics: CallMetrics,
    /// "webhook", "judge" or "grader", for logs.
    what: &'static str,
    pub(crate) route: String,
    pub(crate) part: String,
}

impl CallEvents {
    /// Events of the part `part` of `route`. Both are names from the configuration, so metric labels
    /// stay bounded. The circuit begins closed.
    pub(crate) fn new(what: &'static str, route: &str, part: &str, metrics: CallMetrics) -> Self {
        metrics.circuit_open.with_label_values(&[route, part]).set(0);
        Self { metrics, what, route: route.to_owned(), part: part.to_owned() }
    }

    /// An attempt ended.
    pub(crate) fn attempt(&self, outcome: &'static str, took: Duration) {
        let Self { metrics, what, route, part } = self;
        metrics.requests.with_label_values(&[route.as_str(), part, outcome]).inc();
        metrics.duration.with_label_values(&[route, part]).observe(took.as_secs_f64());
        tracing::debug!(what, route, part, outcome, ?took, "asked for rewards");
    }

    /// The circuit opened or closed.
    pub(super) fn circuit(&self, open: bool) {
        let Self { metrics, what, route, part } = self;
        metrics.circuit_open.with_label_values(&[route, part]).set(i64::from(open));
        if open {
            tracing::warn!(
                what,
                route,
                part,
                "it keeps failing: its rewards are missing until it answers again"
            );
        } else {
            tracing::info!(what, route, part, "it answers again");
        }
    }

    /// `count` values are missing for one reason; `detail` is for the log.
    pub(crate) fn missing(&self, reason: &'static str, count: usize, detail: &str) {
        if count == 0 {
            return;
        }
        let Self { metrics, what, route, part } = self;
        let counter = metrics.missing.with_label_values(&[route.as_str(), part, reason]);
        counter.inc_by(u64::try_from(count).unwrap_or(u64::MAX));
        if reason == "circuit_open" {
            // Logged as a warning when the circuit opened.
            tracing::debug!(what, route, part, count, "rewards are missing");
        } else {
            tracing::warn!(what, route, part, reason, count, detail, "rewards are missing");
        }
    }
}
