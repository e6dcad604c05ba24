//! `hone bench http`: what the server adds to the engine: HTTP, JSON, the chat template, the tokenizer and the
//! ledger.
//!
//! A daemon on loopback serves the embedded model, or another one, without rollouts and training. The same
//! questions with the same seeds are answered in turns by the engine alone, whose prompts are tokens already,
//! over HTTP, and over HTTP as a stream; first for one client, then for several. Every completion over HTTP
//! is recorded. The clients run in the same process.

mod client;
mod report;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::ensure;
use serde_json::json;
use tokio::task::JoinSet;

use hone_core::types::{Message, Role, SamplingParams, TokenId};
use hone_engine::{Engine, EngineBackend, EngineConfig, GenerateRequest, Priority};

use super::{Folder, machine};
use crate::app::Service;
use crate::config::{Config, DataConfig, LogConfig, ServerConfig};
use crate::demo::config::serve_with;
use crate::demo::task::{QuestionKind, QuestionSplit, Questions};

use client::BenchConnection;
use report::{AnswerPath, PathSamples};

pub use report::{HttpBenchReport, LoadStats, PathStats};

/// Different questions.
const QUESTIONS: usize = 64;

/// The options of `hone bench http`.
#[derive(Clone, Debug)]
pub struct HttpBenchOptions {
    /// Rounds of all paths and loads, after one that is not measured.
    pub rounds: u32,
    /// Seconds of each path under each load in a round.
    pub seconds: f64,
    /// Clients of the second load, each with one request at a time.
    pub users: usize,
    /// Tokens of each completion.
    pub tokens: u32,
    /// A Hugging Face directory or a hub id; `None` for the embedded model.
    pub model: Option<String>,
    /// The engine.
    pub backend: EngineBackend,
}

/// Runs the benchmark on a daemon that `start` starts.
///
/// # Errors
/// If the daemon does not start, or a request fails or is not recorded.
pub async fn run(
    options: &HttpBenchOptions,
    start: impl AsyncFnOnce(Config) -> anyhow::Result<Service>,
) -> anyhow::Result<HttpBenchReport> {
    let dir = Folder::temporary()?;
    let before = machine::load();
    let service = start(config(options, &dir.0)).await?;
    let measured = measure(options, &service).await;
    service.shutdown().await?;
    let mut report = measured?;
    report.load = [before, machine::load()];
    Ok(report)
}

/// The daemon's configuration: clients only.
fn config(options: &HttpBenchOptions, dir: &Path) -> Config {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut config = Config {
        server: ServerConfig {
            bind: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            ..ServerConfig::default()
        },
        data: DataConfig { dir: dir.join("data"), min_free_bytes: 0 },
        engine: EngineConfig { replicas: cores.clamp(1, 8), ..EngineConfig::default() },
        log: LogConfig { level: "warn".to_owned(), ..LogConfig::default() },
        ..Config::default()
    };
    config.rollout.enabled = false;
    config.train.enabled = false;
    serve_with(&mut config, options.backend);
    if let Some(model) = &options.model {
        config.model.path.clone_from(model);
    }
    config
}

async fn measure(options: &HttpBenchOptions, service: &Service) -> anyhow::Result<HttpBenchReport> {
    let work = Arc::new(BenchWork::new(options, service)?);
    let mut loads = [1, options.users.max(1)].map(|users| (users, <[PathSamples; 3]>::default()));
    let mut asked = work.check().await?;
    for round in 0..=options.rounds.max(1) {
        for (users, samples) in &mut loads {
            for turn in 0..AnswerPath::ALL.len() {
                // Another path goes first in each round.
                let at = (turn + round as usize) % AnswerPath::ALL.len();
                let path = AnswerPath::ALL[at];
                let (latencies, rate) = work.phase(path, *users, round).await?;
                if path != AnswerPath::Engine {
                    asked += latencies.len() as u64;
                }
                // The first round fills caches.
                if round > 0 {
                    samples[at].latencies.extend(latencies);
                    samples[at].rates.push(rate);
                }
            }
        }
    }
    service.store().flush().await?;
    let recorded = service.store().stats()?.interactions;
    ensure!(recorded == asked, "{asked} completions over HTTP, {recorded} in the ledger");
    Ok(HttpBenchReport {
        model: options.model.clone(),
        backend: options.backend,
        tokens: options.tokens,
        seconds: options.seconds * f64::from(options.rounds.max(1)),
        loads: loads.iter().map(|(users, samples)| LoadStats::new(*users, samples)).collect(),
        recorded,
        load: [0.0; 2],
    })
}

/// The requests, and what answers them.
struct BenchWork {
    engine: Arc<dyn Engine>,
    addr: SocketAddr,
    seconds: Duration,
    tokens: u32,
    /// The texts of the questions and the tokens of their prompts.
    questions: Vec<(String, Vec<TokenId>)>,
}

