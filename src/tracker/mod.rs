//! The tracker of a run (`run.tracker`): an MLflow tracking server that gets steps, evaluations and the verdicts of
//! versions.
//!
//! A thread reads them where they are kept, in the ledger and in the logs of `hone train`, and `tracker.json` in the data
//! directory says which of them the server has. So nothing waits for the server, an outage loses nothing, and a
//! restarted process continues the same run.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use anyhow::Context as _;
use reqwest::blocking::{Client, RequestBuilder};
use reqwest::{StatusCode, Url};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::oneshot;

use hone_core::files::replace_file;
use hone_core::metrics::Metrics;
use hone_core::types::{PolicyState, PolicyVersion, UnixMillis, now_ms};
use hone_store::Store;

use crate::config::{self, Config, MlflowServer};

/// How often new records are looked for.
const INTERVAL: Duration = Duration::from_secs(1);
/// The same after a failed request.
const RETRY: Duration = Duration::from_secs(10);
/// Longest time of a request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time at the end of the process.
const GRACE: Duration = Duration::from_secs(5);
/// Steps that are read at once.
const STEPS: usize = 64;
/// Metrics that MLflow accepts in a request.
const MOST_METRICS: usize = 1000;
/// Parameters that MLflow accepts in a request.
const MOST_PARAMETERS: usize = 100;
/// Characters that MLflow accepts in a parameter.
const MOST_CHARS: usize = 500;
/// Sections whose keys are parameters: those that determine what is learned.
const SECTIONS: [&str; 7] = ["model", "engine", "rollout", "dataset", "run", "train", "policy"];

/// How a run ended.
#[derive(Clone, Copy, Debug)]
pub enum RunStatus {
    /// All steps were taken, or the daemon was shut down.
    Finished,
    /// An operator interrupted it.
    Killed,
    /// A component failed.
    Failed,
}

impl RunStatus {
    /// MLflow's word.
    fn as_str(self) -> &'static str {
        match self {
            Self::Finished => "FINISHED",
            Self::Killed => "KILLED",
            Self::Failed => "FAILED",
        }
    }
}

/// Sends to the server until it is finished or dropped.
pub struct Tracker {
    ending: Sender<RunStatus>,
    /// Closed when the thread has ended.
    ended: oneshot::Receiver<()>,
}

impl Tracker {
    /// Starts to send; `None` without a server. `command` and `model` become tags of the run. Without a `store` steps
    /// are read from the run's log.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(
        config: &Config,
        (command, model): (&str, &str),
        store: Option<&Store>,
        metrics: &Arc<Metrics>,
    ) -> anyhow::Result<Option<Self>> {
        let Some(server) = config.run.mlflow.clone() else { return Ok(None) };
        let tags = [
            ("mlflow.source.name", command),
            ("hone.model", model),
            ("hone.version", env!("CARGO_PKG_VERSION")),
        ];
        let session = TrackerSession {
            tags: tags.map(|(key, value)| json!({"key": key, "value": value})).into(),
            parameters: parameters(config)?,
            sent: Sent::load(&config.data.dir, &server, store),
            store: store.cloned(),
            data: config.data.dir.clone(),
            metrics: Arc::clone(metrics),
            version: None,
            is_open: false,
            is_failing: false,
            is_refused: false,
            steps: RunLog::default(),
            evaluations: RunLog::default(),
            server,
        };
        let (ending, received) = channel();
        let (end, ended) = oneshot::channel();
        let thread = std::thread::Builder::new().name("hone-tracker".to_owned());
        let run = move || {
            session.run(&received);
            drop(end);
        };
        thread.spawn(run).context("run.tracker")?;
        Ok(Some(Self { ending, ended }))
    }

    /// Sends the rest and the status of the run, for a few seconds at most.
    pub async fn finish(self, status: RunStatus) {
        let _ended = self.ending.send(status).is_err();
        if tokio::time::timeout(GRACE, self.ended).await.is_err() {
            tracing::warn!(
                "run.tracker does not have everything yet: the next start sends the rest"
            );
        }
    }
}

