//! Traces and metrics for an OpenTelemetry collector, as protobuf over HTTP.
//!
//! Spans with the target [`SPANS`] wait in a bounded queue, and the Prometheus metrics of the process are sent as they
//! are. Both are sent on threads of their own, so that nothing waits for the collector: what it does not take is dropped
//! and counted.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use opentelemetry::Key;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::{SpanExporter as OtlpSpans, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value};
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint,
    ResourceMetrics, ScopeMetrics, Sum, metric, number_data_point,
};
use opentelemetry_proto::tonic::resource::v1::Resource as ProtoResource;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, SdkTracerProvider, Span, SpanData, SpanExporter,
    SpanProcessor,
};
use parking_lot::Mutex;
use prometheus::proto::{LabelPair, MetricFamily, MetricType};
use prometheus::{IntCounter, IntCounterVec};
use prost::Message as _;
use tracing::Subscriber;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::registry::LookupSpan;

use hone_core::metrics::{Metrics, SPANS};

use crate::config::Collector;

/// Spans that may wait; further ones are dropped.
const QUEUE: usize = 8192;
/// Spans are sent so often.
const SPAN_INTERVAL: Duration = Duration::from_secs(1);
/// Metrics are sent so often.
const METRICS_INTERVAL: Duration = Duration::from_secs(15);
/// Longest time of a request to the collector.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time at the end of the process for each of spans and metrics.
const GRACE: Duration = Duration::from_secs(2);
const SERVICE: &str = "hone";

/// The exporter of the process, as there is one log of the process.
static EXPORTER: OnceLock<Exporter> = OnceLock::new();

struct Exporter {
    provider: SdkTracerProvider,
    resource: Resource,
    collector: Collector,
    counts: Arc<Counts>,
    /// The thread that sends metrics, and what ends it.
    metrics: Mutex<Option<(Sender<()>, JoinHandle<()>)>>,
}

/// The layer that exports spans; `None` without a collector.
///
/// # Errors
/// If the HTTP client cannot be created.
pub fn layer<S>(collector: Option<&Collector>) -> anyhow::Result<Option<impl Layer<S> + use<S>>>
where
    S: Subscriber + for<'a> LookupSpan<'a> + Send + Sync,
{
    let Some(collector) = collector else { return Ok(None) };
    let exporter = Exporter::new(collector).context("OTEL_EXPORTER_OTLP_ENDPOINT")?;
    let tracer = EXPORTER.get_or_init(|| exporter).provider.tracer(SERVICE);
    let layer = tracing_opentelemetry::layer()
        .with_tracer(tracer)
        .with_location(false)
        .with_threads(false)
        .with_level(false)
        .with_target(false)
        .with_tracked_inactivity(false);
    let layer: Box<dyn Layer<S> + Send + Sync> = Box::new(layer);
    Ok(Some(layer.with_filter(Targets::new().with_target(SPANS, LevelFilter::INFO))))
}

/// Sends these metrics too, if there is a collector and it does not get those of another daemon of this process.
pub fn export_metrics(metrics: &Arc<Metrics>) {
    let Some(exporter) = EXPORTER.get() else { return };
    let mut running = exporter.metrics.lock();
    if running.is_some() {
        return;
    }
    let counters = (metrics.otlp_dropped_spans.clone(), metrics.otlp_failed_exports.clone());
    let _already_set = exporter.counts.counters.set(counters).is_err();
    let (stop, stopped) = channel();
    let sender = MetricsSender {
        metrics: Arc::clone(metrics),
        url: exporter.collector.url("metrics"),
        headers: exporter.collector.headers(),
        resource: exporter.resource.clone(),
        started: unix_nanos(),
        counts: Arc::clone(&exporter.counts),
    };
    let thread = std::thread::Builder::new().name("hone-otlp".to_owned());
    match thread.spawn(move || sender.run(&stopped)) {
        Ok(thread) => *running = Some((stop, thread)),
        Err(error) => tracing::warn!(%error, "metrics are not sent to the collector"),
    }
}

