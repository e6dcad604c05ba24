//! `hone-bench ratings`: how many ratings a policy needs to learn, by how often users rate, how often they are wrong, and
//! what the trainer makes of a rating. Users wait while a step's worth of ratings waits for the trainer, so that the
//! numbers depend little on the machine's speed.

use std::cell::{Cell, RefCell};
use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use clap::Args;
use futures::future::join_all;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use tokio::time::sleep;

use hone_config::Config;
use hone_config::flags::engine_backend;
use hone_demo::RewardsMode;
use hone_demo::client::{Client, UserRequest};
use hone_demo::config::{TASK_ASKED, build, serve_with};
use hone_demo::task::{QuestionSplit, Questions, REWARD_MAX, score};
use hone_demo::users::UserTally;
use hone_engine::EngineBackend;
use hone_report::stats;
use hone_report::terminal::Progress;

use crate::measure::{BenchOutcome, cores, with_daemon};

/// Longest wait for the daemon to be ready.
const PATIENCE: Duration = Duration::from_secs(60);
/// Requests at a time.
const PARALLEL: usize = 16;
/// How often the trainer's load is read, and how often a waiting user looks at it.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Longest wait of a user: ratings that no step takes must not end the traffic.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Answers at the begin and the end of a run whose mean rewards are compared.
const ENDS: usize = 1000;
/// Seed of the bootstrap.
const STATS_SEED: u64 = 1;

/// What the trainer makes of ratings: names with changes of the configuration.
const METHODS: &[(&str, &str)] = &[
    ("default", ""),
    ("replay", "train.replay.share=0.5"),
    ("two updates", "train.num_iterations=2"),
    ("half the rate", "train.learning_rate=0.001"),
];

#[derive(Debug, Args)]
pub struct RatingsOptions {
    /// Number of seeds
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub seeds: u64,
    /// First seed
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// A method: a name and changes of the demo's configuration, such as
    /// "replay: train.replay.share=0.5 train.beta=0" [default: several]
    #[arg(long = "method", value_name = "NAME: KEY=VALUE…")]
    pub methods: Vec<String>,
    /// Shares of the answers that users rate, separated by commas
    #[arg(long, value_name = "SHARES", value_delimiter = ',', default_value = "1,0.1")]
    pub rated: Vec<f64>,
    /// Shares of the thumbs that are inverted, separated by commas
    #[arg(long, value_name = "SHARES", value_delimiter = ',', default_value = "0,0.2")]
    pub inverted: Vec<f64>,
    /// Most ratings of a run
    #[arg(long, value_name = "N", default_value_t = 6000)]
    pub ratings: u64,
    /// Most answers of a run
    #[arg(long, value_name = "N", default_value_t = 60_000)]
    pub answers: u64,
    /// Engine that answers the users
    #[arg(long, value_name = "BACKEND", default_value = "native", value_parser = engine_backend())]
    pub backend: EngineBackend,
}

/// Runs the benchmark on daemons, one after the other: in each seed all methods, so that a change of the machine's load
/// meets all of them. Failed requests end it.
pub(crate) async fn run(options: &RatingsOptions) -> anyhow::Result<BenchOutcome> {
    let methods: Vec<(String, String)> = match options.methods.as_slice() {
        [] => METHODS.iter().map(|(name, keys)| ((*name).to_owned(), (*keys).to_owned())).collect(),
        chosen => chosen
            .iter()
            .map(|text| {
                let (name, keys) = text.split_once(':').unwrap_or((text, ""));
                (name.trim().to_owned(), keys.trim().to_owned())
            })
            .collect(),
    };
    let progress = Progress::new(std::io::stderr().is_terminal());
    let mut cells: Vec<(Value, Vec<RatingsRun>)> = Vec::new();
    for (method, _) in &methods {
        for rated in &options.rated {
            for inverted in &options.inverted {
                let cell = json!({"method": method, "rated": rated, "inverted": inverted});
                cells.push((cell, Vec::new()));
            }
        }
    }
    for seed in options.seed..options.seed + options.seeds {
        for (cell, runs) in &mut cells {
            let [rated, inverted] =
                ["rated", "inverted"].map(|key| cell[key].as_f64().unwrap_or(1.0));
            let changes = methods.iter().find(|(name, _)| cell["method"] == **name);
            let changes = changes.map_or("", |(_, keys)| keys);
            let run = measure(options, changes, seed, rated, inverted).await;
            let run = run.with_context(|| format!("{cell}, seed {seed}"))?;
            progress.note(&format!("{cell}, seed {seed}: {run:?}"));
            runs.push(run);
        }
    }
    let rows = cells.into_iter().map(|(cell, runs)| row(cell, &runs));
    Ok(BenchOutcome::of(Value::Array(rows.collect())))
}

