//! `hone-bench http`: what the server adds to the engine: HTTP, JSON, the chat template, the tokenizer and the
//! ledger. docs/benchmarks.md explains how it measures. The clients run in the same process, on a thread of their
//! own, as if they were another process: the server's threads do nothing for them.

use std::cell::Cell;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use clap::Args;
use futures::future::try_join_all;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::sleep;

use hone_core::types::{Message, Role, SamplingParams, TokenId};
use hone_engine::{Engine, EngineBackend, EngineConfig, GenerateRequest, Priority};
use hone_store::Store;

use super::measure::{BenchOutcome, cores, measured, quantiles};
use hone::app::Service;
use hone_config::flags::{count, engine_backend, seconds};
use hone_config::{Config, DataConfig, LogConfig, ServerConfig};
use hone_demo::config::serve_with;
use hone_demo::task::{QuestionKind, QuestionSplit, Questions};

/// What HTTP may add to the time of a completion at the median, in ms.
const MAX_ADDED_MS: f64 = 1.0;
/// The least throughput over HTTP, relative to that of the engine alone.
const MIN_RATIO: f64 = 0.97;

const QUESTIONS: usize = 64;
/// Duration of a block, unless a single request takes longer.
const BLOCK: Duration = Duration::from_millis(100);
/// The least and the largest number of requests in a block, for each client.
const REQUESTS: [u64; 2] = [4, 32];

/// The longest pause of a client between two requests, in the mean times of a token.
const PAUSE_TOKENS: f64 = 2.0;
/// The shortest pause that timers keep.
const LEAST_PAUSE: Duration = Duration::from_millis(1);

#[derive(Clone, Debug, Args)]
pub struct HttpBenchOptions {
    /// Seconds of the engine alone, of responses and of streams, first for one client and then for several
    #[arg(long, value_name = "S", default_value_t = 15.0, value_parser = seconds)]
    pub seconds: f64,
    /// Number of clients, each with one request at a time
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = count(1..=1 << 16))]
    pub users: usize,
    /// Mean tokens per completion; lengths are spread evenly from half of it to one and a half times it
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    pub tokens: u32,
    /// Model: a Hugging Face directory or hub id [default: the embedded model]
    #[arg(long, value_name = "DIR|HUB_ID")]
    pub model: Option<String>,
    /// Engine
    #[arg(long, value_name = "BACKEND", default_value = "native", value_parser = engine_backend())]
    pub backend: EngineBackend,
    /// Exit code 1 if HTTP adds more than 1 ms to a completion or takes more than 3 % of the throughput
    #[arg(long)]
    pub check: bool,
}

pub(crate) async fn run(options: &HttpBenchOptions) -> anyhow::Result<BenchOutcome> {
    let config = |dir: &Path| Ok(config(options, dir));
    measured(config, async |service| {
        let (report, passed) = measure(options, service).await?;
        let failed = options.check && !passed;
        let failure = failed.then(|| "HTTP adds more than 1 ms or takes more than 3 %".to_owned());
        Ok((report, failure))
    })
    .await
}

/// The daemon's configuration: clients only.
fn config(options: &HttpBenchOptions, dir: &Path) -> Config {
    let mut config = Config {
        server: ServerConfig {
            bind: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            ..ServerConfig::default()
        },
        data: DataConfig { dir: dir.join("data"), min_free_bytes: 0 },
        engine: EngineConfig { replicas: cores().clamp(1, 8), ..EngineConfig::default() },
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

/// The measurements, and whether HTTP costs no more than it may under every load.
async fn measure(options: &HttpBenchOptions, service: &Service) -> anyhow::Result<(Value, bool)> {
    let work = BenchWork::new(options.tokens, service)?;
    work.fill_cache().await?;
    work.check().await?;
    let (users, seconds) = ([1, options.users], options.seconds);
    // The clients have a thread of their own.
    let clients = tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let (mut loads, mut passed, mut asked) = (Vec::new(), true, 1);
            for users in users {
                let mut load = BenchLoad::new(&work, users).await?;
                let turns = load.measure(Duration::from_secs_f64(3.0 * seconds)).await?;
                let (stats, is_fast) = stats(users, load.requests, &turns);
                loads.push(stats);
                passed &= is_fast;
                asked += load.recorded;
            }
            anyhow::Ok((loads, passed, asked))
        })
    });
    let (loads, passed, asked) = clients.await??;
    service.store().flush().await?;
    let recorded = service.store().stats()?.interactions;
    ensure!(recorded == asked, "{asked} completions over HTTP, {recorded} in the ledger");
    let report = json!({
        "model": options.model,
        "backend": options.backend,
        "tokens": options.tokens,
        "loads": loads,
        "recorded": recorded,
    });
    Ok((report, passed))
}

