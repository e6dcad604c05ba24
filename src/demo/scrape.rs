//! Reads the few figures the demo needs out of `/metrics`.

/// The samples of one scrape in Prometheus' text format.
#[derive(Clone, Debug, Default)]
pub struct Scrape {
    /// `(name, labels as written, value)`
    samples: Vec<(String, String, f64)>,
}

impl Scrape {
    /// Reads what it can; comments and lines that are no sample are skipped.
    pub fn parse(text: &str) -> Self {
        Self { samples: text.lines().filter_map(parse_line).collect() }
    }

    /// The sum over all label values; `None` when the metric is absent.
    pub fn value(&self, name: &str) -> Option<f64> {
        self.samples
            .iter()
            .filter(|(sample, ..)| sample == name)
            .map(|(.., value)| *value)
            .reduce(|a, b| a + b)
    }

    /// The `q`-quantile of a histogram without other labels, linear within its bucket as
    /// Prometheus' `histogram_quantile` has it; `None` while it is empty.
    pub fn quantile(&self, name: &str, q: f64) -> Option<f64> {
        let bucket = format!("{name}_bucket");
        let mut buckets: Vec<(f64, f64)> = self
            .samples
            .iter()
            .filter(|(sample, ..)| *sample == bucket)
            .filter_map(|(_, labels, count)| Some((upper_bound(labels)?, *count)))
            .collect();
        buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        let total = buckets.last()?.1;
        if total <= 0.0 {
            return None;
        }
        let rank = q * total;
        let (mut low, mut below) = (0.0, 0.0);
        for (high, count) in buckets {
            if count >= rank && count > below {
                // Beyond the last finite bound nothing more is known.
                let inside = (rank - below) / (count - below);
                return Some(if high.is_finite() { low + (high - low) * inside } else { low });
            }
            (low, below) = (high, count);
        }
        None
    }
}

fn parse_line(line: &str) -> Option<(String, String, f64)> {
    if line.starts_with('#') {
        return None;
    }
    let (key, value) = line.rsplit_once(' ')?;
    let (name, labels) = match key.split_once('{') {
        Some((name, labels)) => (name, labels.strip_suffix('}')?),
        None => (key, ""),
    };
    Some((name.to_owned(), labels.to_owned(), value.parse().ok()?))
}

fn upper_bound(labels: &str) -> Option<f64> {
    let (_, rest) = labels.split_once("le=\"")?;
    rest.split_once('"')?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use hone_core::metrics::Metrics;

    use super::*;

    #[test]
    fn reads_what_the_daemon_exports() {
        let metrics = Metrics::new().unwrap();
        metrics.policy_published.inc_by(12);
        metrics.train.kl.set(0.25);
        metrics.feedback.with_label_values(&["recorded"]).inc_by(3);
        metrics.feedback.with_label_values(&["unknown"]).inc_by(2);
        let scrape = Scrape::parse(&metrics.encode().unwrap());
        assert_eq!(scrape.value("hone_policy_published_total"), Some(12.0));
        assert_eq!(scrape.value("hone_train_kl"), Some(0.25));
        assert_eq!(scrape.value("hone_http_feedback_total"), Some(5.0));
        assert_eq!(scrape.value("hone_no_such_thing"), None);
    }

    #[test]
    fn quantiles_are_linear_within_a_bucket() {
        let metrics = Metrics::new().unwrap();
        assert_eq!(quantile(&metrics, 0.5), None);
        // Buckets … 0.5, 1, 2.5, 5 …: two observations in (1, 2.5], two in (2.5, 5].
        for seconds in [2.0, 2.0, 3.0, 4.0] {
            metrics.feedback_to_policy.observe(seconds);
        }
        assert_eq!(quantile(&metrics, 0.25), Some(1.75));
        assert_eq!(quantile(&metrics, 0.5), Some(2.5));
        assert_eq!(quantile(&metrics, 1.0), Some(5.0));
        // Above the last bound, only the bound is known.
        for _ in 0..100 {
            metrics.feedback_to_policy.observe(5000.0);
        }
        assert_eq!(quantile(&metrics, 0.9), Some(900.0));
    }

    fn quantile(metrics: &Metrics, q: f64) -> Option<f64> {
        Scrape::parse(&metrics.encode().unwrap()).quantile("hone_feedback_to_policy_seconds", q)
    }
}