/// The configuration without secrets.
fn parameters(config: &Config) -> anyhow::Result<Vec<Value>> {
    let mut all = config::values(config)?;
    all.retain(|(key, _)| SECTIONS.iter().any(|s| key.split('.').next() == Some(s)));
    for route in &config.routes.0 {
        all.extend(route.parts().into_iter().map(|part| {
            let key = format!("route.{}.{}", route.name, part.name);
            (key, format!("{}, weight {}", part.kind.name(), part.weight))
        }));
    }
    let text = |value: &str| value.trim_matches('"').chars().take(MOST_CHARS).collect::<String>();
    Ok(all.iter().map(|(key, value)| json!({"key": name(key), "value": text(value)})).collect())
}

/// A name with the characters that MLflow permits.
fn name(text: &str) -> String {
    let permitted = |c: char| c.is_ascii_alphanumeric() || "_-. /".contains(c);
    text.chars().map(|c| if permitted(c) { c } else { '_' }).collect()
}

/// What the server has: `tracker.json`.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
struct Sent {
    /// Empty before the run is created.
    run_id: String,
    has_parameters: bool,
    step: u64,
    /// The step of the last evaluation.
    evaluation: Option<u64>,
    /// The last version with a verdict.
    version: u64,
}

impl Sent {
    fn file(data: &Path) -> PathBuf {
        data.join("tracker.json")
    }

    fn load(data: &Path, server: &MlflowServer, store: Option<&Store>) -> Self {
        let saved = std::fs::read(Self::file(data)).ok();
        let mut sent: Self =
            saved.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
        if let Some(run_id) = server.run_id.as_ref().filter(|run_id| **run_id != sent.run_id) {
            sent = Self { run_id: run_id.clone(), ..Self::default() };
        }
        // A crash may have undone steps.
        if let Some(store) = store {
            let last = store.last_step().ok().flatten().map_or(0, |last| last.step);
            sent.step = sent.step.min(last);
            sent.evaluation = sent.evaluation.map(|step| step.min(last));
        }
        sent
    }
}

/// A line of a run's log, or a step of the ledger. `None` is a value that is not finite.
#[derive(Deserialize)]
struct Logged {
    step: u64,
    time_ms: UnixMillis,
    #[serde(flatten)]
    values: BTreeMap<String, Option<f64>>,
}

impl Logged {
    fn metrics(&self) -> impl Iterator<Item = Value> {
        self.values.iter().map(|(key, value)| {
            let value = value.filter(|value| value.is_finite()).map_or(json!("NaN"), Value::from);
            json!({"key": name(key), "value": value, "timestamp": self.time_ms, "step": self.step})
        })
    }
}

/// A log of `hone train`, which only grows.
#[derive(Default)]
struct RunLog {
    /// Length in bytes at which every line had been sent.
    sent: u64,
}

impl RunLog {
    /// The lines after a step. The file is read only if it grew.
    fn after(&mut self, file: &Path, step: Option<u64>) -> Vec<Logged> {
        let length = std::fs::metadata(file).map_or(0, |file| file.len());
        if length == self.sent {
            return Vec::new();
        }
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Logged>(line).ok());
        let new: Vec<_> = lines.filter(|line| step.is_none_or(|step| line.step > step)).collect();
        if new.is_empty() {
            self.sent = length;
        }
        new
    }
}

/// Why a request has failed.
enum Failure {
    /// It may succeed later.
    Outage(String),
    /// The server does not accept it.
    Refusal(String),
}

struct TrackerSession {
    server: MlflowServer,
    tags: Vec<Value>,
    parameters: Vec<Value>,
    store: Option<Store>,
    data: PathBuf,
    metrics: Arc<Metrics>,
    sent: Sent,
    steps: RunLog,
    evaluations: RunLog,
    /// The version that the run's tag has.
    version: Option<i64>,
    /// Whether the run exists on the server, with the status that it runs.
    is_open: bool,
    is_failing: bool,
    /// Whether a refusal was logged.
    is_refused: bool,
}

