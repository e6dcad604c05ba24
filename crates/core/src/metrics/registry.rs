//! Creates, registers and describes metrics.

use prometheus::core::Collector;
use prometheus::{
    CounterVec, Encoder, Error, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec,
    IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, Result, TextEncoder,
};

/// Histogram buckets in seconds for waits inside the process.
pub(super) const FAST: &[f64] =
    &[0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0];
/// Histogram buckets in seconds for the time to the first token.
pub(super) const FIRST_TOKEN: &[f64] =
    &[0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];
/// Histogram buckets in seconds for requests.
pub(super) const REQUEST: &[f64] =
    &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0];
/// Histogram buckets in seconds for training and loading.
pub(super) const SLOW: &[f64] =
    &[0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0];
/// Histogram buckets for operations in one commit.
pub(super) const BATCH: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0];
/// Histogram buckets for rewards.
pub(super) const REWARD: &[f64] =
    &[-2.0, -1.0, -0.5, 0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.5, 2.0, 5.0];

/// Prometheus' type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// Never decreases; the name ends in `_total`.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Exported as `_bucket` (with the label `le`), `_sum` and `_count`.
    Histogram,
}

/// A metric as `/metrics` exports it once it has a sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetricDescription {
    /// The full name.
    pub name: String,
    /// The help text.
    pub help: String,
    /// The type.
    pub kind: MetricKind,
    /// The label names, except a histogram's `le`.
    pub labels: Vec<String>,
}

/// Registers metrics and keeps their descriptions, because Prometheus' registry does not export
/// metrics that have no sample yet. Each constructor fails if the name is taken or invalid.
#[derive(Clone, Default)]
pub(super) struct MetricRegistry {
    registry: Registry,
    pub(super) descriptions: Vec<MetricDescription>,
}

impl MetricRegistry {
    /// Another handle of this registry, with the descriptions of the metrics registered so far.
    pub(super) fn share(&mut self) -> Result<Self> {
        Ok(self.clone())
    }

    /// The text format that Prometheus scrapes.
    pub(super) fn encode(&self) -> Result<String> {
        let mut buffer = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut buffer)?;
        String::from_utf8(buffer).map_err(|e| Error::Msg(e.to_string()))
    }

    fn add<C: Collector + Clone + 'static>(&mut self, kind: MetricKind, metric: C) -> Result<C> {
        self.registry.register(Box::new(metric.clone()))?;
        self.descriptions.extend(metric.desc().into_iter().map(|d| MetricDescription {
            name: d.fq_name.clone(),
            help: d.help.clone(),
            kind,
            labels: d.variable_labels.clone(),
        }));
        Ok(metric)
    }

    pub(super) fn counter(&mut self, name: &str, help: &str) -> Result<IntCounter> {
        self.add(MetricKind::Counter, IntCounter::new(name, help)?)
    }

    pub(super) fn counters(
        &mut self,
        name: &str,
        help: &str,
        labels: &[&str],
    ) -> Result<IntCounterVec> {
        self.add(MetricKind::Counter, IntCounterVec::new(Opts::new(name, help), labels)?)
    }

    pub(super) fn float_counters(
        &mut self,
        name: &str,
        help: &str,
        labels: &[&str],
    ) -> Result<CounterVec> {
        self.add(MetricKind::Counter, CounterVec::new(Opts::new(name, help), labels)?)
    }

    pub(super) fn gauge(&mut self, name: &str, help: &str) -> Result<Gauge> {
        self.add(MetricKind::Gauge, Gauge::new(name, help)?)
    }

    pub(super) fn gauges(&mut self, name: &str, help: &str, labels: &[&str]) -> Result<GaugeVec> {
        self.add(MetricKind::Gauge, GaugeVec::new(Opts::new(name, help), labels)?)
    }

    pub(super) fn int_gauge(&mut self, name: &str, help: &str) -> Result<IntGauge> {
        self.add(MetricKind::Gauge, IntGauge::new(name, help)?)
    }

    pub(super) fn int_gauges(
        &mut self,
        name: &str,
        help: &str,
        labels: &[&str],
    ) -> Result<IntGaugeVec> {
        self.add(MetricKind::Gauge, IntGaugeVec::new(Opts::new(name, help), labels)?)
    }

    pub(super) fn histogram(
        &mut self,
        name: &str,
        help: &str,
        buckets: &[f64],
    ) -> Result<Histogram> {
        let options = HistogramOpts::new(name, help).buckets(buckets.to_vec());
        self.add(MetricKind::Histogram, Histogram::with_opts(options)?)
    }

    pub(super) fn histograms(
        &mut self,
        name: &str,
        help: &str,
        buckets: &[f64],
        labels: &[&str],
    ) -> Result<HistogramVec> {
        let options = HistogramOpts::new(name, help).buckets(buckets.to_vec());
        self.add(MetricKind::Histogram, HistogramVec::new(options, labels)?)
    }
}

/// The type that a constructor of [`MetricRegistry`] returns.
macro_rules! metric_type {
    (counter) => {
        prometheus::IntCounter
    };
    (counters) => {
        prometheus::IntCounterVec
    };
    (float_counters) => {
        prometheus::CounterVec
    };
    (gauge) => {
        prometheus::Gauge
    };
    (gauges) => {
        prometheus::GaugeVec
    };
    (int_gauge) => {
        prometheus::IntGauge
    };
    (int_gauges) => {
        prometheus::IntGaugeVec
    };
    (histogram) => {
        prometheus::Histogram
    };
    (histograms) => {
        prometheus::HistogramVec
    };
}

/// Declares a struct of metrics and its `register` function. Each entry is
/// `field: constructor(name, help, ...)` with a constructor of [`MetricRegistry`]; the help text is
/// also the field's documentation. Fields after `with` are made by functions of the registry.
macro_rules! metric_set {
    (
        $(#[$doc:meta])*
        $set:ident {
            $($field:ident: $make:ident($name:literal, $help:literal $(, $option:expr)*),)+
        }
        $(with {
            $($(#[$inner_doc:meta])* $vis:vis $inner:ident: $type:ty = $init:expr,)+
        })?
    ) => {
        $(#[$doc])*
        pub struct $set {
            $(
                #[doc = $help]
                pub $field: $crate::metrics::registry::metric_type!($make),
            )+
            $($($(#[$inner_doc])* $vis $inner: $type,)+)?
        }

        impl $set {
            pub(super) fn register(
                registry: &mut $crate::metrics::registry::MetricRegistry,
            ) -> prometheus::Result<Self> {
                Ok(Self {
                    $($field: registry.$make($name, $help $(, $option)*)?,)+
                    $($($inner: $init(registry)?,)+)?
                })
            }
        }
    };
}

pub(super) use {metric_set, metric_type};
