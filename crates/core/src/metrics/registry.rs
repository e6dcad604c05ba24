//! Makes metrics, registers them and remembers what they are.

use prometheus::{
    CounterVec, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec,
    IntGauge, IntGaugeVec, Opts, Registry,
};

/// What Prometheus calls a metric's type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// Only rises; its name ends in `_total`.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Exported as `_bucket` (with label `le`), `_sum` and `_count`.
    Histogram,
}

/// One metric as `/metrics` shows it once it has a sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetricDescription {
    /// The full name.
    pub name: String,
    /// What it means.
    pub help: String,
    /// Its type.
    pub kind: MetricKind,
    /// The names of its labels; `le` of a histogram is not among them.
    pub labels: Vec<String>,
}

/// Makes collectors and registers them; the first failure is kept.
#[derive(Default)]
pub(crate) struct Maker {
    pub(crate) registry: Registry,
    pub(crate) descriptions: Vec<MetricDescription>,
    pub(crate) error: Option<prometheus::Error>,
}

impl Maker {
    fn add<C: prometheus::core::Collector + Clone + 'static>(
        &mut self,
        kind: MetricKind,
        made: prometheus::Result<C>,
    ) -> Option<C> {
        match made.and_then(|c| self.registry.register(Box::new(c.clone())).map(|()| c)) {
            Ok(collector) => {
                self.descriptions.extend(collector.desc().into_iter().map(|d| MetricDescription {
                    name: d.fq_name.clone(),
                    help: d.help.clone(),
                    kind,
                    labels: d.variable_labels.clone(),
                }));
                Some(collector)
            }
            Err(error) => {
                self.error.get_or_insert(error);
                None
            }
        }
    }

    pub(crate) fn counter(&mut self, name: &str, help: &str) -> Option<IntCounter> {
        self.add(MetricKind::Counter, IntCounter::new(name, help))
    }

    pub(crate) fn counters(
        &mut self,
        name: &str,
        help: &str,
        labels: &[&str],
    ) -> Option<IntCounterVec> {
        self.add(MetricKind::Counter, IntCounterVec::new(Opts::new(name, help), labels))
    }

    pub(crate) fn float_counters(
        &mut self,
        name: &str,
        help: &str,
        labels: &[&str],
    ) -> Option<CounterVec> {
        self.add(MetricKind::Counter, CounterVec::new(Opts::new(name, help), labels))
    }

    pub(crate) fn gauge(&mut self, name: &str, help: &str) -> Option<Gauge> {
        self.add(MetricKind::Gauge, Gauge::new(name, help))
    }

    pub(crate) fn gauges(&mut self, name: &str, help: &str, labels: &[&str]) -> Option<GaugeVec> {
        self.add(MetricKind::Gauge, GaugeVec::new(Opts::new(name, help), labels))
    }

    pub(crate) fn int_gauge(&mut self, name: &str, help: &str) -> Option<IntGauge> {
        self.add(MetricKind::Gauge, IntGauge::new(name, help))
    }

    pub(crate) fn int_gauges(
        &mut self,
        name: &str,
        help: &str,
        labels: &[&str],
    ) -> Option<IntGaugeVec> {
        self.add(MetricKind::Gauge, IntGaugeVec::new(Opts::new(name, help), labels))
    }

    pub(crate) fn histogram(
        &mut self,
        name: &str,
        help: &str,
        buckets: &[f64],
    ) -> Option<Histogram> {
        let opts = HistogramOpts::new(name, help).buckets(buckets.to_vec());
        self.add(MetricKind::Histogram, Histogram::with_opts(opts))
    }

    pub(crate) fn histograms(
        &mut self,
        name: &str,
        help: &str,
        buckets: &[f64],
        labels: &[&str],
    ) -> Option<HistogramVec> {
        let opts = HistogramOpts::new(name, help).buckets(buckets.to_vec());
        self.add(MetricKind::Histogram, HistogramVec::new(opts, labels))
    }
}
