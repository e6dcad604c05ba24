//! The metrics of the service.

use parking_lot::RwLock;
use prometheus::proto::MetricFamily;
use prometheus::{HistogramOpts, HistogramVec, IntCounterVec, IntGauge, IntGaugeVec, Opts, Result};

use crate::{files, memory};

use super::registry::{
    BATCH, FAST, FIRST_TOKEN, MetricDescription, MetricRegistry, REQUEST, REWARD, SLOW, metric_set,
};

metric_set! {
    /// Every metric of the process. Share it with an `Arc`.
    ///
    /// Label values are bounded: no ids, keys, users or raw paths.
    Metrics {
        build_info: IntGaugeVec("hone_build_info",
            "Constant 1, labeled with the running version.", &["version"]),

        memory_planned: IntGaugeVec("hone_memory_planned_bytes",
            "Memory that the plan predicts for each part of the process.", &["part"]),
        memory_planned_peak: IntGauge("hone_memory_planned_peak_bytes",
            "Peak of the process's memory that the plan predicts."),
        memory_resident: IntGauge("hone_memory_resident_bytes",
            "Resident memory of the process when the metrics were read."),
        memory_resident_peak: IntGauge("hone_memory_resident_peak_bytes",
            "Largest resident memory of the process since its start."),

        device_memory: IntGaugeVec("hone_device_memory_bytes",
            "Memory of the GPU that each part of the process has.", &["part"]),
        device_memory_free: IntGauge("hone_device_memory_free_bytes",
            "Free memory of the GPU when the metrics were read."),
        device_busy: CounterVec("hone_device_busy_seconds_total",
            "Time of passes on the GPU, copies included: those of the native engine, and those of steps.", &["kind"]),

        data_free: IntGauge("hone_data_free_bytes",
            "Free bytes of the file system of the data directory when the metrics were read."),

        open_files: IntGauge("hone_process_open_files",
            "Files and sockets that the process had open when the metrics were read."),
        open_files_limit: IntGauge("hone_process_open_files_limit",
            "Files and sockets that the process may have open; 0 if there is no limit."),

        otlp_dropped_spans: IntCounter("hone_otlp_dropped_spans_total",
            "Spans that were not sent, because the queue was full or the collector did not take them."),
        otlp_failed_exports: IntCounterVec("hone_otlp_failed_exports_total",
            "Requests that the collector did not take, by signal.", &["signal"]),

        tracker_failed_requests: IntCounter("hone_tracker_failed_requests_total",
            "Requests that the server of run.tracker did not take."),

        http_requests: IntCounterVec("hone_http_requests_total",
            "HTTP requests answered, by route pattern and status code.", &["route", "code"]),
        http_request_duration: HistogramVec("hone_http_request_duration_seconds",
            "Time from the arrival of a request to the last byte of its response.",
            REQUEST, &["route"]),
        http_in_flight: IntGauge("hone_http_requests_in_flight",
            "HTTP requests that have not been answered yet."),
        http_time_to_first_token: HistogramVec("hone_http_time_to_first_token_seconds",
            "Time from the arrival of a chat request to its first token, by the trainer's state.",
            FIRST_TOKEN, &["trainer"]),
        http_completion_tokens: IntCounter("hone_http_completion_tokens_total",
            "Completion tokens sent to clients."),
        http_prompt_tokens: IntCounter("hone_http_prompt_tokens_total",
            "Prompt tokens received from clients."),
        http_connections: IntGauge("hone_http_connections",
            "Open connections of clients."),
        http_closed_connections: IntCounterVec("hone_http_closed_connections_total",
            "Connections that the server closed: those without a TLS handshake, without a whole request, \
             without a next one, whose client did not read, and idle ones while all were taken, by reason.", &["reason"]),
        http_limited: IntCounterVec("hone_http_limited_requests_total",
            "Requests refused by a limit of the server or of their API key, by limit.", &["reason"]),
        http_key_expiry: Gauge("hone_http_key_expiry_timestamp_seconds",
            "Unix time at which the next API key expires; 0 if none will."),
        http_expired_keys: IntGauge("hone_http_expired_keys",
            "API keys in the configuration that are expired."),
        http_certificate_expiry: Gauge("hone_http_certificate_expiry_timestamp_seconds",
            "Unix time at which the first certificate of server.tls expires; 0 without TLS."),
        http_disconnects: IntCounter("hone_http_disconnects_total",
            "Clients that disconnected before their completion ended."),
        http_continued_prompts: IntCounterVec("hone_http_continued_prompts_total",
            "Prompts with messages of the assistant, by what became of the tokens of recorded ones.",
            &["outcome"]),
        feedback: IntCounterVec("hone_http_feedback_total",
            "Feedback posts, by outcome.", &["outcome"]),

        feedback_received: IntCounter("hone_feedback_received_total",
            "Ratings recorded. One that waits for the trainer again, because the quarantine of its \
             API key ended, counts again."),
        feedback_ratings: IntCounterVec("hone_feedback_ratings_total",
            "Ratings whose outcome is final: trained, or the reason why they are not used.",
            &["outcome"]),
        feedback_waiting: IntGauge("hone_feedback_waiting_ratings",
            "Ratings that wait for the trainer: those received so far, without those whose outcome \
             is final."),
        corrections_received: IntCounter("hone_feedback_corrections_received_total",
            "Corrections recorded. One that waits for the trainer again, because its step was undone \
             or a quarantine ended, counts again."),
        corrections_waiting: IntGauge("hone_feedback_waiting_corrections",
            "Corrections that wait for the trainer."),

        engine_slots: IntGaugeVec("hone_engine_sequences",
            "Sequences that are being generated, by priority.", &["priority"]),
        engine_waiting: IntGaugeVec("hone_engine_waiting_requests",
            "Requests that wait for a slot, by priority.", &["priority"]),
        engine_tokens: IntCounterVec("hone_engine_tokens_total",
            "Tokens generated, by priority.", &["priority"]),
        engine_rejected: IntCounter("hone_engine_rejected_requests_total",
            "Live requests refused because the queue was full, or their API key's share of it."),
        engine_queue_wait: Histogram("hone_engine_queue_wait_seconds",
            "Time that live requests waited for a slot, those that waited too long included.",
            FIRST_TOKEN),
        engine_preempted: IntCounter("hone_engine_preempted_sequences_total",
            "Shadow sequences stopped to free their slot for live traffic."),
        engine_failures: IntCounter("hone_engine_failures_total",
            "Generations that failed in the engine."),

        engine_restarts: IntCounter("hone_engine_restarts_total",
            "Panics of an engine's thread, after which it started again."),

        engine_mask_duration: Histogram("hone_engine_mask_duration_seconds",
            "Time to compute the tokens that a grammar permits next.", FAST),

        engine_prompt_tokens: IntCounterVec("hone_engine_prompt_tokens_total",
            "Prompt tokens of the native engine: computed, or taken from the prefix cache, by source.",
            &["source"]),
        engine_cache_pages: IntGaugeVec("hone_engine_cache_pages",
            "Pages of the native engine's cache, of 16 positions each: used by sequences, or kept for \
             later requests, by state.", &["state"]),
        engine_cache_capacity: IntGauge("hone_engine_cache_capacity_pages",
            "Pages that the native engine's cache may hold."),

        store_commit_duration: Histogram("hone_store_commit_duration_seconds",
            "Time of one group commit.", FAST),
        store_batch_operations: Histogram("hone_store_batch_operations",
            "Operations in one group commit.", BATCH),
        store_queue: IntGauge("hone_store_queue_operations",
            "Operations that wait for the ledger's writer."),
        store_queue_bytes: IntGauge("hone_store_queue_bytes",
            "About the memory of what is not written to the ledger yet."),
        store_late_writes: IntCounter("hone_store_late_writes_total",
            "Writes of clients that were answered with 503, because the disk hung."),
        store_writer_restarts: IntCounter("hone_store_writer_restarts_total",
            "Panics of the ledger's writer outside a transaction."),
        store_dropped: IntCounterVec("hone_store_dropped_records_total",
            "Records that were not written, because the queue was full, their sample or group is \
             unknown, or the disk kept failing, by table.", &["table"]),
        store_records: IntCounterVec("hone_store_records_total",
            "Records committed, by table.", &["table"]),
        store_erasures: IntCounter("hone_store_erasures_total",
            "Transactions in which prompts or feedback were erased."),
        store_file: IntGauge("hone_store_file_bytes", "Size of the ledger's file."),
        store_expired: IntCounterVec("hone_store_expired_prompts_total",
            "Prompts that store.retention removed with their completions, by the limit: age or size.",
            &["reason"]),

        fleet_process: IntGaugeVec("hone_fleet_process",
            "Constant 1 in a process of a fleet, by what it does: server, trainer or standby.", &["role"]),
        fleet_unshipped: IntGauge("hone_fleet_unshipped_batches",
            "Transactions of the ledger that the object store does not have yet."),
        fleet_lag: Gauge("hone_fleet_lag_seconds",
            "Age of the oldest transaction that the object store does not have yet."),
        fleet_intake_lag: Gauge("hone_fleet_intake_lag_seconds",
            "In the trainer: time since it had taken in all that the servers shipped."),
        fleet_held: IntGauge("hone_fleet_held_posts",
            "Feedback that waits for its completion, which another server has."),
        fleet_failing: IntGauge("hone_fleet_failing",
            "1 while records cannot be shipped, or the fleet's versions cannot be served."),
        fleet_store_requests: IntCounterVec("hone_fleet_store_requests_total",
            "Requests to the object store: read, write, and the failed ones of both, by kind.", &["kind"]),
        fleet_store_bytes: IntCounterVec("hone_fleet_store_bytes_total",
            "Bytes sent to and received from the object store, by direction.", &["direction"]),

        reward_value: HistogramVec("hone_reward_value",
            "Values of reward parts, by route and part.", REWARD, &["route", "part"]),
        reward_missing: IntCounterVec("hone_reward_missing_total",
            "Reward parts that could not be scored, by route and part.", &["route", "part"]),
        reward_feedback_capped: IntCounterVec("hone_reward_feedback_capped_total",
            "Pieces of feedback that counted less or not at all because their API key exceeded its \
             share of a batch, by route and part.", &["route", "part"]),
        reward_quarantined_keys: IntGauge("hone_reward_quarantined_keys",
            "API keys whose feedback is recorded but not trained on."),

        rollout_groups: IntCounterVec("hone_rollout_groups_total",
            "Groups completed, by prompt source.", &["source"]),
        rollout_in_flight: IntGauge("hone_rollout_in_flight_groups",
            "Groups that are being sampled or scored."),
        rollout_queue: IntGauge("hone_rollout_queue_prompts",
            "Prompts that wait for their group to be sampled."),
        rollout_skipped: IntCounterVec("hone_rollout_skipped_prompts_total",
            "Prompts for which no group was made, by reason.", &["reason"]),
        rollout_left_out: IntCounterVec("hone_rollout_left_out_completions_total",
            "Served completions that were left out of their prompt's group, by reason.",
            &["reason"]),
        rollout_samples: IntCounter("hone_rollout_samples_total", "Shadow samples generated."),

        policy_version: IntGauge("hone_policy_version",
            "The policy version that is being served."),
        policy_published: IntCounter("hone_policy_published_total", "Policy versions published."),
        policy_rejected: IntCounterVec("hone_policy_rejected_total",
            "Policy versions that failed a check, by check.", &["reason"]),
        policy_rollbacks: IntCounter("hone_policy_rollbacks_total",
            "Earlier policy versions activated, by an operator or by a warning."),
        policy_canaries: IntCounterVec("hone_policy_canaries_total",
            "Canaries that ended, by outcome.", &["outcome"]),
        policy_canary_share: Gauge("hone_policy_canary_share_ratio",
            "Share of the live traffic that a canary gets; 0 without one."),
        policy_canary_ratings: IntGaugeVec("hone_policy_canary_ratings",
            "Ratings that the last canary's test has, by version.", &["version"]),
        policy_canary_evidence: GaugeVec("hone_policy_canary_evidence",
            "Natural logarithm of the evidence of the last canary's tests, by finding. A test decides \
             at ln(1 / alpha), where alpha is at most policy.canary.alpha.", &["finding"]),
        policy_kl_budget: Gauge("hone_policy_kl_budget_ratio",
            "KL of the last candidate to the anchor, as a share of policy.gate.max_kl. At 1 every version is rejected."),
        policy_swap_duration: Histogram("hone_policy_swap_duration_seconds",
            "Time for which a hot swap blocked generation.", FAST),
        policy_load_duration: Histogram("hone_policy_load_duration_seconds",
            "Time to load a version next to the active one, the drain of its slot included.", SLOW),
        policy_parity_difference: Gauge("hone_policy_parity_logprob_difference",
            "Mean absolute difference between served and trained log-probabilities in the last \
             version's parity probe."),
        feedback_to_policy: Histogram("hone_feedback_to_policy_seconds",
            "Time from feedback to the first served version trained on it.", SLOW),
    }
    with {
        /// The trainer.
        pub train: TrainMetrics = TrainMetrics::register,
        /// Calls to reward webhooks.
        pub reward_webhook: CallMetrics = webhook_calls,
        /// Calls to judges.
        pub reward_judge: JudgeMetrics = JudgeMetrics::register,
        /// What computes metrics whenever they are read.
        readers: Readers = no_readers,
        // Last, because it copies the descriptions of the metrics above.
        registry: MetricRegistry = MetricRegistry::share,
    }
}

