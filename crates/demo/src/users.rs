//! Simulated users: they ask additions over real HTTP, read the streamed answers, and post a thumbs
//! up if an answer is right and well formed, else a thumbs down.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use futures::future::join_all;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::time::{Instant, sleep};

use super::client::{Client, ClientError, UserRequest};
use super::config::{GROUP_SIZE, SAMPLES_PER_STEP, TASK_ASKED, TASK_SABOTAGED};
use super::options::RewardsMode;
use super::task::{self, Question, QuestionSplit, Questions};

/// With graders, users pause while this many prompts or groups wait: those of the current optimizer
/// step and the next one. More would only make the samples staler.
const ENOUGH_WAITING: u64 = 2 * (SAMPLES_PER_STEP / GROUP_SIZE) as u64;
/// Users pause no longer than this, so that latency is measured at all times.
const LONGEST_PAUSE: Duration = Duration::from_millis(2500);
/// How often a pausing user checks the load.
const CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// The trainer's load, which the demo's main loop polls for the users.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrainerLoad {
    /// Whether the trainer is computing.
    pub trainer_busy: bool,
    /// Prompts without a group, and groups that were not trained on yet.
    pub waiting: u64,
    /// Whether a canary waits for ratings, so that users must not pause.
    pub canary: bool,
    /// Whether questions go to the route whose grader is sabotaged.
    pub sabotaged: bool,
    /// Whether users end after their current request.
    pub ended: bool,
}

impl TrainerLoad {
    /// Whether further prompts would only make samples staler.
    fn is_enough(self) -> bool {
        self.waiting >= ENOUGH_WAITING && !self.canary
    }
}

/// What simulated users share.
pub struct Users<'a> {
    /// The client of all of them.
    pub client: &'a Client,
    /// Whether they post thumbs, and send the reference answer.
    pub mode: RewardsMode,
    /// What became of their requests.
    pub tally: &'a SharedTally,
    /// The trainer's load.
    pub load: &'a Cell<TrainerLoad>,
}

impl Users<'_> {
    /// Lets `count` users ask one stream of questions until [`TrainerLoad::ended`].
    pub async fn run(&self, seed: u64, count: usize) {
        let questions = &RefCell::new(Questions::new(seed, QuestionSplit::Asked));
        let users = (1..=count as u64).map(|stream| async move {
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            random.set_stream(stream);
            while !self.load.get().ended {
                let question = questions.borrow_mut().next();
                let Some(question) = question else { return };
                self.ask(&question, random.random()).await;
                self.think(&mut random).await;
            }
        });
        join_all(users).await;
    }

    async fn ask(&self, question: &Question, seed: u32) {
        let before = self.load.get();
        let metadata = metadata(self.mode, question, before.sabotaged);
        let request = UserRequest::sampled(question, metadata, seed.into());
        self.tally.borrow_mut().requests += 1;
        let answer = match self.client.ask(&request).await {
            Ok(answer) => answer,
            Err(error) => {
                self.tally.borrow_mut().add_failure(&error);
                return sleep(Duration::from_millis(200)).await;
            }
        };
        let busy = before.trainer_busy || self.load.get().trainer_busy;
        let score = task::score(&answer.text, question.answer());
        self.tally.borrow_mut().add_answer(score.reward(), answer.first_token, busy);
        if self.mode.has_thumbs() {
            let up = score.thumbs_up();
            let posted = self.client.thumb(&answer.completion_id, up).await;
            let mut tally = self.tally.borrow_mut();
            match posted {
                Ok(_) => tally.add_thumb(up),
                Err(error) => tally.add_failure(&error),
            }
        }
    }

    /// Pauses shortly; longer if shadow completions need the engines and enough prompts wait.
    async fn think(&self, random: &mut ChaCha8Rng) {
        sleep(Duration::from_millis(random.random_range(1..10))).await;
        if !self.mode.has_graders() {
            return;
        }
        let until = Instant::now() + LONGEST_PAUSE.mul_f64(random.random_range(0.5..1.0));
        while !self.load.get().ended && Instant::now() < until && self.load.get().is_enough() {
            sleep(CHECK_INTERVAL).await;
        }
    }
}

