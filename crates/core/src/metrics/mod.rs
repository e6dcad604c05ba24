//! Every metric, named once, in one registry of our own.

mod registry;
mod remote;
mod train;

use prometheus::{
    Encoder, Gauge, Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec,
    Registry, TextEncoder,
};
use registry::Maker;

pub use registry::{MetricDescription, MetricKind};
pub use remote::{CallMetrics, JudgeMetrics};
pub use train::TrainMetrics;

/// The registry and every metric in it. Cheap to share behind an `Arc`.
///
/// Labels are bounded: no ids, keys, users or raw paths.
#[expect(missing_docs, reason = "the help text in `Metrics::new` is the documentation")]
pub struct Metrics {
    registry: Registry,
    descriptions: Vec<MetricDescription>,

    pub http_requests: IntCounterVec,
    pub http_request_duration: HistogramVec,
    pub http_in_flight: IntGauge,
    pub http_time_to_first_token: HistogramVec,
    pub http_completion_tokens: IntCounter,
    pub http_prompt_tokens: IntCounter,
    pub http_disconnects: IntCounter,

    pub engine_slots: IntGaugeVec,
    pub engine_waiting: IntGaugeVec,
    pub engine_tokens: IntCounterVec,
    pub engine_rejected: IntCounter,
    pub engine_preempted: IntCounter,
    pub engine_failures: IntCounter,

    pub store_commit_duration: Histogram,
    pub store_batch_operations: Histogram,
    pub store_queue: IntGauge,
    pub store_dropped: IntCounterVec,
    pub store_records: IntCounterVec,

    pub feedback: IntCounterVec,
    pub reward_value: HistogramVec,
    pub reward_missing: IntCounterVec,
    pub reward_feedback_capped: IntCounterVec,
    pub reward_quarantined_keys: IntGauge,
    pub reward_webhook: CallMetrics,
    pub reward_judge: JudgeMetrics,

    pub rollout_groups: IntCounterVec,
    pub rollout_in_flight: IntGauge,
    pub rollout_queue: IntGauge,
    pub rollout_skipped: IntCounterVec,
    pub rollout_samples: IntCounter,

    pub train: TrainMetrics,

    pub policy_version: IntGauge,
    pub policy_published: IntCounter,
    pub policy_rejected: IntCounterVec,
    pub policy_rollbacks: IntCounter,
    pub policy_swap_duration: Histogram,
    pub policy_load_duration: Histogram,
    pub policy_parity_difference: Gauge,
    pub feedback_to_policy: Histogram,
}

const FAST: &[f64] =
    &[0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0];
const FIRST_TOKEN: &[f64] =
    &[0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];
const REQUEST: &[f64] =
    &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0];
const SLOW: &[f64] = &[0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0];
const BATCH: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0];
const REWARD: &[f64] = &[-2.0, -1.0, -0.5, 0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.5, 2.0, 5.0];

impl Metrics {
    /// Makes and registers every metric.
    ///
    /// # Errors
    /// Only if two metrics here share a name, which a test rules out.
    pub fn new() -> Result<Self, prometheus::Error> {
        let mut m = Maker::default();
        let made = Self::build(&mut m);
        match (made, m.error) {
            (_, Some(error)) => Err(error),
            (Some(metrics), None) => Ok(metrics),
            (None, None) => Err(prometheus::Error::Msg("a metric was not made".to_owned())),
        }
    }

