//! `hone-bench safety`: whether users notice when learning goes wrong. The simulator computes the users' *true
//! satisfaction* from the answers alone, so it does not depend on what the daemon is rewarded with.

mod crowd;
mod scenario;
mod verdict;
mod windows;

use std::cell::{Cell, RefCell};
use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::{Args, ValueEnum as _};
use futures::future::join_all;
use serde_json::json;
use tokio::time::sleep;

use hone_core::types::{PolicyState, PolicyVersion};
use hone_engine::EngineBackend;
use hone_train::policy::Promotion;

use crate::measure::{BenchOutcome, with_daemon};
use crowd::{Crowd, ObservedAnswer, RatingHabits, UserTaste, mean_of};
use hone_config::Config;
use hone_config::flags::{engine_backend, promotion};
use hone_demo::client::{Client, ClientError, UserRequest};
use hone_demo::config::{TASK_ASKED, TASK_HELD_OUT, serve_with};
use hone_report::terminal::Progress;
use scenario::SafetyScenario;
use verdict::{MODES, SafetyRun, VersionCounts, was_active};
use windows::{expected, final_mean, largest_loss, worst_window};

/// Longest wait for the daemon to be ready.
const PATIENCE: Duration = Duration::from_secs(60);
/// Most held-out questions that the base of each seed, and each version of an exam, answers.
const EXAM_ANSWERS: u64 = 1200;
/// Added to the seed for the users who ask the held-out questions.
const EXAM_SEED: u64 = 1 << 32;

#[derive(Debug, Args)]
pub struct SafetyOptions {
    /// Number of seeds
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub seeds: u64,
    /// Scenarios, separated by commas [default: all]
    #[arg(long, value_name = "NAMES", value_enum, value_delimiter = ',')]
    pub scenarios: Vec<SafetyScenario>,
    /// How versions are published, separated by commas [default: all]
    #[arg(long, value_name = "MODES", value_delimiter = ',', value_parser = promotion())]
    pub modes: Vec<Promotion>,
    /// Requests of a run; scenarios with late or few ratings have more, and honest ones twice as many
    /// with a canary
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub requests: u64,
    /// Answers between an answer and its rating in the scenario late-feedback, whose runs then have at
    /// least 2.5 times as many requests [default: a sixth of the requests]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub late: Option<u64>,
    /// Engine that answers the users; mistralrs takes twice as long
    #[arg(long, value_name = "BACKEND", default_value = "native", value_parser = engine_backend())]
    pub backend: EngineBackend,
    /// Exit code 1 if a canary does not keep its promise
    #[arg(long)]
    pub check: bool,
}

/// Runs the benchmark on daemons, one after the other. Failed requests of users are counted; other failures
/// end it.
pub(crate) async fn run(options: &SafetyOptions) -> anyhow::Result<BenchOutcome> {
    let modes: &[Promotion] = match options.modes.as_slice() {
        [] => &MODES,
        chosen => chosen,
    };
    let scenarios = match options.scenarios.as_slice() {
        [] => SafetyScenario::value_variants(),
        chosen => chosen,
    };
    let progress = Progress::new(std::io::stderr().is_terminal());
    let mut runs = Vec::new();
    for seed in 1..=options.seeds {
        let base = measure_base(options, seed).await?;
        for scenario in scenarios {
            for &mode in modes {
                let name = json!({"scenario": scenario, "mode": mode, "seed": seed}).to_string();
                let run = measure(options, *scenario, mode, seed, &base).await;
                let run = run.with_context(|| name.clone())?;
                let (last, minutes) = (run.final_satisfaction, run.minutes);
                progress.note(&format!("{name}: final {last:.3}, {minutes:.1} minutes"));
                runs.push(run);
            }
        }
    }
    Ok(verdict::report(&runs, options.check))
}

/// The users who ask the held-out questions of a seed. They post no ratings.
fn examiners(options: &SafetyOptions, seed: u64) -> Crowd {
    let total = options.requests.clamp(1, EXAM_ANSWERS);
    let silent = RatingHabits { share: 0.0, ..RatingHabits::default() };
    Crowd::new(seed + EXAM_SEED, total, silent, ([UserTaste::Form; 2], None))
}

/// [`with_daemon`], with a client once it is ready.
async fn with_client<T>(
    config: Config,
    f: impl AsyncFnOnce(Client) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    with_daemon(config, async |daemon| {
        let client = Client::new(&daemon.url())?;
        client.wait_ready(PATIENCE).await?;
        f(client).await
    })
    .await
}

