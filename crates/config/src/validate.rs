//! Validates values and combinations of values. An error names the key, the value and the allowed
//! values.

use std::collections::BTreeSet;

use hone_core::config::section::Parameters;
use hone_core::config::{Checked, ConfigError, Problem, label, quoted};
use hone_engine::EngineBackend;
use hone_hub::{check_revision, dataset_id};
use hone_model::weights::Quantize;
use hone_reward::routes::RouteConfig;
use hone_train::config::DeviceChoice;

use super::schema::Config;

/// Tokens of a prompt for which the native engine's cache must have room.
const NATIVE_PROMPT: usize = 32;

/// Validates a configuration that was changed after [`load`](super::load()), which validates too.
///
/// # Errors
/// The first invalid value.
pub fn validate(config: &Config) -> Result<(), ConfigError> {
    check(config).map_err(|problem| ConfigError::Invalid(problem.sentence()))
}

pub(super) fn check(config: &Config) -> Checked {
    for (i, name) in config.model.names.iter().enumerate() {
        if name.is_empty() || config.model.names[..i].contains(name) {
            let key = format!("model.names[{i}]");
            return Err(Problem::value(&key, quoted(name), "a name that occurs once"));
        }
    }
    device(config)?;
    config.server.check()?;
    if config.data.dir.as_os_str().is_empty() {
        return Err(Problem::value("data.dir", "\"\"", "the path of a directory"));
    }
    config.data.check_in("data.")?;
    config.store.retention.check_as("store.retention")?;
    config.fleet.check_in("fleet.")?;
    engine(config)?;
    config.rollout.check()?;
    dataset(config)?;
    config.train.check()?;
    config.policy.check()?;
    backlog(config)?;
    config.run.check()?;
    config.sandbox.check_in("sandbox.")?;
    config.graders.check()?;
    if tracing_subscriber::EnvFilter::try_new(&config.log.level).is_err() {
        let allowed = "a tracing filter such as \"info\" or \"hone=debug,warn\"";
        return Err(Problem::value("log.level", quoted(&config.log.level), allowed));
    }
    routes(config)
}

/// What a GPU cannot train with.
fn device(config: &Config) -> Checked {
    let DeviceChoice::Cuda(ordinal) = config.model.device else { return Ok(()) };
    let on = format!("with model.device = \"cuda:{ordinal}\"");
    if config.model.quantize != Quantize::None {
        let quantize = quoted(config.model.quantize.as_str());
        return Err(Problem::value("model.quantize", quantize, &format!("\"none\" {on}")));
    }
    let dropout = config.train.lora.dropout;
    if dropout > 0.0 {
        return Err(Problem::value("train.lora.dropout", dropout, &format!("0 {on}")));
    }
    Ok(())
}

/// The keys of `[engine]`, alone and together with the native engine's cache.
fn engine(config: &Config) -> Checked {
    config.engine.check()?;
    let (cache, tokens) = (config.rollout.max_batch_tokens, config.rollout.max_tokens as usize);
    // `rollout.sampler = "engine"`, with which other backends need no cache, is no way out.
    if config.engine.backend == EngineBackend::Native && cache < tokens + NATIVE_PROMPT {
        let allowed = format!(
            "{} or more with engine.backend = \"native\", so that a prompt and rollout.max_tokens \
             {tokens} fit",
            tokens + NATIVE_PROMPT
        );
        return Err(Problem::value("rollout.max_batch_tokens", cache, &allowed));
    }
    Ok(())
}

/// The queue of groups must hold at least one step's samples. Otherwise rollout would wait for the
/// trainer and the trainer for rollout.
fn backlog(c: &Config) -> Checked {
    let (groups, size) = (c.rollout.max_ready_groups, c.rollout.group_size);
    let wanted = c.train.samples_per_step;
    let is_enough = groups == 0 || groups.saturating_mul(size) >= wanted;
    if !c.rollout.enabled || !c.train.enabled || is_enough {
        return Ok(());
    }
    let allowed = format!(
        "0 (as many as two steps need), or {} or more, so that groups of rollout.group_size {size} \
         hold train.samples_per_step {wanted}",
        wanted.div_ceil(size)
    );
    Err(Problem::value("rollout.max_ready_groups", groups, &allowed))
}

/// The keys of `[dataset]`, alone and together with other sections.
fn dataset(config: &Config) -> Checked {
    let c = &config.dataset;
    c.check()?;
    let paths = [("dataset.path", &c.path), ("dataset.eval_path", &c.eval_path)];
    for (key, path) in paths {
        if let Some(Err(_)) = dataset_id(path) {
            return Err(Problem::value(key, format!("{path:?}"), "a file or hf://OWNER/NAME"));
        }
    }
    check_revision("dataset.revision", &c.revision)?;
    for (i, stage) in c.stages.iter().enumerate() {
        if !stage.route.is_empty() && !config.routes.0.iter().any(|r| r.name == stage.route) {
            let key = format!("dataset.stage[{i}].route");
            return Err(Problem::value(&key, quoted(&stage.route), "the name of a route"));
        }
    }
    Ok(())
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
        part.check().map_err(|problem| problem.prefixed(&format!("{key}.")))?;
    }
    Ok(())
}