/// Sends what waits, for a few seconds at most.
pub fn shutdown() {
    let Some(exporter) = EXPORTER.get() else { return };
    if exporter.provider.shutdown_with_timeout(GRACE).is_err() {
        tracing::debug!("the last spans are not sent");
    }
    let Some((stop, thread)) = exporter.metrics.lock().take() else { return };
    drop(stop);
    let deadline = std::time::Instant::now() + GRACE;
    while !thread.is_finished() && std::time::Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
}

impl Exporter {
    fn new(collector: &Collector) -> anyhow::Result<Self> {
        let spans = OtlpSpans::builder()
            .with_http()
            .with_endpoint(collector.url("traces"))
            .with_headers(collector.headers())
            .with_timeout(TIMEOUT)
            .build()?;
        let counts = Arc::new(Counts::default());
        let batches = BatchConfigBuilder::default()
            .with_max_queue_size(2 * QUEUE)
            .with_scheduled_delay(SPAN_INTERVAL)
            .build();
        let sender = CountedSpans { inner: spans, counts: Arc::clone(&counts) };
        let batches = BatchSpanProcessor::builder(sender).with_batch_config(batches).build();
        let queue = BoundedSpans { inner: batches, counts: Arc::clone(&counts) };
        let version = opentelemetry::KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
        let resource = || Resource::builder().with_attribute(version.clone());
        // `OTEL_SERVICE_NAME` or `OTEL_RESOURCE_ATTRIBUTES` may have a name.
        let name = resource().build().get(&Key::from_static_str("service.name"));
        let resource = match name {
            Some(name) if !name.as_str().starts_with("unknown_service") => resource().build(),
            _ => resource().with_service_name(SERVICE).build(),
        };
        let provider = SdkTracerProvider::builder()
            .with_span_processor(queue)
            .with_resource(resource.clone())
            .build();
        Ok(Self {
            provider,
            resource,
            collector: collector.clone(),
            counts,
            metrics: Mutex::default(),
        })
    }
}

/// What waits and what was lost.
#[derive(Debug, Default)]
struct Counts {
    waiting: AtomicUsize,
    failing: AtomicBool,
    counters: OnceLock<(IntCounter, IntCounterVec)>,
}

impl Counts {
    fn drop_spans(&self, count: usize) {
        if let Some((dropped, _)) = self.counters.get() {
            dropped.inc_by(count as u64);
        }
    }

    /// Counts a failed request. An outage is logged once.
    fn sent(&self, signal: &str, error: Option<String>) {
        let fails = error.is_some();
        if let (true, Some((_, failed))) = (fails, self.counters.get()) {
            failed.with_label_values(&[signal]).inc();
        }
        match (self.failing.swap(fails, Ordering::Relaxed), error) {
            (false, Some(error)) => {
                tracing::warn!(signal, error, "the OpenTelemetry collector does not take data");
            }
            (true, None) => tracing::info!(signal, "the OpenTelemetry collector takes data again"),
            _ => {}
        }
    }
}

// Spans: a bound of the queue that counts what it drops, before the library's queue, and a count of failures after it.

#[derive(Debug)]
struct BoundedSpans {
    inner: BatchSpanProcessor,
    counts: Arc<Counts>,
}

impl SpanProcessor for BoundedSpans {
    fn on_start(&self, span: &mut Span, context: &opentelemetry::Context) {
        self.inner.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        if !span.span_context.is_sampled() {
            return;
        }
        if self.counts.waiting.fetch_add(1, Ordering::Relaxed) >= QUEUE {
            self.counts.waiting.fetch_sub(1, Ordering::Relaxed);
            self.counts.drop_spans(1);
        } else {
            self.inner.on_end(span);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.inner.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.inner.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.inner.set_resource(resource);
    }
}

#[derive(Debug)]
struct CountedSpans {
    inner: OtlpSpans,
    counts: Arc<Counts>,
}

impl SpanExporter for CountedSpans {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let count = batch.len();
        let result = self.inner.export(batch).await;
        self.counts.waiting.fetch_sub(count, Ordering::Relaxed);
        if result.is_err() {
            self.counts.drop_spans(count);
        }
        self.counts.sent("traces", result.as_ref().err().map(ToString::to_string));
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.inner.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.inner.set_resource(resource);
    }
}

