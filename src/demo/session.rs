//! The phases of a demo: evaluate, let users ask while the trainer learns, evaluate again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::client::{Client, TrainerStatus};
use super::eval::DemoEvaluation;
use super::progress::{DemoProgress, View};
use super::report::{DemoReport, Findings, clock, count, peak_rss_mib};
use super::scrape::Scrape;
use super::tally::{Board, UserTally};
use super::task::Question;
use super::users::{Pulse, Users};
use super::{DemoError, DemoOptions, eval, task};
use crate::config::Config;

/// A demo ends by itself within this time, whatever it has reached.
const TIME_LIMIT: Duration = Duration::from_secs(285);
/// Kept back from it for the trainer to finish a step and for shutting down.
const RESERVE: Duration = Duration::from_secs(15);
/// How often the daemon is asked what waits: users follow it, and what they learn late comes in
/// bursts.
const POLL: Duration = Duration::from_millis(10);
/// How often it is asked for its metrics, which only the display needs.
const SCRAPE: Duration = Duration::from_millis(250);
/// Polls in a row that may fail: half a second's.
const POLLS_FAILED: u32 = 50;
/// Longest wait for the trainer to finish what it is doing.
const SETTLE: Duration = Duration::from_secs(30);
/// Longest wait for the daemon to be ready.
const READY: Duration = Duration::from_secs(60);

/// The share of the maximum whose time is told.
const NEARLY: f64 = 0.9;

/// What stays the same through all phases.
struct Session<'a> {
    options: &'a DemoOptions,
    client: Client,
    board: Arc<Board>,
    /// Engines, and so answers at the same time.
    engines: usize,
    questions: Vec<Question>,
}

/// How the learning phase ended.
struct Learned {
    step: u64,
    cut_short: Option<String>,
    /// Until served answers earned so much in the running mean that [`NEARLY`] is reached.
    nearly: Option<Duration>,
}

/// Conducts a demo against the daemon at `url`.
pub(super) async fn conduct(
    options: &DemoOptions,
    config: &Config,
    url: &str,
    progress: &mut DemoProgress,
) -> Result<Findings, DemoError> {
    let session = Session {
        options,
        client: Client::new(url)?,
        board: Arc::default(),
        engines: config.engine.replicas,
        questions: eval::held_out(eval::QUESTIONS),
    };
    session.client.wait_ready(READY).await?;
    // Nothing is learned before the first evaluation.
    session.client.pause().await?;
    let engines = count(session.engines as u64, "engine");
    let dir = config.data.dir.display();
    progress.done("serving", &format!("{url} · {engines} · data in {dir}"));

    let measuring = Instant::now();
    let before = session.evaluate("before", progress).await?;
    let deadline = TIME_LIMIT.saturating_sub(measuring.elapsed().mul_f64(1.5) + RESERVE);

    let learned = session.learn(deadline, progress).await?;
    session.settle().await?;
    progress.done("learned", &learned_line(&learned, &session.board.read()));

    let after = session.evaluate("after", progress).await?;
    let scrape = session.client.metrics().await?;
    if options.keep_serving {
        session.client.resume().await?;
    }
    let tally = session.board.read();
    let report = session.report(&before, &after, &learned, &tally, &scrape, progress.elapsed());
    Ok(Findings { report, before, after, tally, cut_short: learned.cut_short })
}

