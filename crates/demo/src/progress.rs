//! Progress of a demo: bars and rows on a terminal, plain lines elsewhere.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use super::client::TrainerStatus;
use super::report::{count, ms, percent};
use super::task::REWARD_MAX;
use super::users::UserTally;
use hone_report::terminal::{MISSING, Progress, clock, sparkline};

/// Time between two plain lines of the learning phase.
const LINE_INTERVAL: Duration = Duration::from_secs(5);
/// Characters of the sparkline.
const SPARK_WIDTH: usize = 32;

/// The state of the learning phase.
#[derive(Clone, Debug, Default)]
pub struct LearningView {
    /// Optimizer steps requested.
    pub steps: u64,
    /// The trainer's state, with the steps of this demo.
    pub status: TrainerStatus,
    /// KL to the reference policy, in nats per token.
    pub kl: Option<f64>,
    /// The served reward after each step.
    pub history: Vec<f64>,
}

/// Displays the phases of a demo.
pub struct DemoProgress {
    began: Instant,
    display: Progress,
    last_line: Option<Instant>,
}

impl DemoProgress {
    pub fn new(terminal: bool) -> Self {
        Self { began: Instant::now(), display: Progress::new(terminal), last_line: None }
    }

    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    pub fn begin(&mut self, message: &str) {
        self.display.spin(message);
    }

    /// Changes the message of the phase.
    pub fn message(&self, text: &str) {
        self.display.set_message(text);
    }

    /// Ends a phase with a line that stays.
    pub fn done(&mut self, label: &str, text: &str) {
        self.display.clear();
        self.event(true, label, text);
    }

    /// Writes a line that stays, above the state of the phase.
    pub fn event(&self, good: bool, label: &str, text: &str) {
        let mark = match self.display.has_bars() {
            true if good => "  ✓".to_owned(),
            true => "  !".to_owned(),
            false => clock(self.elapsed()),
        };
        self.display.note(&format!("{mark} {label:<11} {text}"));
    }

    /// Shows the state of the learning phase.
    pub fn update(&mut self, view: &LearningView, tally: &UserTally) {
        let elapsed = clock(self.elapsed());
        if self.display.has_bars() {
            self.display.show(view.status.step, view.steps, &elapsed, &rows(view, tally));
        } else if self.last_line.is_none_or(|last| last.elapsed() >= LINE_INTERVAL) {
            self.last_line = Some(Instant::now());
            self.display.note(&format!("{elapsed} {}", plain(view, tally)));
        }
    }

    pub fn clear(&mut self) {
        self.display.clear();
    }
}

fn rows(view: &LearningView, tally: &UserTally) -> [String; 3] {
    let spark = sparkline(&view.history, 0.0, REWARD_MAX, SPARK_WIDTH);
    let TrainerStatus { policy_version, state, .. } = &view.status;
    [
        format!("reward     {:<15}{spark}", reward(tally)).trim_end().to_owned(),
        format!("policy     version {policy_version}{} · trainer is {state}", kl(view)),
        format!("users      {}", traffic(tally)),
    ]
}

fn plain(view: &LearningView, tally: &UserTally) -> String {
    let TrainerStatus { policy_version, step, .. } = &view.status;
    let (steps, reward, kl, traffic) = (view.steps, reward(tally), kl(view), traffic(tally));
    let label = "learning";
    format!(
        "{label:<10} step {step} of {steps} · reward {reward} · version {policy_version}{kl} · {traffic}"
    )
}

fn kl(view: &LearningView) -> String {
    view.kl.map(|kl| format!(" · KL {kl:.3}")).unwrap_or_default()
}

fn reward(tally: &UserTally) -> String {
    let shown = |reward| format!("{reward:.2} of {REWARD_MAX:.2}");
    tally.reward.map_or_else(|| MISSING.to_owned(), shown)
}

fn traffic(tally: &UserTally) -> String {
    let mut text = format!("{}, {} failed", count(tally.requests, "request"), tally.failed);
    if tally.feedback > 0 {
        let up = percent(tally.thumbs_up as f64 / tally.feedback as f64);
        let _ = write!(text, " · {} ({up} up)", count(tally.feedback, "thumb"));
    }
    if let Some(p50) = tally.overall().p50 {
        let _ = write!(text, " · first token {}", ms(Some(p50)));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_the_plain_line_show_the_same_state() {
        let mut tally = UserTally::default();
        for index in 0..40 {
            tally.requests += 1;
            tally.add_answer(1.2, Duration::from_millis(8), false);
            tally.add_thumb(index % 4 != 0);
        }
        let mut view = LearningView { steps: 60, ..LearningView::default() };
        view.status.state = "waiting".into();
        insta::assert_snapshot!(rows(&view, &UserTally::default()).join("\n"), @r"
        reward     –
        policy     version 0 · trainer is waiting
        users      0 requests, 0 failed
        ");
        view.history = vec![0.7, 0.8, 0.8, 1.0, 1.2];
        view.kl = Some(0.0421);
        (view.status.step, view.status.policy_version) = (5, 5);
        view.status.state = "training".into();
        insta::assert_snapshot!(rows(&view, &tally).join("\n"), @r"
        reward     1.20 of 1.50   ▄▅▅▆▇
        policy     version 5 · KL 0.042 · trainer is training
        users      40 requests, 0 failed · 40 thumbs (75 % up) · first token 8.0 ms
        ");
        insta::assert_snapshot!(plain(&view, &tally), @"learning   step 5 of 60 · reward 1.20 of 1.50 · version 5 · KL 0.042 · 40 requests, 0 failed · 40 thumbs (75 % up) · first token 8.0 ms");
    }
}