// Metrics: those of Prometheus, as they are.

struct MetricsSender {
    metrics: Arc<Metrics>,
    url: String,
    headers: HashMap<String, String>,
    resource: Resource,
    started: u64,
    counts: Arc<Counts>,
}

impl MetricsSender {
    /// Sends metrics now, in each interval, and when `stopped` is closed.
    fn run(&self, stopped: &Receiver<()>) {
        let client = match reqwest::blocking::Client::builder().timeout(TIMEOUT).build() {
            Ok(client) => client,
            Err(error) => return self.counts.sent("metrics", Some(error.to_string())),
        };
        let mut stopping = false;
        loop {
            let post = client.post(&self.url).header("content-type", "application/x-protobuf");
            let post =
                self.headers.iter().fold(post, |post, (name, value)| post.header(name, value));
            let body = self.request(&self.metrics.families()).encode_to_vec();
            let sent = post.body(body).send().and_then(|response| response.error_for_status());
            self.counts.sent("metrics", sent.err().map(|error| error.to_string()));
            match (stopping, stopped.recv_timeout(METRICS_INTERVAL)) {
                (true, _) => return,
                (false, waited) => stopping = waited != Err(RecvTimeoutError::Timeout),
            }
        }
    }

    fn request(&self, families: &[MetricFamily]) -> ExportMetricsServiceRequest {
        let attributes =
            self.resource.iter().map(|(name, value)| attribute(name.as_str(), &value.as_str()));
        let resource =
            ProtoResource { attributes: attributes.collect(), ..ProtoResource::default() };
        let scope =
            InstrumentationScope { name: SERVICE.to_owned(), ..InstrumentationScope::default() };
        let metrics = converted(families, self.started, unix_nanos());
        let scope = ScopeMetrics { scope: Some(scope), metrics, ..ScopeMetrics::default() };
        let resource_metrics = vec![ResourceMetrics {
            resource: Some(resource),
            scope_metrics: vec![scope],
            ..ResourceMetrics::default()
        }];
        ExportMetricsServiceRequest { resource_metrics }
    }
}

fn converted(
    families: &[MetricFamily],
    start_time_unix_nano: u64,
    time_unix_nano: u64,
) -> Vec<Metric> {
    let cumulative = AggregationTemporality::Cumulative as i32;
    let attributes = |labels: &[LabelPair]| -> Vec<KeyValue> {
        labels.iter().map(|label| attribute(label.name(), label.value())).collect()
    };
    let one = |family: &MetricFamily| {
        let kind = family.get_field_type();
        let number = |metric: &prometheus::proto::Metric| NumberDataPoint {
            attributes: attributes(metric.get_label()),
            start_time_unix_nano,
            time_unix_nano,
            value: Some(number_data_point::Value::AsDouble(match kind {
                MetricType::COUNTER => metric.get_counter().get_value(),
                _ => metric.get_gauge().get_value(),
            })),
            ..NumberDataPoint::default()
        };
        let numbers = || family.get_metric().iter().map(number).collect();
        let data = match kind {
            MetricType::COUNTER => metric::Data::Sum(Sum {
                data_points: numbers(),
                aggregation_temporality: cumulative,
                is_monotonic: true,
            }),
            MetricType::HISTOGRAM => metric::Data::Histogram(Histogram {
                data_points: family
                    .get_metric()
                    .iter()
                    .map(|metric| HistogramDataPoint {
                        attributes: attributes(metric.get_label()),
                        start_time_unix_nano,
                        time_unix_nano,
                        ..buckets(metric.get_histogram())
                    })
                    .collect(),
                aggregation_temporality: cumulative,
            }),
            _ => metric::Data::Gauge(Gauge { data_points: numbers() }),
        };
        Metric {
            name: family.name().to_owned(),
            description: family.help().to_owned(),
            unit: unit(family.name()).to_owned(),
            data: Some(data),
            ..Metric::default()
        }
    };
    families.iter().map(one).collect()
}

