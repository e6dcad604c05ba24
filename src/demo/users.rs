//! Simulated users: they ask additions over real HTTP, read the streamed answers, and post a thumbs
//! up if an answer is right and well formed, else a thumbs down.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::client::{Client, UserRequest};
use super::config::{GROUP_SIZE, SAMPLES_PER_STEP, TASK_ASKED, TASK_SABOTAGED};
use super::options::RewardsMode;
use super::tally::SharedTally;
use super::task::{self, MAX_TOKENS, Question, QuestionSplit, Questions};

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
}

impl TrainerLoad {
    /// Whether further prompts would only make samples staler.
    fn is_enough(self) -> bool {
        self.waiting >= ENOUGH_WAITING && !self.canary
    }
}

/// Users that ask until [`Self::stop`].
pub struct Users {
    tasks: JoinSet<()>,
    stop: Arc<AtomicBool>,
}

struct User {
    client: Client,
    mode: RewardsMode,
    questions: Arc<Mutex<Questions>>,
    tally: Arc<SharedTally>,
    load: watch::Receiver<TrainerLoad>,
    stop: Arc<AtomicBool>,
    random: ChaCha8Rng,
}

impl Users {
    /// Starts `count` users that share one stream of questions.
    pub fn start(
        client: &Client,
        mode: RewardsMode,
        seed: u64,
        count: usize,
        tally: &Arc<SharedTally>,
        load: &watch::Receiver<TrainerLoad>,
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
                tally: Arc::clone(tally),
                load: load.clone(),
                stop: Arc::clone(&stop),
                random,
            };
            tasks.spawn(user.run());
        }
        Self { tasks, stop }
    }

    /// Ends every user after its current request.
    pub async fn stop(mut self) {
        self.stop.store(true, Ordering::Relaxed);
        while self.tasks.join_next().await.is_some() {}
    }
}

impl User {
    async fn run(mut self) {
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
        let request = UserRequest {
            text: question.text(),
            metadata: metadata(self.mode, question, self.load.borrow().sabotaged),
            temperature: 1.0,
            seed: self.random.random::<u32>().into(),
            max_tokens: MAX_TOKENS,
            store: true,
        };
        self.tally.add_request();
        let busy_before = self.load.borrow().trainer_busy;
        let answer = match self.client.ask(&request).await {
            Ok(answer) => answer,
            Err(error) => {
                self.tally.add_failure(&error);
                return sleep(Duration::from_millis(200)).await;
            }
        };
        let busy = busy_before || self.load.borrow().trainer_busy;
        let score = task::score(&answer.text, question.answer());
        self.tally.add_answer(score.reward(), answer.first_token, busy);
        if self.mode.has_thumbs() {
            let up = score.thumbs_up();
            match self.client.thumb(&answer.completion_id, up).await {
                Ok(_) => self.tally.add_thumb(up),
                Err(error) => self.tally.add_failure(&error),
            }
        }
    }

    /// Pauses shortly; longer if shadow completions need the engines and enough prompts wait.
    async fn think(&mut self) {
        sleep(Duration::from_millis(self.random.random_range(1..10))).await;
        if !self.mode.has_graders() {
            return;
        }
        let patience = LONGEST_PAUSE.mul_f64(self.random.random_range(0.5..1.0));
        let until = Instant::now() + patience;
        while !self.stopped() && Instant::now() < until && self.load.borrow().is_enough() {
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
}
