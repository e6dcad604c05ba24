//! The daemon's side: finds the interpreter, starts launchers, keeps their time.

use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};
use tokio::sync::Semaphore;

use super::spec::{Ended, LaunchReply, LaunchSpec};
use super::{
    Isolation, IsolationLayer, Limits, RunOutcome, RunRequest, SUBCOMMAND, SandboxError, Setup,
    Status,
};

/// How long a launcher may take beyond the run's own time before it is killed too.
const GRACE: Duration = Duration::from_secs(5);
/// How long the interpreter may take to say where its files are.
const DISCOVERY: Duration = Duration::from_secs(20);
/// Most that is read of a launcher's report: three outputs with every byte escaped.
const ANSWER_BYTES: u64 = 256 << 20;

/// Reads the program from descriptor 3 and runs it as `__main__`, leaving no name behind.
const BOOTSTRAP: &str = "exec(compile(open(3, 'rb').read(), '<program>', 'exec'))";

/// Asked of the interpreter once, outside of the sandbox: it is trusted, programs are not.
const ASK: &str = "import json, os, sys\n\
    print(json.dumps({'executable': os.path.realpath(sys.executable), \
    'paths': [p for p in sys.path if os.path.isabs(p)] \
    + [os.path.join(sys.base_prefix, 'lib')]}))";

/// Where shared libraries and the time zones lie.
const SYSTEM: [&str; 8] = [
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
    "/etc/ld-musl-x86_64.path",
];

#[derive(Deserialize)]
struct Interpreter {
    executable: PathBuf,
    paths: Vec<PathBuf>,
}

/// Runs programs, each in a process that can do nothing but compute.
#[derive(Clone, Debug)]
pub struct Sandbox {
    launcher: PathBuf,
    interpreter: PathBuf,
    readable: Vec<PathBuf>,
    uid: u32,
    without: Vec<IsolationLayer>,
    permits: Arc<Semaphore>,
}

impl Sandbox {
    /// Finds the interpreter and its files.
    ///
    /// # Errors
    /// If this is not Linux, or there is no working interpreter.
    pub async fn new(setup: Setup) -> Result<Self, SandboxError> {
        if !cfg!(target_os = "linux") {
            let reason = "the sandbox needs Linux (namespaces, landlock, seccomp)".to_owned();
            return Err(SandboxError::Unavailable(reason));
        }
        if setup.uid == 0 {
            let least = 1;
            let most = u64::from(u32::MAX - 1);
            return Err(SandboxError::Limit { key: "uid", value: 0, least, most });
        }
        let wrong = |reason: String| SandboxError::Interpreter {
            python: setup.python.display().to_string(),
            reason,
        };
        let ask = Command::new(&setup.python)
            .args(["-I", "-S", "-B", "-c", ASK])
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output();
        let said = tokio::time::timeout(DISCOVERY, ask)
            .await
            .map_err(|_| wrong(format!("it said nothing for {} s", DISCOVERY.as_secs())))?
            .map_err(|error| wrong(error.to_string()))?;
        let Interpreter { executable, paths } =
            serde_json::from_slice(&said.stdout).map_err(|_| {
                let text = String::from_utf8_lossy(&said.stderr);
                wrong(format!("it is not Python 3: {}", text.lines().last().unwrap_or_default()))
            })?;
        let readable = [executable.clone()].into_iter().chain(paths);
        let readable = readable.chain(SYSTEM.map(PathBuf::from));
        Ok(Self {
            launcher: setup.launcher,
            interpreter: executable,
            readable: existing(readable),
            uid: setup.uid,
            without: setup.without,
            permits: Arc::new(Semaphore::new(setup.concurrency.max(1))),
        })
    }

    /// Runs an empty program, to see what this machine confines by.
    ///
    /// # Errors
    /// As [`Sandbox::run`].
    pub async fn probe(&self) -> Result<Isolation, SandboxError> {
        let limits = Limits { wall_ms: 10_000, ..Limits::default() };
        let request = RunRequest { code: "print(6 * 7)".into(), limits, ..RunRequest::default() };
        let outcome = self.run(request).await?;
        if outcome.status != Status::Ok || outcome.stdout != "42\n" {
            let (status, tail) = (&outcome.status, outcome.stderr_tail(3));
            return Err(SandboxError::Launcher(format!("a probe ended in {status:?}: {tail}")));
        }
        Ok(outcome.isolation)
    }

