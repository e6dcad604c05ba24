//! `hone bench safety`: whether users notice when learning goes wrong.
//!
//! Simulated users ask a daemon on loopback the questions of the demo and rate the answers. The
//! simulator computes their *true satisfaction* from the answers alone, so it does not depend on what the
//! daemon is rewarded with. Each scenario breaks something, and runs with each way of publication.

mod crowd;
mod html;
mod run;
mod scenario;
mod setup;
mod taste;
mod verdict;
mod windows;

use std::collections::BTreeMap;
use std::io::IsTerminal as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

use hone_core::types::{PolicyState, PolicyVersion};
use hone_engine::EngineBackend;
use hone_train::policy::Promotion;

use self::crowd::RatingHabits;
use self::run::{mode_name, was_active};
use self::taste::{Satisfaction, UserTaste};
use self::verdict::is_judged_by_windows;
use self::windows::{Experience, WINDOW, final_mean, moving_mean, worst_window};
use super::Folder;
use crate::config::Config;
use crate::demo::DaemonHandle;
use crate::demo::client::{Client, ClientError, UserRequest};
use crate::demo::config::{TASK_ASKED, TASK_HELD_OUT, serve_with};
use crate::demo::task::MAX_TOKENS;
use crate::progress::Progress;
use crowd::{Crowd, CrowdCounts, ObservedAnswer, UserVisit};

pub use html::SafetyReport;
pub use run::SafetyRun;
pub use scenario::SafetyScenario;
pub use verdict::{LateFeedbackTest, SafetyCheck, SafetyVerdict};
pub use windows::WorstWindow;

/// Longest wait for the daemon to be ready.
const PATIENCE: Duration = Duration::from_secs(60);
/// Most held-out questions that the base of each seed, and each version of an exam, answers.
const EXAM_ANSWERS: u64 = 1200;
/// Added to the seed for the users who ask the held-out questions.
const EXAM_SEED: u64 = 1 << 32;
/// Points of a curve.
const POINTS: usize = 200;

/// The options of `hone bench safety`.
#[derive(Clone, Debug)]
pub struct SafetyOptions {
    /// The seeds are 1 to this.
    pub seeds: u64,
    /// The scenarios, in this order.
    pub scenarios: Vec<SafetyScenario>,
    /// How versions are published, in this order.
    pub modes: Vec<Promotion>,
    /// Requests of a run. With a canary, honest scenarios get twice as many.
    pub requests: u64,
    /// Answers between an answer and its rating where feedback is late; a sixth of the requests if absent.
    pub late: Option<u64>,
    /// The engine of the users.
    pub backend: EngineBackend,
}

/// Runs the benchmark on daemons that `start` starts, one after the other.
///
/// # Errors
/// If a daemon does not start, or its status cannot be read. Failed requests of users are counted.
pub async fn run(
    options: &SafetyOptions,
    start: impl AsyncFn(Config) -> anyhow::Result<DaemonHandle>,
) -> anyhow::Result<SafetyReport> {
    let progress = Progress::new(std::io::stderr().is_terminal());
    let mut runs = Vec::new();
    for seed in 1..=options.seeds {
        let base = measure_base(options, seed, &start).await?;
        for scenario in &options.scenarios {
            for mode in &options.modes {
                let name = format!("{scenario}, {}, seed {seed}", mode_name(*mode));
                let run = measure(options, *scenario, *mode, seed, &base, &start).await;
                let run = run.with_context(|| name.clone())?;
                progress.note(&format!(
                    "{name}: final {:.3}, {} promoted, {} rejected, {} rolled back, {:.1} minutes",
                    run.final_satisfaction,
                    run.promoted,
                    run.rejected,
                    run.rolled_back,
                    run.minutes
                ));
                runs.push(run);
            }
        }
    }
    let (verdicts, late_feedback) = (verdict::verdicts(&runs), verdict::late_feedback(&runs));
    Ok(SafetyReport { runs, verdicts, late_feedback })
}

/// The users who ask the held-out questions of a seed. They post no ratings.
fn examiners(options: &SafetyOptions, seed: u64) -> Crowd {
    let total = options.requests.clamp(1, EXAM_ANSWERS);
    let silent = RatingHabits { share: 0.0, ..RatingHabits::default() };
    Crowd::new(seed + EXAM_SEED, total, silent, None)
}

