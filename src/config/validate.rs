//! Ranges: every number has one, and an error names the key, the value and what is allowed.

use std::collections::BTreeSet;

use super::describe::Problem;
use super::range::{Checked, above, at_least, below, between};
use super::{
    Config, EngineConfig, PolicyConfig, RolloutConfig, RouteConfig, SamplerKind, ScheduleKind,
    ServerConfig, StoreConfig, TrainConfig,
};
use super::{dataset, lora, objective, run};

/// One sentence with the key, the value and what is allowed.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(pub String);

/// Checks every range. [`super::load`] has done so already; call it again after flags.
///
/// # Errors
/// The first value that is out of range.
pub fn validate(config: &Config) -> Result<(), ConfigError> {
    check(config).map_err(|problem| ConfigError(problem.sentence()))
}

pub(super) fn check(config: &Config) -> Checked {
    server(&config.server)?;
    if config.data.dir.as_os_str().is_empty() {
        return Err(Problem::value("data.dir", "\"\"", "the path of a directory"));
    }
    engine(&config.engine)?;
    store(&config.store)?;
    rollout(&config.rollout)?;
    dataset::check(config)?;
    train(&config.train)?;
    policy(&config.policy)?;
    backlog(config)?;
    run::check(config)?;
    between("sandbox.concurrency", config.sandbox.concurrency, 1, 256)?;
    between("sandbox.uid", config.sandbox.uid, 1, u32::MAX - 1)?;
    config.graders.check()?;
    if tracing_subscriber::EnvFilter::try_new(&config.log.level).is_err() {
        let allowed = "a tracing filter such as \"info\" or \"hone=debug,warn\"";
        return Err(Problem::value("log.level", quoted(&config.log.level), allowed));
    }
    routes(config)
}

/// What may wait for the trainer must be enough for a step, or both wait for each other.
fn backlog(c: &Config) -> Checked {
    let (groups, size) = (c.rollout.max_ready_groups, c.rollout.group_size);
    let wanted = c.train.samples_per_step;
    if !c.rollout.enabled || !c.train.enabled || groups.saturating_mul(size) >= wanted {
        return Ok(());
    }
    let allowed = format!(
        "{} or more, so that groups of rollout.group_size {size} hold train.samples_per_step {wanted}",
        wanted.div_ceil(size)
    );
    Err(Problem::value("rollout.max_ready_groups", groups, &allowed))
}

fn server(c: &ServerConfig) -> Checked {
    for (name, keys) in [("client_keys", &c.client_keys), ("admin_keys", &c.admin_keys)] {
        for (i, key) in keys.iter().enumerate() {
            // The value itself is a secret.
            if key.is_empty() || !key.bytes().all(|b| b.is_ascii_graphic()) {
                return Err(Problem::new(
                    format!("server.{name}[{i}]"),
                    " cannot be a bearer key: it must be printable ASCII without spaces",
                ));
            }
        }
    }
    if c.client_keys.iter().any(|key| c.admin_keys.contains(key)) {
        return Err(Problem::new(
            "server.admin_keys",
            " shares a key with server.client_keys: each must have its own",
        ));
    }
    between("server.max_body_bytes", c.max_body_bytes, 1024, 1 << 30)?;
    between("server.default_max_tokens", c.default_max_tokens, 1, 1 << 20)?;
    between("server.shutdown_grace_seconds", c.shutdown_grace_seconds, 0, 3600)
}

fn engine(c: &EngineConfig) -> Checked {
    between("engine.replicas", c.replicas, 1, 256)?;
    between("engine.queue", c.queue, 0, 1 << 20)
}

fn store(c: &StoreConfig) -> Checked {
    between("store.group_commit_ms", c.group_commit_ms, 0, 1000)?;
    between("store.queue", c.queue, 16, 1 << 24)
}

fn rollout(c: &RolloutConfig) -> Checked {
    between("rollout.group_size", c.group_size, 2, 1024)?;
    between("rollout.temperature", c.temperature, 0.01, 10.0)?;
    between("rollout.max_tokens", c.max_tokens, 1, 1 << 20)?;
    between("rollout.max_concurrent", c.max_concurrent, 0, 65_536)?;
    between("rollout.max_batch_tokens", c.max_batch_tokens, 32, 1 << 30)?;
    if c.sampler != SamplerKind::Engine && c.max_batch_tokens < c.max_tokens as usize + 32 {
        let allowed = format!(
            "{} or more, so that a prompt and rollout.max_tokens {} fit, or rollout.sampler = \"engine\"",
            c.max_tokens as usize + 32,
            c.max_tokens
        );
        return Err(Problem::value("rollout.max_batch_tokens", c.max_batch_tokens, &allowed));
    }
    between("rollout.queue", c.queue, 1, 1 << 20)?;
    between("rollout.feedback_wait_ms", c.feedback_wait_ms, 0, 3_600_000)?;
    between("rollout.max_ready_groups", c.max_ready_groups, 1, 1 << 20)
}

