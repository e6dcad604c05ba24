//! The measurements.

use serde::Serialize;

use hone_engine::EngineBackend;

use hone_demo::users::percentile;

/// What HTTP may add to the time of a completion at the median, in ms.
const MAX_ADDED_MS: f64 = 1.0;
/// The least throughput over HTTP, relative to that of the engine alone.
const MIN_RATIO: f64 = 0.97;

/// What answers a request: the engine alone, the server, or the server with a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AnswerPath {
    Engine,
    Http,
    Stream,
}

impl AnswerPath {
    pub(crate) const ALL: [Self; 3] = [Self::Engine, Self::Http, Self::Stream];
}

/// Requests of all clients on one path.
#[derive(Clone, Debug)]
pub(crate) struct BenchBlock {
    /// Times of the completions in ms, by seed.
    pub latencies: Vec<f64>,
    /// From the first request to the last response.
    pub seconds: f64,
    /// Completion tokens.
    pub tokens: u64,
}

impl BenchBlock {
    pub(crate) const EMPTY: Self = Self { latencies: Vec::new(), seconds: 0.0, tokens: 0 };
}

/// A median with its 95 % confidence interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MedianEstimate {
    /// The median.
    pub median: f64,
    /// The interval's bounds, by the ranks of a binomial distribution. It supposes independent samples.
    pub interval: [f64; 2],
}

impl MedianEstimate {
    fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let values = sorted(values);
        let margin = 0.98 * (values.len() as f64).sqrt();
        // Negative values become 0.
        let low = (0.5 * values.len() as f64 - margin) as usize;
        let high = values.len().saturating_sub(1 + low);
        let interval = [low, high].map(|at| values.get(at).copied().unwrap_or(f64::NAN));
        Self { median: percentile(&values, 0.5).unwrap_or(f64::NAN), interval }
    }
}

/// One path under one load.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PathStats {
    /// Completions.
    pub requests: usize,
    /// Time of a completion in ms: the median and the 99th percentile (nearest rank).
    pub latency_ms: [f64; 2],
    /// Completion tokens per second of all clients together.
    pub tokens_per_second: f64,
}

impl PathStats {
    fn new(blocks: &[&BenchBlock]) -> Self {
        let latencies = sorted(blocks.iter().flat_map(|block| &block.latencies).copied());
        let tokens: u64 = blocks.iter().map(|block| block.tokens).sum();
        let seconds: f64 = blocks.iter().map(|block| block.seconds).sum();
        Self {
            requests: latencies.len(),
            latency_ms: [0.5, 0.99].map(|q| percentile(&latencies, q).unwrap_or(f64::NAN)),
            tokens_per_second: tokens as f64 / seconds,
        }
    }
}

/// All paths under one load.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LoadStats {
    /// Clients, each with one request at a time.
    pub users: usize,
    /// Turns, each with a block on every path.
    pub turns: usize,
    /// Requests in a block, of all clients together.
    pub requests_per_turn: u64,
    /// The engine alone.
    pub engine: PathStats,
    /// The server.
    pub http: PathStats,
    /// The server, with a stream.
    pub stream: PathStats,
    /// What HTTP adds to the time of a completion in ms, in a whole response and in a stream, by pairs of
    /// requests with the same seed in the same turn.
    pub added_ms: [MedianEstimate; 2],
    /// The throughput over HTTP divided by that of the engine alone, in a whole response and in a stream, by
    /// pairs of blocks of the same turn.
    pub throughput_ratios: [MedianEstimate; 2],
}

impl LoadStats {
    /// The blocks of a turn are in the order of [`AnswerPath::ALL`].
    pub(crate) fn new(users: usize, requests_per_turn: u64, turns: &[[BenchBlock; 3]]) -> Self {
        let stats = |at: usize| PathStats::new(&turns.iter().map(|t| &t[at]).collect::<Vec<_>>());
        let added = |at: usize| {
            MedianEstimate::of(turns.iter().flat_map(|turn| {
                let pairs = turn[at].latencies.iter().zip(&turn[0].latencies);
                pairs.map(|(path, engine)| path - engine)
            }))
        };
        let ratio = |at: usize| {
            MedianEstimate::of(turns.iter().map(|turn| turn[0].seconds / turn[at].seconds))
        };
        Self {
            users,
            turns: turns.len(),
            requests_per_turn,
            engine: stats(0),
            http: stats(1),
            stream: stats(2),
            added_ms: [added(1), added(2)],
            throughput_ratios: [ratio(1), ratio(2)],
        }
    }

