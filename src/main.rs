//! Hone's binary: parse, run, exit code.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;

use hone::app::adapters::Export;
use hone::cli::{
    AdaptersCommand, BenchCommand, BenchInterferenceArgs, BenchSampleArgs, BenchTrainArgs, Cli,
    Command, DbCommand, DemoArgs, EvalArgs, RewardsCommand, RunArgs, ServeArgs, TrainArgs,
};
use hone::config::{Config, LogConfig};
use hone::demo::{DaemonHandle, DemoError};
use hone::runs::eval::EvalOptions;
use hone::runs::report::Ending;
use hone::runs::train::TrainOptions;
use hone::{app, bench, config, demo, logging, runs};
use hone_model::adapter::merge::Precision;
use hone_reward::sandbox;

/// Wrong usage or configuration.
const USAGE: u8 = 2;

/// Columns of tables.
const TABLE_WIDTH: usize = 120;

fn main() -> ExitCode {
    // Before anything else: a thread that was started already could not be confined.
    if std::env::args_os().nth(1).is_some_and(|first| first == sandbox::SUBCOMMAND) {
        return sandbox::child_main();
    }
    let outcome = match Cli::parse().command {
        Command::Serve(args) => serve(args),
        Command::Demo(args) => run_demo(args),
        Command::Train(args) => train(args),
        Command::Eval(args) => eval(args),
        Command::Validate { config } => validate(config.as_deref()),
        Command::Db { command } => db(command),
        Command::Rewards { command: RewardsCommand::List } => list_rewards(),
        Command::Adapters { command } => adapters(command),
        Command::Bench { command: BenchCommand::Rewards { bytes, json } } => {
            bench_rewards(bytes, json)
        }
        Command::Bench { command: BenchCommand::Train(args) } => bench_train(args),
        Command::Bench { command: BenchCommand::Sample(args) } => bench_sample(args),
        Command::Bench { command: BenchCommand::Interference(args) } => bench_interference(args),
        Command::Rewards { command: RewardsCommand::Test { file, config, route, json } } => {
            test_rewards(&file, config.as_deref(), route, json)
        }
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            complain(&format!("error: {}", with_causes(&error)));
            ExitCode::FAILURE
        }
    }
}

/// An error and its causes, without causes that the text already contains.
fn with_causes(error: &anyhow::Error) -> String {
    let texts = error.chain().map(ToString::to_string);
    let join = |text: String, cause: String| {
        if text.contains(&cause) { text } else { format!("{text}: {cause}") }
    };
    texts.reduce(join).unwrap_or_default()
}

#[expect(clippy::print_stderr, reason = "the one place that tells a person what went wrong")]
fn complain(message: &str) {
    eprintln!("{message}");
}

fn say(message: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{message}")?;
    out.flush()
}

fn load(file: Option<&std::path::Path>) -> Result<Config, ExitCode> {
    config::load(file).map_err(|error| {
        complain(&format!("error: {error}"));
        ExitCode::from(USAGE)
    })
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()
}

fn serve(args: ServeArgs) -> anyhow::Result<ExitCode> {
    let mut config = match load(args.config.as_deref()) {
        Ok(config) => config,
        Err(code) => return Ok(code),
    };
    if let Some(model) = args.model {
        config.model.path = model;
    }
    if let Some(data) = args.data {
        config.data.dir = data;
    }
    if let Some(bind) = args.bind {
        config.server.bind = bind;
    }
    if let Err(error) = config::validate(&config) {
        complain(&format!("error: {error}"));
        return Ok(ExitCode::from(USAGE));
    }
    logging::init(&config.log);
    runtime()?.block_on(async {
        let running = app::start(config).await?;
        say(&format!("listening on http://{}", running.addr))?;
        app::until_told_to_stop().await?;
        running.shutdown().await?;
        Ok(ExitCode::SUCCESS)
    })
}

/// Starts a daemon within this process.
async fn start(config: Config) -> anyhow::Result<DaemonHandle> {
    logging::init(&config.log);
    let running = app::start(config).await?;
    Ok(DaemonHandle::new(running.addr, || running.shutdown()))
}