impl TrackerSession {
    fn run(mut self, ending: &Receiver<RunStatus>) {
        let client = match Client::builder().timeout(TIMEOUT).build() {
            Ok(client) => client,
            Err(error) => return tracing::error!(%error, "nothing is sent to run.tracker"),
        };
        let mut wait = Duration::ZERO;
        loop {
            let status = match ending.recv_timeout(wait) {
                Ok(status) => Some(status),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => Some(RunStatus::Failed),
            };
            let sent = self.send(&client);
            self.report(sent.as_ref().err());
            wait = if sent.is_ok() { INTERVAL } else { RETRY };
            if let Some(status) = status {
                let run = json!({"run_id": self.sent.run_id, "status": status.as_str(), "end_time": now_ms()});
                let _failed = sent.is_ok() && self.post(&client, "runs/update", &run).is_err();
                return;
            }
        }
    }

    /// Sends everything that the server does not have.
    fn send(&mut self, client: &Client) -> Result<(), Failure> {
        self.open(client)?;
        if !self.sent.has_parameters {
            for parameters in self.parameters.clone().chunks(MOST_PARAMETERS) {
                self.log(client, json!({"params": parameters, "tags": self.tags}))?;
            }
            self.sent.has_parameters = true;
            self.save();
        }
        loop {
            let steps = self.steps();
            let Some(last) = steps.last() else { break };
            self.log_metrics(client, &steps)?;
            self.sent.step = last.step;
            self.save();
        }
        let file = self.data.join("run/evaluations.jsonl");
        let evaluations = self.evaluations.after(&file, self.sent.evaluation);
        if let Some(last) = evaluations.last() {
            self.log_metrics(client, &evaluations)?;
            self.sent.evaluation = Some(last.step);
            self.save();
        }
        while let Some(verdict) = self.verdict() {
            self.log_metrics(client, &[verdict])?;
            self.sent.version += 1;
            self.save();
        }
        let version = self.metrics.policy_version.get();
        if self.version != Some(version) {
            let tag = json!({"key": "hone.policy_version", "value": version.to_string()});
            self.log(client, json!({"tags": [tag]}))?;
            self.version = Some(version);
        }
        Ok(())
    }

    /// Continues the run, or creates one if there is none or the server does not have it.
    fn open(&mut self, client: &Client) -> Result<(), Failure> {
        if self.is_open {
            return Ok(());
        }
        if !self.sent.run_id.is_empty() {
            let run = json!({"run_id": self.sent.run_id, "status": "RUNNING"});
            match self.post(client, "runs/update", &run) {
                Err(Failure::Refusal(_)) if self.server.run_id.is_none() => {
                    self.sent = Sent::default();
                }
                updated => {
                    self.is_open = updated.map(|_| true)?;
                    return Ok(());
                }
            }
        }
        let name = self.server.experiment.clone();
        let url = self.url("experiments/get-by-name");
        let url = Url::parse_with_params(&url, [("experiment_name", &name)]);
        let found = self.request(client.get(url.map_err(|e| Failure::Outage(e.to_string()))?));
        let id = match found {
            Ok(found) => found["experiment"]["experiment_id"].clone(),
            Err(Failure::Refusal(_)) => {
                let made = self.post(client, "experiments/create", &json!({"name": name}))?;
                made["experiment_id"].clone()
            }
            Err(outage) => return Err(outage),
        };
        let run = json!({"experiment_id": id, "start_time": now_ms(), "tags": self.tags});
        let run = self.post(client, "runs/create", &run)?;
        let id = run["run"]["info"]["run_id"].as_str().unwrap_or_default();
        tracing::info!(run = id, experiment = name, "run.tracker has a new run");
        self.sent.run_id = id.to_owned();
        self.is_open = true;
        self.save();
        Ok(())
    }

    fn steps(&mut self) -> Vec<Logged> {
        let first = self.sent.step + 1;
        let Some(store) = &self.store else {
            let file = self.data.join("run/steps.jsonl");
            let mut steps = self.steps.after(&file, Some(self.sent.step));
            steps.truncate(STEPS);
            return steps;
        };
        // Callers that need the ledger report errors.
        let records = store.steps(first, STEPS).unwrap_or_default().into_iter();
        let logged = records.map(|record| Logged {
            step: record.step,
            time_ms: record.created,
            values: record.metrics.into_iter().map(|(key, value)| (key, Some(value))).collect(),
        });
        logged.collect()
    }