    /// Whether HTTP costs no more than it may.
    fn passed(&self) -> bool {
        self.added_ms.iter().all(|added| added.median <= MAX_ADDED_MS)
            && self.throughput_ratios.iter().all(|ratio| ratio.median >= MIN_RATIO)
    }
}

/// The measurements.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HttpBenchReport {
    /// The model; `None` is the embedded one.
    pub model: Option<String>,
    /// The engine.
    pub backend: EngineBackend,
    /// Tokens of a completion on average.
    pub tokens: u32,
    /// With one client, and with several.
    pub loads: Vec<LoadStats>,
    /// Interactions in the ledger: the completions over HTTP.
    pub recorded: u64,
    /// Load average before and after.
    pub load: [f64; 2],
}

impl HttpBenchReport {
    /// Whether HTTP adds at most 1 ms to the median completion and takes at most 3 % of the throughput, under
    /// every load, in whole responses and in streams.
    pub fn passed(&self) -> bool {
        self.loads.iter().all(LoadStats::passed)
    }
}

fn sorted(values: impl IntoIterator<Item = f64>) -> Vec<f64> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    sorted
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(ms: [f64; 3]) -> HttpBenchReport {
        let block = |ms: f64, turn: f64| BenchBlock {
            latencies: vec![ms * turn, ms * turn],
            seconds: ms * turn / 500.0,
            tokens: 128,
        };
        let turns: Vec<_> = (1..=100).map(|turn| ms.map(|ms| block(ms, f64::from(turn)))).collect();
        HttpBenchReport {
            model: None,
            backend: EngineBackend::Native,
            tokens: 64,
            loads: vec![LoadStats::new(1, 2, &turns)],
            recorded: 200,
            load: [0.1, 1.9],
        }
    }

    #[test]
    fn differences_and_ratios_are_those_of_pairs() {
        let load = report([1.0, 1.01, 1.02]).loads.remove(0);
        let ([http, stream], [ratio, _]) = (load.added_ms, load.throughput_ratios);
        for (found, expected) in [
            (load.engine.latency_ms[0], 50.0),
            (load.http.latency_ms[0], 50.5),
            (load.stream.latency_ms[1], 100.98),
            (load.engine.tokens_per_second, 1267.0),
            (load.stream.tokens_per_second, 1242.0),
            (http.median, 0.5),
            (http.interval[0], 0.44),
            (http.interval[1], 0.57),
            (stream.interval[1], 1.14),
            (ratio.median, 0.99),
            (ratio.interval[0], 0.99),
        ] {
            assert!((found - expected).abs() < 0.005 + 1e-3 * expected, "{expected}: {load:?}");
        }
    }

    #[test]
    fn both_paths_must_be_fast_enough() {
        assert!(report([1.0, 1.01, 1.019]).passed());
        assert!(report([1.0, 0.99, 0.9]).passed());
        assert!(!report([1.0, 1.01, 1.04]).passed());
        assert!(!report([1.0, 1.04, 1.01]).passed());
        // Under every load.
        let of_both = |first, last| {
            let mut both = report(first);
            both.loads.extend(report(last).loads);
            both
        };
        assert!(of_both([1.0, 1.01, 1.019], [1.0, 1.0, 1.0]).passed());
        assert!(!of_both([0.1, 0.11, 0.11], [1.0, 1.0, 1.0]).passed());
        assert!(!of_both([1.0, 1.0, 1.0], [0.1, 0.11, 0.11]).passed());
        assert!(!of_both([1.0, 1.0, 1.04], [1.0, 1.0, 1.0]).passed());
    }
}
