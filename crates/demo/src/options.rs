//! The command line of `hone demo`.

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;

use hone_engine::EngineBackend;
use hone_rollout::SamplerKind;
use hone_train::config::DeviceChoice;
use hone_train::policy::Promotion;

use hone_config::flags::{device, engine_backend, promotion, sampler_kind};

/// Default of `--steps`: enough to reach nearly the maximum reward.
const DEFAULT_STEPS: u64 = 100;

/// The sources of the rewards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum RewardsMode {
    /// Built-in graders score shadow completions; users' thumbs count for served ones.
    #[default]
    Both,
    /// Built-in graders alone.
    Graded,
    /// Users' thumbs alone, on one served completion per question.
    Feedback,
}

impl RewardsMode {
    /// Whether built-in graders score completions.
    pub fn has_graders(self) -> bool {
        self != Self::Feedback
    }

    /// Whether users post thumbs.
    pub fn has_thumbs(self) -> bool {
        self != Self::Graded
    }
}

/// `hone demo`.
#[derive(Clone, Debug, Args)]
pub struct DemoOptions {
    /// Optimizer steps
    #[arg(long, value_name = "N", default_value_t = DEFAULT_STEPS,
          value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub steps: u64,
    /// Seed of the users, the samples and the trainer
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Source of the rewards
    #[arg(long, value_enum, default_value_t = RewardsMode::Both)]
    pub rewards: RewardsMode,
    /// Engine that answers the users
    #[arg(long, value_name = "BACKEND", default_value = "mistralrs", value_parser = engine_backend())]
    pub backend: EngineBackend,
    /// What computes: the processor, or with cuda:N a GPU, on which the native engine answers the users
    #[arg(long, value_name = "cpu|cuda:N", default_value = "cpu", value_parser = device)]
    pub device: DeviceChoice,
    /// Sampler of the shadow completions
    #[arg(long, value_name = "SAMPLER", default_value = "auto", value_parser = sampler_kind())]
    pub sampler: SamplerKind,
    /// What a version must pass before all users get it
    #[arg(long, value_name = "MODE", default_value = "direct", value_parser = promotion())]
    pub promotion: Promotion,
    /// With a canary, reward wrong sums after some promotions, to show that users notice it
    #[arg(long)]
    pub sabotage: bool,
    /// Ask and rate a server that runs, such as http://localhost:8080, instead of starting one
    #[arg(long, value_name = "URL", conflicts_with_all = ["rewards", "backend", "device", "sampler",
          "promotion", "sabotage", "data", "keep_serving"])]
    pub server: Option<String>,
    /// Data directory, which is kept [default: a temporary one]
    #[arg(long, value_name = "DIR")]
    pub data: Option<PathBuf>,
    /// Keep serving the trained model until Ctrl-C
    #[arg(long)]
    pub keep_serving: bool,
    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
}

impl Default for DemoOptions {
    fn default() -> Self {
        Self {
            steps: DEFAULT_STEPS,
            seed: 1,
            server: None,
            data: None,
            keep_serving: false,
            report: None,
            rewards: RewardsMode::default(),
            backend: EngineBackend::default(),
            device: DeviceChoice::default(),
            sampler: SamplerKind::default(),
            promotion: Promotion::Direct,
            sabotage: false,
        }
    }
}

impl DemoOptions {
    /// The options with what they imply. A GPU computes for the native engine. The users of a server that runs already
    /// know only what they rated, and that it may check its versions. Steps count from its present one.
    pub(super) fn resolved(mut self) -> Self {
        if self.server.is_some() {
            (self.rewards, self.promotion) = (RewardsMode::Feedback, Promotion::Gate);
        }
        if let DeviceChoice::Cuda(_) = self.device {
            self.backend = EngineBackend::Native;
        }
        self
    }

    /// Rejects options whose failure would otherwise show only after minutes.
    ///
    /// # Errors
    /// If a canary has no ratings, there is nothing to sabotage, or the report cannot be
    /// written.
    pub fn check(&self) -> Result<(), DemoUsage> {
        let refuse = |reason: &str| Err(DemoUsage(reason.to_owned()));
        if let Some(url) = self.server.as_ref().filter(|url| !url.starts_with("http://")) {
            return Err(DemoUsage(format!(
                "--server is {url:?}: it must begin with http://, such as http://localhost:8080"
            )));
        }
        let is_canary = self.promotion == Promotion::Canary;
        if is_canary && !self.rewards.has_thumbs() {
            return refuse(
                "--promotion is canary: --rewards must be both or feedback, because users' thumbs decide",
            );
        }
        if self.sabotage && !(is_canary && self.rewards.has_graders()) {
            return refuse(
                "--sabotage needs --promotion canary, which rolls back, and --rewards both, whose \
                 grader is sabotaged",
            );
        }
        let Some(file) = &self.report else { return Ok(()) };
        let parent = match file.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        if file.is_dir() || !parent.is_dir() {
            let file = file.display();
            return Err(DemoUsage(format!(
                "--report {file}: it must be a file in a directory that exists"
            )));
        }
        Ok(())
    }
}

/// An unusable option or data directory.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct DemoUsage(pub(super) String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unusable_options_are_rejected() {
        let parent = tempfile::tempdir().unwrap();
        let usual = DemoOptions::default;
        let report = |path: PathBuf| DemoOptions { report: Some(path), ..usual() };
        let file = |name: &str| parent.path().join(name);
        let published =
            |promotion, sabotage, rewards| DemoOptions { promotion, sabotage, rewards, ..usual() };
        let (canary, gate, both) = (Promotion::Canary, Promotion::Gate, RewardsMode::Both);
        let thumbs = "--promotion is canary: --rewards must be both or feedback, because users' thumbs decide";
        let needed = "--sabotage needs --promotion canary, which rolls back, and --rewards both, whose grader is \
                      sabotaged";
        for (options, error) in [
            (usual(), ""),
            (report("report.json".into()), ""),
            (report(file("report.json")), ""),
            (report(parent.path().to_owned()), "it must be a file in a directory that exists"),
            (report(file("no/report.json")), "it must be a file in a directory that exists"),
            (
                DemoOptions { server: Some("localhost:8080".to_owned()), ..usual() },
                "it must begin with http://",
            ),
            (published(canary, false, RewardsMode::Feedback), ""),
            (published(canary, true, both), ""),
            (published(gate, false, RewardsMode::Graded), ""),
            (published(canary, false, RewardsMode::Graded), thumbs),
            (published(gate, true, both), needed),
            (published(canary, true, RewardsMode::Feedback), needed),
        ] {
            let found = options.check().err().map(|found| found.to_string()).unwrap_or_default();
            assert!(found.contains(error) && found.is_empty() == error.is_empty(), "{found}");
        }
    }
}