    /// Runs a program, as soon as fewer than the allowed number are running.
    ///
    /// Dropping the future ends the run.
    ///
    /// # Errors
    /// If it cannot be confined, or not be started; whatever the program itself does is an
    /// [`RunOutcome`].
    pub async fn run(&self, request: RunRequest) -> Result<RunOutcome, SandboxError> {
        request.limits.check()?;
        let failed = |what: &str, error: &dyn std::fmt::Display| {
            SandboxError::Launcher(format!("{what}: {error}"))
        };
        // Never closed.
        let _permit = self.permits.acquire().await.map_err(|e| failed("permits", &e))?;
        let limits = request.limits;
        let spec = LaunchSpec {
            argv: self.arguments(),
            readable: self.readable.clone(),
            limits,
            uid: self.uid,
            without: self.without.clone(),
            code: request.code,
            stdin: request.stdin,
        };
        let mut line = serde_json::to_vec(&spec).map_err(|e| failed("specification", &e))?;
        line.push(b'\n');
        let mut launcher = self.launch().map_err(|e| failed("starting it", &e))?;
        let whole = tokio::time::timeout(limits.wall() + GRACE, talk(&mut launcher, &line));
        let (answer, complaint) = match whole.await {
            Ok(Ok(said)) => said,
            Ok(Err(error)) => return Err(failed("talking to it", &error)),
            Err(_) => {
                // Its own clock, or the closing of its input, should have ended it.
                launcher.kill().await.map_err(|e| failed("killing it", &e))?;
                return Err(failed("it", &"did not answer in time"));
            }
        };
        match serde_json::from_slice(&answer) {
            Ok(LaunchReply::Ran { ended, cpu, wall, stdout, stderr, report, isolation }) => {
                let status = status(&ended, cpu, &limits, &stderr);
                let (wall, cpu) = (Duration::from_secs_f64(wall), Duration::from_secs_f64(cpu));
                Ok(RunOutcome { status, stdout, stderr, report, wall, cpu, isolation })
            }
            Ok(LaunchReply::Unavailable(reason)) => Err(SandboxError::Unavailable(reason)),
            Ok(LaunchReply::Failed(reason)) => Err(SandboxError::Launcher(reason)),
            Err(error) => {
                let text = String::from_utf8_lossy(&complaint);
                Err(failed("its report", &format!("{error}; {}", text.trim())))
            }
        }
    }

    fn arguments(&self) -> Vec<String> {
        let program = self.interpreter.to_string_lossy().into_owned();
        // Isolated, no site packages, no byte code written, UTF-8 whatever the locale.
        let rest = ["-I", "-S", "-B", "-X", "utf8", "-c", BOOTSTRAP].map(str::to_owned);
        [program].into_iter().chain(rest).collect()
    }

    fn launch(&self) -> std::io::Result<Child> {
        let mut command = Command::new(&self.launcher);
        command
            .arg(SUBCOMMAND)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // When a run is dropped, its input closes and it ends its child, itself, in this order;
            // killed, it would leave the child to be waited for by process 1, which may not.
            .kill_on_drop(false);
        #[cfg(unix)]
        command.process_group(0);
        command.spawn()
    }
}

/// Sends the specification, reads report and complaints, waits for the end. Standard input stays
/// open until then: its closing ends the run.
async fn talk(launcher: &mut Child, line: &[u8]) -> std::io::Result<(Vec<u8>, Vec<u8>)> {
    let (Some(mut stdin), Some(stdout), Some(stderr)) =
        (launcher.stdin.take(), launcher.stdout.take(), launcher.stderr.take())
    else {
        return Err(std::io::ErrorKind::BrokenPipe.into());
    };
    let (mut answer, mut complaint) = (Vec::new(), Vec::new());
    let (mut stdout, mut stderr) = (stdout.take(ANSWER_BYTES), stderr.take(64 * 1024));
    let send = async {
        // A launcher that ends early has said why.
        let _ = stdin.write_all(line).await;
        stdin
    };
    let (_open, read, read_too) =
        tokio::join!(send, stdout.read_to_end(&mut answer), stderr.read_to_end(&mut complaint));
    read?;
    read_too?;
    launcher.wait().await?;
    Ok((answer, complaint))
}

/// Puts a name to how it ended.
fn status(ended: &Ended, cpu: f64, limits: &Limits, stderr: &str) -> Status {
    match *ended {
        Ended::Deadline => Status::Timeout,
        Ended::Output => Status::Output,
        Ended::Exit(0) => Status::Ok,
        Ended::Exit(exit) => {
            let last = stderr.trim_end().lines().next_back().unwrap_or_default();
            if last.starts_with("MemoryError") { Status::Memory } else { Status::Error { exit } }
        }
        Ended::Signal(signal) => {
            // SIGKILL is 9 and SIGXCPU 24 on every Linux that seccompiler knows.
            let spent = cpu + 0.1 >= limits.cpu_seconds() as f64;
            if signal == 24 || (signal == 9 && spent) {
                Status::Timeout
            } else {
                Status::Killed { signal }
            }
        }
    }
}

/// The paths that exist, canonical; what lies below another is left out.
fn existing(paths: impl Iterator<Item = PathBuf>) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = paths.filter_map(|p| std::fs::canonicalize(p).ok()).collect();
    // By components: a directory comes directly before what lies below it.
    found.sort();
    found.dedup_by(|path, before| path.starts_with(&*before));
    found
}