/// Answers of the base model to held-out questions.
async fn measure_base(
    options: &SafetyOptions,
    seed: u64,
    start: &impl AsyncFn(Config) -> anyhow::Result<DaemonHandle>,
) -> anyhow::Result<Vec<ObservedAnswer>> {
    let dir = Folder::temporary()?;
    let crowd = examiners(options, seed);
    let mut config = setup::without_training(seed, &dir.0);
    serve_with(&mut config, options.backend);
    let daemon = start(config).await?;
    let sent = async {
        let client = Client::new(daemon.url())?;
        client.wait_ready(PATIENCE).await?;
        anyhow::Ok(send(&client, TASK_HELD_OUT, None, crowd).await)
    };
    let sent = sent.await;
    daemon.shut_down().await?;
    let (answers, counts) = sent?;
    anyhow::ensure!(
        !answers.is_empty(),
        "the base model gave no answer: {}",
        counts.failures.join("; ")
    );
    Ok(answers)
}

/// What a daemon reports at the end of a run.
struct FinalState {
    good: Vec<u64>,
    promoted: usize,
    rejected: usize,
    rolled_back: usize,
    steps: u64,
    hold: Option<String>,
}

async fn measure(
    options: &SafetyOptions,
    scenario: SafetyScenario,
    mode: Promotion,
    seed: u64,
    base: &[ObservedAnswer],
    start: &impl AsyncFn(Config) -> anyhow::Result<DaemonHandle>,
) -> anyhow::Result<SafetyRun> {
    let began = Instant::now();
    let dir = Folder::temporary()?;
    let usual = scenario.requests(options.requests, options.late);
    let total = if mode == Promotion::Canary && scenario.is_honest() { 2 * usual } else { usual };
    let habits = scenario.habits(SafetyScenario::lag(options.requests, options.late));
    let half = usize::try_from(total / 2).unwrap_or(usize::MAX);
    let change_at = (scenario == SafetyScenario::TasteChange).then_some(half);
    let crowd = Crowd::new(seed, total, habits, change_at);
    let mut config = setup::config(scenario, mode, seed, &dir.0)?;
    serve_with(&mut config, options.backend);
    let most_waiting = Some(setup::most_waiting(scenario, &config));
    let daemon = start(config).await?;
    let measured = async {
        let client = Client::new(daemon.url())?;
        client.wait_ready(PATIENCE).await?;
        let (answers, counts) = send(&client, TASK_ASKED, most_waiting, crowd).await;
        let state = final_state(&client).await?;
        let exam = match is_judged_by_windows(scenario, mode) {
            true => examine(&client, &state.good, || examiners(options, seed)).await?,
            false => Vec::new(),
        };
        anyhow::Ok((answers, counts, state, exam))
    };
    let measured = measured.await;
    let ended = daemon.shut_down().await;
    let (answers, counts, state, exam) = measured?;
    ended?;
    let mut run = SafetyRun {
        promoted: state.promoted,
        rejected: state.rejected,
        rolled_back: state.rolled_back,
        steps: state.steps,
        hold: state.hold,
        ..SafetyRun::empty(scenario, mode, seed)
    };
    add_counts(&mut run, counts);
    let is_good = |version| state.good.contains(&version);
    add_satisfaction(&mut run, base, &exam, &answers, &is_good);
    run.minutes = began.elapsed().as_secs_f64() / 60.0;
    Ok(run)
}

/// Answers of every good version to held-out questions, without training. In a short run a version answers a few
/// hundred requests, so the best of several versions would seem better than it is by as much as the bound on
/// a window permits.
async fn examine(
    client: &Client,
    good: &[u64],
    examiners: impl Fn() -> Crowd,
) -> anyhow::Result<Vec<ObservedAnswer>> {
    client.pause().await?;
    let mut all = Vec::new();
    for &version in good.iter().filter(|version| **version > 0) {
        client.activate(PolicyVersion(version)).await?;
        let (answers, counts) = send(client, TASK_HELD_OUT, None, examiners()).await;
        anyhow::ensure!(counts.failed == 0, "version {version}: {}", counts.failures.join("; "));
        all.extend(answers);
    }
    Ok(all)
}