/// The counts of a histogram, whose buckets are cumulative in Prometheus and not in OpenTelemetry.
fn buckets(histogram: &prometheus::proto::Histogram) -> HistogramDataPoint {
    let count = histogram.get_sample_count();
    let finite = || histogram.get_bucket().iter().filter(|bucket| bucket.upper_bound().is_finite());
    let mut below = 0;
    let bucket_counts = finite()
        .map(|bucket| bucket.cumulative_count())
        .chain([count])
        .map(|cumulative| cumulative.saturating_sub(std::mem::replace(&mut below, cumulative)))
        .collect();
    HistogramDataPoint {
        count,
        sum: Some(histogram.get_sample_sum()),
        bucket_counts,
        explicit_bounds: finite().map(|bucket| bucket.upper_bound()).collect(),
        ..HistogramDataPoint::default()
    }
}

/// The unit in a metric's name, as UCUM writes it.
fn unit(name: &str) -> &'static str {
    match name.trim_end_matches("_total").rsplit('_').next() {
        Some("seconds") => "s",
        Some("bytes") => "By",
        _ => "1",
    }
}

fn attribute(key: &str, value: &str) -> KeyValue {
    let value = any_value::Value::StringValue(value.to_owned());
    KeyValue {
        key: key.to_owned(),
        value: Some(AnyValue { value: Some(value) }),
        ..KeyValue::default()
    }
}

fn unix_nanos() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_metrics_of_prometheus_are_converted_with_their_labels_and_buckets() {
        let metrics = Metrics::new().unwrap();
        metrics.http_requests.with_label_values(&["/v1/models", "200"]).inc_by(3);
        metrics.http_request_duration.with_label_values(&["/v1/models"]).observe(0.02);
        metrics.http_request_duration.with_label_values(&["/v1/models"]).observe(1e9);
        let converted = converted(&metrics.families(), 1, 2);
        let find = |name: &str| converted.iter().find(|metric| metric.name == name).unwrap();
        let Some(metric::Data::Sum(sum)) = &find("hone_http_requests_total").data else { panic!() };
        let point = &sum.data_points[0];
        assert_eq!(point.value, Some(number_data_point::Value::AsDouble(3.0)));
        assert_eq!(point.attributes, [attribute("code", "200"), attribute("route", "/v1/models")]);
        assert!(sum.is_monotonic);
        let duration = find("hone_http_request_duration_seconds");
        let Some(metric::Data::Histogram(histogram)) = &duration.data else { panic!() };
        let point = &histogram.data_points[0];
        assert_eq!((duration.unit.as_str(), point.count), ("s", 2));
        assert_eq!(point.bucket_counts.len(), point.explicit_bounds.len() + 1);
        assert_eq!(point.bucket_counts.iter().sum::<u64>(), 2);
        assert_eq!(point.bucket_counts.last(), Some(&1));
        let resident = find("hone_memory_resident_bytes");
        assert!(matches!(resident.data, Some(metric::Data::Gauge(_))) && resident.unit == "By");
    }

    #[test]
    fn the_queue_is_bounded_and_counts_what_it_drops() {
        let collector = Collector { endpoint: "http://127.0.0.1:9".to_owned(), headers: None };
        let exporter = Exporter::new(&collector).unwrap();
        let metrics = Metrics::new().unwrap();
        let counters = (metrics.otlp_dropped_spans.clone(), metrics.otlp_failed_exports.clone());
        exporter.counts.counters.set(counters).unwrap();
        exporter.counts.waiting.store(QUEUE, Ordering::Relaxed);
        use opentelemetry::trace::Tracer as _;
        drop(exporter.provider.tracer("t").start("dropped"));
        assert_eq!(metrics.otlp_dropped_spans.get(), 1);
        exporter.counts.waiting.store(0, Ordering::Relaxed);
        drop(exporter.provider.tracer("t").start("refused"));
        let _result = exporter.provider.force_flush();
        assert_eq!(metrics.otlp_dropped_spans.get(), 2);
        assert_eq!(metrics.otlp_failed_exports.with_label_values(&["traces"]).get(), 1);
    }
}
