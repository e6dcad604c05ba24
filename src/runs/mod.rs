//! Runs on a dataset or on recorded completions: `hone train`, `hone eval` and `hone rewards test`, with
//! their logs, statistics, tables and reports.
//!
//! [`train`] and [`eval`] drive the daemon's [`Core`](crate::app::Core), and [`data_check`] decides
//! whether they can learn. [`from_ledger`] trains without a daemon. The other modules depend on no engine,
//! trainer or clock: the same input gives the same bytes.

pub mod data_check;
pub mod eval;
pub mod eval_set;
pub mod from_ledger;
pub mod jsonl;
pub mod report;
pub mod score;
pub mod table;
pub mod train;

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use hone_core::types::StepRecord;
use hone_train::monitoring::metric_names;
use hone_train::monitoring::warnings::Warning;

use crate::config::EarlyStopConfig;
use hone_report::terminal::{Progress, clock};

const NO_DATASET: &str = "dataset.path is missing: it must name a file of prompts";

const NO_LENGTH: &str =
    "train.max_steps and train.epochs are 0: one of them must be set (--steps N or --epochs E)";

// The best step on held-out prompts, and the decision to stop early.

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// The optimizer step that was evaluated; 0 is the policy at the start of the run.
    pub step: u64,
    pub reward: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopDecision {
    /// The best evaluation: its adapter is copied.
    Improved,
    /// Not an improvement, for this many evaluations in a row.
    Waiting(u64),
    /// Patience is exhausted: the run ends.
    Stop,
}

/// Tracks the held-out reward. It is serialized between processes, without the configuration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BestTracker {
    best: Option<Best>,
    waited: u64,
    last_step: Option<u64>,
}

impl BestTracker {
    /// Adds the evaluation of a step. A reward that is not finite is no improvement. A step that is not
    /// after the last one changes nothing: a resumed run repeats it.
    ///
    /// As in Keras and the Hugging Face trainer, an improvement is more than `min_delta` above the
    /// best, and patience counts evaluations, not steps.
    pub fn observe(&mut self, config: &EarlyStopConfig, step: u64, reward: f64) -> StopDecision {
        if self.last_step.is_none_or(|last| step > last) {
            self.last_step = Some(step);
            let better = self.best.is_none_or(|best| reward > best.reward + config.min_delta);
            if reward.is_finite() && better {
                self.best = Some(Best { step, reward });
                self.waited = 0;
                return StopDecision::Improved;
            }
            self.waited += 1;
        }
        if config.patience > 0 && self.waited >= config.patience {
            StopDecision::Stop
        } else {
            StopDecision::Waiting(self.waited)
        }
    }

    /// The best evaluation, if any had a finite reward.
    pub fn best(&self) -> Option<Best> {
        self.best
    }
}

// Progress of `hone train`: a bar on a terminal, a plain line every few steps elsewhere.

/// Steps whose mean duration gives the remaining time.
const PACE_STEPS: usize = 20;

/// The state of a run after a step. Unknown values are left out of the line.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunView {
    /// Optimizer steps taken, including those before a resume.
    pub step: u64,
    pub steps: u64,
    /// Batches without a step in this process.
    pub skipped: u64,
    reward: Option<f64>,
    /// Standard deviation of the reward within groups.
    std: Option<f64>,
    /// Share of groups with different rewards: only these have advantages to learn from.
    signal: Option<f64>,
    /// KL to the reference, in nats per token.
    kl: Option<f64>,
    length: Option<f64>,
    /// The held-out reward, until it is shown.
    held_out: Option<f64>,
    /// Completion tokens trained on by this process.
    tokens: f64,
    /// Training time of this process, without evaluations.
    training: Duration,
    evaluating: Duration,
    /// The training time after each of the last steps.
    step_ends: VecDeque<Duration>,
}

impl RunView {
    pub fn new(step: u64, steps: u64) -> Self {
        Self { step, steps, ..Self::default() }
    }

    /// Adds a step that ended `elapsed` after this process began to train.
    pub fn add_step(&mut self, record: &StepRecord, elapsed: Duration) {
        let metric = |name| metric_names::finite(record, name);
        self.step = record.step;
        self.reward = metric(metric_names::REWARD_MEAN);
        self.std = metric(metric_names::REWARD_STD);
        self.signal = metric(metric_names::ZERO_STD_GROUPS).map(|equal| 1.0 - equal);
        self.kl = metric(metric_names::KL);
        self.length = metric(metric_names::LENGTH);
        self.tokens += metric(metric_names::TOKENS).unwrap_or(0.0);
        self.training = elapsed.saturating_sub(self.evaluating);
        self.step_ends.push_back(self.training);
        if self.step_ends.len() > PACE_STEPS + 1 {
            self.step_ends.pop_front();
        }
    }

    /// Adds an evaluation. The next line shows its reward.
    pub fn add_evaluation(&mut self, reward: Option<f64>, took: Duration) {
        self.held_out = reward;
        self.evaluating += took;
    }