/// A number of clients.
struct BenchLoad<'a> {
    work: &'a BenchWork,
    connections: Vec<BenchConnection>,
    /// The requests in a block, of all clients together.
    requests: u64,
    /// The longest pause of a client before a request.
    pause: Duration,
    /// The number of the next turn's first request, from which its seed follows.
    next: u64,
    /// Completions over HTTP so far.
    recorded: u64,
}

impl<'a> BenchLoad<'a> {
    async fn new(work: &'a BenchWork, users: usize) -> anyhow::Result<Self> {
        let connections = (0..users).map(|_| BenchConnection::open(work.addr));
        let connections = try_join_all(connections).await?;
        let requests = REQUESTS[0] * users as u64;
        Ok(Self { work, connections, requests, pause: Duration::ZERO, next: 0, recorded: 0 })
    }

    /// Measures turns of one block on each path, for `duration` and at least one.
    async fn measure(&mut self, duration: Duration) -> anyhow::Result<Vec<[BenchBlock; 3]>> {
        // The first turn fills caches, the second shows how long a request takes.
        self.turn(0).await?;
        let [engine, ..] = self.turn(0).await?;
        let [least, most] = REQUESTS.map(|each| each * self.connections.len() as u64);
        let requests = self.requests as f64 * BLOCK.as_secs_f64() / engine.seconds;
        self.requests = (requests.round() as u64).clamp(least, most);
        let latency: f64 = engine.latencies.iter().sum::<f64>() / 1e3;
        let pause = Duration::from_secs_f64(PAUSE_TOKENS * latency / engine.tokens.max(1) as f64);
        if pause >= LEAST_PAUSE {
            self.pause = pause;
        }
        let (began, mut turns) = (Instant::now(), Vec::new());
        while turns.is_empty() || began.elapsed() < duration {
            let turn = self.turn(turns.len()).await?;
            turns.push(turn);
        }
        Ok(turns)
    }

    /// The same requests on each path, in the order of [`AnswerPath::ALL`]. The path that goes first changes
    /// with `number`.
    async fn turn(&mut self, number: usize) -> anyhow::Result<[BenchBlock; 3]> {
        let mut blocks = [(); 3].map(|()| BenchBlock::default());
        for turn in 0..blocks.len() {
            let at = (turn + number) % blocks.len();
            blocks[at] = self.block(AnswerPath::ALL[at]).await?;
        }
        self.next += self.requests;
        Ok(blocks)
    }

    /// The next requests on one path, each by the client that is free first, after pauses of at most
    /// `self.pause`.
    async fn block(&mut self, path: AnswerPath) -> anyhow::Result<BenchBlock> {
        let work = self.work;
        // What is left of recording the previous block does not disturb this one.
        work.store.flush().await?;
        let (next, end, pause) = (&Cell::new(self.next), self.next + self.requests, self.pause);
        let began = Instant::now();
        let clients = self.connections.iter_mut().map(async |connection| {
            let mut times = Vec::new();
            loop {
                let seed = next.replace(next.get() + 1);
                if seed >= end {
                    return anyhow::Ok(times);
                }
                if !pause.is_zero() {
                    sleep(pause.mul_f64(spread(seed ^ PAUSE_SALT))).await;
                }
                let began = Instant::now();
                if path == AnswerPath::Engine {
                    work.generate(seed, work.length(seed)).await?;
                } else {
                    connection.post(&work.body(seed, path == AnswerPath::Stream)).await?;
                }
                times.push((seed, began.elapsed().as_secs_f64() * 1e3));
            }
        });
        let mut times = try_join_all(clients).await?.concat();
        let seconds = began.elapsed().as_secs_f64();
        if path != AnswerPath::Engine {
            self.recorded += times.len() as u64;
        }
        times.sort_unstable_by_key(|&(seed, _)| seed);
        let tokens = times.iter().map(|&(seed, _)| u64::from(work.length(seed))).sum();
        let latencies = times.into_iter().map(|(_, ms)| ms).collect();
        Ok(BenchBlock { latencies, seconds, tokens })
    }
}