    fn build(m: &mut Maker) -> Option<Self> {
        let build_info = m.int_gauges(
            "hone_build_info",
            "Constant 1, labelled with the running version.",
            &["version"],
        )?;
        build_info.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        Some(Self {
            http_requests: m.counters(
                "hone_http_requests_total",
                "HTTP requests answered, by route pattern and status code.",
                &["route", "code"],
            )?,
            http_request_duration: m.histograms(
                "hone_http_request_duration_seconds",
                "Time from request to the last byte of the answer.",
                REQUEST,
                &["route"],
            )?,
            http_in_flight: m
                .int_gauge("hone_http_requests_in_flight", "HTTP requests being answered.")?,
            http_time_to_first_token: m.histograms(
                "hone_http_time_to_first_token_seconds",
                "Time from a chat request to its first token, by what the trainer was doing.",
                FIRST_TOKEN,
                &["trainer"],
            )?,
            http_completion_tokens: m
                .counter("hone_http_completion_tokens_total", "Tokens served to clients.")?,
            http_prompt_tokens: m
                .counter("hone_http_prompt_tokens_total", "Prompt tokens of clients.")?,
            http_disconnects: m.counter(
                "hone_http_disconnects_total",
                "Clients that hung up before their completion ended.",
            )?,
            engine_slots: m.int_gauges(
                "hone_engine_sequences",
                "Sequences running, by priority.",
                &["priority"],
            )?,
            engine_waiting: m.int_gauges(
                "hone_engine_waiting_requests",
                "Requests waiting for a slot, by priority.",
                &["priority"],
            )?,
            engine_tokens: m.counters(
                "hone_engine_tokens_total",
                "Tokens generated, by priority.",
                &["priority"],
            )?,
            engine_rejected: m.counter(
                "hone_engine_rejected_requests_total",
                "Live requests refused because the queue was full.",
            )?,
            engine_preempted: m.counter(
                "hone_engine_preempted_sequences_total",
                "Shadow sequences that gave way to live traffic.",
            )?,
            engine_failures: m
                .counter("hone_engine_failures_total", "Generations that failed in the engine.")?,
            store_commit_duration: m.histogram(
                "hone_store_commit_duration_seconds",
                "Time of one group commit.",
                FAST,
            )?,
            store_batch_operations: m.histogram(
                "hone_store_batch_operations",
                "Operations in one group commit.",
                BATCH,
            )?,
            store_queue: m.int_gauge("hone_store_queue_operations", "Writes waiting.")?,
            store_dropped: m.counters(
                "hone_store_dropped_records_total",
                "Records shed because the queue was full, by table.",
                &["table"],
            )?,
            store_records: m.counters(
                "hone_store_records_total",
                "Records committed, by table.",
                &["table"],
            )?,
            feedback: m.counters(
                "hone_http_feedback_total",
                "Feedback posts, by outcome.",
                &["outcome"],
            )?,
            reward_value: m.histograms(
                "hone_reward_value",
                "Values of reward parts, by route and part.",
                REWARD,
                &["route", "part"],
            )?,
            reward_missing: m.counters(
                "hone_reward_missing_total",
                "Reward parts that could not be scored, by route and part.",
                &["route", "part"],
            )?,
            reward_feedback_capped: m.counters(
                "hone_reward_feedback_capped_total",
                "Pieces of feedback that counted less or not at all, since their key gave more than \
                 its share of a batch, by route and part.",
                &["route", "part"],
            )?,
            reward_quarantined_keys: m.int_gauge(
                "hone_reward_quarantined_keys",
                "API keys whose feedback is kept but not trained on.",
            )?,
            reward_webhook: remote::webhook(m)?,
            reward_judge: remote::judge(m)?,
            rollout_groups: m.counters(
                "hone_rollout_groups_total",
                "Groups completed, by prompt source.",
                &["source"],
            )?,
            rollout_in_flight: m
                .int_gauge("hone_rollout_in_flight_groups", "Groups being sampled or scored.")?,
            rollout_queue: m
                .int_gauge("hone_rollout_queue_prompts", "Prompts waiting for a group.")?,
            rollout_skipped: m.counters(
                "hone_rollout_skipped_prompts_total",
                "Prompts that got no group, by reason.",
                &["reason"],
            )?,
            rollout_samples: m
                .counter("hone_rollout_samples_total", "Shadow samples generated.")?,
            train: train::train(m)?,
            policy_version: m.int_gauge("hone_policy_version", "The version being served.")?,
            policy_published: m.counter("hone_policy_published_total", "Versions published.")?,
            policy_rejected: m.counters(
                "hone_policy_rejected_total",
                "Versions never served, by reason.",
                &["reason"],
            )?,
            policy_rollbacks: m
                .counter("hone_policy_rollbacks_total", "Versions activated by hand.")?,
            policy_swap_duration: m.histogram(
                "hone_policy_swap_duration_seconds",
                "Time for which the exchange of weights held anything up.",
                FAST,
            )?,
            policy_load_duration: m.histogram(
                "hone_policy_load_duration_seconds",
                "Time to load a version beside the active one, idle colour's drain included.",
                SLOW,
            )?,
            policy_parity_difference: m.gauge(
                "hone_policy_parity_logprob_difference",
                "Mean |served - trained| log-probability of the last version's probe.",
            )?,
            feedback_to_policy: m.histogram(
                "hone_feedback_to_policy_seconds",
                "Time from feedback to the first served version trained on it.",
                SLOW,
            )?,
            registry: m.registry.clone(),
            descriptions: std::mem::take(&mut m.descriptions),
        })
    }