/// One run: until nine tenths of the maximum, or the most answers or ratings.
#[derive(Clone, Debug, Default)]
struct RatingsRun {
    /// Ratings until the mean reward of the last 200 answers first reached nine tenths of the maximum.
    reached: Option<u64>,
    ratings: u64,
    answers: usize,
    steps: u64,
    /// Mean rewards of the first and the last answers, with the 95 % interval of their difference.
    ends: [f64; 2],
    rise: Option<[f64; 2]>,
    seconds: f64,
}

/// The median of several runs; runs that did not reach the mark count as the largest.
fn row(mut cell: Value, runs: &[RatingsRun]) -> Value {
    let mut reached: Vec<_> = runs.iter().map(|run| run.reached.unwrap_or(u64::MAX)).collect();
    reached.sort_unstable();
    let shown = |ratings: Option<&u64>| ratings.filter(|ratings| **ratings < u64::MAX).copied();
    let mean = |of: fn(&RatingsRun) -> f64| runs.iter().map(of).sum::<f64>() / runs.len() as f64;
    cell["median"] = json!(shown(reached.get((reached.len() - 1) / 2)));
    cell["range"] = json!([shown(reached.first()), shown(reached.last())]);
    cell["runs"] = json!(runs.len());
    cell["ratings"] = json!(mean(|run| run.ratings as f64).round());
    cell["answers"] = json!(mean(|run| run.answers as f64).round());
    cell["steps"] = json!(mean(|run| run.steps as f64).round());
    cell["first"] = json!(mean(|run| run.ends[0]));
    cell["last"] = json!(mean(|run| run.ends[1]));
    let rises = runs.iter().filter(|run| run.rise.is_some_and(|rise| rise[0] > 0.0)).count();
    cell["rises"] = json!(rises);
    cell["seconds"] = json!(mean(|run| run.seconds));
    cell
}

/// The demo's configuration for thumbs alone, with the changes of a method.
fn config(
    options: &RatingsOptions,
    changes: &str,
    seed: u64,
    dir: &std::path::Path,
) -> anyhow::Result<Config> {
    let mut config = build(RewardsMode::Feedback, 0, seed, dir, cores());
    serve_with(&mut config, options.backend);
    config.log.level = "error".to_owned();
    let mut table = toml::Table::try_from(&config)?;
    for change in changes.split_whitespace() {
        let invalid = || anyhow!("--method: {change:?} is not KEY=VALUE");
        let (key, value) = change.split_once('=').ok_or_else(invalid)?;
        let (sections, last) = key.rsplit_once('.').ok_or_else(invalid)?;
        let mut at = &mut table;
        for section in sections.split('.') {
            let next = at.entry(section).or_insert_with(|| toml::Table::new().into());
            at = next.as_table_mut().ok_or_else(invalid)?;
        }
        let value = format!("value = {value}").parse::<toml::Table>();
        let value = value.map_err(|_| invalid())?.remove("value").ok_or_else(invalid)?;
        at.insert(last.to_owned(), value);
    }
    let mut config = hone_config::parse(&toml::to_string(&table)?)?;
    // A constant of the daemon.
    config.data.min_free_bytes = 0;
    hone_config::validate(&config)?;
    Ok(config)
}

/// Users who post a thumb up if an answer is right and well formed.
struct Raters<'a> {
    client: &'a Client,
    rated: f64,
    inverted: f64,
    questions: RefCell<Questions>,
    tally: RefCell<UserTally>,
    rewards: RefCell<Vec<f64>>,
    /// Whether enough ratings wait for the trainer.
    enough: Cell<bool>,
    ended: Cell<bool>,
}

