//! The services that the configured rewards use.

use std::sync::Arc;

use anyhow::Context;

use hone_core::metrics::Metrics;
use hone_engine::Codec;
use hone_reward::routes::RouteConfig;
use hone_reward::sandbox::Setup;
use hone_reward::{GraderEndpoint, LazySandbox, RewardError, Routes, Tools};

use super::engines::SelfJudge;
use super::model::open_model;
use crate::config::Config;

/// The services that the configured rewards use.
pub struct RewardTools {
    /// Argument of [`Routes::with`].
    pub tools: Tools,
    /// Judge in `tools` that uses the served base model; not loaded yet.
    pub(super) self_judge: Arc<SelfJudge>,
}

impl RewardTools {
    /// Builds the configured routes and probes their parts.
    ///
    /// # Errors
    /// The first route, part and key with a wrong value, or with Python that cannot be loaded.
    pub async fn routes(&self, config: &Config) -> Result<Routes, RewardError> {
        let routes = Routes::with(&config.routes, &self.tools)?;
        routes.probe().await?;
        Ok(routes)
    }
}

/// Sets up the services that the configured rewards use. A sandbox is probed before it is used.
///
/// # Errors
/// If a reward runs Python that cannot be confined on this machine, or if an HTTP client cannot be
/// created.
pub async fn reward_tools(config: &Config, metrics: Arc<Metrics>) -> anyhow::Result<RewardTools> {
    let self_judge = Arc::new(SelfJudge::default());
    let python = Arc::new(LazySandbox::new(Setup {
        python: config.sandbox.python.clone(),
        concurrency: config.sandbox.concurrency,
        uid: config.sandbox.uid,
        ..Setup::default()
    }));
    let mut kinds = config.routes.0.iter().flat_map(RouteConfig::parts).map(|part| part.kind);
    let sandbox = match kinds.any(|kind| kind.needs_sandbox()) {
        true => Some(python.get().await.context("the sandbox")?),
        false => None,
    };
    let endpoint = GraderEndpoint::new(&config.graders, &metrics).context("[graders]")?;
    let tools = Tools {
        metrics: Some(metrics),
        self_judge: Some(self_judge.clone()),
        endpoint,
        sandbox,
        python: Some(python),
    };
    Ok(RewardTools { tools, self_judge })
}

/// The configured rewards and the model's tokenizer, without an engine for the policy. If a judge
/// uses the base model, that model is loaded.
///
/// # Errors
/// If the model cannot be found or read, and as [`reward_tools`].
pub async fn load_rewards(config: &Config) -> anyhow::Result<(Codec, Routes)> {
    let data = &config.data.dir;
    let dir = open_model(config, data).await?;
    let rewards = reward_tools(config, Arc::new(Metrics::new()?)).await?;
    let routes = rewards.routes(config).await?;
    if config.uses_self_judge() {
        rewards.self_judge.load(config, &dir, data, None).await?;
    }
    Ok((Codec::load(&dir)?, routes))
}
