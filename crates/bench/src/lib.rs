//! `hone-bench`: speed of Hone's components on this machine, and safety of what they learn. Other
//! processes change the times, so numbers that are compared are measured in turns within one run.

mod http;
mod interference;
mod measure;
mod ratings;
mod rewards;
mod safety;
mod sample;
mod train;

use std::io::Write;

use anyhow::bail;
use clap::{Parser, Subcommand};
use tokio::runtime::Builder;

use measure::{BenchOutcome, as_table};

/// Measures the performance of Hone on this machine, and what users notice when learning goes wrong.
///
/// Results are written to standard output, logs and progress to standard error. Exit codes: 0 for
/// success, 1 for a failure or a failed check, 2 for wrong usage.
#[derive(Debug, Parser)]
#[command(name = "hone-bench", version, max_term_width = 100)]
pub struct Bench {
    #[command(subcommand)]
    command: BenchCommand,
    /// Print the result as JSON
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum BenchCommand {
    /// Worst time of each reward function; exit code 1 if one needs more than 1 ms for 4 kB
    Rewards,
    /// Time, throughput and memory of an optimizer step
    Train(train::TrainBenchOptions),
    /// Throughput of the native sampler, compared with the limits of memory and arithmetic
    Sample(sample::SampleOptions),
    /// Latency of served clients while Hone is idle and while it samples and trains
    Interference(interference::InterferenceOptions),
    /// Latency and throughput over HTTP, with recording, compared with the engine alone
    Http(http::HttpBenchOptions),
    /// Ratings that a policy needs to learn, by what the trainer makes of them
    Ratings(ratings::RatingsOptions),
    /// Satisfaction of simulated users when learning goes wrong, by how versions are published
    Safety(safety::SafetyOptions),
}

impl Bench {
    /// Runs the benchmark and writes its report to `out`.
    ///
    /// # Errors
    /// If something could not be measured, or a check failed.
    pub fn run(self, out: &mut dyn Write) -> anyhow::Result<()> {
        // As in `hone serve`: the cores compute tokens too.
        let mut runtime = Builder::new_multi_thread();
        let runtime = runtime.worker_threads(measure::cores().div_ceil(2)).enable_all().build()?;
        let outcome = match self.command {
            BenchCommand::Rewards => runtime.block_on(rewards::run(rewards::BYTES))?,
            BenchCommand::Train(train::TrainBenchOptions {
                model, write_model: Some(dir), ..
            }) => {
                return model.write(&dir);
            }
            BenchCommand::Train(options) => BenchOutcome::of(train::run(&options)?),
            BenchCommand::Sample(options) => BenchOutcome::of(sample::run(&options)?),
            BenchCommand::Interference(options) => runtime.block_on(interference::run(&options))?,
            BenchCommand::Http(options) => runtime.block_on(http::run(&options))?,
            BenchCommand::Ratings(options) => runtime.block_on(ratings::run(&options))?,
            BenchCommand::Safety(options) => runtime.block_on(safety::run(&options))?,
        };
        match self.json {
            true => writeln!(out, "{}", outcome.report)?,
            false => write!(out, "{}", as_table(&outcome.report))?,
        }
        outcome.failure.map_or(Ok(()), |failure| bail!("{failure}"))
    }
}