/// Functions that compute metrics.
type Readers = RwLock<Vec<Box<dyn Fn(&Metrics) + Send + Sync>>>;

fn no_readers(_: &mut MetricRegistry) -> Result<Readers> {
    Ok(Readers::default())
}

impl Metrics {
    /// Creates and registers every metric.
    ///
    /// # Errors
    /// If two metrics have the same name, which a test rules out.
    pub fn new() -> Result<Self> {
        let metrics = Self::register(&mut MetricRegistry::default())?;
        metrics.build_info.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        // A rate needs the 0 before the first event.
        for (counter, labels) in [
            (&metrics.engine_tokens, &["live", "shadow"][..]),
            (&metrics.feedback, &["recorded", "duplicate", "unknown", "invalid", "failed"]),
            (&metrics.feedback_ratings, &["trained"]),
            (
                &metrics.policy_canaries,
                &["promoted", "rolled_back", "promoted_at_limit", "rolled_back_at_limit"],
            ),
            (&metrics.train.advantages, &["group", "running", "value"]),
            (&metrics.otlp_failed_exports, &["traces", "metrics"]),
        ] {
            labels.iter().for_each(|label| counter.with_label_values(&[label]).reset());
        }
        Ok(metrics)
    }

    /// Every metric.
    pub fn descriptions(&self) -> &[MetricDescription] {
        &self.registry.descriptions
    }