/// Answers of the base model to held-out questions.
async fn measure_base(options: &SafetyOptions, seed: u64) -> anyhow::Result<Vec<ObservedAnswer>> {
    let dir = tempfile::tempdir()?;
    let crowd = examiners(options, seed);
    let mut config = scenario::without_training(seed, dir.path());
    serve_with(&mut config, options.backend);
    let asked = async |client: Client| anyhow::Ok(send(&client, TASK_HELD_OUT, None, crowd).await);
    let Crowd { answers, counts, .. } = with_client(config, asked).await?;
    anyhow::ensure!(
        !answers.is_empty(),
        "the base model gave no answer: {}",
        counts.failures.join("; ")
    );
    Ok(answers)
}

async fn measure(
    options: &SafetyOptions,
    scenario: SafetyScenario,
    mode: Promotion,
    seed: u64,
    base: &[ObservedAnswer],
) -> anyhow::Result<SafetyRun> {
    let began = Instant::now();
    let dir = tempfile::tempdir()?;
    let usual = scenario.requests(options.requests, options.late);
    let plan = scenario.plan(scenario::lag(options.requests, options.late));
    let total = if mode == Promotion::Canary && plan.is_honest { 2 * usual } else { usual };
    let half = usize::try_from(total / 2).unwrap_or(usize::MAX);
    let [before, after] = plan.tastes;
    let crowd =
        Crowd::new(seed, total, plan.habits, (plan.tastes, (before != after).then_some(half)));
    let mut config = scenario.config(mode, seed, dir.path())?;
    serve_with(&mut config, options.backend);
    let most_waiting = Some(scenario.most_waiting(&config));
    let (crowd, versions, exam) = with_client(config, async |client: Client| {
        let crowd = send(&client, TASK_ASKED, most_waiting, crowd).await;
        let versions = final_state(&client).await?;
        let exam = match scenario.is_judged_by_windows(mode) {
            true => examine(&client, &versions.good, || examiners(options, seed)).await?,
            false => Vec::new(),
        };
        anyhow::Ok((crowd, versions, exam))
    })
    .await?;
    let Crowd { answers, counts, learned, .. } = crowd;
    let mut run =
        SafetyRun { scenario, mode, seed, versions, counts, learned, ..SafetyRun::default() };
    add_satisfaction(&mut run, base, &exam, &answers);
    run.minutes = began.elapsed().as_secs_f64() / 60.0;
    Ok(run)
}

/// Answers of every good version to held-out questions, without training: with the few of a run alone, the best of
/// several versions would seem better than it is.
async fn examine(
    client: &Client,
    good: &[u64],
    examiners: impl Fn() -> Crowd,
) -> anyhow::Result<Vec<ObservedAnswer>> {
    client.pause().await?;
    let mut all = Vec::new();
    for &version in good.iter().filter(|version| **version > 0) {
        client.activate(PolicyVersion(version)).await?;
        let Crowd { answers, counts, .. } = send(client, TASK_HELD_OUT, None, examiners()).await;
        anyhow::ensure!(
            counts.failed_requests == 0,
            "version {version}: {}",
            counts.failures.join("; ")
        );
        all.extend(answers);
    }
    Ok(all)
}

async fn final_state(client: &Client) -> anyhow::Result<VersionCounts> {
    let (status, records) = (client.trainer().await?, client.policies().await?);
    let count = |state: PolicyState| records.iter().filter(|r| r.state == state).count();
    let is_base = |version: u64| version == 0;
    Ok(VersionCounts {
        // A version that was withdrawn is no version to return to.
        good: records.iter().filter(|r| r.state.was_promoted()).map(|r| r.version.0).collect(),
        promoted: records.iter().filter(|r| was_active(r) && !is_base(r.version.0)).count(),
        rejected: count(PolicyState::Rejected),
        rolled_back: count(PolicyState::RolledBack),
        steps: status.step,
        hold: status.hold,
    })
}

