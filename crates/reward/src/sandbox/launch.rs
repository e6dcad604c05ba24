//! The daemon's side: finds the interpreter and starts launchers.

use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};
use tokio::sync::Semaphore;

use super::{Isolation, LaunchSpec, Limits, RunOutcome, RunRequest, SUBCOMMAND, SandboxError};
use super::{Setup, Status, failed};

/// Time that a launcher may take beyond the run's own wall time before it is killed too.
const GRACE: Duration = Duration::from_secs(5);
/// Time that the interpreter has to report the paths of its files.
const DISCOVERY: Duration = Duration::from_secs(20);
/// Most bytes read of a launcher's reply: three outputs with every byte escaped.
const REPLY_BYTES: u64 = 256 << 20;

/// Reads the program from descriptor 3 and runs it as `__main__` without defining a name.
const BOOTSTRAP: &str = "exec(compile(open(3, 'rb').read(), '<program>', 'exec'))";

/// Prints the interpreter's paths. Runs outside the sandbox, because the interpreter is trusted.
const PRINT_PATHS: &str = "import json, os, sys\n\
    print(json.dumps({'executable': os.path.realpath(sys.executable), \
    'paths': [p for p in sys.path if os.path.isabs(p)] \
    + [os.path.join(sys.base_prefix, 'lib')]}))";

/// The shared libraries and time zones that interpreters load.
const SYSTEM: &str = "/lib /lib64 /usr/lib /usr/lib64 /usr/local/lib /usr/share/zoneinfo \
    /etc/ld.so.cache /etc/ld-musl-x86_64.path";

/// The output of [`PRINT_PATHS`].
#[derive(Deserialize)]
struct Interpreter {
    executable: PathBuf,
    paths: Vec<PathBuf>,
}

/// Runs programs, each in a process that can only compute. Clones share the limit on concurrent
/// runs.
#[derive(Clone, Debug)]
pub struct Sandbox {
    setup: Setup,
    interpreter: PathBuf,
    readable: Vec<PathBuf>,
    permits: Arc<Semaphore>,
}

impl Sandbox {
    /// Finds the interpreter and its files.
    ///
    /// # Errors
    /// If this is not Linux, or the interpreter does not work.
    pub async fn new(setup: Setup) -> Result<Self, SandboxError> {
        if !cfg!(target_os = "linux") {
            let reason = "the sandbox needs Linux (namespaces, landlock, seccomp)".to_owned();
            return Err(SandboxError::Unavailable(reason));
        }
        let unusable = |reason: String| {
            let python = setup.python.display();
            SandboxError::Setting(format!("python = `{python}` cannot be used: {reason}"))
        };
        let print_paths = Command::new(&setup.python)
            .args(["-I", "-S", "-B", "-c", PRINT_PATHS])
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output();
        let output = tokio::time::timeout(DISCOVERY, print_paths)
            .await
            .map_err(|_| unusable(format!("no output within {} s", DISCOVERY.as_secs())))?
            .map_err(|error| unusable(error.to_string()))?;
        let Interpreter { executable, paths } =
            serde_json::from_slice(&output.stdout).map_err(|_| {
                let text = String::from_utf8_lossy(&output.stderr);
                unusable(format!("it is not Python 3: {}", text.lines().last().unwrap_or_default()))
            })?;
        let readable = [executable.clone()].into_iter().chain(paths);
        Ok(Self {
            interpreter: executable,
            readable: existing(readable.chain(SYSTEM.split(' ').map(PathBuf::from))),
            permits: Arc::new(Semaphore::new(setup.concurrency.max(1))),
            setup,
        })
    }

    /// Runs a trivial program and returns the layers that confine programs on this machine.
    ///
    /// # Errors
    /// As [`Sandbox::run`], and if the program does not work.
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

    /// Runs a program, as soon as fewer than [`Setup::concurrency`] are running.
    ///
    /// Dropping the future ends the run.
    ///
    /// # Errors
    /// If the program cannot be confined or started. What the program itself does is an [`RunOutcome`].
    pub async fn run(&self, request: RunRequest) -> Result<RunOutcome, SandboxError> {
        let _permit = self.permits.acquire().await.map_err(failed("permits"))?;
        let limits = request.limits;
        let spec = LaunchSpec {
            argv: self.arguments(),
            readable: self.readable.clone(),
            limits,
            without: self.setup.without.clone(),
            code: request.code,
            stdin: request.stdin,
        };
        let mut line = serde_json::to_vec(&spec).map_err(failed("specification"))?;
        line.push(b'\n');
        let mut launcher = self.launch().map_err(failed("starting it"))?;
        let exchange = exchange(&mut launcher, &line);
        let (reply, stderr) = match tokio::time::timeout(limits.wall() + GRACE, exchange).await {
            Ok(outputs) => outputs.map_err(failed("exchanging data with it"))?,
            Err(_) => {
                // Its own clock, or the end of its input, should have ended it.
                launcher.kill().await.map_err(failed("killing it"))?;
                return Err(SandboxError::Launcher("it did not answer in time".to_owned()));
            }
        };
        serde_json::from_slice(&reply).unwrap_or_else(|error| {
            let text = String::from_utf8_lossy(&stderr);
            Err(SandboxError::Launcher(format!("its report: {error}; {}", text.trim())))
        })
    }

    fn arguments(&self) -> Vec<String> {
        let program = self.interpreter.to_string_lossy().into_owned();
        // Isolated, without site packages and byte code files, UTF-8 in every locale.
        let rest = ["-I", "-S", "-B", "-X", "utf8", "-c", BOOTSTRAP].map(str::to_owned);
        [program].into_iter().chain(rest).collect()
    }

    fn launch(&self) -> io::Result<Child> {
        let mut command = Command::new(&self.setup.launcher);
        command
            .arg(SUBCOMMAND)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // When a run is dropped, the launcher's input closes; it then ends its child and
            // itself. Killed, it would leave a child that only process 1 could wait for.
            .kill_on_drop(false);
        #[cfg(unix)]
        command.process_group(0);
        command.spawn()
    }
}

/// Sends the specification, reads standard output and error, and waits for the launcher's end.
/// Standard input stays open until then: when it closes, the launcher ends the run.
async fn exchange(launcher: &mut Child, line: &[u8]) -> io::Result<(Vec<u8>, Vec<u8>)> {
    let (Some(mut stdin), Some(stdout), Some(stderr)) =
        (launcher.stdin.take(), launcher.stdout.take(), launcher.stderr.take())
    else {
        return Err(io::ErrorKind::BrokenPipe.into());
    };
    let (mut reply, mut complaint) = (Vec::new(), Vec::new());
    let (mut stdout, mut stderr) = (stdout.take(REPLY_BYTES), stderr.take(64 * 1024));
    let send = async {
        // A launcher that ends early has written the reason to its outputs.
        let _ = stdin.write_all(line).await;
        stdin
    };
    let (_open, stdout_read, stderr_read) =
        tokio::join!(send, stdout.read_to_end(&mut reply), stderr.read_to_end(&mut complaint));
    stdout_read?;
    stderr_read?;
    launcher.wait().await?;
    Ok((reply, complaint))
}

/// The paths that exist, canonical, without those below another path.
fn existing(paths: impl Iterator<Item = PathBuf>) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = paths.filter_map(|p| std::fs::canonicalize(p).ok()).collect();
    // Paths sort by components: a directory comes directly before the paths below it.
    found.sort();
    found.dedup_by(|path, before| path.starts_with(&*before));
    found
}