    /// Computes metrics with `read` whenever they are read, for those that nothing else updates.
    pub fn read_with(&self, read: impl Fn(&Self) + Send + Sync + 'static) {
        self.readers.write().push(Box::new(read));
    }

    /// The body of `GET /metrics`.
    ///
    /// # Errors
    /// If a metric cannot be encoded.
    pub fn encode(&self) -> Result<String> {
        self.read();
        self.registry.encode()
    }

    /// Every metric that has a sample.
    pub fn families(&self) -> Vec<MetricFamily> {
        self.read();
        self.registry.gather()
    }

    fn read(&self) {
        let set = |gauge: &IntGauge, value| gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        set(&self.memory_resident, memory::resident());
        set(&self.memory_resident_peak, memory::peak_resident());
        set(&self.open_files, files::open_files());
        set(&self.open_files_limit, files::open_files_limit().unwrap_or_default());
        self.readers.read().iter().for_each(|read| read(self));
    }
}

// Metrics of the trainer.

metric_set! {
    /// The trainer's metrics. Gauges show the last optimizer step; a gauge that a step does not
    /// compute keeps its previous value.
    TrainMetrics {
        steps: IntCounter("hone_train_steps_total", "Optimizer steps."),
        step_duration: Histogram("hone_train_step_duration_seconds",
            "Time of one optimizer step.", SLOW),
        state: IntGaugeVec("hone_train_state",
            "1 for the trainer's current state, 0 for the others.", &["state"]),
        reward_mean: GaugeVec("hone_train_reward_mean",
            "Mean weighted reward of the last step's samples, `graded` by reward functions or `rated` \
             by users: the two have different units and different completions.", &["kind"]),
        reward_std: Gauge("hone_train_reward_std",
            "Standard deviation of the weighted reward within a group, mean over the last step's \
             groups."),
        reward_batch_std: Gauge("hone_train_reward_batch_std",
            "Standard deviation of the weighted reward over all samples of the last step."),
        reward_part: GaugeVec("hone_train_reward_part_mean",
            "Mean of each reward part over the last step's samples that have a value for it.",
            &["route", "part"]),
        reward_part_std: GaugeVec("hone_train_reward_part_std",
            "Standard deviation of each reward part over the last step's samples that have a value \
             for it.", &["route", "part"]),
        zero_std_groups: Gauge("hone_train_zero_std_groups_ratio",
            "Fraction of the last step's groups whose rewards are all equal."),
        advantages: IntCounterVec("hone_train_advantages_total",
            "Reward parts turned into advantages, by baseline.", &["baseline"]),
        learned_reward: GaugeVec("hone_train_learned_reward",
            "Judgement of a learned reward part on new ratings: share of pairs that it orders alike, mean \
             by which its predictions exceed them as a share of their range, and 1 if it is used.",
            &["route", "part", "stat"]),
        loss: Gauge("hone_train_loss", "Loss of the last step."),
        kl: Gauge("hone_train_kl",
            "Estimate of KL(policy || reference policy), mean over tokens, in nats."),
        beta: Gauge("hone_train_beta",
            "Coefficient of the KL term in the loss, if it is adaptive."),
        entropy: Gauge("hone_train_entropy",
            "Entropy of the policy's next-token distribution, mean over tokens, in nats."),
        entropy_coefficient: Gauge("hone_train_entropy_coefficient",
            "Coefficient of the entropy bonus, if there is one."),
        clip_ratio: GaugeVec("hone_train_clip_ratio",
            "Fraction of importance ratios whose gradient was clipped, by side; `low_min` and \
             `high_max` are the extremes over sequences.", &["side"]),
        importance_ratio: GaugeVec("hone_train_importance_ratio",
            "Importance ratio exp(logp - old logp) over the last step's tokens, by statistic.",
            &["stat"]),
        sampler_difference: GaugeVec("hone_train_sampler_logprob_difference",
            "Absolute difference between recorded and recomputed log-probabilities of samples of \
             the current version, by statistic.", &["stat"]),
        sampler_ratio: GaugeVec("hone_train_sampler_ratio",
            "Weights of the sampler correction, if it is enabled, by statistic.", &["stat"]),
        off_policy: Gauge("hone_train_off_policy_ratio",
            "Fraction of the last step's sequences masked because they are too far off policy, if \
             masking is enabled."),
        staleness: Gauge("hone_train_staleness_versions",
            "Mean number of versions between sampling and training."),
        grad_norm: Gauge("hone_train_grad_norm", "Global gradient norm before clipping."),
        learning_rate: Gauge("hone_train_learning_rate", "Current learning rate."),
        completion_length: GaugeVec("hone_train_completion_length_tokens",
            "Length of the last step's completions, by statistic.", &["stat"]),
        terminated_length: GaugeVec("hone_train_terminated_length_tokens",
            "Length of the last step's completions that ended before the token limit, by \
             statistic.",
            &["stat"]),
        truncated: Gauge("hone_train_truncated_ratio",
            "Fraction of the last step's completions that ended at the token limit."),
        tokens: IntCounter("hone_train_tokens_total", "Completion tokens trained on."),
        seen_tokens: Gauge("hone_train_seen_tokens",
            "Prompt and completion tokens of all steps so far."),
        loss_token_fraction: Gauge("hone_train_loss_token_fraction",
            "Completion tokens divided by all tokens that the forward pass computed."),
        corrections: IntCounterVec("hone_train_corrections_total",
            "Corrections whose outcome is final: trained, or the reason why they are not used.",
            &["outcome"]),
        correction_nll: Gauge("hone_train_correction_nll",
            "Negative log-likelihood of the last step's corrections, mean over tokens, in nats."),
        replayed: IntCounter("hone_train_replayed_samples_total",
            "Samples of earlier steps that steps trained on again."),
        ready_groups: IntGauge("hone_train_ready_groups", "Groups that wait for the trainer."),
        oldest_waiting: Gauge("hone_train_oldest_waiting_seconds",
            "Age of the oldest group that waits for the trainer; 0 without one."),
        skipped_steps: IntCounterVec("hone_train_skipped_steps_total",
            "Steps skipped, by reason.", &["reason"]),
        damaged_checkpoints: IntCounter("hone_train_damaged_checkpoints_total",
            "Checkpoints that could not be read and were set aside."),
        dropped_groups: IntCounterVec("hone_train_dropped_groups_total",
            "Groups that were ready but will not be trained on, by reason.", &["reason"]),
        restarts: IntCounter("hone_train_restarts_total",
            "Restarts of the trainer from its checkpoint."),
        warnings: IntCounterVec("hone_train_warnings_total",
            "Warnings raised about the run, by kind.", &["kind"]),
        warning_active: IntGaugeVec("hone_train_warning_active",
            "1 while a warning's condition holds, else 0, by kind.", &["kind"]),
    }
}

