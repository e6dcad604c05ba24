//! The keys of `[policy]`.

use serde::{Deserialize, Serialize};

use hone_core::config::section::Parameters;
use hone_core::config::{Checked, Problem};

/// What a version must pass before all traffic gets it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Promotion {
    /// Only the comparison of served and trained log-probabilities.
    Direct,
    /// That, bounds on its drift, and an exam on held-out prompts.
    #[default]
    Gate,
    /// The gate, then a share of the live traffic until its ratings decide.
    Canary,
}

hone_core::parameters! {
    /// When versions are published, what they must pass, and how many keep their files.
    pub struct PolicyConfig {
        /// What a version must pass before all traffic gets it.
        pub promotion: Promotion = Promotion::default(),
        /// Optimizer steps between published versions.
        pub publish_every: u64 = 4 => between(1, u64::MAX),
        /// Newest adapter directories to keep. The active, the previous and the pinned versions always keep
        /// theirs, and so do ancestors of the active version at exponentially growing distances.
        pub keep_versions: usize = 20 => between(2, 1 << 20),
        /// Seconds for which training pauses after an operator activated a version; 0 until it is
        /// resumed. Otherwise the next step would undo the activation.
        pub hold_seconds: u64 = 0 => between(0, 1 << 32),
        /// Versions in a row that may be rejected or rolled back before training pauses until it is
        /// resumed; 0 never pauses. Without it, a trainer whose every version is rejected would not stop.
        #[serde(skip)]
        pub max_rejections: u64 = 3,
        /// `[policy.gate]`
        pub gate: GateConfig = GateConfig::default(),
        /// `[policy.canary]`
        pub canary: CanaryConfig = CanaryConfig::default(),
    }
}

hone_core::parameters! {
    /// Bounds of the gate. Every comparison is on the same prompts and seeds as the active version's.
    pub struct GateConfig {
        /// Prompts that candidate and active version complete, of each graded route; 0 leaves out drift and exam.
        pub prompts: usize = 16 => between(0, 4096),
        /// JSON Lines file with prompts of the exam; empty takes the reservoir of live prompts.
        pub exam_file: String = String::new(),
        /// Share of the live prompts of a graded route that only exams use.
        pub holdout_share: f64 = 0.02 => between(0.0, 0.5),
        /// Largest KL to the base, the initial adapter or the newest pinned version before the active one, in nats
        /// per token. Half of it bounds the KL to the active version. 0 is no bound.
        pub max_kl: f64 = 1.0 => at_least(0.0),
    }
}

/// The end of a canary whose ratings did not decide in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CanaryLimit {
    /// Promote if the mean difference of the ratings is within the margin; roll back if there is no
    /// pair of ratings. Such a promotion has no bound on its error.
    Estimate,
    /// Promote.
    Promote,
    /// Roll back.
    #[default]
    RollBack,
}

hone_core::parameters! {
    /// The canary.
    pub struct CanaryConfig {
        /// Shares of the live traffic, one after the other.
        pub shares: Vec<f64> = vec![0.05, 0.25, 0.5],
        /// Ratings of the canary before the next share.
        pub stage_ratings: u64 = 20 => between(1, 1 << 40),
        /// Difference of the mean rating, as a share of the rating's range, by which the canary may be
        /// worse.
        pub margin: f64 = 0.05 => between(0.001, 0.5),
        /// Largest probability of each wrong decision of a canary: to promote a version that is worse by more than the
        /// margin, and to roll back one that is not worse. Each canary reduces what the next ones get, so that the
        /// expected number of wrong decisions of each kind in a year is at most 100 times this value.
        pub alpha: f64 = 0.05 => between(1e-6, 0.5),
        /// Seconds after which the canary ends without a decision.
        pub max_seconds: u64 = 86_400 => between(1, 1 << 32),
        /// Ratings of both versions after which the canary ends without a decision; 0 is no limit.
        pub max_ratings: u64 = 0 => between(0, 1 << 40),
        /// The end of a canary whose ratings did not decide in time.
        pub on_limit: CanaryLimit = CanaryLimit::default(),
    }
}

impl PolicyConfig {
    /// Checks every range.
    ///
    /// # Errors
    /// The first value out of range, with its full key.
    pub fn check(&self) -> Checked {
        self.check_in("policy.")?;
        self.gate.check_in("policy.gate.")?;
        self.canary.check()
    }
}

impl CanaryConfig {
    fn check(&self) -> Checked {
        let in_range = |share: &f64| *share > 0.0 && *share <= 0.5;
        let rises = self.shares.windows(2).all(|pair| pair[0] < pair[1]);
        if self.shares.is_empty() || !self.shares.iter().all(in_range) || !rises {
            let shown = format!("{:?}", self.shares);
            // Above one half, the active version would have too few ratings to compare with.
            let allowed = "one or more rising shares above 0 and at most 0.5";
            return Err(Problem::value("policy.canary.shares", shown, allowed));
        }
        self.check_in("policy.canary.")
    }
}
