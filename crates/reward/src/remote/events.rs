//! What happens to calls: each event's log line and metric together.

use std::time::Duration;

use hone_core::metrics::CallMetrics;

/// Tells of one part's calls.
pub(crate) struct Events {
    metrics: CallMetrics,
    /// "webhook" or "judge", for people.
    what: &'static str,
    route: String,
    part: String,
}

impl Events {
    /// Of the part `part` of `route`, both named by the configuration; its circuit is closed.
    pub(crate) fn new(what: &'static str, route: &str, part: &str, metrics: CallMetrics) -> Self {
        metrics.circuit_open.with_label_values(&[route, part]).set(0);
        Self { metrics, what, route: route.to_owned(), part: part.to_owned() }
    }

    /// The route's name.
    pub(crate) fn route(&self) -> &str {
        &self.route
    }

    /// The part's name.
    pub(crate) fn part(&self) -> &str {
        &self.part
    }

    /// One request ended.
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
            tracing::warn!(what, route, part, "it keeps failing: its rewards are missing for now");
        } else {
            tracing::info!(what, route, part, "it answers again");
        }
    }

    /// So many values could not be had, for one reason; `detail` says more.
    pub(crate) fn missing(&self, reason: &'static str, count: usize, detail: &str) {
        if count == 0 {
            return;
        }
        let Self { metrics, what, route, part } = self;
        let counter = metrics.missing.with_label_values(&[route.as_str(), part, reason]);
        counter.inc_by(u64::try_from(count).unwrap_or(u64::MAX));
        if reason == "circuit_open" {
            // Said once, when it opened.
            tracing::debug!(what, route, part, count, "rewards are missing");
        } else {
            tracing::warn!(what, route, part, reason, count, detail, "rewards are missing");
        }
    }
}
