//! `hone eval`: the active policy of a data directory and the base model, on a dataset.

use anyhow::{Context, ensure};
use serde::Serialize;

use hone_core::types::PolicyVersion;
use hone_dataset::Dataset;
use hone_train::monitoring::warnings::RewardRoles;

use super::eval_set::{EvalSet, Evaluation};
use super::report::{Comparison, comparison_table, comparisons};
use super::table::ScoredSample;
use super::{NO_DATASET, table};
use crate::app::{self, Core};
use crate::config::Config;
use crate::usage;
use hone_report::stats::{self, Estimate};
use hone_report::terminal::{MISSING, one_line, shown};

/// The options of `hone eval` that are not in the configuration.
#[derive(Clone, Debug, Default)]
pub struct EvalOptions {
    /// The k of pass@k; each at most `run.eval_samples`.
    pub pass_at: Vec<u64>,
    /// The part whose value 1 is a success; the route's first correctness part if absent.
    pub part: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PassAt {
    pub k: u64,
    /// Of the base model; `None` if the active policy is the base.
    pub base: Option<Estimate>,
    pub active: Option<Estimate>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EvalOutcome {
    pub prompts: usize,
    pub samples: usize,
    pub version: u64,
    /// Total and parts. `before` is the base, `after` the active policy; `before` is missing if they
    /// are the same.
    pub comparisons: Vec<Comparison>,
    pub part: Option<String>,
    pub pass_at: Vec<PassAt>,
    /// The active policy's first completion of each of the first prompts, as many as `--show` requests.
    pub active_samples: Vec<ScoredSample>,
    /// The base model's completions of the same prompts; `None` if the active policy is the base.
    pub base_samples: Option<Vec<ScoredSample>>,
}

/// Evaluates the held-out prompts of the dataset, or all prompts if none are held out. The ledger does
/// not change.
pub async fn run(mut config: Config, options: EvalOptions) -> anyhow::Result<EvalOutcome> {
    app::fetch_dataset(&mut config).await?;
    let dataset = config.dataset_in_use();
    let dataset = dataset.context(NO_DATASET).map_err(usage)?;
    let samples = config.run.eval_samples;
    if let Some(k) = options.pass_at.iter().find(|k| !(1..=samples as u64).contains(k)) {
        let range = format!("it must be from 1 to run.eval_samples ({samples})");
        return Err(usage(anyhow::anyhow!("--pass-at is {k}: {range}")));
    }
    let part = success_part(&config, options.part).map_err(usage)?;
    let Dataset { train, held_out, .. } = Dataset::open(dataset).map_err(usage)?;
    let all = if held_out.is_empty() { train } else { held_out };
    config.train.enabled = false;
    config.rollout.enabled = false;
    let core = Core::start_offline(&config, None).await?;
    let route = core.routes.require("rollout.dataset_route", &config.rollout.dataset_route)?;
    let eval_set = EvalSet::new(&config, all, route);
    let active = eval_set.run(&core.engine).await?;
    let base = if active.version == PolicyVersion::BASE.0 {
        None
    } else {
        core.publisher.stage(PolicyVersion::BASE, None).await?;
        core.publisher.activate().await?;
        Some(eval_set.run(&core.engine).await?)
    };
    core.shutdown(app::RUN_GRACE).await?;
    let pass_at = options.pass_at.iter().map(|k| PassAt {
        k: *k,
        base: base.as_ref().and_then(|base| passed(base, part.as_deref(), *k, eval_set.seed)),
        active: passed(&active, part.as_deref(), *k, eval_set.seed),
    });
    let before = base.as_ref().unwrap_or(&active);
    let mut comparisons = comparisons(before, &active, eval_set.seed);
    if base.is_none() {
        for comparison in &mut comparisons {
            (comparison.before, comparison.difference) = (None, None);
        }
    }
    Ok(EvalOutcome {
        prompts: eval_set.prompts.len(),
        samples,
        version: active.version,
        comparisons,
        pass_at: pass_at.collect(),
        part,
        active_samples: first_samples(&active, config.run.samples_shown),
        base_samples: base.as_ref().map(|base| first_samples(base, config.run.samples_shown)),
    })
}

fn first_samples(evaluation: &Evaluation, most: usize) -> Vec<ScoredSample> {
    evaluation.answers.iter().filter_map(|samples| samples.first()).take(most).cloned().collect()
}

fn passed(evaluation: &Evaluation, part: Option<&str>, k: u64, seed: u64) -> Option<Estimate> {
    stats::mean_pass_at_k(&evaluation.successes(part?, 1.0), k, seed)
}

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
    pub fn text(&self) -> String {
        let counted = format!("{} prompts, {} completions each", self.prompts, self.samples);
        let mut text = format!("policy version {}, {counted}\n\n", self.version);
        text += &shown(&comparison_table(&self.comparisons, ["base", "active"], one_line));
        for PassAt { k, base, active } in &self.pass_at {
            let mean =
                |e: &Option<Estimate>| e.map_or(MISSING.to_owned(), |e| format!("{:.3}", e.mean));
            text += &format!(" pass@{k}  base {}  active {}\n", mean(base), mean(active));
        }
        let base = self.base_samples.iter().map(|samples| ("the base model".to_owned(), samples));
        let active = (format!("policy version {}", self.version), &self.active_samples);
        for (policy, samples) in base.chain([active]).filter(|(_, samples)| !samples.is_empty()) {
            text += &format!("\nsamples of {policy}\n{}", table::render(samples));
        }
        text
    }
}