fn train(c: &TrainConfig) -> Checked {
    between("train.samples_per_step", c.samples_per_step, 1, 1 << 20)?;
    between("train.micro_batch", c.micro_batch, 1, 1 << 16)?;
    between("train.num_iterations", c.num_iterations, 1, 64)?;
    above("train.learning_rate", c.learning_rate, 0.0)?;
    optimiser(c)?;
    below("train.adam_beta1", c.adam_beta1, 0.0, 1.0)?;
    below("train.adam_beta2", c.adam_beta2, 0.0, 1.0)?;
    above("train.adam_eps", c.adam_eps, 0.0)?;
    at_least("train.weight_decay", c.weight_decay, 0.0)?;
    at_least("train.max_grad_norm", c.max_grad_norm, 0.0)?;
    objective::check(c)?;
    at_least("train.baseline_window", c.baseline_window, 1.0)?;
    at_least("train.max_sampler_difference", c.max_sampler_difference, 0.0)?;
    between("train.threads", c.threads, 0, 4096)?;
    between("train.keep_checkpoints", c.keep_checkpoints, 1, 10_000)?;
    lora::check(&c.lora)
}

fn optimiser(c: &TrainConfig) -> Checked {
    below("train.warmup_ratio", c.warmup_ratio, 0.0, 1.0)?;
    if c.warmup_ratio > 0.0 && c.warmup_steps > 0 {
        let allowed = format!("0 where train.warmup_ratio ({}) is set", c.warmup_ratio);
        return Err(Problem::value("train.warmup_steps", c.warmup_steps, &allowed));
    }
    at_least("train.min_learning_rate", c.min_learning_rate, 0.0)?;
    if c.min_learning_rate > c.learning_rate {
        let allowed = format!("at most train.learning_rate ({})", c.learning_rate);
        return Err(Problem::value("train.min_learning_rate", c.min_learning_rate, &allowed));
    }
    if c.min_learning_rate > 0.0
        && !matches!(c.schedule, ScheduleKind::Cosine | ScheduleKind::Polynomial)
    {
        let allowed = "0 unless train.schedule is \"cosine\" or \"polynomial\"";
        return Err(Problem::value("train.min_learning_rate", c.min_learning_rate, allowed));
    }
    above("train.schedule_power", c.schedule_power, 0.0)?;
    below("train.ema_decay", c.ema_decay, 0.0, 1.0)?;
    if c.ema_decay > 0.0 && c.swa_start > 0 {
        let allowed = format!("0 where train.ema_decay ({}) is set", c.ema_decay);
        return Err(Problem::value("train.swa_start", c.swa_start, &allowed));
    }
    schedule(c)
}

/// Schedules that end must know where.
fn schedule(c: &TrainConfig) -> Checked {
    let ends = !matches!(c.schedule, ScheduleKind::Constant | ScheduleKind::InverseSqrt);
    if (ends || c.warmup_ratio > 0.0) && c.schedule_steps() == 0 {
        let why = if ends { "schedule" } else { "warmup_ratio" };
        let allowed = format!("at least 1 with train.{why} set and no train.max_steps");
        return Err(Problem::value("train.total_steps", c.total_steps, &allowed));
    }
    if ends && c.warmup_steps >= c.schedule_steps() {
        let allowed = format!("less than the schedule's steps ({})", c.schedule_steps());
        return Err(Problem::value("train.warmup_steps", c.warmup_steps, &allowed));
    }
    Ok(())
}

fn policy(c: &PolicyConfig) -> Checked {
    between("policy.publish_every", c.publish_every, 1, u64::MAX)?;
    between("policy.keep_versions", c.keep_versions, 2, 1 << 20)?;
    above("policy.parity_tolerance", c.parity_tolerance, 0.0)?;
    between("policy.probe_tokens", c.probe_tokens, 1, 4096)
}

fn routes(config: &Config) -> Checked {
    let mut names = BTreeSet::new();
    for (i, route) in config.routes.0.iter().enumerate() {
        let key = format!("route[{i}]");
        label(&format!("{key}.name"), &route.name)?;
        if !names.insert(&route.name) {
            let allowed = "a name that no other route has";
            return Err(Problem::value(&format!("{key}.name"), quoted(&route.name), allowed));
        }
        parts(&key, route)?;
    }
    if config.dataset_in_use().is_some() && !names.contains(&config.rollout.dataset_route) {
        let shown = quoted(&config.rollout.dataset_route);
        return Err(Problem::value("rollout.dataset_route", shown, "the name of a route"));
    }
    Ok(())
}

fn parts(route_key: &str, route: &RouteConfig) -> Checked {
    let mut names = BTreeSet::new();
    for (i, part) in route.rewards.iter().enumerate() {
        let key = format!("{route_key}.reward[{i}]");
        label(&format!("{key}.name"), &part.name)?;
        if !names.insert(&part.name) {
            let allowed = "a name that no other part of the route has";
            return Err(Problem::value(&format!("{key}.name"), quoted(&part.name), allowed));
        }
        part.check().map_err(|inner| Problem::new(format!("{key}.{}", inner.key), inner.says))?;
    }
    Ok(())
}

pub(super) fn quoted(text: &str) -> String {
    format!("{text:?}")
}

/// Names of routes and parts are metric labels.
pub(super) fn label(key: &str, name: &str) -> Checked {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"_-.".contains(&b);
    if (1..=64).contains(&name.len()) && name.bytes().all(plain) {
        return Ok(());
    }
    Err(Problem::value(key, quoted(name), "1 to 64 letters, digits, '_', '-' or '.'"))
}