    /// The time of the remaining steps at the mean pace of the last steps, without evaluations;
    /// `None` before the second step of this process.
    pub fn remaining(&self) -> Option<Duration> {
        let (first, last) = (self.step_ends.front()?, self.step_ends.back()?);
        let steps = self.step_ends.len() - 1;
        let left = self.steps.saturating_sub(self.step);
        let seconds = (*last - *first).as_secs_f64() / steps as f64 * left as f64;
        Duration::try_from_secs_f64(seconds).ok()
    }

    /// Completion tokens per second of training, generation included.
    pub fn tokens_per_second(&self) -> Option<f64> {
        let seconds = self.training.as_secs_f64();
        (seconds > 0.0 && self.tokens > 0.0).then(|| self.tokens / seconds)
    }

    /// Everything after `step X/Y`. A held-out reward is shown once.
    fn metrics(&mut self) -> String {
        let mut parts = Vec::new();
        if let Some(reward) = self.reward {
            let std = self.std.map(|std| format!(" ± {std:.3}")).unwrap_or_default();
            parts.push(format!("reward {reward:.3}{std}"));
        }
        let signal = |share: f64| format!("signal in {:.0} % of groups", 100.0 * share);
        parts.extend(self.signal.map(signal));
        parts.extend(self.held_out.take().map(|reward| format!("held out {reward:.3}")));
        parts.extend(self.kl.map(|kl| format!("KL {kl:.4}")));
        parts.extend(self.length.map(|length| format!("length {length:.0}")));
        parts.extend(self.tokens_per_second().map(|rate| format!("{rate:.0} tok/s")));
        parts.extend(self.remaining().map(|left| format!("ETA {}", clock(left))));
        if self.skipped > 0 {
            parts.push(format!("skipped batches {}", self.skipped));
        }
        parts.join(" · ")
    }

    /// The state in one line, without a line end. A held-out reward is shown once.
    pub fn line(&mut self) -> String {
        let digits = self.steps.max(1).ilog10() as usize + 1;
        let mut line = format!("step {:>digits$}/{}", self.step, self.steps);
        let metrics = self.metrics();
        if !metrics.is_empty() {
            let _ = write!(line, "  {metrics}");
        }
        line
    }
}

/// A warning as two lines for the terminal.
pub fn warning_text(warning: &Warning) -> String {
    format!("warning: step {}: {}\n         {}", warning.step, warning.message, warning.advice)
}

/// Displays a run.
pub struct RunProgress {
    display: Progress,
    line_every: u64,
    /// [`RunView::skipped`] of the last line about skipped batches.
    shown_skipped: u64,
}

impl RunProgress {
    /// A bar on a terminal, else a line every `line_every` steps (0 counts as 1) and at the last.
    pub fn new(terminal: bool, line_every: u64) -> Self {
        Self { display: Progress::new(terminal), line_every: line_every.max(1), shown_skipped: 1 }
    }

    pub fn update(&mut self, view: &mut RunView) {
        if self.display.has_bars() {
            self.redraw(view);
        } else if view.step.is_multiple_of(self.line_every) || view.step >= view.steps {
            self.note(&view.line());
        }
    }

    /// Shows a change between two steps, which only a bar does.
    pub fn redraw(&mut self, view: &mut RunView) {
        if self.display.has_bars() {
            self.display.show(view.step, view.steps, &view.metrics(), &[]);
        }
    }

    /// Shows skipped batches; without a bar, only when their number has doubled.
    pub fn update_skipped(&mut self, view: &mut RunView) {
        if self.display.has_bars() {
            self.redraw(view);
        } else if self.is_due(view.skipped) {
            self.note(&view.line());
        }
    }

    fn is_due(&mut self, skipped: u64) -> bool {
        let is_due = skipped >= 2 * self.shown_skipped;
        if is_due {
            self.shown_skipped = skipped;
        }
        is_due
    }

    pub fn note(&self, text: &str) {
        self.display.note(text);
    }

    pub fn finish(&mut self) {
        self.display.clear();
    }
}

#[cfg(test)]
mod tests {
    use hone_train::monitoring::warnings::WarningKind;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn patience_counts_evaluations_without_an_improvement() {
        let config = EarlyStopConfig { patience: 2, min_delta: 0.1 };
        let (mut tracker, best) = (BestTracker::default(), Best { step: 20, reward: 0.7 });
        for (step, reward, decision) in [
            (0, 0.5, StopDecision::Improved),
            (10, 0.59, StopDecision::Waiting(1)),
            (20, 0.7, StopDecision::Improved),
            (30, f64::NAN, StopDecision::Waiting(1)),
            (40, 0.75, StopDecision::Stop),
            // A resumed run repeats a step, which is not counted twice.
            (40, 9.0, StopDecision::Stop),
        ] {
            assert_eq!(tracker.observe(&config, step, reward), decision, "{step}: {reward}");
        }
        assert_eq!(tracker.best(), Some(best));
        // Without patience, a run never stops.
        let config = EarlyStopConfig::default();
        assert_eq!(tracker.observe(&config, 50, 0.0), StopDecision::Waiting(3));
    }