// Metrics of external services that score samples: webhooks and judges.

/// Calls to one kind of service.
#[derive(Clone)]
pub struct CallMetrics {
    /// Requests by outcome, retries included.
    pub requests: IntCounterVec,
    /// Time of one request.
    pub duration: HistogramVec,
    /// 1 while a circuit breaker blocks requests after repeated failures.
    pub circuit_open: IntGaugeVec,
    /// Samples without a value, by reason.
    pub missing: IntCounterVec,
}

metric_set! {
    /// Calls to judges, and their costs.
    JudgeMetrics {
        cache: IntCounterVec("hone_reward_judge_cache_total",
            "Lookups in the cache of judgments, by result.", &["route", "part", "result"]),
        tokens: IntCounterVec("hone_reward_judge_tokens_total",
            "Tokens that judges read and wrote, by kind.", &["route", "part", "kind"]),
        cost: CounterVec("hone_reward_judge_cost_total",
            "Cost of judges' tokens, in the currency of the configured prices.",
            &["route", "part"]),
    }
    with {
        /// Calls to judges.
        pub calls: CallMetrics = judge_calls,
    }
}

fn webhook_calls(registry: &mut MetricRegistry) -> Result<CallMetrics> {
    calls(registry, "webhook", "reward webhook")
}

fn judge_calls(registry: &mut MetricRegistry) -> Result<CallMetrics> {
    calls(registry, "judge", "judge")
}

