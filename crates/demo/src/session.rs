//! The phases of a demo: evaluate, let users ask while the trainer learns, evaluate again.

use std::cell::Cell;
use std::time::{Duration, Instant};

use futures::future::join;
use tokio::time::{MissedTickBehavior, interval, sleep};

use hone_engine::EngineBackend;
use hone_train::policy::Promotion;

use super::client::{Client, Scrape, TrainerStatus};
use super::config::parallel_requests;
use super::eval::{self, Decoding, DemoEvaluation};
use super::options::DemoOptions;
use super::progress::{DemoProgress, LearningView};
use super::report::{DemoReport, Findings, count, held_out_rows, peak_rss_mib};
use super::task::{self, Question, QuestionKind};
use super::users::{NEARLY, SharedTally, TrainerLoad, Users};
use super::versions::{DecisionKind, VersionHistory};
use hone_config::Config;
use hone_report::terminal::clock;

/// A demo ends within this time.
const TIME_LIMIT: Duration = Duration::from_secs(285);
/// The part of it that is reserved for the trainer's last step and the shutdown.
const RESERVE: Duration = Duration::from_secs(15);
/// How often the trainer's load is read. Users react to it; with a slow poll they would ask in bursts.
const POLL: Duration = Duration::from_millis(10);
/// How often the metrics are read, which only the display needs.
const SCRAPE: Duration = Duration::from_millis(250);
/// Consecutive polls that may fail, half a second in all.
const POLLS_FAILED: u32 = 50;
/// Longest wait for the trainer to finish its step.
const SETTLE: Duration = Duration::from_secs(30);
/// Longest wait for the daemon to be ready.
const READY: Duration = Duration::from_secs(60);

/// Versions before a sabotage, so that there is something to lose.
const GOOD_BEFORE_SABOTAGE: usize = 3;
/// Users of a server that runs already.
const VISITORS: usize = 8;
/// Polls of the versions in a row that must find the trainer at rest before the phase ends, because a
/// publication begins shortly after the last step.
const POLLS_AT_REST: u32 = 2;

/// The inputs of every phase.
struct Session<'a> {
    options: &'a DemoOptions,
    client: Client,
    tally: SharedTally,
    /// Answers that the engine computes in parallel.
    parallel: usize,
    questions: Vec<Question>,
    /// The server's step at the beginning.
    first_step: u64,
}

/// How the learning phase ended.
struct LearningOutcome {
    step: u64,
    cut_short: Option<String>,
    /// Time until the running mean of the reward reached the share [`NEARLY`] of the maximum.
    nearly: Option<Duration>,
    /// The decisions about versions, with a gate or a canary.
    versions: Option<VersionHistory>,
}

/// Runs all phases against the daemon at `url`.
pub(super) async fn run(
    options: &DemoOptions,
    config: &Config,
    url: &str,
    progress: &mut DemoProgress,
) -> anyhow::Result<Findings> {
    let client = Client::new(url)?;
    client.wait_ready(READY).await?;
    let session = Session {
        options,
        first_step: client.trainer().await?.step,
        client,
        tally: SharedTally::default(),
        parallel: match options.server {
            Some(_) => VISITORS,
            None => parallel_requests(&config.engine),
        },
        questions: eval::held_out(eval::QUESTIONS),
    };
    // The first evaluation measures the base model.
    session.client.pause().await?;
    let engines = match config.engine.backend {
        EngineBackend::Mistralrs => count(config.engine.replicas as u64, "engine"),
        EngineBackend::Native => "native engine".to_owned(),
    };
    let dir = config.data.dir.display();
    match options.server {
        Some(_) => progress.done("visiting", url),
        None => progress.done("serving", &format!("{url} · {engines} · data in {dir}")),
    }

    let measuring = Instant::now();
    let before = session.evaluate("before", progress).await?;
    let deadline = TIME_LIMIT.saturating_sub(measuring.elapsed().mul_f64(1.5) + RESERVE);

    let learned = session.learn(deadline, progress).await?;
    session.settle().await?;
    progress.done("learned", &learned_line(&learned, session.tally.borrow().reward));

    let after = session.evaluate("after", progress).await?;
    let scrape = session.client.metrics().await?;
    if options.keep_serving {
        session.client.resume().await?;
    }
    let report = session.report(&before, &after, &learned, &scrape, progress.elapsed());
    let tally = session.tally.into_inner();
    Ok(Findings { report, before, after, tally, cut_short: learned.cut_short })
}

