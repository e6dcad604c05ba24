//! `hone eval`: the active policy of a data directory on a dataset, beside the base model.

use std::sync::Arc;

use anyhow::{Context, ensure};
use serde::Serialize;

use hone_core::types::PolicyVersion;
use hone_dataset::Dataset;
use hone_train::monitoring::warnings::RewardRoles;

use super::evaluate::{EvalSet, Evaluation};
use super::report::Comparison;
use super::stats::Estimate;
use super::{compare, stats};
use crate::app::Core;
use crate::config::Config;

/// What `hone eval` was told beside the configuration.
#[derive(Clone, Debug, Default)]
pub struct EvalOptions {
    /// The k of pass@k; each at most `run.eval_samples`.
    pub pass_at: Vec<u64>,
    /// The part whose value of 1 is a success; the route's first correctness part where absent.
    pub part: Option<String>,
}

/// pass@k of both policies.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PassAt {
    /// Completions that are looked at.
    pub k: u64,
    /// The base model's; `None` where the active policy is the base.
    pub base: Option<Estimate>,
    /// The active policy's.
    pub active: Option<Estimate>,
}

/// What an evaluation found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EvalOutcome {
    /// Prompts that were asked.
    pub prompts: usize,
    /// Completions of each.
    pub samples: usize,
    /// The active policy version.
    pub version: u64,
    /// Total and parts: base before, active after; without an adapter only `after`.
    pub comparisons: Vec<Comparison>,
    /// The part that pass@k counts.
    pub part: Option<String>,
    /// pass@k.
    pub pass_at: Vec<PassAt>,
}

/// Asks the held-out prompts of the dataset, or all where none are held out. Trains nothing and
/// changes nothing in the data directory's ledger.
///
/// # Errors
/// If there is no dataset, a k or part that cannot be, or a part of the loop fails.
pub async fn run(mut config: Config, options: EvalOptions) -> anyhow::Result<EvalOutcome> {
    let dataset = config.dataset_in_use();
    let dataset = dataset.context("dataset.path is missing: it must name a file of prompts")?;
    let samples = config.run.eval_samples;
    for k in &options.pass_at {
        ensure!(
            (1..=samples as u64).contains(k),
            "--pass-at is {k}: it must be from 1 to run.eval_samples ({samples})"
        );
    }
    let Dataset { train, held_out, .. } = Dataset::open(&dataset)?;
    let all = if held_out.is_empty() { train } else { held_out };
    let most = if config.run.eval_prompts == 0 { all.len() } else { config.run.eval_prompts };
    config.train.enabled = false;
    config.rollout.enabled = false;
    let core = Core::start_offline(&config, None).await?;
    let route = core.routes.require("rollout.dataset_route", &config.rollout.dataset_route)?;
    let part = success_part(&config, options.part)?;
    let exam = EvalSet {
        prompts: all.into_iter().take(most).collect(),
        route: Arc::clone(route),
        samples,
        temperature: config.run.eval_temperature,
        max_tokens: config.rollout.max_tokens,
        seed: config.train.seed,
    };
    let active = exam.run(&core.engine).await?;
    let base = if active.version == PolicyVersion::BASE.0 {
        None
    } else {
        core.publisher.stage(PolicyVersion::BASE, None).await?;
        core.publisher.activate().await?;
        Some(exam.run(&core.engine).await?)
    };
    core.shutdown().await?;
    let pass_at = options.pass_at.iter().map(|k| PassAt {
        k: *k,
        base: base.as_ref().and_then(|base| passed(base, part.as_deref(), *k, exam.seed)),
        active: passed(&active, part.as_deref(), *k, exam.seed),
    });
    let before = base.as_ref().unwrap_or(&active);
    let mut comparisons = compare::comparisons(before, &active, exam.seed);
    if base.is_none() {
        for comparison in &mut comparisons {
            (comparison.before, comparison.difference) = (None, None);
        }
    }
    Ok(EvalOutcome {
        prompts: exam.prompts.len(),
        samples,
        version: active.version,
        comparisons,
        pass_at: pass_at.collect(),
        part,
    })
}

fn passed(evaluation: &Evaluation, part: Option<&str>, k: u64, seed: u64) -> Option<Estimate> {
    stats::mean_pass_at_k(&evaluation.successes(part?, 1.0), k, seed)
}

/// The part that was named, or the first that rewards a right answer.
fn success_part(config: &Config, named: Option<String>) -> anyhow::Result<Option<String>> {
    let name = &config.rollout.dataset_route;
    let routes = config.routes.0.iter().filter(|route| route.name == *name);
    let parts: Vec<(String, &str)> =
        routes.flat_map(|r| r.parts()).map(|p| (p.name.clone(), p.kind.name())).collect();
    match named {
        Some(part) => {
            let known: Vec<&str> = parts.iter().map(|(name, _)| name.as_str()).collect();
            let listed = known.join(", ");
            ensure!(known.contains(&part.as_str()), "--part is {part}: it must be one of {listed}");
            Ok(Some(part))
        }
        None => {
            let roles = RewardRoles::of(parts.iter().map(|(name, kind)| (name.as_str(), *kind)));
            Ok(roles.correctness.into_iter().next())
        }
    }
}

impl EvalOutcome {
    /// For people.
    pub fn text(&self) -> String {
        let counted = format!("{} prompts, {} completions each", self.prompts, self.samples);
        let head = format!("policy version {}, {counted}\n\n", self.version);
        let mut text = head + compare::table(&self.comparisons, ["base", "active"]).as_str();
        for PassAt { k, base, active } in &self.pass_at {
            let shown =
                |e: &Option<Estimate>| e.map_or("–".to_owned(), |e| format!("{:.3}", e.mean));
            text +=
                format!("  pass@{k}  base {}  active {}\n", shown(base), shown(active)).as_str();
        }
        text
    }
}