/// The metrics of a service, by its short name in theirs and its name in help texts.
fn calls(registry: &mut MetricRegistry, short: &str, service: &str) -> Result<CallMetrics> {
    let opts = |what: &str, help: &str| {
        let help = help.replace("SERVICE", service);
        Opts::new(format!("hone_reward_{short}_{what}"), help)
    };
    let requests = "Requests to SERVICEs, retries included, by outcome.";
    let duration = opts("duration_seconds", "Time of one request to a SERVICE.");
    let duration = HistogramOpts { common_opts: duration, buckets: REQUEST.to_vec() };
    let open = "1 while a SERVICE is not called because it kept failing, else 0.";
    let missing = "Samples that a SERVICE did not score, by reason.";
    let [outcome, reason] = ["outcome", "reason"].map(|label| ["route", "part", label]);
    let part = &["route", "part"];
    Ok(CallMetrics {
        requests: registry.add(IntCounterVec::new(opts("requests_total", requests), &outcome))?,
        duration: registry.add(HistogramVec::new(duration, part))?,
        circuit_open: registry.add(IntGaugeVec::new(opts("circuit_open", open), part))?,
        missing: registry.add(IntCounterVec::new(opts("missing_total", missing), &reason))?,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::registry::MetricKind;
    use super::*;

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
            // Prometheus reserves these suffixes for the series of histograms.
            for suffix in ["_bucket", "_sum", "_count"] {
                assert!(!d.name.ends_with(suffix), "{}", d.name);
            }
        }
    }

    #[test]
    fn every_exported_metric_is_described() {
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
        for d in metrics.descriptions() {
            let lines = text.lines().filter(|line| line.starts_with(&d.name)).count();
            assert!(lines > 0, "{} is not exported before its first sample", d.name);
        }
        assert!(text.contains("\nhone_policy_rejected_total 0\n"));
        assert!(text.contains("\nhone_reward_value_count 0\n"));
    }
}