/// Contains the reference answer only if a grader needs it.
fn metadata(mode: RewardsMode, question: &Question, sabotaged: bool) -> BTreeMap<String, String> {
    let task = if sabotaged { TASK_SABOTAGED } else { TASK_ASKED };
    let mut metadata = BTreeMap::from([("task".to_owned(), task.to_owned())]);
    if mode.has_graders() {
        metadata.insert("answer".to_owned(), question.answer().to_string());
    }
    metadata
}

// Counts, latencies and rewards of the users' requests.

/// Answers that the running mean of the reward averages over.
const MEAN_WINDOW: f64 = 64.0;
/// Answers whose mean reward must reach [`NEARLY`] of the maximum.
const RECENT: usize = 200;
/// The share of the maximum reward whose time and number of ratings are reported.
pub const NEARLY: f64 = 0.9;
/// Failures whose messages are kept.
const FAILURES_KEPT: usize = 3;

/// A tally that users, the evaluation and the progress display share.
pub type SharedTally = RefCell<UserTally>;

/// The counts up to now.
#[derive(Clone, Debug, Default)]
pub struct UserTally {
    /// Chat completions requested, including failed ones.
    pub requests: u64,
    /// Chat completions and feedback posts that failed.
    pub failed: u64,
    /// Acknowledged feedback posts.
    pub feedback: u64,
    /// Acknowledged thumbs up.
    pub thumbs_up: u64,
    /// Running mean of the reward of answers to users.
    pub reward: Option<f64>,
    /// Thumbs until the mean reward of the last 200 answers first reached nine tenths of the maximum.
    pub ratings_to_nearly: Option<u64>,
    /// The rewards of the last [`RECENT`] answers.
    recent: VecDeque<f64>,
    /// The messages of the first few failures.
    pub failures: Vec<String>,
    answers: u64,
    /// Times to the first token in milliseconds while the trainer was idle.
    idle: Vec<f64>,
    /// The same while it was computing.
    busy: Vec<f64>,
}

/// Time to first token in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Latency {
    /// Median.
    pub p50: Option<f64>,
    /// 99th percentile.
    pub p99: Option<f64>,
}

impl UserTally {
    /// Counts a failed request.
    pub fn add_failure(&mut self, error: &ClientError) {
        self.failed += 1;
        if self.failures.len() < FAILURES_KEPT {
            self.failures.push(error.to_string());
        }
    }

    /// Counts an answer to a user.
    pub fn add_answer(&mut self, reward: f64, first_token: Duration, trainer_busy: bool) {
        self.answers += 1;
        let share = 1.0 / (self.answers as f64).min(MEAN_WINDOW);
        let mean = self.reward.unwrap_or(reward);
        self.reward = Some(mean + share * (reward - mean));
        self.recent.push_back(reward);
        if self.recent.len() > RECENT {
            self.recent.pop_front();
        }
        let ms = first_token.as_secs_f64() * 1e3;
        if trainer_busy { self.busy.push(ms) } else { self.idle.push(ms) }
    }

    /// Counts an acknowledged thumb.
    pub fn add_thumb(&mut self, up: bool) {
        self.feedback += 1;
        self.thumbs_up += u64::from(up);
        let most = task::REWARD_MAX * RECENT as f64;
        if self.recent.len() == RECENT && self.recent.iter().sum::<f64>() >= NEARLY * most {
            self.ratings_to_nearly.get_or_insert(self.feedback);
        }
    }

    /// Whether [`Self::reward`] averages over its whole window.
    pub fn is_settled(&self) -> bool {
        self.answers as f64 >= MEAN_WINDOW
    }

    /// Latency while the trainer was idle.
    pub fn idle(&self) -> Latency {
        Latency::of(self.idle.clone())
    }

    /// Latency while the trainer was computing.
    pub fn busy(&self) -> Latency {
        Latency::of(self.busy.clone())
    }

