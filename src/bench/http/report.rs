//! The measurements and how they are printed.

use std::fmt;

use serde::Serialize;

use hone_engine::EngineBackend;

use crate::demo::tally::percentile;

/// What answers a request: the engine alone, the server, or the server with a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AnswerPath {
    Engine,
    Http,
    Stream,
}

impl AnswerPath {
    pub(super) const ALL: [Self; 3] = [Self::Engine, Self::Http, Self::Stream];
}

/// One path under one load.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PathStats {
    /// Completions.
    pub requests: usize,
    /// Time of a completion in ms: the median and the 99th percentile (nearest rank).
    pub latency_ms: [f64; 2],
    /// Completion tokens per second of all clients together: the median of the rounds.
    pub tokens_per_second: f64,
}

/// All paths under one load.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LoadStats {
    /// Clients, each with one request at a time.
    pub users: usize,
    /// The engine alone.
    pub engine: PathStats,
    /// The server.
    pub http: PathStats,
    /// The server, with a stream.
    pub stream: PathStats,
    /// The throughput over HTTP divided by that of the engine alone, in a whole response and in a stream: the
    /// medians of the rounds.
    pub throughput_ratios: [f64; 2],
}

/// The measurements.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HttpBenchReport {
    /// The model; `None` is the embedded one.
    pub model: Option<String>,
    /// The engine.
    pub backend: EngineBackend,
    /// Tokens of each completion.
    pub tokens: u32,
    /// Seconds of each path under each load.
    pub seconds: f64,
    /// With one client, and with several.
    pub loads: Vec<LoadStats>,
    /// Interactions in the ledger: the completions over HTTP.
    pub recorded: u64,
    /// Load average before and after.
    pub load: [f64; 2],
}

/// The samples of one path under one load.
#[derive(Default)]
pub(super) struct PathSamples {
    /// Times of the completions of all rounds in ms.
    pub latencies: Vec<f64>,
    /// Completion tokens per second in each round.
    pub rates: Vec<f64>,
}

impl PathSamples {
    fn stats(&self) -> PathStats {
        let latencies = sorted(&self.latencies);
        PathStats {
            requests: latencies.len(),
            latency_ms: [0.5, 0.99].map(|q| percentile(&latencies, q).unwrap_or(f64::NAN)),
            tokens_per_second: median(&self.rates),
        }
    }
}

impl LoadStats {
    /// `samples` has the paths in the order of [`AnswerPath::ALL`].
    pub(super) fn new(users: usize, samples: &[PathSamples; 3]) -> Self {
        let [engine, http, stream] = samples;
        let ratio = |path: &PathSamples| {
            let rounds = path.rates.iter().zip(&engine.rates);
            median(&rounds.map(|(rate, alone)| rate / alone).collect::<Vec<_>>())
        };
        Self {
            users,
            throughput_ratios: [ratio(http), ratio(stream)],
            engine: engine.stats(),
            http: http.stats(),
            stream: stream.stats(),
        }
    }

    /// What HTTP adds to the median time of a completion in ms: in a whole response and in a stream.
    pub fn added_ms(&self) -> [f64; 2] {
        [&self.http, &self.stream].map(|path| path.latency_ms[0] - self.engine.latency_ms[0])
    }
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

fn median(values: &[f64]) -> f64 {
    percentile(&sorted(values), 0.5).unwrap_or(f64::NAN)
}

impl fmt::Display for HttpBenchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, backend, tokens, seconds, loads, recorded, load } = self;
        writeln!(
            f,
            "{tokens} tokens a completion, {seconds:.0} s of each in turns, model: {}, backend: {backend:?}",
            model.as_deref().unwrap_or("embedded")
        )?;
        writeln!(f, "                          engine        HTTP      stream")?;
        for stats in loads {
            let paths = [&stats.engine, &stats.http, &stats.stream];
            writeln!(f, "{} client(s)", stats.users)?;
            for (name, at) in [("p50", 0), ("p99", 1)] {
                let [engine, http, stream] = paths.map(|path| path.latency_ms[at]);
                writeln!(f, "  {name:<15} {engine:>11.2} {http:>11.2} {stream:>11.2} ms")?;
            }
            let [http, stream] = stats.added_ms();
            writeln!(f, "  added at p50    {:>11} {http:>11.2} {stream:>11.2} ms", "")?;
            let [engine, http, stream] = paths.map(|path| path.tokens_per_second);
            writeln!(f, "  throughput      {engine:>11.0} {http:>11.0} {stream:>11.0} tokens/s")?;
            let [http, stream] = stats.throughput_ratios;
            writeln!(f, "  ratio           {:>11} {http:>11.3} {stream:>11.3}", "")?;
        }
        writeln!(f, "{recorded} completions recorded")?;
        write!(f, "load {:.2} before, {:.2} after", load[0], load[1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_ratios_of_the_rounds_are_reported() {
        let samples = |ms: f64, rates: [f64; 3]| PathSamples {
            latencies: (1..=100).map(|i| ms * f64::from(i)).collect(),
            rates: rates.to_vec(),
        };
        let samples = [
            samples(1.0, [1000.0, 2000.0, 4000.0]),
            samples(1.01, [990.0, 1900.0, 4000.0]),
            samples(1.02, [980.0, 1960.0, 3600.0]),
        ];
        let report = HttpBenchReport {
            model: None,
            backend: EngineBackend::Native,
            tokens: 64,
            seconds: 10.0,
            loads: vec![LoadStats::new(1, &samples)],
            recorded: 200,
            load: [0.1, 1.9],
        };
        insta::assert_snapshot!(report, @r"
        64 tokens a completion, 10 s of each in turns, model: embedded, backend: Native
                                  engine        HTTP      stream
        1 client(s)
          p50                   50.00       50.50       51.00 ms
          p99                   99.00       99.99      100.98 ms
          added at p50                       0.50        1.00 ms
          throughput             2000        1900        1960 tokens/s
          ratio                             0.990       0.980
        200 completions recorded
        load 0.10 before, 1.90 after
        ");
    }
}
