//! Creates, registers and describes metrics.

use std::collections::BTreeSet;

use prometheus::core::Collector;
use prometheus::proto::{MetricFamily, MetricType};
use prometheus::{Encoder, Error, Registry, Result, TextEncoder};

/// Histogram buckets in seconds for waits inside the process.
pub(super) const FAST: &[f64] =
    &[0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0];
/// Histogram buckets in seconds for the time to the first token.
pub(super) const FIRST_TOKEN: &[f64] =
    &[0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];
pub(super) const REQUEST: &[f64] =
    &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0];
/// Histogram buckets in seconds for training and loading.
pub(super) const SLOW: &[f64] =
    &[0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0];
pub(super) const BATCH: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0];
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

/// A metric as `/metrics` exports it.
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

/// Registers metrics and keeps their descriptions, because Prometheus' registry omits metrics that
/// have no sample yet.
#[derive(Clone, Default)]
pub(super) struct MetricRegistry {
    registry: Registry,
    pub(super) descriptions: Vec<MetricDescription>,
}

impl MetricRegistry {
    /// Registers a metric. Fails if it was not created, or if its name is taken.
    pub(super) fn add<C: Collector + Clone + 'static>(&mut self, metric: Result<C>) -> Result<C> {
        let metric = metric?;
        self.registry.register(Box::new(metric.clone()))?;
        let kind = match metric.collect().first().map(|family| family.get_field_type()) {
            Some(MetricType::COUNTER) => MetricKind::Counter,
            Some(MetricType::HISTOGRAM) => MetricKind::Histogram,
            _ => MetricKind::Gauge,
        };
        self.descriptions.extend(metric.desc().into_iter().map(|d| MetricDescription {
            name: d.fq_name.clone(),
            help: d.help.clone(),
            kind,
            labels: d.variable_labels.clone(),
        }));
        Ok(metric)
    }

    /// Another handle of this registry, with the descriptions of the metrics registered so far.
    pub(super) fn share(&mut self) -> Result<Self> {
        Ok(self.clone())
    }

    /// Every metric that has a sample.
    pub(super) fn gather(&self) -> Vec<MetricFamily> {
        self.registry.gather()
    }

    /// The text format that Prometheus scrapes. A metric that has no labeled sample yet is a 0 without
    /// labels, so that queries and alerts find every name from the first scrape on.
    pub(super) fn encode(&self) -> Result<String> {
        let families = self.registry.gather();
        let mut buffer = Vec::new();
        TextEncoder::new().encode(&families, &mut buffer)?;
        let mut text = String::from_utf8(buffer).map_err(|e| Error::Msg(e.to_string()))?;
        let sampled: BTreeSet<&str> = families.iter().map(|family| family.name()).collect();
        for MetricDescription { name, help, kind, .. } in &self.descriptions {
            if sampled.contains(name.as_str()) {
                continue;
            }
            let (kind, sample) = match kind {
                MetricKind::Counter => ("counter", format!("{name} 0")),
                MetricKind::Gauge => ("gauge", format!("{name} 0")),
                MetricKind::Histogram => {
                    let bucket = format!("{name}_bucket{{le=\"+Inf\"}} 0");
                    ("histogram", format!("{bucket}\n{name}_sum 0\n{name}_count 0"))
                }
            };
            text.push_str(&format!("# HELP {name} {help}\n# TYPE {name} {kind}\n{sample}\n"));
        }
        Ok(text)
    }
}

/// Creates a metric of one of Prometheus' types from its name and help text, a histogram's buckets,
/// and a vector's label names.
macro_rules! new_metric {
    (Histogram, $name:expr, $help:expr, $buckets:expr) => {
        prometheus::Histogram::with_opts(
            prometheus::HistogramOpts::new($name, $help).buckets($buckets.to_vec()),
        )
    };
    (HistogramVec, $name:expr, $help:expr, $buckets:expr, $labels:expr) => {
        prometheus::HistogramVec::new(
            prometheus::HistogramOpts::new($name, $help).buckets($buckets.to_vec()),
            $labels,
        )
    };
    ($type:ident, $name:expr, $help:expr) => {
        prometheus::$type::new($name, $help)
    };
    ($type:ident, $name:expr, $help:expr, $labels:expr) => {
        prometheus::$type::new(prometheus::Opts::new($name, $help), $labels)
    };
}

/// Declares a struct of metrics and its `register` function. Each entry is `field: Type(name, help,
/// ...)` with the arguments of [`new_metric`]; the help text is also the field's documentation.
/// Functions of the registry make the fields after `with`.
macro_rules! metric_set {
    (
        $(#[$doc:meta])*
        $set:ident {
            $($field:ident: $type:ident($name:literal, $help:literal $(, $option:expr)*),)+
        }
        $(with {
            $($(#[$inner_doc:meta])* $vis:vis $inner:ident: $inner_type:ty = $init:expr,)+
        })?
    ) => {
        $(#[$doc])*
        pub struct $set {
            $(
                #[doc = $help]
                pub $field: prometheus::$type,
            )+
            $($($(#[$inner_doc])* $vis $inner: $inner_type,)+)?
        }

        impl $set {
            pub(super) fn register(
                registry: &mut $crate::metrics::registry::MetricRegistry,
            ) -> prometheus::Result<Self> {
                use $crate::metrics::registry::new_metric;

                Ok(Self {
                    $($field: registry.add(new_metric!($type, $name, $help $(, $option)*))?,)+
                    $($($inner: $init(registry)?,)+)?
                })
            }
        }
    };
}

pub(super) use {metric_set, new_metric};