    /// The next version's checks, if they have ended.
    fn verdict(&self) -> Option<Logged> {
        let version = self.sent.version + 1;
        let record = self.store.as_ref()?.policy(PolicyVersion(version)).ok()??;
        if matches!(record.state, PolicyState::Candidate | PolicyState::Canary) {
            return None;
        }
        let passed =
            record.state != PolicyState::Rejected && record.checks.iter().all(|c| c.passed);
        let checks = record.checks.iter().map(|check| {
            let value = check.value.unwrap_or(if check.passed { 1.0 } else { 0.0 });
            (format!("version/{}", check.name), Some(value))
        });
        let own = [("version/number", version as f64), ("version/passed", f64::from(passed))];
        let own = own.map(|(key, value)| (key.to_owned(), Some(value)));
        let values = checks.chain(own).collect();
        Some(Logged { step: record.step, time_ms: record.created, values })
    }

    fn log_metrics(&mut self, client: &Client, lines: &[Logged]) -> Result<(), Failure> {
        let metrics: Vec<Value> = lines.iter().flat_map(Logged::metrics).collect();
        metrics.chunks(MOST_METRICS).try_for_each(|some| self.log(client, json!({"metrics": some})))
    }

    /// Adds to the run. What the server refuses is left out, because it would refuse it again.
    fn log(&mut self, client: &Client, mut what: Value) -> Result<(), Failure> {
        what["run_id"] = self.sent.run_id.clone().into();
        match self.post(client, "runs/log-batch", &what) {
            Err(Failure::Refusal(reason)) => {
                self.metrics.tracker_failed_requests.inc();
                if !std::mem::replace(&mut self.is_refused, true) {
                    tracing::warn!(reason, "run.tracker refuses some values, which are left out");
                }
                Ok(())
            }
            answered => answered.map(drop),
        }
    }

    fn url(&self, path: &str) -> String {
        format!("{}/api/2.0/mlflow/{path}", self.server.address)
    }

    fn post(&self, client: &Client, path: &str, body: &Value) -> Result<Value, Failure> {
        self.request(client.post(self.url(path)).json(body))
    }

    fn request(&self, request: RequestBuilder) -> Result<Value, Failure> {
        let request = match (&self.server.token, &self.server.user) {
            (Some(token), _) => request.bearer_auth(token.expose()),
            (None, Some((user, password))) => request.basic_auth(user, Some(password.expose())),
            (None, None) => request,
        };
        answer(request)
    }

    /// Counts a failure. An outage is logged once.
    fn report(&mut self, failure: Option<&Failure>) {
        self.metrics.tracker_failed_requests.inc_by(failure.map_or(0, |_| 1));
        match (std::mem::replace(&mut self.is_failing, failure.is_some()), failure) {
            (false, Some(Failure::Outage(reason) | Failure::Refusal(reason))) => {
                tracing::warn!(reason, "the server of run.tracker does not take the steps");
            }
            (true, None) => tracing::info!("the server of run.tracker takes the steps again"),
            _ => {}
        }
    }

    fn save(&self) {
        let text = serde_json::to_vec(&self.sent).unwrap_or_default();
        if let Err(error) = replace_file(&Sent::file(&self.data), &text) {
            tracing::warn!(%error, "the state of run.tracker is not saved");
        }
    }
}

fn answer(request: RequestBuilder) -> Result<Value, Failure> {
    // The address may contain a password.
    let outage = |error: reqwest::Error| {
        Failure::Outage(format!("{:#}", anyhow::Error::from(error.without_url())))
    };
    let response = request.send().map_err(outage)?;
    let status = response.status();
    if status.is_success() {
        return response.json().map_err(outage);
    }
    let body: Value = response.json().unwrap_or_default();
    let message: String = body["message"].as_str().unwrap_or_default().chars().take(300).collect();
    let reason = format!("{status}: {message}");
    Err(match status {
        StatusCode::BAD_REQUEST | StatusCode::NOT_FOUND | StatusCode::PAYLOAD_TOO_LARGE => {
            Failure::Refusal(reason)
        }
        _ => Failure::Outage(reason),
    })
}

#[cfg(test)]
mod tests;
