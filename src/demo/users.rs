//! Simulated users: they ask additions over real HTTP, read the streamed answers, and put a thumb
//! up where an answer is right and well formed.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::client::{Ask, Client};
use super::config::{GROUP_SIZE, SAMPLES_PER_STEP, TASK_ASKED};
use super::tally::Board;
use super::task::{MAX_TOKENS, Question, QuestionSplit, Questions};
use super::{RewardsMode, task};

/// Where graders score shadow siblings, users hold back while this many prompts or groups wait,
/// which is the optimiser step in hand and the next one: more would only make the samples staler.
const ENOUGH_WAITING: u64 = 2 * (SAMPLES_PER_STEP / GROUP_SIZE) as u64;
/// Yet each user asks at least this often, so that latency is measured at all times.
const LONGEST_PAUSE: Duration = Duration::from_millis(2500);
/// How often a user who holds back looks again.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// What the users see of the daemon's state; the demo's main loop keeps it fresh.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pulse {
    /// Whether the trainer is computing.
    pub trainer_busy: bool,
    /// Prompts that became no group yet, and groups that were not trained on yet.
    pub waiting: u64,
}

/// The users, asking until told to stop.
pub struct Users {
    tasks: JoinSet<()>,
    stop: Arc<AtomicBool>,
}

struct User {
    client: Client,
    mode: RewardsMode,
    questions: Arc<Mutex<Questions>>,
    board: Arc<Board>,
    pulse: watch::Receiver<Pulse>,
    stop: Arc<AtomicBool>,
    random: ChaCha8Rng,
}

impl Users {
    /// Starts `count` users who draw from one stream of questions.
    pub fn start(
        client: &Client,
        mode: RewardsMode,
        seed: u64,
        count: usize,
        board: &Arc<Board>,
        pulse: &watch::Receiver<Pulse>,
    ) -> Self {
        let questions = Arc::new(Mutex::new(Questions::new(seed, QuestionSplit::Asked)));
        let stop = Arc::new(AtomicBool::new(false));
        let mut tasks = JoinSet::new();
        for index in 0..count {
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            random.set_stream(index as u64 + 1);
            let user = User {
                client: client.clone(),
                mode,
                questions: Arc::clone(&questions),
                board: Arc::clone(board),
                pulse: pulse.clone(),
                stop: Arc::clone(&stop),
                random,
            };
            tasks.spawn(user.live());
        }
        Self { tasks, stop }
    }

    /// Lets every user finish what they are doing, then ends them.
    pub async fn stop(mut self) {
        self.stop.store(true, Ordering::Relaxed);
        while self.tasks.join_next().await.is_some() {}
    }
}

impl User {
    async fn live(mut self) {
        while !self.stopped() {
            let question = {
                let mut questions = self.questions.lock().unwrap_or_else(PoisonError::into_inner);
                questions.next()
            };
            let Some(question) = question else { return };
            self.ask(&question).await;
            self.think().await;
        }
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    async fn ask(&mut self, question: &Question) {
        let ask = Ask {
            text: question.text(),
            metadata: metadata(self.mode, question),
            seed: self.random.random::<u32>().into(),
            max_tokens: MAX_TOKENS,
        };
        self.board.asked();
        let busy_before = self.pulse.borrow().trainer_busy;
        let answer = match self.client.ask(&ask).await {
            Ok(answer) => answer,
            Err(error) => {
                self.board.failed(&error);
                return sleep(Duration::from_millis(200)).await;
            }
        };
        let busy = busy_before || self.pulse.borrow().trainer_busy;
        let score = task::score(&answer.text, question.answer());
        self.board.served(score.reward(), answer.first_token, busy);
        if self.mode.has_thumbs() {
            let up = score.thumbs_up();
            match self.client.thumb(&answer.completion_id, up).await {
                Ok(()) => self.board.thumb(up),
                Err(error) => self.board.failed(&error),
            }
        }
    }

    /// A short pause; longer where shadow siblings need the engines and enough prompts wait.
    async fn think(&mut self) {
        if !self.mode.has_graders() {
            return sleep(Duration::from_millis(self.random.random_range(1..10))).await;
        }
        sleep(Duration::from_millis(self.random.random_range(1..10))).await;
        let patience = LONGEST_PAUSE.mul_f64(self.random.random_range(0.5..1.0));
        let until = Instant::now() + patience;
        while !self.stopped()
            && Instant::now() < until
            && self.pulse.borrow().waiting >= ENOUGH_WAITING
        {
            sleep(LOOK_AGAIN).await;
        }
    }
}

/// The reference goes along only where a grader is meant to see it.
fn metadata(mode: RewardsMode, question: &Question) -> BTreeMap<String, String> {
    let mut metadata = BTreeMap::from([("task".to_owned(), TASK_ASKED.to_owned())]);
    if mode.has_graders() {
        metadata.insert("answer".to_owned(), question.answer().to_string());
    }
    metadata
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn with_feedback_alone_nothing_could_grade() {
        let question = Question { a: 1, b: 2, phrasing: 0 };
        assert!(!metadata(RewardsMode::Feedback, &question).contains_key("answer"));
        for mode in [RewardsMode::Both, RewardsMode::Graded] {
            assert_eq!(metadata(mode, &question)["answer"], question.answer().to_string());
        }
    }
}