/// Changes the order of pauses, so that they do not depend on the lengths.
const PAUSE_SALT: u64 = 0x5555;

/// Numbers in 0..1 that consecutive seeds spread evenly.
fn spread(seed: u64) -> f64 {
    // 2^64 divided by the golden ratio: the upper bits of its multiples are spread evenly.
    (seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 11) as f64 / (1_u64 << 53) as f64
}

/// The requests, and what answers them.
struct BenchWork {
    engine: Arc<dyn Engine>,
    store: Store,
    addr: SocketAddr,
    /// Tokens of a completion on average.
    tokens: u32,
    /// The texts of the questions and the tokens of their prompts.
    questions: Vec<(String, Vec<TokenId>)>,
}

impl BenchWork {
    fn new(tokens: u32, service: &Service) -> anyhow::Result<Self> {
        let engine = service.engine();
        let asked = Questions::new(1, QuestionSplit::HeldOut(QuestionKind::Asked));
        let questions = asked.take(QUESTIONS).map(|asked| {
            let text = asked.text();
            let ids = engine.codec().prompt(&[Message::new(Role::User, text.as_str())])?;
            anyhow::Ok((text, ids))
        });
        let questions = questions.collect::<anyhow::Result<_>>()?;
        Ok(Self { questions, engine, store: service.store().clone(), addr: service.addr, tokens })
    }

    /// Lets the engine compute every prompt once: its cache would help the paths that do not go first.
    async fn fill_cache(&self) -> anyhow::Result<()> {
        for seed in 0..QUESTIONS as u64 {
            self.generate(seed, 1).await?;
        }
        Ok(())
    }

    /// Checks that both ways to ask give the same answer, with one request over HTTP.
    async fn check(&self) -> anyhow::Result<()> {
        let alone = self.generate(0, self.length(0)).await?;
        let mut connection = BenchConnection::open(self.addr).await?;
        let response = connection.post(&self.body(0, false)).await?;
        let text = serde_json::to_string(&alone)?;
        ensure!(response.contains(&text), "{text} of the engine is not in {response}");
        let counted = format!("\"completion_tokens\":{}", self.length(0));
        ensure!(response.contains(&counted), "{counted} is not in {response}");
        Ok(())
    }

    /// Tokens of the completion with a seed.
    fn length(&self, seed: u64) -> u32 {
        let extra = spread(seed) * (f64::from(self.tokens) + 1.0);
        self.tokens.div_ceil(2) + extra as u32
    }

    fn question(&self, seed: u64) -> &(String, Vec<TokenId>) {
        &self.questions[seed as usize % QUESTIONS]
    }

    /// Generates and collects one completion. Returns its text.
    async fn generate(&self, seed: u64, max_tokens: u32) -> anyhow::Result<String> {
        let params =
            SamplingParams { seed, max_tokens, ignore_eos: true, ..SamplingParams::default() };
        let request = GenerateRequest::new(self.question(seed).1.clone(), params, Priority::Live);
        Ok(self.engine.generate(request).await?.collect().await?.text)
    }

    /// The request of [`Self::generate`] as JSON.
    fn body(&self, seed: u64, stream: bool) -> String {
        let body = json!({
            "model": "default",
            "messages": [{"role": "user", "content": self.question(seed).0}],
            "seed": seed,
            "max_tokens": self.length(seed),
            "ignore_eos": true,
            "stream": stream,
            "store": true,
        });
        body.to_string()
    }
}

// A client that costs little, so that it hardly changes what is measured beside it: one connection, fixed
// headers, and responses that are received but not read.