    /// Latency of all answers.
    pub fn overall(&self) -> Latency {
        Latency::of([self.idle.as_slice(), self.busy.as_slice()].concat())
    }
}

impl Latency {
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        Self { p50: percentile(&values, 0.50), p99: percentile(&values, 0.99) }
    }
}

/// The nearest-rank percentile of sorted values: the least value that is at least as large as the
/// share `q` of them; `None` without values.
pub fn percentile(sorted: &[f64], q: f64) -> Option<f64> {
    let rank = (q * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_graders_receive_the_reference_answer() {
        let question = Question { a: 1, b: 2, phrasing: 0 };
        assert!(!metadata(RewardsMode::Feedback, &question, false).contains_key("answer"));
        for mode in [RewardsMode::Both, RewardsMode::Graded] {
            let metadata = metadata(mode, &question, false);
            assert_eq!(metadata["answer"], question.answer().to_string());
            assert_eq!(metadata["task"], TASK_ASKED);
        }
        assert_eq!(metadata(RewardsMode::Both, &question, true)["task"], TASK_SABOTAGED);
    }

    #[test]
    fn users_do_not_pause_during_a_canary() {
        let full = TrainerLoad { waiting: ENOUGH_WAITING, ..TrainerLoad::default() };
        assert!(full.is_enough());
        assert!(!TrainerLoad { waiting: ENOUGH_WAITING - 1, ..full }.is_enough());
        assert!(!TrainerLoad { canary: true, ..full }.is_enough());
    }

    #[test]
    fn percentiles_are_by_nearest_rank() {
        let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
        for (values, q, expected) in [
            (&hundred[..], 0.50, Some(50.0)),
            (&hundred, 0.99, Some(99.0)),
            (&hundred, 1.0, Some(100.0)),
            (&[7.0], 0.01, Some(7.0)),
            (&[1.0, 2.0], 0.99, Some(2.0)),
            (&[], 0.5, None),
        ] {
            assert_eq!(percentile(values, q), expected, "{q} of {}", values.len());
        }
    }

    #[test]
    fn latencies_are_separated_by_the_trainers_activity() {
        let mut tally = UserTally::default();
        for ms in [1, 2, 3] {
            tally.add_answer(1.0, Duration::from_millis(ms), false);
        }
        tally.add_answer(1.0, Duration::from_millis(9), true);
        assert_eq!(tally.idle(), Latency { p50: Some(2.0), p99: Some(3.0) });
        assert_eq!(tally.busy(), Latency { p50: Some(9.0), p99: Some(9.0) });
        assert_eq!(tally.overall(), Latency { p50: Some(2.0), p99: Some(9.0) });
    }

    #[test]
    fn the_mean_reward_is_plain_at_first_and_a_moving_average_later() {
        let mut tally = UserTally::default();
        for reward in [0.0, 1.5, 1.5, 0.0] {
            tally.add_answer(reward, Duration::ZERO, false);
        }
        assert!((tally.reward.unwrap() - 0.75).abs() < 1e-12);
        for _ in 0..1000 {
            tally.add_answer(1.5, Duration::ZERO, false);
        }
        assert!(tally.reward.unwrap() > 1.499);
    }

    #[test]
    fn ratings_count_until_the_last_answers_are_nearly_perfect() {
        let mut tally = UserTally::default();
        for answer in 0..400 {
            // The mean of answers 180 to 379 is the first one of nine tenths.
            tally.add_answer(if answer < 200 { 0.0 } else { 1.5 }, Duration::ZERO, false);
            tally.add_thumb(answer >= 200);
        }
        assert_eq!(tally.ratings_to_nearly, Some(380));
    }

    #[test]
    fn every_failure_is_counted_and_few_messages_are_kept() {
        let mut tally = UserTally::default();
        for status in 500..510 {
            let reason = format!("HTTP {status}: no");
            tally.add_failure(&ClientError { what: "feedback", reason });
        }
        assert_eq!(tally.failed, 10);
        assert_eq!(tally.failures.len(), FAILURES_KEPT);
        assert_eq!(tally.failures[0], "feedback: HTTP 500: no");
    }
}
