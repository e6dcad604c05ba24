//! The commands: parses the command line, runs the command, and sets the exit code.

use std::io::{self, BufReader, IsTerminal, Read, Write};
use std::path::Path;
use std::pin::pin;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, ensure};
use clap::{CommandFactory, Parser};
use serde::Serialize;

use crate::app::adapters::{Export, VersionChoice};
use crate::app::generate::GenerateOptions;
use crate::cli::{
    AdaptersCommand, Cli, Command, ConfigArgs, DataArgs, DbCommand, EraseArgs, EvalArgs,
    ExportArgs, FleetCommand, GenerateArgs, InitArgs, RewardsCommand, ServeArgs, TestRewardsArgs,
    TrainArgs, ValidateArgs,
};
use crate::config::{Config, LogConfig};
use crate::ledger::inspect::Inspector;
use crate::ledger::trl::TrlExport;
use crate::runs::eval::EvalOptions;
use crate::runs::from_ledger::train::FromLedgerOptions;
use crate::runs::report::Ending;
use crate::runs::train::TrainOptions;
use crate::starter::{Starter, Teacher};
use crate::{UsageError, app, config, fleet, import_trl as trl, logging, runs, telemetry, usage};
use hone_core::files::keep_files_private;
use hone_core::types::{InteractionId, Message, Role, SamplingParams};
use hone_demo::{DaemonHandle, DemoOptions, DemoUsage};
use hone_engine::EngineError;
use hone_model::adapter::merge::Precision;
use hone_report::terminal::visible;
use hone_reward::routes::{RewardConfig, RouteConfig, RouteList};
use hone_reward::sandbox;
use hone_store::{ErasureFilter, Ledger, StoreError, maintain};

/// Exit code of a run that a signal ended, as shells report Ctrl-C.
const INTERRUPTED: u8 = 130;

/// The exit code of a command, or its error.
type Outcome = anyhow::Result<ExitCode>;

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    // The sandbox confines the whole process, so it must start before any other thread.
    if std::env::args_os().nth(1).is_some_and(|first| first == sandbox::SUBCOMMAND) {
        return sandbox::child_main();
    }
    let mut out = Output::default();
    let command = Cli::parse().command;
    let outcome = check_clock(SystemTime::now()).and_then(|()| run(command, &mut out));
    telemetry::shutdown();
    match outcome {
        Ok(code) => code,
        // The reader of a closed pipe has all the output that it wants.
        Err(_) if out.closed => ExitCode::SUCCESS,
        Err(error) => {
            print_error(&error);
            if error.is::<UsageError>() { ExitCode::from(2) } else { ExitCode::FAILURE }
        }
    }
}

/// Refuses a clock before 1970. Identifiers begin with the time since then, so none could be made.
fn check_clock(now: SystemTime) -> anyhow::Result<()> {
    let clock = now.duration_since(UNIX_EPOCH);
    let wrong = "the clock of this machine is before 1970: set it, because identifiers and records contain the time";
    clock.map(drop).map_err(|_| anyhow::Error::msg(wrong))
}