async fn final_state(client: &Client) -> anyhow::Result<FinalState> {
    let (status, records) = (client.trainer().await?, client.policies().await?);
    let count = |state: PolicyState| records.iter().filter(|r| r.state == state).count();
    let is_base = |version: u64| version == 0;
    Ok(FinalState {
        // A version that was withdrawn is no version to return to.
        good: records.iter().filter(|r| r.state.was_promoted()).map(|r| r.version.0).collect(),
        promoted: records.iter().filter(|r| was_active(r) && !is_base(r.version.0)).count(),
        rejected: count(PolicyState::Rejected),
        rolled_back: count(PolicyState::RolledBack),
        steps: status.step,
        hold: status.hold,
    })
}

fn add_counts(run: &mut SafetyRun, counts: CrowdCounts) {
    run.requests = counts.requests;
    run.failed_requests = counts.failed;
    run.failures = counts.failures;
    run.ratings = counts.ratings;
    run.ratings_not_trained = counts.untrained;
}

/// Computes the satisfaction of a run from its answers, and from those of the base and of the versions of an
/// exam to held-out questions.
fn add_satisfaction(
    run: &mut SafetyRun,
    base: &[ObservedAnswer],
    exam: &[ObservedAnswer],
    answers: &[ObservedAnswer],
    is_good: &dyn Fn(u64) -> bool,
) {
    let expected = Experience::new(base.iter().chain(exam).chain(answers)).expected(answers);
    let of_base = Satisfaction::mean(base.iter().map(|answer| answer.satisfaction));
    let taste = answers.last().map_or(UserTaste::Form, |answer| answer.taste);
    let observed: Vec<f64> = answers.iter().map(ObservedAnswer::value).collect();
    run.base = of_base.under(taste);
    run.final_satisfaction = final_mean(&observed);
    run.worst_window = worst_window(&expected, is_good, of_base);
    run.worst_window_observed = worst_window(answers, is_good, of_base);
    run.curve = curve(&observed);
}

/// At most [`POINTS`] of the moving means, evenly spaced and with the last one.
fn curve(values: &[f64]) -> Vec<(f64, f64)> {
    let means = moving_mean(values);
    let every = means.len().div_ceil(POINTS).max(1);
    let width = values.len().min(WINDOW);
    let points = means.iter().enumerate().map(|(start, mean)| ((start + width) as f64, *mean));
    let last = points.clone().next_back();
    let mut kept: Vec<(f64, f64)> = points.step_by(every).collect();
    if kept.last() != last.as_ref() {
        kept.extend(last);
    }
    kept
}

// Sends the users' requests and ratings to a daemon.

/// Requests at a time.
const PARALLEL: usize = 4;
/// Longest pause. Prompts of which nothing comes must not end the traffic.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// How often a pausing user looks whether to go on.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);
/// How often the trainer's load is read.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// A pause after a failed request.
const AFTER_FAILURE: Duration = Duration::from_millis(50);