/// The end of a response's head.
const HEAD_END: &[u8] = b"\r\n\r\n";
/// The end of a response in chunks. JSON has no line breaks within its strings.
const LAST_CHUNK: &[u8] = b"\r\n0\r\n\r\n";

/// A connection that is kept between requests.
struct BenchConnection {
    stream: TcpStream,
    addr: SocketAddr,
    received: Vec<u8>,
}

impl BenchConnection {
    pub async fn open(addr: SocketAddr) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(addr).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, addr, received: Vec::new() })
    }

    /// Posts a JSON body to the chat completions and returns the whole response.
    pub async fn post(&mut self, body: &str) -> anyhow::Result<&str> {
        let request = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n{body}",
            self.addr,
            body.len()
        );
        self.stream.write_all(request.as_bytes()).await?;
        self.received.clear();
        while !is_whole(&self.received)? {
            let read = self.stream.read_buf(&mut self.received).await?;
            ensure!(read > 0, "the connection ended within a response");
        }
        let text = std::str::from_utf8(&self.received)?;
        ensure!(text.starts_with("HTTP/1.1 200 "), "not a completion: {text}");
        Ok(text)
    }
}

/// Whether a response has arrived up to its end.
fn is_whole(received: &[u8]) -> anyhow::Result<bool> {
    let end = received.windows(HEAD_END.len()).position(|window| window == HEAD_END);
    let Some(end) = end else { return Ok(false) };
    let head = std::str::from_utf8(received.get(..end).unwrap_or_default())?;
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    match length {
        Some(length) => {
            let length: usize = length.parse().context("the header content-length")?;
            Ok(received.len() >= end + HEAD_END.len() + length)
        }
        None => Ok(received.ends_with(LAST_CHUNK)),
    }
}

// The measurements.

/// What answers a request: the engine alone, the server, or the server with a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AnswerPath {
    Engine,
    Http,
    Stream,
}

impl AnswerPath {
    const ALL: [Self; 3] = [Self::Engine, Self::Http, Self::Stream];
}

/// Requests of all clients on one path.
#[derive(Clone, Debug, Default)]
struct BenchBlock {
    /// Times of the completions in ms, by seed.
    latencies: Vec<f64>,
    /// From the first request to the last response.
    seconds: f64,
    tokens: u64,
}

/// A median with its 95 % confidence interval, by the ranks of a binomial distribution. It supposes
/// independent samples.
fn median(values: impl Iterator<Item = f64>) -> (f64, [f64; 2]) {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let margin = 0.98 * (values.len() as f64).sqrt();
    // Negative values become 0.
    let low = (0.5 * values.len() as f64 - margin) as usize;
    let high = values.len().saturating_sub(1 + low);
    let interval = [low, high].map(|at| values.get(at).copied().unwrap_or(f64::NAN));
    (quantiles(values)[0], interval)
}