/// Computes the satisfaction of a run from its answers, and from those of the base and of the versions of an
/// exam to held-out questions.
fn add_satisfaction(
    run: &mut SafetyRun,
    base: &[ObservedAnswer],
    exam: &[ObservedAnswer],
    answers: &[ObservedAnswer],
) {
    let valued = expected(base.iter().chain(exam).chain(answers), answers);
    let of_base = mean_of(base);
    let taste = answers.last().map_or(UserTaste::Form, |answer| answer.taste);
    let observed: Vec<f64> = answers.iter().map(ObservedAnswer::value).collect();
    let good = &run.versions.good;
    run.worst_window = worst_window(&valued, &|version| good.contains(&version), of_base);
    run.largest_loss = largest_loss(&valued, good, of_base);
    run.base = of_base[taste as usize];
    run.final_satisfaction = final_mean(&observed);
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
/// How often the trust in a learned part is read.
const LEARNED_INTERVAL: Duration = Duration::from_millis(100);
/// A pause after a failed request.
const AFTER_FAILURE: Duration = Duration::from_millis(50);

/// Sends every request of `crowd` with `metadata.task` = `task`. With `most_waiting`, users pause while that
/// many prompts and groups wait for the trainer, except during a canary and while training pauses.
async fn send(client: &Client, task: &str, most_waiting: Option<u64>, crowd: Crowd) -> Crowd {
    let (crowd, is_paused) = (RefCell::new(crowd), Cell::new(false));
    let users = (0..PARALLEL).map(|_| ask_all(client, task, &crowd, &is_paused));
    tokio::select! {
        _ = join_all(users) => {}
        () = pace(client, most_waiting, &is_paused) => {}
        () = watch_learned(client, &crowd) => {}
    }
    crowd.into_inner()
}

/// Looks whether the daemon trusts its learned part, if it has one. Never returns.
async fn watch_learned(client: &Client, crowd: &RefCell<Crowd>) {
    loop {
        let scrape = client.metrics().await.ok();
        let trusted = scrape.and_then(|s| s.value_of("hone_train_learned_reward", "trusted"));
        if let Some(trusted) = trusted {
            crowd.borrow_mut().saw_learned(trusted > 0.0);
        }
        sleep(LEARNED_INTERVAL).await;
    }
}

/// Sets `is_paused` while `most_waiting` prompts and groups wait for the trainer. Never returns.
async fn pace(client: &Client, most_waiting: Option<u64>, is_paused: &Cell<bool>) {
    loop {
        if let Some(most) = most_waiting {
            // A failed poll must not stop the users, who count failures.
            is_paused.set(should_pause(client, most).await.unwrap_or(false));
        }
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

async fn ask_all(client: &Client, task: &str, crowd: &RefCell<Crowd>, is_paused: &Cell<bool>) {
    loop {
        let Some(visit) = crowd.borrow_mut().next() else { return };
        let metadata = [
            ("task", task.to_owned()),
            // A session for each visit, because a canary counts one rating of a session.
            ("session_id", format!("user-{}-{}", visit.user, visit.seed)),
            ("answer", visit.question.answer().to_string()),
        ];
        let metadata = metadata.map(|(key, value)| (key.to_owned(), value)).into();
        let request = UserRequest::sampled(&visit.question, metadata, visit.seed);
        match client.ask(&request).await {
            Ok(answer) => {
                let (id, version) = (answer.completion_id, answer.version.0);
                let due = crowd.borrow_mut().answered(&visit, id, version, &answer.text);
                for thumb in due {
                    let reply = client.thumb(&thumb.completion_id, thumb.up).await;
                    match reply {
                        Ok(reply) => crowd.borrow_mut().rated(reply.trained.unwrap_or(true)),
                        Err(error) => crowd.borrow_mut().failed(error.to_string()),
                    }
                }
            }
            Err(error) => {
                crowd.borrow_mut().failed(error.to_string());
                sleep(AFTER_FAILURE).await;
            }
        }
        let began = Instant::now();
        while is_paused.get() && began.elapsed() < LONGEST_PAUSE {
            sleep(CHECK_INTERVAL).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::crowd::IDEAL;
    use super::*;

    fn measured(
        base: &[ObservedAnswer],
        exam: &[ObservedAnswer],
        all: &[ObservedAnswer],
    ) -> SafetyRun {
        let versions = VersionCounts { good: vec![0, 1, 2], ..VersionCounts::default() };
        let mut run = SafetyRun { versions, ..SafetyRun::default() };
        add_satisfaction(&mut run, base, exam, all);
        run
    }

    #[test]
    fn a_version_is_valued_by_all_its_answers() {
        let (answer, text) = (ObservedAnswer::to_one_and_one, IDEAL);
        let base: Vec<_> = [text, ""].repeat(100).into_iter().map(|t| answer(0, t)).collect();
        // By chance, every answer of the base is bad for 300 requests, then good for 300.
        let answers = [vec![answer(0, ""); 300], vec![answer(0, text); 300]].concat();
        let run = measured(&base, &[], &answers);
        assert!((run.base - 0.5).abs() < 1e-9);
        assert!((run.final_satisfaction - 1.0).abs() < 1e-9, "{run:?}");
        assert!(run.worst_window.shortfall.abs() < 1e-9, "{run:?}");
    }

    #[test]
    fn an_exam_adds_to_what_is_known_of_a_version() {
        let (answer, text) = (ObservedAnswer::to_one_and_one, IDEAL);
        // Both versions are right in half of all cases; in the run, the first one was right in all.
        let exam = [vec![answer(1, ""); 900], vec![answer(1, text); 600]].concat();
        let answers = [vec![answer(1, text); 300], [answer(2, text), answer(2, "")].repeat(150)];
        let run = measured(&[answer(0, "")], &exam, &answers.concat());
        assert!(run.worst_window.shortfall.abs() < 1e-9, "{run:?}");
    }
}