fn run(command: Command, out: &mut Output) -> Outcome {
    match command {
        Command::Init(args) => init(args, out),
        Command::Serve(args) => serve(args, out),
        Command::Demo(options) => run_demo(options, out),
        Command::Train(args) => train(args, out),
        Command::Eval(args) => eval(args, out),
        Command::Generate(args) => generate(args, out),
        Command::Validate(args) => validate(args, out),
        Command::ImportTrl { file, output } => import_trl(&file, output.as_deref(), out),
        Command::Db { command } => db(command, out),
        Command::Rewards { command: RewardsCommand::List } => list_rewards(out),
        Command::Rewards { command: RewardsCommand::Test(args) } => test_rewards(args, out),
        Command::Adapters { command } => adapters(command, out),
        Command::Fleet { command } => fleet(command, out),
        Command::Device => {
            write!(out, "{}", hone_cuda::inventory())?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Completions { shell } => {
            // Into memory first, because the generator panics on a closed pipe.
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "hone", &mut script);
            out.write_all(&script)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Man { to } => {
            let place = || format!("--to: {}", to.display());
            std::fs::create_dir_all(&to).with_context(place)?;
            clap_mangen::generate_to(Cli::command(), &to).with_context(place)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn init(args: InitArgs, out: &mut Output) -> Outcome {
    let InitArgs { target, model, learn_from, dataset } = args;
    if learn_from == Some(Teacher::Feedback) && dataset.is_some() {
        let why = "--dataset is for --learn-from answers: feedback needs no dataset";
        return Err(usage(anyhow::Error::msg(why)));
    }
    let mut starter = Starter { model, teacher: learn_from, dataset };
    if io::stdin().is_terminal() {
        starter.ask(&mut BufReader::new(io::stdin()), &mut io::stderr())?;
    }
    write!(out, "{}", starter.write(&target)?)?;
    Ok(ExitCode::SUCCESS)
}

fn load(file: Option<&Path>) -> anyhow::Result<Config> {
    config::load(file).map_err(usage)
}

/// The configuration from the file and the environment, with the flags of `args` and then `change`
/// applied.
fn load_with(args: ConfigArgs, change: impl FnOnce(&mut Config)) -> anyhow::Result<Config> {
    let mut config = load(args.config.as_deref())?;
    set(&mut config.model.path, args.model);
    set(&mut config.model.quantize, args.quantize);
    set(&mut config.data.dir, args.data);
    change(&mut config);
    config::validate(&config).map_err(usage)?;
    Ok(config)
}

/// The runtime of the server, with a thread for every second core. The cores compute tokens too, and a thread that
/// wakes there interrupts a step that all of the engine's threads compute together.
fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = cores.div_ceil(2);
    tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build()
}

/// Overrides a key with a flag that is present.
fn set<T>(key: &mut T, flag: Option<T>) {
    if let Some(value) = flag {
        *key = value;
    }
}

/// The configuration of `hone serve`.
fn serve_config(args: &ServeArgs) -> anyhow::Result<Config> {
    load_with(args.config.clone(), |config| {
        config.fleet.role = args.role;
        set(&mut config.engine.backend, args.backend);
        set(&mut config.server.bind, args.bind);
        config.server.insecure |= args.insecure;
    })
}

fn serve(args: ServeArgs, out: &mut Output) -> Outcome {
    let config = serve_config(&args)?;
    let epochs = config.train.epochs;
    if epochs > 0.0 {
        let why = "it must be 0 for `hone serve`, whose training ends only at train.max_steps";
        return Err(usage(anyhow::anyhow!("train.epochs is {epochs}: {why}")));
    }
    if args.explain_memory {
        return explain_memory(&config, true, args.json, out);
    }
    logging::init(&config.log);
    runtime()?.block_on(async {
        let mut reloads = app::ReloadSignal::new()?;
        // Before the address is known, so that a signal ends the process in order from then on.
        let mut stop = pin!(app::shutdown_signal()?);
        let mut service = tokio::select! {
            started = app::start(config) => started?,
            () = &mut stop => return Ok(ExitCode::SUCCESS),
        };
        if let Err(error) = writeln!(out, "listening on {}", service.url()) {
            tracing::warn!(%error, "cannot print the address");
        }
        let failure = loop {
            tokio::select! {
                () = &mut stop => break None,
                reason = service.failed() => break Some(reason),
                () = reloads.recv() => reload(&service, &args),
            }
        };
        service.shutdown().await?;
        failure.map_or(Ok(ExitCode::SUCCESS), |reason| Err(anyhow::Error::msg(reason)))
    })
}

/// Reads the configuration again and replaces the API keys and the certificate.
fn reload(service: &app::Service, args: &ServeArgs) {
    let reloaded = serve_config(args)
        .and_then(|config| service.reload(&config.server).map_err(anyhow::Error::from));
    match reloaded {
        Ok(keys) => tracing::info!(keys, "the API keys and the certificate are reloaded"),
        Err(error) => {
            let error = format!("{error:#}");
            tracing::error!(%error, "the API keys and the certificate are not reloaded and stay as they are");
        }
    }
}

fn fleet(command: FleetCommand, out: &mut Output) -> Outcome {
    let sentence = match command {
        FleetCommand::Init(args) => {
            let config = run_config(args, |_| {})?;
            runtime()?.block_on(fleet::init(&config))?
        }
        FleetCommand::Rebuild(args) => {
            let config = run_config(args, |_| {})?;
            runtime()?.block_on(fleet::rebuild(&config))?
        }
        FleetCommand::Activate { version, config } => {
            let config = run_config(config, |_| {})?;
            runtime()?.block_on(fleet::activate(&config, version))?
        }
        FleetCommand::Status { json, config } => {
            let config = run_config(config, |_| {})?;
            let status = runtime()?.block_on(fleet::status(&config))?;
            return show(out, json, &status, || status.text());
        }
    };
    writeln!(out, "{sentence}")?;
    Ok(ExitCode::SUCCESS)
}

/// Prints the memory plan of `hone serve`, or without clients of `hone train`.
fn explain_memory(config: &Config, has_clients: bool, json: bool, out: &mut Output) -> Outcome {
    let memory = runtime()?.block_on(app::explain_memory(config, has_clients))?;
    show(out, json, &memory, || format!("{memory}\n"))
}

/// Prints a result as a line of JSON, or as `text`.
fn show(
    out: &mut Output,
    json: bool,
    result: &impl Serialize,
    text: impl FnOnce() -> String,
) -> Outcome {
    if json {
        writeln!(out, "{}", serde_json::to_string(result)?)?;
    } else {
        write!(out, "{}", text())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Starts a daemon in this process.
async fn start_daemon(config: Config) -> anyhow::Result<DaemonHandle> {
    logging::init(&config.log);
    let service = app::start(config).await?;
    Ok(DaemonHandle { url: service.url(), shutdown: Box::pin(service.shutdown()) })
}

fn run_demo(options: DemoOptions, out: &mut Output) -> Outcome {
    let outcome = runtime()?.block_on(hone_demo::run(options, start_daemon, out));
    let outcome =
        outcome.map_err(|error| if error.is::<DemoUsage>() { usage(error) } else { error })?;
    Ok(if outcome.improved { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// [`load_with`] for a command that reports its progress. Starts logging.
fn run_config(args: ConfigArgs, change: impl FnOnce(&mut Config)) -> anyhow::Result<Config> {
    let config = load_with(args, |config| {
        if config.log.level == LogConfig::default().level {
            // Progress and results contain the same information as the log lines at `info`.
            "warn".clone_into(&mut config.log.level);
        }
        change(config);
    })?;
    logging::init(&config.log);
    Ok(config)
}

fn train(mut args: TrainArgs, out: &mut Output) -> Outcome {
    if let Some(source) = &args.ledger.from_ledger
        && args.run.config.config.is_none()
        && let Some(saved) = runs::from_ledger::train::saved_configuration(source)
    {
        print_note(&format!("the configuration is {}", saved.display()));
        args.run.config.config = Some(saved);
    }
    let config = run_config(args.run.config, |config| {
        set(&mut config.engine.backend, args.run.backend);
        set(&mut config.dataset.path, args.run.dataset);
        let train = &mut config.train;
        // The flag determines the length, whichever key the file uses.
        (train.max_steps, train.epochs) = match (args.steps, args.epochs) {
            (Some(steps), _) => (steps, 0.0),
            (None, Some(epochs)) => (0, epochs),
            (None, None) => (train.max_steps, train.epochs),
        };
    })?;
    if args.explain_memory {
        return explain_memory(&config, false, args.json, out);
    }
    let terminal = std::io::stderr().is_terminal();
    let interrupt = async {
        // If signals cannot be handled, the run cannot be interrupted.
        match app::shutdown_signal() {
            Ok(signal) => signal.await,
            Err(_) => std::future::pending().await,
        }
    };
    let (report, file) = if let Some(source) = args.ledger.from_ledger.clone() {
        let (filter, holdout) = (args.ledger.filter, args.ledger.holdout);
        let options = FromLedgerOptions { source, filter, holdout, report: args.report, terminal };
        let run = runs::from_ledger::train::run(config, options, interrupt);
        runtime()?.block_on(run)?
    } else {
        let options = TrainOptions { report: args.report, terminal };
        runtime()?.block_on(runs::train::run(config, options, interrupt))?
    };
    show(out, args.json, &report, || {
        format!("{}\nreport  {}\n", report.summary(), file.display())
    })?;
    match report.ending {
        Ending::Failed(reason) => Err(anyhow::Error::msg(reason)),
        Ending::Interrupted => Ok(ExitCode::from(INTERRUPTED)),
        Ending::Finished | Ending::EarlyStop => Ok(ExitCode::SUCCESS),
    }
}

fn eval(args: EvalArgs, out: &mut Output) -> Outcome {
    let config = run_config(args.run.config, |config| {
        set(&mut config.engine.backend, args.run.backend);
        set(&mut config.dataset.path, args.run.dataset);
        set(&mut config.run.eval_samples, args.samples);
        set(&mut config.run.samples_shown, args.show);
    })?;
    let options = EvalOptions { pass_at: args.pass_at, part: args.part };
    let outcome = runtime()?.block_on(runs::eval::run(config, options))?;
    show(out, args.json, &outcome, || outcome.text().trim_end().to_owned() + "\n")
}

fn generate(args: GenerateArgs, out: &mut Output) -> Outcome {
    let weights = args.weights();
    let GenerateArgs { prompt, messages, system, json, samples, .. } = args;
    let config = run_config(args.config, |config| {
        set(&mut config.dataset.system_prompt, system);
        // Nothing else needs the cores.
        config.train.enabled = false;
    })?;
    let messages = match (prompt, messages) {
        (_, Some(file)) => read_messages(&file),
        (Some(content), None) => Ok(vec![Message::new(Role::User, content)]),
        (None, None) => read_prompt(),
    }
    .map_err(usage)?;
    let params = SamplingParams {
        temperature: args.temperature,
        top_p: args.top_p,
        max_tokens: args.max_tokens,
        seed: args.seed,
        ..SamplingParams::default()
    };
    let options = GenerateOptions { messages, weights, params, samples };
    let chosen = |weights: &str| {
        if !json {
            print_note(&format!("weights of {weights}"));
        }
    };
    // The reader of a terminal is a person, whom control characters of the model must not reach.
    let (is_terminal, mut shown) = (io::stdout().is_terminal(), None);
    let write = |index: u64, text: &str| -> io::Result<()> {
        if json {
            return Ok(());
        }
        if shown.replace(index) != Some(index) {
            if index > 0 {
                writeln!(out)?;
            }
            if samples > 1 {
                writeln!(out, "--- {} of {samples}", index + 1)?;
            }
        }
        let keep = |c: char| match c {
            '\n' | '\t' => Some(c),
            _ if is_terminal => visible(c),
            _ => Some(c),
        };
        let text: String = text.chars().filter_map(keep).collect();
        out.write_all(text.as_bytes())?;
        out.flush()
    };
    let generated = runtime()?.block_on(app::generate::run(&config, &options, chosen, write));
    let generated = generated.map_err(|error| match error.downcast_ref() {
        Some(EngineError::Invalid(_) | EngineError::PromptTooLong { .. }) => usage(error),
        _ => error,
    })?;
    show(out, json, &generated, || "\n".to_owned())
}

/// Reads the user's message from standard input.
fn read_prompt() -> anyhow::Result<Vec<Message>> {
    let mut input = io::stdin();
    ensure!(!input.is_terminal(), "PROMPT is missing: it must be an argument or standard input");
    let mut content = String::new();
    input.read_to_string(&mut content).context("standard input")?;
    ensure!(!content.trim().is_empty(), "PROMPT is missing: standard input is empty");
    Ok(vec![Message::new(Role::User, content)])
}

fn read_messages(file: &Path) -> anyhow::Result<Vec<Message>> {
    let place = || format!("--messages: {}", file.display());
    let text = std::fs::read_to_string(file).with_context(place)?;
    let messages: Vec<Message> = serde_json::from_str(&text).with_context(place)?;
    ensure!(!messages.is_empty(), "{} has no message", place());
    Ok(messages)
}

fn test_rewards(args: TestRewardsArgs, out: &mut Output) -> Outcome {
    let TestRewardsArgs { file, config: config_file, route, preset, kinds, json } = args;
    let mut config = load(config_file.as_deref())?;
    if config_file.is_none() {
        let name = &config.rollout.dataset_route;
        let route = runs::score::route(name, preset.as_deref(), &kinds);
        config.routes = RouteList(vec![route.map_err(usage)?]);
        config::validate(&config).map_err(usage)?;
    }
    logging::init(&config.log);
    let scored = runtime()?.block_on(async {
        let (codec, routes) = app::load_rewards(&config).await?;
        let inputs = runs::score::read(&file, &codec)?;
        let name = route.unwrap_or_else(|| config.rollout.dataset_route.clone());
        let route = routes.require("--route", &name)?;
        anyhow::ensure!(route.has_graders(), "route {name} has no reward that scores a completion");
        let parts = config.routes.0.iter().filter(|route| route.name == name);
        let parts: Vec<RewardConfig> = parts.flat_map(RouteConfig::parts).collect();
        Ok(runs::score::run(route, &parts, inputs).await)
    })?;
    let text = if json {
        runs::table::scores_json(&scored, 0)?
    } else {
        runs::table::scores_text(&scored, 0)
    };
    writeln!(out, "{}", text.trim_end())?;
    Ok(ExitCode::SUCCESS)
}

fn validate(args: ValidateArgs, out: &mut Output) -> Outcome {
    let mut config = load(args.file.or(args.config).as_deref())?;
    set(&mut config.model.path, args.model);
    set(&mut config.dataset.path, args.dataset);
    config::validate(&config).map_err(usage)?;
    let report = runtime()?
        .block_on(runs::data_check::validate(&mut config, !args.config_only))
        .map_err(usage)?;
    write!(out, "{report}")?;
    Ok(ExitCode::SUCCESS)
}

fn import_trl(file: &Path, output: Option<&Path>, out: &mut Output) -> Outcome {
    let imported = trl::import(file).map_err(usage)?;
    match output {
        None => write!(out, "{}", imported.toml)?,
        Some(target) => std::fs::write(target, &imported.toml)
            .with_context(|| format!("{} cannot be written", target.display()))?,
    }
    for note in &imported.notes {
        print_note(note);
    }
    Ok(ExitCode::SUCCESS)
}

fn adapters(command: AdaptersCommand, out: &mut Output) -> Outcome {
    match command {
        AdaptersCommand::List { json, data } => {
            let records = app::adapters::list(&data.data)?;
            return show(out, json, &records, || app::adapters::policy_tree(&records, &data.data));
        }
        AdaptersCommand::Export { merged, peft, version, best, f32, config } => {
            let config = run_config(config, |_| {})?;
            let precision = if f32 { Precision::F32 } else { Precision::Base };
            let export = merged.map(|target| Export::Merged(target, precision));
            let export = export.or(peft.map(Export::Peft));
            let export = export.context("--merged or --peft is required").map_err(usage)?;
            let choice = match version {
                _ if best => VersionChoice::Best,
                Some(version) => VersionChoice::Number(version),
                None => VersionChoice::Active,
            };
            let done = runtime()?.block_on(app::adapters::export(&config, choice, &export))?;
            writeln!(out, "{done}")?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn db(command: DbCommand, out: &mut Output) -> Outcome {
    let ledger = |args: DataArgs| args.data.join(app::LEDGER);
    match command {
        DbCommand::Stats { json, data } => {
            let stats = maintain::stats(&ledger(data))?;
            let row = |(table, rows)| format!("{table:<16} {rows:>10}\n");
            return show(out, json, &stats, || stats.rows().into_iter().map(row).collect());
        }
        DbCommand::Check(data) => {
            let report = maintain::check(&ledger(data))?;
            writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?;
            if !report.is_healthy() {
                return Ok(ExitCode::FAILURE);
            }
        }
        DbCommand::Compact(data) => {
            writeln!(out, "{}", serde_json::to_string(&maintain::compact(&ledger(data))?)?)?;
        }
        DbCommand::Inspect(data) => {
            ensure!(
                io::stdout().is_terminal() && io::stdin().is_terminal(),
                "`hone db inspect` needs a terminal; `hone db export` writes the records for other programs"
            );
            Inspector::new(open_ledger(&data)?)?.run()?;
        }
        DbCommand::Export(args) => export(args, out)?,
        DbCommand::Import { file, data } => {
            keep_files_private();
            let place = || file.display().to_string();
            let lines = BufReader::new(std::fs::File::open(&file).with_context(place)?);
            std::fs::create_dir_all(&data.data).with_context(|| data.data.display().to_string())?;
            let report = hone_store::import(&ledger(data), lines).with_context(place)?;
            writeln!(out, "{}", serde_json::to_string(&report)?)?;
        }
        DbCommand::Erase(args) => {
            let (selection, by) = selection(&args)?;
            let erased = maintain::erase(&ledger(args.data), &selection, by, args.dry_run)?;
            writeln!(out, "{}", serde_json::to_string(&erased)?)?;
        }
        DbCommand::Backup { to, data } => {
            let backup = hone_store::backup(&data.data, &to)?;
            writeln!(out, "{}", serde_json::to_string(&backup)?)?;
        }
        DbCommand::Restore { from, data } => {
            let report = hone_store::restore(&from, &data.data)?;
            writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?;
            if !report.is_healthy() {
                return Ok(ExitCode::FAILURE);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The ledger of a stopped daemon, to read it.
fn open_ledger(data: &DataArgs) -> anyhow::Result<Ledger> {
    let opened = Ledger::open_read_only(&data.data.join(app::LEDGER));
    opened.map_err(|error| match error {
        StoreError::InUse(_) => anyhow::Error::new(error)
            .context("stop the daemon first, or use a backup of its data directory"),
        error => error.into(),
    })
}

fn export(args: ExportArgs, out: &mut Output) -> anyhow::Result<()> {
    let ExportArgs { columns, format, part, threshold, output, data } = args;
    keep_files_private();
    let mut file = match &output {
        Some(path) => {
            let created = std::fs::File::create_new(path);
            let place = || format!("--output: {} cannot be written", path.display());
            Some(io::BufWriter::new(created.with_context(place)?))
        }
        None => None,
    };
    let out: &mut (dyn Write + Send) = match &mut file {
        Some(file) => file,
        None => out,
    };
    match columns {
        None => drop(maintain::export(&data.data.join(app::LEDGER), out)?),
        Some(columns) => {
            let export = TrlExport { columns, format, part, threshold };
            print_note(&export.write(&open_ledger(&data)?, out)?.to_string());
        }
    }
    Ok(())
}

/// What to erase, and the name of the flag.
fn selection(args: &EraseArgs) -> anyhow::Result<(ErasureFilter, &'static str)> {
    let EraseArgs { completion, session, end_user, key, before, .. } = args;
    if let Some(id) = completion {
        let found = InteractionId::from_completion_id(id);
        let id = found.ok_or_else(|| {
            usage(anyhow::anyhow!("--completion is {id:?}: it must be the id of a completion"))
        })?;
        return Ok((ErasureFilter::Completion(id), "completion_id"));
    }
    let texts = [
        session.clone().map(|text| (ErasureFilter::Session(text), "session_id")),
        end_user.clone().map(|text| (ErasureFilter::EndUser(text), "end_user")),
        key.clone().map(|text| (ErasureFilter::Key(text), "key_id")),
        before.map(|time| (ErasureFilter::Before(time), "before")),
    ];
    // clap requires one of them.
    texts.into_iter().flatten().next().context("nothing is selected")
}

fn list_rewards(out: &mut Output) -> Outcome {
    for entry in hone_reward::catalogue() {
        writeln!(
            out,
            "{}\n  formula     {}\n  range       {}\n  parameters  {}\n  weight      {}",
            entry.kind, entry.formula, entry.range, entry.parameters, entry.typical_weight
        )?;
    }
    Ok(ExitCode::SUCCESS)
}

// Standard output and standard error.

/// Standard output, which remembers whether its reader has closed the pipe. The lock is taken for
/// each write only, because other threads may print too.
#[derive(Default)]
pub(crate) struct Output {
    closed: bool,
}

impl Output {
    fn observe<T>(&mut self, result: io::Result<T>) -> io::Result<T> {
        self.closed |= matches!(&result, Err(e) if e.kind() == io::ErrorKind::BrokenPipe);
        result
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let result = io::stdout().write(bytes);
        self.observe(result)
    }

    fn flush(&mut self) -> io::Result<()> {
        let result = io::stdout().flush();
        self.observe(result)
    }
}

/// Prints an error and its causes to standard error, without a cause whose text an earlier one
/// already contains.
fn print_error(error: &anyhow::Error) {
    let append = |text: String, cause: String| {
        if text.contains(&cause) { text } else { format!("{text}: {cause}") }
    };
    let text = error.chain().map(ToString::to_string).reduce(append).unwrap_or_default();
    // Without a standard error, the exit code still reports the failure.
    let _failed = writeln!(io::stderr(), "error: {text}");
}

/// Prints a remark about a result to standard error.
pub(crate) fn print_note(text: &str) {
    // The result contains the remark too.
    let _failed = writeln!(io::stderr(), "note: {text}");
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_clock_before_1970_is_refused() {
        assert!(check_clock(UNIX_EPOCH).is_ok());
        let error = check_clock(UNIX_EPOCH - Duration::from_secs(1)).unwrap_err();
        assert!(error.to_string().contains("is before 1970"), "{error}");
    }
}
