//! The command line of `hone demo`.

use std::path::{Path, PathBuf};

use serde::Serialize;

use hone_engine::EngineBackend;
use hone_rollout::SamplerKind;
use hone_train::policy::Promotion;

use super::error::DemoError;

/// Default of `--steps`: enough to reach nearly the maximum reward.
pub const DEFAULT_STEPS: u64 = 100;

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

/// The options of a demo.
#[derive(Clone, Debug)]
pub struct DemoOptions {
    /// Optimizer steps, at least 1.
    pub steps: u64,
    /// Seed of the users' questions and of the trainer.
    pub seed: u64,
    /// URL of a server that runs already, whose users the demo's users are. It has its own configuration, and
    /// steps count from its present one.
    pub server: Option<String>,
    /// A new or empty directory that keeps the data; a temporary one if absent.
    pub data: Option<PathBuf>,
    /// Whether to serve after the report until Ctrl-C.
    pub keep_serving: bool,
    /// File of the report as JSON.
    pub report: Option<PathBuf>,
    /// The sources of the rewards.
    pub rewards: RewardsMode,
    /// The engine that answers the users.
    pub backend: EngineBackend,
    /// The sampler of shadow completions.
    pub sampler: SamplerKind,
    /// What a version must pass before all users get it.
    pub promotion: Promotion,
    /// Whether to reward wrong sums after some promotions, so that a canary has something to roll back.
    pub sabotage: bool,
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
            sampler: SamplerKind::default(),
            promotion: Promotion::Direct,
            sabotage: false,
        }
    }
}

impl DemoOptions {
    /// Rejects options whose failure would otherwise show only after minutes.
    ///
    /// # Errors
    /// If there is no step, a canary has no ratings, there is nothing to sabotage, or the report cannot be
    /// written.
    pub fn check(&self) -> Result<(), DemoError> {
        let refuse = |reason: &str| Err(DemoError::Options(reason.to_owned()));
        if self.steps == 0 {
            return refuse("--steps is 0; it must be at least 1");
        }
        if let Some(url) = self.server.as_ref().filter(|url| !url.starts_with("http://")) {
            return Err(DemoError::Options(format!(
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
            return Err(DemoError::Options(format!(
                "--report {file}: it must be a file in a directory that exists"
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unusable_options_are_rejected() {
        let parent = tempfile::tempdir().unwrap();
        let with = |steps, report: Option<PathBuf>| {
            DemoOptions { steps, report, ..DemoOptions::default() }.check()
        };
        assert!(with(1, None).is_ok());
        assert!(with(1, Some("report.json".into())).is_ok());
        assert!(with(1, Some(parent.path().join("report.json"))).is_ok());
        assert!(with(0, None).unwrap_err().to_string().contains("--steps is 0"));
        assert!(with(1, Some(parent.path().to_owned())).is_err());
        assert!(with(1, Some(parent.path().join("no/report.json"))).is_err());
        let server = Some("localhost:8080".to_owned());
        let error = DemoOptions { server, ..DemoOptions::default() }.check().unwrap_err();
        assert!(error.to_string().contains("it must begin with http://"), "{error}");
    }

    #[test]
    fn a_canary_needs_thumbs_and_sabotage_needs_a_canary() {
        let check = |promotion, sabotage, rewards| {
            let options = DemoOptions { promotion, sabotage, rewards, ..DemoOptions::default() };
            options.check().map_err(|error| error.to_string())
        };
        let (canary, both) = (Promotion::Canary, RewardsMode::Both);
        assert_eq!(check(canary, false, RewardsMode::Feedback), Ok(()));
        assert_eq!(check(canary, true, both), Ok(()));
        assert_eq!(check(Promotion::Gate, false, RewardsMode::Graded), Ok(()));
        insta::assert_snapshot!(check(canary, false, RewardsMode::Graded).unwrap_err(), @"--promotion is canary: --rewards must be both or feedback, because users' thumbs decide");
        let needed = "--sabotage needs --promotion canary, which rolls back, and --rewards both, whose grader is sabotaged";
        assert_eq!(check(Promotion::Gate, true, both), Err(needed.to_owned()));
        assert_eq!(check(canary, true, RewardsMode::Feedback), Err(needed.to_owned()));
    }
}