async fn measure(
    options: &RatingsOptions,
    changes: &str,
    seed: u64,
    rated: f64,
    inverted: f64,
) -> anyhow::Result<RatingsRun> {
    let dir = tempfile::tempdir()?;
    let config = config(options, changes, seed, dir.path())?;
    let enough = config.train.samples_per_step.div_ceil(4) as u64;
    with_daemon(config, async |daemon| {
        let client = Client::new(&daemon.url())?;
        client.wait_ready(PATIENCE).await?;
        let raters = Raters {
            client: &client,
            rated,
            inverted,
            questions: RefCell::new(Questions::new(seed, QuestionSplit::Asked)),
            tally: RefCell::default(),
            rewards: RefCell::default(),
            enough: Cell::new(false),
            ended: Cell::new(false),
        };
        let began = Instant::now();
        let users = (0..PARALLEL as u64).map(|stream| raters.ask(seed, stream));
        tokio::join!(join_all(users), raters.watch(options, enough));
        let (tally, rewards) = (raters.tally.into_inner(), raters.rewards.into_inner());
        anyhow::ensure!(tally.failed == 0, "requests failed: {}", tally.failures.join("; "));
        let part = ENDS.min(rewards.len() / 2);
        let [first, last] = [&rewards[..part], &rewards[rewards.len() - part..]];
        let pairs: Vec<_> = first.iter().copied().zip(last.iter().copied()).collect();
        let rise = stats::paired_difference(&pairs, STATS_SEED).and_then(|rise| rise.interval);
        Ok(RatingsRun {
            reached: tally.ratings_to_nearly,
            ratings: tally.feedback,
            answers: rewards.len(),
            steps: client.trainer().await?.step,
            ends: [first, last].map(|part| part.iter().sum::<f64>() / part.len().max(1) as f64),
            rise: rise.map(|interval| [interval.low, interval.high]),
            seconds: began.elapsed().as_secs_f64(),
        })
    })
    .await
}

impl Raters<'_> {
    /// Ends the users once the run is over, and keeps the trainer's load.
    async fn watch(&self, options: &RatingsOptions, enough: u64) {
        loop {
            let waiting = self.client.trainer().await.map_or(0, |status| status.ready_groups);
            self.enough.set(waiting >= enough);
            if self.is_over(options) {
                return self.ended.set(true);
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    fn is_over(&self, options: &RatingsOptions) -> bool {
        let tally = self.tally.borrow();
        tally.ratings_to_nearly.is_some()
            || tally.failed > 0
            || tally.feedback >= options.ratings
            || self.rewards.borrow().len() as u64 >= options.answers
    }

    async fn ask(&self, seed: u64, stream: u64) {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(stream);
        while !self.ended.get() {
            let Some(question) = self.questions.borrow_mut().next() else { return };
            let metadata = [("task".to_owned(), TASK_ASKED.to_owned())].into();
            let request = UserRequest::sampled(&question, metadata, random.random::<u32>().into());
            let answer = match self.client.ask(&request).await {
                Ok(answer) => answer,
                Err(error) => return self.tally.borrow_mut().add_failure(&error),
            };
            let score = score(&answer.text, question.answer());
            self.rewards.borrow_mut().push(score.reward() / REWARD_MAX);
            self.tally.borrow_mut().add_answer(score.reward(), answer.first_token, false);
            if random.random::<f64>() < self.rated {
                let up = score.thumbs_up() ^ (random.random::<f64>() < self.inverted);
                match self.client.thumb(&answer.completion_id, up).await {
                    Ok(_) => self.tally.borrow_mut().add_thumb(up),
                    Err(error) => return self.tally.borrow_mut().add_failure(&error),
                }
            }
            let began = Instant::now();
            while self.enough.get() && !self.ended.get() && began.elapsed() < LONGEST_PAUSE {
                sleep(POLL_INTERVAL).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_method_is_a_valid_configuration() {
        let options: RatingsOptions = crate::measure::tests::options(&[]);
        let usual = config(&options, "", 1, "data".as_ref()).unwrap();
        for (name, changes) in METHODS {
            let changed = config(&options, changes, 1, "data".as_ref()).unwrap();
            assert_eq!(changed == usual, changes.is_empty(), "{name}");
        }
        for wrong in ["train.beta", "beta=1", "train.beta=x", "train.samples_per_step.no=1"] {
            let error = config(&options, wrong, 1, "data".as_ref()).unwrap_err().to_string();
            assert!(error.contains(&format!("{wrong:?} is not KEY=VALUE")), "{error}");
        }
        let unknown = config(&options, "train.unknown=1", 1, "data".as_ref()).unwrap_err();
        assert!(unknown.to_string().contains("unknown"), "{unknown}");
    }

    #[test]
    fn a_run_that_did_not_reach_the_mark_counts_as_the_largest() {
        let run = |reached| RatingsRun { reached, ..RatingsRun::default() };
        let row = |runs: &[Option<u64>]| {
            let runs: Vec<_> = runs.iter().copied().map(run).collect();
            let row = super::row(json!({}), &runs);
            (row["median"].clone(), row["range"].clone())
        };
        assert_eq!(row(&[Some(9), None, Some(5)]), (json!(9), json!([5, null])));
        assert_eq!(row(&[None, None, Some(5)]).0, Value::Null);
    }
}
