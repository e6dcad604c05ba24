//! The launcher: a process of the same binary that confines one run, supervises it and reports.
//!
//! It has one thread, an empty environment and no secrets. Its child becomes the interpreter. The
//! launcher itself stays outside the confinement, reads the child's output up to a limit, and kills
//! the child at the deadline, when it writes too much, and when the daemon closes the launcher's
//! standard input (also by dying). The child is the first process of its pid namespace, so the
//! kernel kills every process that it started.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{PidfdFlags, Signal, kill_process, pidfd_open};

use super::confine::LANDLOCK_ENOUGH;
use super::{Isolation, IsolationLayer, LaunchSpec, RunOutcome, SandboxError, Status, failed};
use super::{confine, namespaces, sys};

/// Longest line accepted as a specification.
const SPEC_BYTES: usize = 64 << 20;
/// Most bytes kept of descriptor 4.
const REPORT_BYTES: usize = 1 << 20;

/// Runs as the launcher: reads one specification from standard input, runs its program confined,
/// and writes the reply to standard output.
///
/// Must be called before any thread starts: a process with threads cannot enter a user namespace.
pub fn child_main() -> ExitCode {
    let reply = read_spec().and_then(|spec| supervise(&spec));
    let Ok(text) = serde_json::to_vec(&reply) else { return ExitCode::FAILURE };
    let mut out = io::stdout().lock();
    match out.write_all(&text).and_then(|()| out.flush()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Reads the specification's line without `BufRead`, whose buffer would hold on to later bytes:
/// standard input stays open.
fn read_spec() -> Result<LaunchSpec, SandboxError> {
    let mut line = Vec::new();
    let mut chunk = [0; 64 * 1024];
    let mut input = io::stdin().lock();
    while line.last() != Some(&b'\n') {
        let count = input.read(&mut chunk).map_err(failed("reading the specification"))?;
        line.extend_from_slice(&chunk[..count]);
        if count == 0 || line.len() > SPEC_BYTES {
            let reason = "the specification is not one line of JSON";
            return Err(SandboxError::Launcher(reason.to_owned()));
        }
    }
    serde_json::from_slice(&line).map_err(failed("the specification"))
}

/// Enters the available namespaces and records the missing layers.
fn isolate(spec: &LaunchSpec) -> Result<Isolation, SandboxError> {
    let has = |layer| !spec.without.contains(&layer);
    let mut isolation = Isolation {
        landlock_abi: if has(IsolationLayer::Landlock) { sys::landlock_abi() } else { 0 },
        seccomp: has(IsolationLayer::Seccomp),
        ..Isolation::default()
    };
    let entered = if !has(IsolationLayer::Namespaces) {
        Err("switched off".to_owned())
    } else {
        namespaces::enter().and_then(|user_namespace| {
            namespaces::new_root(&spec.readable)?;
            Ok(user_namespace)
        })
    };
    match entered {
        Ok(user_namespace) => {
            isolation.namespaces = true;
            isolation.user_namespace = user_namespace;
        }
        Err(reason) => isolation.missing.push(format!("namespaces: {reason}")),
    }
    let landlock = isolation.landlock_abi;
    if landlock < LANDLOCK_ENOUGH {
        let text = format!("landlock: version {landlock}, {LANDLOCK_ENOUGH} is needed");
        isolation.missing.push(text);
    }
    let lacking = if !isolation.seccomp {
        "system calls cannot be filtered: seccomp is switched off"
    } else if !isolation.namespaces && landlock < LANDLOCK_ENOUGH {
        "files cannot be protected: neither a mount namespace nor landlock"
    } else {
        return Ok(isolation);
    };
    Err(SandboxError::Unavailable(format!("{lacking} ({})", isolation.missing.join("; "))))
}

fn supervise(spec: &LaunchSpec) -> Result<RunOutcome, SandboxError> {
    sys::close_on_exec_from(3).map_err(failed("close_range"))?;
    let pipe = || pipe_with(PipeFlags::CLOEXEC).map_err(failed("pipe"));
    let (stdout, stdout_end) = pipe()?;
    let (stderr, stderr_end) = pipe()?;
    let (report, report_end) = pipe()?;
    let (status, status_end) = pipe()?;
    let (launcher, launcher_end) = pipe()?;
    let stdin = sys::sealed_file(spec.stdin.as_bytes()).map_err(failed("memfd"))?;
    let code = sys::sealed_file(spec.code.as_bytes()).map_err(failed("memfd"))?;
    let files = [stdin, stdout_end, stderr_end, code, report_end];
    let isolation = isolate(spec)?;
    let start = Instant::now();
    let Some(pid) = sys::fork().map_err(failed("fork"))? else {
        drop(launcher_end);
        let mut status_end = File::from(status_end);
        let reason = confine::run(spec, isolation, &launcher, &files, &mut status_end);
        let _ = status_end.write_all(reason.as_bytes());
        sys::exit(127)
    };
    drop((files, status_end, launcher));
    let limit = spec.limits.output_bytes;
    let mut streams = [
        OutputPipe::new(stdout, limit)?,
        OutputPipe::new(stderr, limit)?,
        OutputPipe::new(report, REPORT_BYTES)?,
    ];
    let early = pidfd_open(pid, PidfdFlags::empty())
        .map_err(|e| SandboxError::Unavailable(format!("runs cannot be watched: pidfd_open: {e}")))
        .and_then(|pidfd| watch(&pidfd, &mut streams, start + spec.limits.wall()));
    if !matches!(early, Ok(None)) {
        // The child has not been waited for, so its id has not been reused.
        let _ = kill_process(pid, Signal::KILL);
    }
    // Returns after every process in the pid namespace has ended.
    let (exit, cpu) = sys::wait(pid).map_err(failed("wait4"))?;
    let wall = start.elapsed();
    let early = early?;
    // All writers have ended; read the rest of their output.
    streams.iter_mut().for_each(OutputPipe::drain);
    let isolation = read_status(status)?;
    let over = streams.iter().any(|stream| stream.over);
    let [stdout, stderr, report] = streams.map(|stream| stream.text());
    let status = match early {
        Some(status) => status,
        None if over => Status::Output,
        None => classify(exit, &stderr, cpu, spec),
    };
    Ok(RunOutcome { status, stdout, stderr, report, wall, cpu, isolation })
}

/// The status of a program that was not killed by the launcher.
fn classify(exit: ExitStatus, stderr: &str, cpu: Duration, spec: &LaunchSpec) -> Status {
    let cpu_limit = Duration::from_secs(spec.limits.cpu_seconds());
    let cpu_is_spent = cpu + Duration::from_millis(100) >= cpu_limit;
    let last = stderr.trim_end().lines().next_back().unwrap_or_default();
    match (exit.signal(), exit.code().unwrap_or_default()) {
        (Some(libc::SIGXCPU), _) => Status::Timeout,
        (Some(libc::SIGKILL), _) if cpu_is_spent => Status::Timeout,
        (Some(signal), _) => Status::Killed { signal },
        (None, 0) => Status::Ok,
        (None, _) if last.starts_with("MemoryError") => Status::Memory,
        (None, exit) => Status::Error { exit },
    }
}

/// Reads the child's isolation, or its reason for not becoming the interpreter.
fn read_status(pipe: OwnedFd) -> Result<Isolation, SandboxError> {
    let mut text = String::new();
    File::from(pipe).read_to_string(&mut text).map_err(failed("the run's isolation"))?;
    let (line, reason) = text.split_once('\n').unwrap_or(("", &text));
    if reason.starts_with("seccomp") || reason.starts_with("giving up root") {
        return Err(SandboxError::Unavailable(reason.to_owned()));
    }
    if !reason.is_empty() {
        return Err(SandboxError::Launcher(reason.to_owned()));
    }
    let ended_early = "the run ended before the interpreter was started";
    serde_json::from_str(line).map_err(|_| SandboxError::Launcher(ended_early.to_owned()))
}

/// Reads output until the child ends (`None`) or must be killed (with this status).
fn watch(
    pidfd: &OwnedFd,
    streams: &mut [OutputPipe; 3],
    deadline: Instant,
) -> Result<Option<Status>, SandboxError> {
    let input = io::stdin();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(Some(Status::Timeout));
        }
        let timeout = Timespec::try_from(left.min(Duration::from_secs(60)));
        let timeout = timeout.map_err(failed("the deadline"))?;
        let mut fds =
            vec![PollFd::new(pidfd, PollFlags::IN), PollFd::new(&input, PollFlags::empty())];
        let open = streams.iter().filter_map(|stream| stream.pipe.as_ref());
        fds.extend(open.map(|pipe| PollFd::new(pipe, PollFlags::IN)));
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(failed("poll")(error)),
        }
        let [ended, daemon_gone] = [0, 1].map(|i| !fds[i].revents().is_empty());
        if daemon_gone {
            return Err(SandboxError::Launcher("the daemon went away".to_owned()));
        }
        for stream in streams.iter_mut() {
            stream.drain();
            if stream.over {
                return Ok(Some(Status::Output));
            }
        }
        if ended {
            return Ok(None);
        }
    }
}

/// The reading end of one of the child's pipes, with the bytes read from it.
struct OutputPipe {
    /// `None` after the end of the stream.
    pipe: Option<File>,
    kept: Vec<u8>,
    limit: usize,
    /// Whether the child wrote more than `limit` bytes.
    over: bool,
}

impl OutputPipe {
    fn new(pipe: OwnedFd, limit: usize) -> Result<Self, SandboxError> {
        fcntl_setfl(&pipe, OFlags::NONBLOCK).map_err(failed("pipe"))?;
        Ok(Self { pipe: Some(pipe.into()), kept: Vec::new(), limit, over: false })
    }

    /// Reads all available bytes, up to the limit.
    fn drain(&mut self) {
        let mut chunk = [0; 16 * 1024];
        while let Some(pipe) = &mut self.pipe {
            match pipe.read(&mut chunk) {
                Ok(0) => self.pipe = None,
                Ok(count) => {
                    let fits = (self.limit - self.kept.len()).min(count);
                    self.kept.extend_from_slice(&chunk[..fits]);
                    if fits < count {
                        self.over = true;
                        return;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => self.pipe = None,
            }
        }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.kept).into_owned()
    }
}