impl BenchWork {
    fn new(options: &HttpBenchOptions, service: &Service) -> anyhow::Result<Self> {
        let engine = service.engine();
        let asked = Questions::new(1, QuestionSplit::HeldOut(QuestionKind::Asked));
        let question = |text: String| {
            let ids = engine.codec().prompt(&[Message::new(Role::User, text.as_str())])?;
            anyhow::Ok((text, ids))
        };
        let questions = asked.take(QUESTIONS).map(|asked| question(asked.text()));
        Ok(Self {
            questions: questions.collect::<anyhow::Result<_>>()?,
            engine,
            addr: service.addr,
            seconds: Duration::from_secs_f64(options.seconds),
            tokens: options.tokens,
        })
    }

    /// Checks that both ways to ask give the same answer. Returns the number of requests over HTTP.
    async fn check(&self) -> anyhow::Result<u64> {
        let alone = self.generate(0).await?;
        let mut connection = BenchConnection::open(self.addr).await?;
        let response = connection.post(&self.body(0, false)?).await?;
        let text = serde_json::to_string(&alone)?;
        ensure!(response.contains(&text), "{text} of the engine is not in {response}");
        let counted = format!("\"completion_tokens\":{}", self.tokens);
        ensure!(response.contains(&counted), "{counted} is not in {response}");
        Ok(1)
    }

    /// Runs `users` clients for the duration of a phase. Returns the times of the completions in ms, and the
    /// tokens per second.
    async fn phase(
        self: &Arc<Self>,
        path: AnswerPath,
        users: usize,
        round: u32,
    ) -> anyhow::Result<(Vec<f64>, f64)> {
        let began = Instant::now();
        let mut running = JoinSet::new();
        for user in 0..users {
            // The same seeds on each path.
            let first = u64::from(round) << 40 | (user as u64) << 24;
            let work = Arc::clone(self);
            running.spawn(async move { work.ask(path, first, began + work.seconds).await });
        }
        let mut latencies = Vec::new();
        while let Some(done) = running.join_next().await {
            latencies.extend(done??);
        }
        let tokens = latencies.len() as f64 * f64::from(self.tokens);
        Ok((latencies, tokens / began.elapsed().as_secs_f64()))
    }

    /// One client.
    async fn ask(&self, path: AnswerPath, first: u64, end: Instant) -> anyhow::Result<Vec<f64>> {
        let mut connection = BenchConnection::open(self.addr).await?;
        let mut latencies = Vec::new();
        for seed in first.. {
            let began = Instant::now();
            if began >= end {
                break;
            }
            match path {
                AnswerPath::Engine => {
                    self.generate(seed).await?;
                }
                AnswerPath::Http | AnswerPath::Stream => {
                    let body = self.body(seed, path == AnswerPath::Stream)?;
                    connection.post(&body).await?;
                }
            }
            latencies.push(began.elapsed().as_secs_f64() * 1e3);
        }
        Ok(latencies)
    }

    fn question(&self, seed: u64) -> anyhow::Result<&(String, Vec<TokenId>)> {
        let at = seed as usize % self.questions.len().max(1);
        self.questions.get(at).ok_or_else(|| anyhow::anyhow!("there are no questions"))
    }

    /// Generates and collects one completion. Returns its text.
    async fn generate(&self, seed: u64) -> anyhow::Result<String> {
        let params = SamplingParams {
            seed,
            max_tokens: self.tokens,
            ignore_eos: true,
            ..SamplingParams::default()
        };
        let request = GenerateRequest::new(self.question(seed)?.1.clone(), params, Priority::Live);
        Ok(self.engine.generate(request).await?.collect().await?.text)
    }

    /// The request of [`Self::generate`] as JSON.
    fn body(&self, seed: u64, stream: bool) -> anyhow::Result<String> {
        let body = json!({
            "model": "default",
            "messages": [{"role": "user", "content": self.question(seed)?.0}],
            "seed": seed,
            "max_tokens": self.tokens,
            "ignore_eos": true,
            "stream": stream,
            "store": true,
        });
        Ok(body.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn the_embedded_model_is_measured() {
        let options = HttpBenchOptions {
            rounds: 1,
            seconds: 0.1,
            users: 3,
            tokens: 8,
            model: None,
            backend: EngineBackend::Native,
        };
        let report = run(&options, crate::app::start).await.unwrap();
        let users: Vec<usize> = report.loads.iter().map(|load| load.users).collect();
        assert_eq!(users, [1, 3]);
        for load in &report.loads {
            assert!(load.engine.requests > 0 && load.http.requests > 0, "{report}");
            assert!(load.stream.requests > 0 && load.throughput_ratios.iter().all(|r| *r > 0.0));
        }
        assert!(report.recorded > 0, "{report}");
    }
}