/// All paths under one load, and whether HTTP costs no more than it may. The blocks of a turn are in the order
/// of [`AnswerPath::ALL`].
fn stats(users: usize, requests_per_turn: u64, turns: &[[BenchBlock; 3]]) -> (Value, bool) {
    let path = |at: usize| {
        let blocks = || turns.iter().map(|turn| &turn[at]);
        let latencies: Vec<f64> = blocks().flat_map(|block| &block.latencies).copied().collect();
        let tokens: u64 = blocks().map(|block| block.tokens).sum();
        json!({
            "requests": latencies.len(),
            "latency_ms": quantiles(latencies),
            "tokens_per_second": tokens as f64 / blocks().map(|block| block.seconds).sum::<f64>(),
        })
    };
    // By pairs of requests with the same seed in the same turn.
    let added = [1, 2].map(|at| {
        median(turns.iter().flat_map(|turn| {
            let pairs = turn[at].latencies.iter().zip(&turn[0].latencies);
            pairs.map(|(path, engine)| path - engine)
        }))
    });
    // By pairs of blocks of the same turn.
    let ratios =
        [1, 2].map(|at| median(turns.iter().map(|turn| turn[0].seconds / turn[at].seconds)));
    let passed = added.iter().all(|(median, _)| *median <= MAX_ADDED_MS)
        && ratios.iter().all(|(median, _)| *median >= MIN_RATIO);
    let shown = |estimates: [(f64, [f64; 2]); 2]| {
        estimates.map(|(median, interval)| json!({"median": median, "interval": interval}))
    };
    let report = json!({
        "users": users,
        "turns": turns.len(),
        "requests_per_turn": requests_per_turn,
        "engine": path(0),
        "http": path(1),
        "stream": path(2),
        "added_ms": shown(added),
        "throughput_ratios": shown(ratios),
    });
    (report, passed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_spread_evenly() {
        for salt in [0, PAUSE_SALT] {
            let mut tenths = [0; 10];
            (0..1000).for_each(|seed| tenths[(spread(seed ^ salt) * 10.0) as usize] += 1);
            assert!(tenths.iter().all(|count| (80..=120).contains(count)), "{tenths:?}");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_embedded_model_is_measured() {
        let flags = ["--seconds", "0.1", "--users", "3", "--tokens", "8"];
        let report = run(&crate::measure::tests::options(&flags)).await.unwrap().report;
        let loads = report["loads"].as_array().unwrap();
        assert_eq!([&loads[0]["users"], &loads[1]["users"]], [1, 3]);
        for load in loads {
            let count = |name: &str| load[name].as_u64().unwrap();
            assert!(count("requests_per_turn") >= 4 * count("users"), "{report}");
            let requests = count("turns") * count("requests_per_turn");
            for path in ["engine", "http", "stream"] {
                assert_eq!(load[path]["requests"], requests, "{report}");
            }
            for ratio in load["throughput_ratios"].as_array().unwrap() {
                assert!(ratio["median"].as_f64().unwrap() > 0.0, "{report}");
            }
        }
        assert!(report["recorded"].as_u64().unwrap() > 0, "{report}");
    }

    /// A hundred turns whose requests take a multiple of `ms` on each path.
    fn measured(ms: [f64; 3]) -> (Value, bool) {
        let block = |ms: f64, turn: f64| BenchBlock {
            latencies: vec![ms * turn, ms * turn],
            seconds: ms * turn / 500.0,
            tokens: 128,
        };
        let turns: Vec<_> = (1..=100).map(|turn| ms.map(|ms| block(ms, f64::from(turn)))).collect();
        stats(1, 2, &turns)
    }

    #[test]
    fn differences_and_ratios_are_those_of_pairs() {
        let (load, _) = measured([1.0, 1.01, 1.02]);
        for (path, expected) in [
            ("/engine/latency_ms/0", 50.0),
            ("/http/latency_ms/0", 50.5),
            ("/stream/latency_ms/1", 100.98),
            ("/engine/tokens_per_second", 1267.0),
            ("/stream/tokens_per_second", 1242.0),
            ("/added_ms/0/median", 0.5),
            ("/added_ms/0/interval/0", 0.44),
            ("/added_ms/0/interval/1", 0.57),
            ("/added_ms/1/interval/1", 1.14),
            ("/throughput_ratios/0/median", 0.99),
            ("/throughput_ratios/0/interval/0", 0.99),
        ] {
            let found = load.pointer(path).and_then(Value::as_f64).unwrap();
            assert!((found - expected).abs() < 0.005 + 1e-3 * expected, "{path}: {load}");
        }
    }

    #[test]
    fn both_paths_must_be_fast_enough() {
        for (ms, passed) in [
            ([1.0, 1.01, 1.019], true),
            ([1.0, 0.99, 0.9], true),
            ([1.0, 1.01, 1.04], false),
            ([1.0, 1.04, 1.01], false),
            // Fast enough in ms, but not in throughput.
            ([0.1, 0.11, 0.11], false),
        ] {
            assert_eq!(measured(ms).1, passed, "{ms:?}");
        }
    }

    #[test]
    fn a_response_ends_with_its_length_or_its_last_chunk() {
        let whole = |text: &str| is_whole(text.as_bytes()).unwrap();
        assert!(!whole("") && !whole("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n"));
        assert!(!whole("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{"));
        assert!(whole("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"));
        let chunks = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\na\n\n";
        assert!(!whole(chunks) && whole(&format!("{chunks}\r\n0\r\n\r\n")));
        assert!(is_whole(b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n").is_err());
    }
}