    proptest! {
        #[test]
        fn resuming_anywhere_changes_nothing(
            rewards in prop::collection::vec(-2.0..2.0f64, 1..30), cut in 0usize..30,
        ) {
            let config = EarlyStopConfig { patience: 3, min_delta: 0.05 };
            let (mut whole, mut resumed) = (BestTracker::default(), BestTracker::default());
            for (step, reward) in rewards.iter().enumerate() {
                if step == cut {
                    let text = serde_json::to_string(&resumed).unwrap();
                    resumed = serde_json::from_str(&text).unwrap();
                }
                let decision = whole.observe(&config, step as u64, *reward);
                prop_assert_eq!(decision, resumed.observe(&config, step as u64, *reward));
            }
            let best = whole.best().unwrap().reward;
            prop_assert!(rewards.iter().all(|r| *r <= best + config.min_delta));
        }
    }

    const METRICS: [(&str, f64); 6] = [
        ("reward_mean", 0.8125),
        ("reward_std", 0.31),
        ("zero_std_groups_ratio", 0.25),
        ("kl", 0.0123),
        ("completion_length", 31.6),
        ("tokens", 2022.0),
    ];

    fn add(view: &mut RunView, step: u64, metrics: &[(&str, f64)], seconds: u64) {
        let metrics = metrics.iter().map(|(n, v)| ((*n).to_owned(), *v)).collect();
        let record = StepRecord { step, groups: Vec::new(), metrics, created: 0 };
        view.add_step(&record, Duration::from_secs(seconds));
    }

    /// A run resumed after `first` of `steps` steps that has taken `count` more, 10 s each.
    fn run(first: u64, count: u64, steps: u64) -> RunView {
        let mut view = RunView::new(first, steps);
        (1..=count).for_each(|i| add(&mut view, first + i, &METRICS, 10 * i));
        view
    }

    #[test]
    fn a_line_shows_the_known_values_and_a_held_out_reward_once() {
        let mut view = RunView { steps: 300, ..RunView::default() };
        insta::assert_snapshot!(view.line(), @"step   0/300");
        add(&mut view, 1, &METRICS, 2);
        insta::assert_snapshot!(view.line(), @"step   1/300  reward 0.812 ± 0.310 · signal in 75 % of groups · KL 0.0123 · length 32 · 1011 tok/s");
        add(&mut view, 2, &[("reward_mean", f64::NAN)], 4);
        insta::assert_snapshot!(view.line(), @"step   2/300  506 tok/s · ETA 9:56");
        view.add_evaluation(Some(0.9), Duration::ZERO);
        view.skipped = 3;
        add(&mut view, 3, &[("zero_std_groups_ratio", 1.0)], 6);
        insta::assert_snapshot!(view.line(), @"step   3/300  signal in 0 % of groups · held out 0.900 · 337 tok/s · ETA 9:54 · skipped batches 3");
        assert!(!view.line().contains("held out"));
    }

    #[test]
    fn the_remaining_time_follows_the_pace_of_the_last_steps_of_this_process() {
        let seconds = |seconds| Some(Duration::from_secs(seconds));
        assert_eq!(run(100, 10, 200).remaining(), seconds(900));
        assert_eq!(run(100, 0, 200).remaining(), None);
        assert_eq!(run(100, 1, 200).remaining(), None, "one step has no pace");
        assert_eq!(RunView { step: 300, ..run(100, 10, 200) }.remaining(), seconds(0));
        // Evaluations are not counted.
        let mut view = run(0, 10, 100);
        view.add_evaluation(Some(0.5), Duration::from_secs(1000));
        assert_eq!(view.remaining(), seconds(900));
        add(&mut view, 11, &METRICS, 1110);
        assert_eq!(view.remaining(), seconds(890));
        assert_eq!(view.tokens_per_second(), Some(2022.0 / 10.0));
        let mut view = run(0, 10, 100);
        (1..=PACE_STEPS as u64).for_each(|i| add(&mut view, 10 + i, &METRICS, 100 + 2 * i));
        assert_eq!(view.remaining(), seconds(2 * 70));
    }

    #[test]
    fn lines_about_skipped_batches_become_rare() {
        let mut progress = RunProgress::new(false, 1);
        let shown: Vec<u64> = (0..100).filter(|skipped| progress.is_due(*skipped)).collect();
        assert_eq!(shown, [2, 4, 8, 16, 32, 64]);
    }

    #[test]
    fn warnings_are_two_lines() {
        let warning = Warning {
            kind: WarningKind::Collapse,
            step: 7,
            message: "the deviation fell".to_owned(),
            advice: "Raise `rollout.group_size`.".to_owned(),
        };
        insta::assert_snapshot!(warning_text(&warning), @"
        warning: step 7: the deviation fell
                 Raise `rollout.group_size`.
        ");
    }
}