impl Session<'_> {
    async fn evaluate(
        &self,
        label: &str,
        progress: &mut DemoProgress,
    ) -> Result<DemoEvaluation, DemoError> {
        let total = self.questions.len();
        progress.begin(&format!("{label}: asking {total} held-out questions"));
        let heard = |n| progress.message(&format!("{label}: {n} of {total} held-out questions"));
        let evaluation =
            eval::measure(&self.client, &self.questions, self.engines, &self.board, heard).await?;
        let reward = format!("{:.2} of {:.2}", evaluation.reward(), task::REWARD_MAX);
        progress.done(label, &format!("{reward} on {total} held-out questions"));
        Ok(evaluation)
    }

    /// Users ask and the trainer learns, until all steps are taken or `deadline` (since the
    /// demo's start) has passed.
    async fn learn(
        &self,
        deadline: Duration,
        progress: &mut DemoProgress,
    ) -> Result<Learned, DemoError> {
        let (beat, pulse) = watch::channel(Pulse::default());
        // With feedback alone every engine is kept busy by users; else shadows need room.
        let users = if self.options.rewards.has_graders() { 4 } else { self.engines };
        let users = Users::start(
            &self.client,
            self.options.rewards,
            self.options.seed,
            users,
            &self.board,
            &pulse,
        );
        self.client.resume().await?;
        let learned = self.watch(deadline, &beat, progress).await;
        users.stop().await;
        learned
    }

    async fn watch(
        &self,
        deadline: Duration,
        beat: &watch::Sender<Pulse>,
        progress: &mut DemoProgress,
    ) -> Result<Learned, DemoError> {
        let steps = self.options.steps;
        let mut view = View { steps, reward_max: task::REWARD_MAX, ..View::default() };
        let mut ticks = interval(POLL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut failed = 0;
        let (began, mut nearly) = (Instant::now(), None);
        let mut scraped: Option<Instant> = None;
        loop {
            ticks.tick().await;
            let due = scraped.is_none_or(|at| at.elapsed() >= SCRAPE);
            let (status, scrape) = match self.poll(due).await {
                Ok(news) => news,
                Err(error) if failed >= POLLS_FAILED => return Err(error),
                Err(_) => {
                    failed += 1;
                    continue;
                }
            };
            failed = 0;
            beat.send_replace(pulse(&status));
            if let Some(scrape) = scrape {
                scraped = Some(Instant::now());
                view.kl = scrape.value("hone_train_kl");
            }
            refresh(&mut view, &status, self.board.read(), progress.elapsed());
            progress.update(&view);
            let tally = &view.tally;
            if tally.is_settled()
                && tally.reward.is_some_and(|reward| reward >= NEARLY * task::REWARD_MAX)
            {
                nearly.get_or_insert_with(|| began.elapsed());
            }
            if status.state == "failed" {
                let reason = status.last_error.unwrap_or_else(|| "no reason given".to_owned());
                return Err(DemoError::Trainer(reason));
            }
            if status.step >= steps || status.state == "finished" {
                return Ok(Learned { step: status.step, cut_short: None, nearly });
            }
            if progress.elapsed() >= deadline {
                let limit = clock(TIME_LIMIT);
                let reason =
                    format!("step {} of {steps} at the time limit of {limit}", status.step);
                return Ok(Learned { step: status.step, cut_short: Some(reason), nearly });
            }
        }
    }

    async fn poll(&self, scrape: bool) -> Result<(TrainerStatus, Option<Scrape>), DemoError> {
        let status = self.client.trainer().await?;
        Ok((status, if scrape { Some(self.client.metrics().await?) } else { None }))
    }

    /// Pauses the trainer and waits until it has published what it was working on.
    async fn settle(&self) -> Result<(), DemoError> {
        let paused = self.client.pause().await;
        let until = Instant::now() + SETTLE;
        while !self.client.trainer().await?.settled() {
            // A trainer that has finished need not be pausable; one that goes on must be.
            if Instant::now() >= until {
                return Ok(paused?);
            }
            sleep(POLL).await;
        }
        Ok(())
    }

    fn report(
        &self,
        before: &DemoEvaluation,
        after: &DemoEvaluation,
        learned: &Learned,
        tally: &UserTally,
        scrape: &Scrape,
        wall: Duration,
    ) -> DemoReport {
        let (all, idle, busy) = (tally.overall(), tally.idle(), tally.busy());
        DemoReport {
            reward_max: task::REWARD_MAX,
            reward_before: before.reward(),
            reward_after: after.reward(),
            steps: learned.step,
            seconds_to_nine_tenths: learned.nearly.map(|time| time.as_secs_f64()),
            swaps: whole(scrape.value("hone_policy_published_total")),
            requests: tally.requests,
            failed_requests: tally.failed,
            feedback: tally.feedback,
            kl: scrape.value("hone_train_kl").filter(|_| learned.step > 0),
            wall_seconds: wall.as_secs_f64(),
            ttft_p50_ms: all.p50,
            ttft_p99_ms: all.p99,
            ttft_idle_p50_ms: idle.p50,
            ttft_idle_p99_ms: idle.p99,
            ttft_busy_p50_ms: busy.p50,
            ttft_busy_p99_ms: busy.p99,
            feedback_to_policy_p50_seconds: scrape.quantile("hone_feedback_to_policy_seconds", 0.5),
            peak_rss_mib: peak_rss_mib(),
            seed: self.options.seed,
            rewards: self.options.rewards,
            sampler: self.options.sampler,
        }
    }
}

fn learned_line(learned: &Learned, tally: &UserTally) -> String {
    let steps = count(learned.step, "step");
    let reward = tally.reward.map(|r| format!(" · users see {r:.2} of {:.2}", task::REWARD_MAX));
    let early = learned.cut_short.as_ref().map(|reason| format!(" · ended early: {reason}"));
    format!("{steps}{}{}", reward.unwrap_or_default(), early.unwrap_or_default())
}

fn pulse(status: &TrainerStatus) -> Pulse {
    let waiting = status.queued_prompts + status.in_flight_groups + status.ready_groups;
    Pulse { trainer_busy: status.busy(), waiting }
}

fn refresh(view: &mut View, status: &TrainerStatus, tally: UserTally, elapsed: Duration) {
    if status.step > view.step {
        view.history.extend(tally.reward);
    }
    view.step = status.step;
    view.trainer.clone_from(&status.state);
    view.version = status.policy_version;
    view.tally = tally;
    view.elapsed = elapsed;
}

/// A count that Prometheus hands out as a float; the conversion saturates.
fn whole(value: Option<f64>) -> u64 {
    value.unwrap_or(0.0) as u64
}
