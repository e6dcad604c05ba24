//! Reads metrics out of `/metrics`.

/// One scrape in Prometheus' text format.
#[derive(Clone, Debug)]
pub struct Scrape(String);

impl Scrape {
    /// Keeps the text of a response.
    pub fn new(text: String) -> Self {
        Self(text)
    }

    /// The sum over all label values; `None` if the metric is absent.
    pub fn value(&self, name: &str) -> Option<f64> {
        self.samples(name).map(|(_, value)| value).reduce(|a, b| a + b)
    }

    /// The sum over the samples that have a label of this value; 0 without one.
    pub fn labelled(&self, name: &str, label: &str) -> f64 {
        let label = format!("=\"{label}\"");
        let found = self.samples(name).filter(|(labels, _)| labels.contains(&label));
        found.map(|(_, value)| value).sum()
    }

    /// The `q`-quantile of a histogram without other labels, linear within its bucket as
    /// Prometheus' `histogram_quantile`; `None` while the histogram is empty.
    pub fn quantile(&self, name: &str, q: f64) -> Option<f64> {
        let bucket = format!("{name}_bucket");
        let bound = |labels: &str| labels.split('"').nth(1)?.parse::<f64>().ok();
        let mut buckets: Vec<(f64, f64)> = self
            .samples(&bucket)
            .filter_map(|(labels, count)| Some((bound(labels)?, count)))
            .collect();
        buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        let rank = q * buckets.last().map(|(_, total)| *total).filter(|total| *total > 0.0)?;
        let (mut low, mut below) = (0.0, 0.0);
        for (high, count) in buckets {
            if count >= rank && count > below {
                // The last bucket has no upper bound.
                let inside = (rank - below) / (count - below);
                return Some(if high.is_finite() { low + (high - low) * inside } else { low });
            }
            (low, below) = (high, count);
        }
        None
    }

    /// Labels and value of each sample of a metric. Lines that are not samples are skipped.
    fn samples(&self, name: &str) -> impl Iterator<Item = (&str, f64)> {
        self.0.lines().filter_map(move |line| {
            let (labels, value) = line.strip_prefix(name)?.rsplit_once(' ')?;
            let is_whole_name = labels.is_empty() || labels.starts_with('{');
            Some((labels, value.parse().ok().filter(|_| is_whole_name)?))
        })
    }
}

#[cfg(test)]
mod tests {
    use hone_core::metrics::Metrics;

    use super::*;

    #[test]
    fn reads_the_metrics_of_the_daemon() {
        let metrics = Metrics::new().unwrap();
        metrics.policy_published.inc_by(12);
        metrics.train.kl.set(0.25);
        metrics.feedback.with_label_values(&["recorded"]).inc_by(3);
        metrics.feedback.with_label_values(&["unknown"]).inc_by(2);
        let scrape = Scrape::new(metrics.encode().unwrap());
        assert_eq!(scrape.value("hone_policy_published_total"), Some(12.0));
        assert_eq!(scrape.value("hone_train_kl"), Some(0.25));
        assert_eq!(scrape.value("hone_http_feedback_total"), Some(5.0));
        assert_eq!(scrape.labelled("hone_http_feedback_total", "recorded"), 3.0);
        assert_eq!(scrape.labelled("hone_http_feedback_total", "lost"), 0.0);
        assert_eq!(scrape.value("hone_no_such_thing"), None);
        assert_eq!(scrape.value("hone_train_k"), None);
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
        Scrape::new(metrics.encode().unwrap()).quantile("hone_feedback_to_policy_seconds", q)
    }
}