fn run_demo(args: DemoArgs) -> anyhow::Result<ExitCode> {
    let mut out = std::io::stdout();
    let outcome = match runtime()?.block_on(demo::run(args.into(), start, &mut out)) {
        Err(error @ (DemoError::Options(_) | DemoError::Data { .. })) => {
            complain(&format!("error: {error}"));
            return Ok(ExitCode::from(USAGE));
        }
        outcome => outcome?,
    };
    Ok(if outcome.improved { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The configuration of a run: file, environment, flags. Logging starts with it.
fn run_config(args: RunArgs, change: impl FnOnce(&mut Config)) -> Result<Config, ExitCode> {
    let mut config = load(args.config.as_deref())?;
    if let Some(model) = args.model {
        config.model.path = model;
    }
    if let Some(data) = args.data {
        config.data.dir = data;
    }
    if let Some(dataset) = args.dataset {
        config.dataset.path = dataset;
    }
    if config.log.level == LogConfig::default().level {
        // Progress and results say what a person wants to know.
        "warn".clone_into(&mut config.log.level);
    }
    change(&mut config);
    match config::validate(&config) {
        Ok(()) => {
            logging::init(&config.log);
            Ok(config)
        }
        Err(error) => {
            complain(&format!("error: {error}"));
            Err(ExitCode::from(USAGE))
        }
    }
}

fn train(args: TrainArgs) -> anyhow::Result<ExitCode> {
    let steps = |config: &mut Config| {
        config.train.max_steps = args.steps.unwrap_or(config.train.max_steps);
    };
    let config = match run_config(args.run, steps) {
        Ok(config) => config,
        Err(code) => return Ok(code),
    };
    if args.explain_memory {
        say(&app::explain_memory(&config)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let terminal = std::io::stderr().is_terminal();
    let options = TrainOptions { report: args.report, terminal, width: TABLE_WIDTH };
    let outcome = runtime()?.block_on(async {
        let interrupt = async {
            // Where signals cannot be listened to, the run goes to its end.
            if app::until_told_to_stop().await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        runs::train::run(config, options, interrupt).await
    })?;
    if args.json {
        say(&serde_json::to_string(&outcome.report)?)?;
    } else {
        say(&runs::compare::table(&outcome.report.comparisons, ["before", "after"]))?;
        say(&format!("report  {}", outcome.file.display()))?;
    }
    Ok(match outcome.report.ending {
        Ending::Failed(why) => {
            complain(&format!("error: {why}"));
            ExitCode::FAILURE
        }
        Ending::Finished | Ending::EarlyStop | Ending::Interrupted => ExitCode::SUCCESS,
    })
}

fn eval(args: EvalArgs) -> anyhow::Result<ExitCode> {
    let samples = |config: &mut Config| {
        config.run.eval_samples = args.samples.unwrap_or(config.run.eval_samples);
    };
    let config = match run_config(args.run, samples) {
        Ok(config) => config,
        Err(code) => return Ok(code),
    };
    let options = EvalOptions { pass_at: args.pass_at, part: args.part };
    let outcome = runtime()?.block_on(runs::eval::run(config, options))?;
    say(&if args.json { serde_json::to_string(&outcome)? } else { outcome.text() })?;
    Ok(ExitCode::SUCCESS)
}

fn test_rewards(
    file: &std::path::Path,
    config: Option<&std::path::Path>,
    route: Option<String>,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let config = match load(config) {
        Ok(config) => config,
        Err(code) => return Ok(code),
    };
    logging::init(&config.log);
    let scored = runtime()?.block_on(async {
        let (codec, routes) = app::rewards_alone(&config).await?;
        let inputs = runs::score::read(file, &codec)?;
        let name = route.unwrap_or_else(|| config.rollout.dataset_route.clone());
        let route = routes.require("--route", &name)?;
        anyhow::ensure!(route.has_graders(), "route {name} has no reward that scores a completion");
        Ok(runs::score::run(route, inputs).await)
    })?;
    let text = if json {
        runs::table::scores_json(&scored, 0)?
    } else {
        runs::table::scores_text(&scored, TABLE_WIDTH, 0)
    };
    say(text.trim_end())?;
    Ok(ExitCode::SUCCESS)
}

fn validate(file: Option<&std::path::Path>) -> anyhow::Result<ExitCode> {
    let config = match load(file) {
        Ok(config) => config,
        Err(code) => return Ok(code),
    };
    let checked = runtime()?.block_on(async {
        let metrics =
            Arc::new(hone_core::metrics::Metrics::new().map_err(|error| error.to_string())?);
        let tools = app::reward_tools(&config, metrics).await;
        let tools = tools.map_err(|error| with_causes(&error))?;
        let routes = hone_reward::Routes::with(&config.routes, &tools.tools);
        routes.map(|_| ()).map_err(|error| error.to_string())
    });
    let read = config.dataset_in_use().map(|dataset| hone_dataset::check(&dataset));
    let checked = checked.and(read.transpose().map_err(|error| error.to_string()));
    if let Err(error) = checked {
        complain(&format!("error: {error}"));
        return Ok(ExitCode::from(USAGE));
    }
    say("the configuration is valid")?;
    Ok(ExitCode::SUCCESS)
}

fn adapters(command: AdaptersCommand) -> anyhow::Result<ExitCode> {
    match command {
        AdaptersCommand::List { json, data } => {
            let records = app::adapters::list(&data)?;
            if json {
                say(&serde_json::to_string(&records)?)?;
                return Ok(ExitCode::SUCCESS);
            }
            say(&format!(
                "{:>7}  {:>6}  {:>8}  {:<10} {:>7}",
                "version", "parent", "step", "state", "reward"
            ))?;
            for record in records {
                let parent = record.parent.map_or_else(|| "-".to_owned(), |p| p.to_string());
                let reward = record.metrics.get("reward_mean");
                let reward = reward.map_or_else(|| "-".to_owned(), |reward| format!("{reward:.3}"));
                let state = format!("{:?}", record.state).to_lowercase();
                let (version, step) = (record.version, record.step);
                say(&format!("{version:>7}  {parent:>6}  {step:>8}  {state:<10} {reward:>7}"))?;
            }
        }
        AdaptersCommand::Export { merged, peft, version, f32, model, config, data } => {
            let args = RunArgs { model, config, dataset: None, data };
            let config = match run_config(args, |_| {}) {
                Ok(config) => config,
                Err(code) => return Ok(code),
            };
            let precision = if f32 { Precision::F32 } else { Precision::Base };
            let to = match (merged, peft) {
                (Some(target), _) => Export::Merged(target, precision),
                (None, Some(target)) => Export::Peft(target),
                // The command line asks for one of them.
                (None, None) => return Ok(ExitCode::from(USAGE)),
            };
            say(&app::adapters::export(&config, version, &to)?)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn bench_rewards(bytes: usize, json: bool) -> anyhow::Result<ExitCode> {
    let all = runtime()?.block_on(bench::rewards::run(bytes))?;
    let limit = bench::rewards::LIMIT.as_secs_f64() * 1e6;
    let slow: Vec<&str> =
        all.iter().filter(|w| w.microseconds > limit).map(|w| w.kind.as_str()).collect();
    if json {
        say(&serde_json::to_string(&all)?)?;
    } else {
        say(&format!("worst time on completions of {bytes} bytes, microseconds"))?;
        for worst in &all {
            say(&format!("{:<26} {:>9.1}", worst.kind, worst.microseconds))?;
        }
    }
    // The limit is meant for one size.
    if bytes > bench::rewards::BYTES || slow.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    complain(&format!("error: over {limit} microseconds: {}", slow.join(", ")));
    Ok(ExitCode::FAILURE)
}

fn bench_train(args: BenchTrainArgs) -> anyhow::Result<ExitCode> {
    if let Some(dir) = &args.write_model {
        args.model.write(dir)?;
        return Ok(ExitCode::SUCCESS);
    }
    let json = args.json;
    let report = bench::train::run(&args.into())?;
    say(&if json { serde_json::to_string(&report)? } else { report.to_string() })?;
    Ok(ExitCode::SUCCESS)
}

fn bench_sample(args: BenchSampleArgs) -> anyhow::Result<ExitCode> {
    let json = args.json;
    let report = bench::sample::run(&args.into())?;
    say(&if json { serde_json::to_string(&report)? } else { report.to_string() })?;
    Ok(ExitCode::SUCCESS)
}

fn bench_interference(args: BenchInterferenceArgs) -> anyhow::Result<ExitCode> {
    let json = args.json;
    let report = runtime()?.block_on(bench::interference::run(&args.into(), start))?;
    say(&if json { serde_json::to_string(&report)? } else { report.to_string() })?;
    let failed = report.idle.failed + report.busy.failed > 0;
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn db(command: DbCommand) -> anyhow::Result<ExitCode> {
    let ledger = |data: &std::path::Path| data.join(app::LEDGER);
    match command {
        DbCommand::Stats { json, data } => {
            let stats = hone_store::maintain::stats(&ledger(&data))?;
            if json {
                say(&serde_json::to_string(&stats)?)?;
            } else {
                for (table, rows) in stats.rows() {
                    say(&format!("{table:<16} {rows:>10}"))?;
                }
            }
        }
        DbCommand::Check { data } => {
            let report = hone_store::maintain::check(&ledger(&data))?;
            say(&serde_json::to_string_pretty(&report)?)?;
            if !report.is_healthy() {
                return Ok(ExitCode::FAILURE);
            }
        }
        DbCommand::Compact { data } => {
            say(&serde_json::to_string(&hone_store::maintain::compact(&ledger(&data))?)?)?;
        }
        DbCommand::Export { data } => {
            hone_store::maintain::export(&ledger(&data), std::io::stdout().lock())?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn list_rewards() -> anyhow::Result<ExitCode> {
    for entry in hone_reward::catalogue() {
        say(&format!(
            "{}\n  formula     {}\n  range       {}\n  parameters  {}\n  weight      {}",
            entry.kind, entry.formula, entry.range, entry.parameters, entry.typical_weight
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}