    /// Every metric, those without a sample yet included, which [`Self::encode`] leaves out.
    pub fn descriptions(&self) -> &[MetricDescription] {
        &self.descriptions
    }

    /// The text that `/metrics` answers.
    ///
    /// # Errors
    /// If a metric cannot be encoded.
    pub fn encode(&self) -> Result<String, prometheus::Error> {
        let mut buffer = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut buffer)?;
        String::from_utf8(buffer).map_err(|e| prometheus::Error::Msg(e.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use crate::metrics::registry::MetricKind;
    use crate::metrics::*;

    fn is_name(text: &str) -> bool {
        text.starts_with(|c: char| c.is_ascii_lowercase())
            && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
    }

    #[test]
    fn names_are_unique_and_follow_the_conventions() {
        let metrics = Metrics::new().unwrap();
        let all = metrics.descriptions();
        let names: BTreeSet<&str> = all.iter().map(|d| d.name.as_str()).collect();
        assert_eq!(names.len(), all.len());
        assert!(all.len() > 50, "{} metrics", all.len());
        for d in all {
            assert!(is_name(&d.name) && d.name.starts_with("hone_"), "{}", d.name);
            assert_eq!(d.name.ends_with("_total"), d.kind == MetricKind::Counter, "{}", d.name);
            assert!(d.help.ends_with('.'), "{}: help is not a sentence: {}", d.name, d.help);
            for label in &d.labels {
                assert!(is_name(label) && label != "le", "{}: label {label}", d.name);
            }
            // A suffix that a histogram's own series would claim.
            for suffix in ["_bucket", "_sum", "_count"] {
                assert!(!d.name.ends_with(suffix), "{}", d.name);
            }
        }
    }

    #[test]
    fn encodes_what_it_describes() {
        let metrics = Metrics::new().unwrap();
        metrics.http_requests.with_label_values(&["/v1/models", "200"]).inc();
        metrics.http_time_to_first_token.with_label_values(&["idle"]).observe(0.02);
        let text = metrics.encode().unwrap();
        assert!(text.contains("hone_http_requests_total{code=\"200\",route=\"/v1/models\"} 1\n"));
        assert!(text.contains(
            "hone_http_time_to_first_token_seconds_bucket{trainer=\"idle\",le=\"0.025\"} 1\n"
        ));
        assert!(text.contains("hone_build_info{version="));
        let described: BTreeSet<&str> =
            metrics.descriptions().iter().map(|d| d.name.as_str()).collect();
        for line in text.lines().filter_map(|l| l.strip_prefix("# TYPE ")) {
            let name = line.split(' ').next().unwrap();
            assert!(described.contains(name), "{name} is exported but not described");
        }
    }
}