/// Sends every request of `crowd` with `metadata.task` = `task`. With `most_waiting`, users pause while that
/// many prompts and groups wait for the trainer, except during a canary and while training pauses. Returns
/// the answers in the order of their arrival.
async fn send(
    client: &Client,
    task: &str,
    most_waiting: Option<u64>,
    crowd: Crowd,
) -> (Vec<ObservedAnswer>, CrowdCounts) {
    let crowd = Arc::new(Mutex::new(crowd));
    let (sender, pause) = watch::channel(false);
    let mut users = JoinSet::new();
    for _ in 0..PARALLEL {
        let (client, crowd) = (client.clone(), Arc::clone(&crowd));
        let (task, pause) = (task.to_owned(), pause.clone());
        users.spawn(async move { ask_all(&client, &task, &crowd, &pause).await });
    }
    let everyone = async { while users.join_next().await.is_some() {} };
    let pacing = async {
        match most_waiting {
            Some(most) => watch_load(client, &sender, most).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = everyone => {}
        () = pacing => {}
    }
    let mut crowd = lock(&crowd);
    (std::mem::take(&mut crowd.answers), std::mem::take(&mut crowd.counts))
}

/// Sets `pause` while `most_waiting` prompts and groups wait for the trainer. Never returns.
async fn watch_load(client: &Client, pause: &watch::Sender<bool>, most_waiting: u64) {
    loop {
        // A failed poll must not stop the users, who count failures.
        let wait = should_pause(client, most_waiting).await.unwrap_or(false);
        pause.send_replace(wait);
        sleep(POLL_INTERVAL).await;
    }
}

async fn should_pause(client: &Client, most_waiting: u64) -> Result<bool, ClientError> {
    let status = client.trainer().await?;
    let waiting = status.queued_prompts + status.in_flight_groups + status.ready_groups;
    if status.settled() || waiting < most_waiting {
        return Ok(false);
    }
    let share = client.metrics().await?.value("hone_policy_canary_share_ratio");
    Ok(share.unwrap_or(0.0) == 0.0)
}

fn lock(crowd: &Mutex<Crowd>) -> MutexGuard<'_, Crowd> {
    crowd.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn ask_all(client: &Client, task: &str, crowd: &Mutex<Crowd>, pause: &watch::Receiver<bool>) {
    loop {
        let Some(visit) = lock(crowd).next() else { return };
        match client.ask(&request(task, &visit)).await {
            Ok(answer) => {
                let version = answer.version.0;
                let due = lock(crowd).answered(&visit, answer.completion_id, version, &answer.text);
                for thumb in due {
                    match client.thumb(&thumb.completion_id, thumb.up).await {
                        Ok(reply) => lock(crowd).rated(reply.trained.unwrap_or(true)),
                        Err(error) => lock(crowd).failed(error.to_string()),
                    }
                }
            }
            Err(error) => {
                lock(crowd).failed(error.to_string());
                sleep(AFTER_FAILURE).await;
            }
        }
        let began = Instant::now();
        while *pause.borrow() && began.elapsed() < LONGEST_PAUSE {
            sleep(CHECK_INTERVAL).await;
        }
    }
}

fn request(task: &str, visit: &UserVisit) -> UserRequest {
    let metadata = [
        ("task", task.to_owned()),
        ("session_id", format!("user-{}", visit.user)),
        ("answer", visit.question.answer().to_string()),
    ];
    UserRequest {
        text: visit.question.text(),
        metadata: metadata
            .map(|(key, value)| (key.to_owned(), value))
            .into_iter()
            .collect::<BTreeMap<_, _>>(),
        temperature: 1.0,
        seed: visit.seed,
        max_tokens: MAX_TOKENS,
        store: true,
    }
}

#[cfg(test)]
mod tests {
    use super::crowd::IDEAL;
    use super::*;

    #[test]
    fn curves_are_thinned_and_end_at_the_last_answer() {
        let values: Vec<f64> = (0..6300).map(|i| f64::from(i % 2)).collect();
        let points = curve(&values);
        assert!(points.len() <= POINTS + 1, "{}", points.len());
        assert_eq!((points[0], points[points.len() - 1]), ((300.0, 0.5), (6300.0, 0.5)));
        assert_eq!(curve(&[0.0, 1.0]), [(2.0, 0.5)]);
        assert!(curve(&[]).is_empty());
    }

    #[test]
    fn a_version_is_valued_by_all_its_answers() {
        let (answer, text) = (ObservedAnswer::to_one_and_one, IDEAL);
        let base: Vec<_> = [text, ""].repeat(100).into_iter().map(|t| answer(0, t)).collect();
        // By chance, every answer of the base is bad for 300 requests, then good for 300.
        let answers = [vec![answer(0, ""); 300], vec![answer(0, text); 300]].concat();
        let mut run = SafetyRun::empty(SafetyScenario::Honest, Promotion::Gate, 1);
        add_satisfaction(&mut run, &base, &[], &answers, &|_| true);
        assert!((run.base - 0.5).abs() < 1e-9);
        assert!((run.final_satisfaction - 1.0).abs() < 1e-9, "{run:?}");
        assert!(run.worst_window.shortfall.abs() < 1e-9, "{run:?}");
        assert!((run.worst_window_observed.shortfall - 0.5).abs() < 1e-9, "{run:?}");
    }

    #[test]
    fn an_exam_adds_to_what_is_known_of_a_version() {
        let (answer, text) = (ObservedAnswer::to_one_and_one, IDEAL);
        // Both versions are right in half of all cases; in the run, the first one was right in all.
        let exam = [vec![answer(1, ""); 900], vec![answer(1, text); 600]].concat();
        let answers = [vec![answer(1, text); 300], [answer(2, text), answer(2, "")].repeat(150)];
        let mut run = SafetyRun::empty(SafetyScenario::HighRate, Promotion::Canary, 1);
        let base = [answer(0, "")];
        add_satisfaction(&mut run, &base, &exam, &answers.concat(), &|_| true);
        assert!(run.worst_window.shortfall.abs() < 1e-9, "{run:?}");
        assert!((run.worst_window_observed.shortfall - 0.5).abs() < 1e-9, "{run:?}");
    }
}