impl Session<'_> {
    async fn evaluate(
        &self,
        label: &str,
        progress: &mut DemoProgress,
    ) -> anyhow::Result<DemoEvaluation> {
        let total = 2 * self.questions.len();
        progress.begin(&format!("{label}: {total} held-out answers"));
        let answered = |n| progress.message(&format!("{label}: {n} of {total} held-out answers"));
        let evaluation = eval::measure(
            &self.client,
            &self.questions,
            self.parallel,
            // Another server may have no route without rewards for them.
            self.options.server.is_none(),
            &self.tally,
            answered,
        )
        .await?;
        let [greedy, sampled] = [Decoding::Greedy, Decoding::Sampled]
            .map(|decoding| evaluation.reward(QuestionKind::Asked, decoding));
        let max = task::REWARD_MAX;
        progress.done(
            label,
            &format!("held out: greedy {greedy:.2}, sampled {sampled:.2} of {max:.2}"),
        );
        Ok(evaluation)
    }

    /// Users ask and the trainer learns, until all steps are taken or the demo has run for `deadline`.
    async fn learn(
        &self,
        deadline: Duration,
        progress: &mut DemoProgress,
    ) -> anyhow::Result<LearningOutcome> {
        let load = Cell::default();
        let (client, mode, seed) = (&self.client, self.options.rewards, self.options.seed);
        let users = Users { client, mode, tally: &self.tally, load: &load };
        // With feedback alone, users keep the engine busy; otherwise shadow completions need it.
        let count = if mode.has_graders() { 4 } else { self.parallel };
        self.client.resume().await?;
        let watching = async {
            let learned = self.watch(deadline, &load, progress).await;
            load.set(TrainerLoad { ended: true, ..load.get() });
            learned
        };
        join(watching, users.run(seed, count)).await.0
    }

    async fn watch(
        &self,
        deadline: Duration,
        load: &Cell<TrainerLoad>,
        progress: &mut DemoProgress,
    ) -> anyhow::Result<LearningOutcome> {
        let steps = self.options.steps;
        let mut view = LearningView { steps, ..LearningView::default() };
        let mut ticks = interval(POLL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut failed = 0;
        let (began, mut nearly) = (Instant::now(), None);
        let mut scraped: Option<Instant> = None;
        let is_followed = self.options.promotion != Promotion::Direct;
        let mut versions = is_followed.then(VersionHistory::default);
        loop {
            ticks.tick().await;
            let due = scraped.is_none_or(|at| at.elapsed() >= SCRAPE);
            let (status, scrape) = match self.poll(due, versions.as_mut(), progress).await {
                Ok(polled) => polled,
                Err(error) if failed >= POLLS_FAILED => return Err(error),
                Err(_) => {
                    failed += 1;
                    continue;
                }
            };
            failed = 0;
            load.set(TrainerLoad {
                trainer_busy: status.busy(),
                waiting: status.queued_prompts + status.in_flight_groups + status.ready_groups,
                canary: versions.as_ref().is_some_and(|versions| versions.is_pending),
                sabotaged: versions.as_ref().is_some_and(|v| v.sabotaged_from.is_some()),
                ended: false,
            });
            if let Some(scrape) = scrape {
                scraped = Some(Instant::now());
                view.kl = scrape.value("hone_train_kl");
            }
            {
                let tally = self.tally.borrow();
                if status.step > view.status.step {
                    view.history.extend(tally.reward);
                }
                view.status.clone_from(&status);
                progress.update(&view, &tally);
                let is_nearly = |reward| reward >= NEARLY * task::REWARD_MAX;
                if tally.is_settled() && tally.reward.is_some_and(is_nearly) {
                    nearly.get_or_insert_with(|| began.elapsed());
                }
            }
            if status.state == "failed" {
                let reason = status.last_error.unwrap_or_else(|| "unknown reason".to_owned());
                anyhow::bail!("the trainer failed: {reason}");
            }
            let is_last = status.step >= steps || status.state == "finished";
            // No version is being checked: users' ratings must decide on the last one. Without a gate or a
            // canary, [`Session::settle`] waits for it. Another server's trainer goes on after the steps that
            // were asked for.
            let is_at_rest = versions.as_ref().is_none_or(|versions| {
                (self.options.server.is_some() || status.settled())
                    && versions.polls_at_rest >= POLLS_AT_REST
            });
            let cut_short = if is_last && is_at_rest {
                None
            } else if status.state == "paused" && status.hold.is_some() {
                status.hold
            } else if progress.elapsed() >= deadline {
                let limit = clock(TIME_LIMIT);
                Some(format!("step {} of {steps} at the time limit of {limit}", status.step))
            } else {
                continue;
            };
            if let Some(versions) = &mut versions {
                // The decision that ended the phase may be newer than the last poll.
                self.follow(versions, progress).await?;
            }
            return Ok(LearningOutcome { step: status.step, cut_short, nearly, versions });
        }
    }

    /// The trainer's status and, if `due`, the metrics; then also the versions, if they are followed.
    async fn poll(
        &self,
        due: bool,
        versions: Option<&mut VersionHistory>,
        progress: &DemoProgress,
    ) -> anyhow::Result<(TrainerStatus, Option<Scrape>)> {
        let mut status = self.client.trainer().await?;
        status.step = status.step.saturating_sub(self.first_step);
        if !due {
            return Ok((status, None));
        }
        if let Some(versions) = versions {
            self.follow(versions, progress).await?;
        }
        Ok((status, Some(self.client.metrics().await?)))
    }

    /// Shows the new decisions about versions, and begins the sabotage after enough promotions.
    async fn follow(
        &self,
        history: &mut VersionHistory,
        progress: &DemoProgress,
    ) -> anyhow::Result<()> {
        for decision in history.observe(&self.client.policies().await?) {
            let good = decision.decision == DecisionKind::Promoted;
            progress.event(good, decision.label(), &decision.text());
        }
        history.polls_at_rest = if history.is_pending { 0 } else { history.polls_at_rest + 1 };
        // During the canary of the last good version, so that sabotaged groups wait for the next one.
        let good = history.promoted + usize::from(history.is_pending);
        let begins = self.options.sabotage && good >= GOOD_BEFORE_SABOTAGE;
        if begins && history.sabotaged_from.is_none() {
            history.sabotaged_from = Some(history.newest + 1);
            // Users need a moment to ask the first sabotaged questions.
            history.polls_at_rest = 0;
            let text = "from now on the graders reward wrong sums without the form";
            progress.event(false, "sabotage", text);
        }
        Ok(())
    }

    /// Pauses the trainer and waits until it has published its last step.
    async fn settle(&self) -> anyhow::Result<()> {
        let paused = self.client.pause().await;
        let until = Instant::now() + SETTLE;
        while !self.client.trainer().await?.settled() {
            // A finished trainer need not accept a pause; a running one must.
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
        learned: &LearningOutcome,
        scrape: &Scrape,
        wall: Duration,
    ) -> DemoReport {
        let tally = self.tally.borrow();
        let (all, idle, busy) = (tally.overall(), tally.idle(), tally.busy());
        let reward =
            |answers: &DemoEvaluation| answers.reward(QuestionKind::Asked, Decoding::Sampled);
        DemoReport {
            reward_max: task::REWARD_MAX,
            reward_before: reward(before),
            reward_after: reward(after),
            held_out: held_out_rows(before, after),
            steps: learned.step,
            seconds_to_nine_tenths: learned.nearly.map(|time| time.as_secs_f64()),
            ratings_to_90: tally.ratings_to_nearly,
            // Prometheus writes counts as floats.
            swaps: scrape.value("hone_policy_published_total").unwrap_or(0.0) as u64,
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
            // The server is another process then.
            peak_rss_mib: peak_rss_mib().filter(|_| self.options.server.is_none()),
            seed: self.options.seed,
            rewards: self.options.rewards,
            backend: self.options.backend,
            sampler: self.options.sampler,
            versions: learned.versions.clone(),
        }
    }
}

fn learned_line(learned: &LearningOutcome, reward: Option<f64>) -> String {
    let steps = count(learned.step, "step");
    let reward = reward.map(|r| format!(" · users see {r:.2} of {:.2}", task::REWARD_MAX));
    let early = learned.cut_short.as_ref().map(|reason| format!(" · ended early: {reason}"));
    format!("{steps}{}{}", reward.unwrap_or_default(), early.unwrap_or_default())
}
