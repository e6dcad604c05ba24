//! The launcher: a process of the same binary that confines one run, watches over it, reports.
//!
//! It has one thread, an empty environment and no secret. Its own child becomes the interpreter; it
//! stays outside, reads what the child writes up to a bound, and ends it at the deadline, when
//! it writes too much, and when the daemon closes its end of the launcher's standard input (also by
//! dying). As first process of its pid namespace, the child takes everything it started with it.

use std::fs::File;
use std::io;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use super::confine::{Files, LANDLOCK_ENOUGH, Stage};
use super::spec::{Ended, LaunchReply, LaunchSpec};
use super::{Isolation, IsolationLayer, confine, namespaces, sys};

/// Longest line that is taken for a specification.
const SPEC_BYTES: usize = 64 << 20;
/// Most that is kept of descriptor 4.
const REPORT_BYTES: usize = 1 << 20;

/// Runs as the launcher: reads one specification from standard input, confines and runs what it
/// says, writes the report to standard output.
///
/// To be called before anything starts a thread: a process with threads cannot enter a user
/// namespace.
pub fn child_main() -> ExitCode {
    let answer = match read_spec().and_then(|spec| supervise(&spec)) {
        Ok(answer) => answer,
        Err(Failure::Unavailable(reason)) => LaunchReply::Unavailable(reason),
        Err(Failure::Failed(reason)) => LaunchReply::Failed(reason),
    };
    let Ok(text) = serde_json::to_vec(&answer) else { return ExitCode::FAILURE };
    let mut out = io::stdout().lock();
    match out.write_all(&text).and_then(|()| out.flush()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

enum Failure {
    Unavailable(String),
    Failed(String),
}

fn failed(what: &str) -> impl Fn(io::Error) -> Failure + '_ {
    move |error| Failure::Failed(format!("{what}: {error}"))
}

/// The line, byte by byte from a buffer of this function: standard input stays open behind it.
fn read_spec() -> Result<LaunchSpec, Failure> {
    let mut line = Vec::new();
    let mut chunk = [0; 64 * 1024];
    let mut input = io::stdin().lock();
    while line.last() != Some(&b'\n') {
        let count = input.read(&mut chunk).map_err(failed("reading the specification"))?;
        line.extend_from_slice(&chunk[..count]);
        if count == 0 || line.len() > SPEC_BYTES {
            return Err(Failure::Failed("the specification is not one line of JSON".to_owned()));
        }
    }
    serde_json::from_slice(&line).map_err(|e| Failure::Failed(format!("the specification: {e}")))
}

/// Enters what namespaces there are and says what is missing.
fn isolate(spec: &LaunchSpec) -> Result<Isolation, Failure> {
    let mut isolation = Isolation {
        landlock_abi: confine::landlock_abi(&spec.without),
        seccomp: !spec.without.contains(&IsolationLayer::Seccomp),
        ..Isolation::default()
    };
    let entered = if spec.without.contains(&IsolationLayer::Namespaces) {
        Err("switched off".to_owned())
    } else {
        let owner = if sys::is_root() { spec.uid } else { namespaces::INNER_ID };
        namespaces::enter().and_then(|entered| {
            namespaces::new_root(&spec.readable, spec.limits.scratch_mb, owner)?;
            Ok(entered)
        })
    };
    match entered {
        Ok(entered) => {
            isolation.namespaces = true;
            isolation.user_namespace = entered.user;
        }
        Err(reason) => isolation.missing.push(format!("namespaces: {reason}")),
    }
    if isolation.landlock_abi < LANDLOCK_ENOUGH {
        let abi = isolation.landlock_abi;
        isolation.missing.push(format!("landlock: version {abi}, {LANDLOCK_ENOUGH} is needed"));
    }
    let reasons = isolation.missing.join("; ");
    let lacks = |what: &str| Err(Failure::Unavailable(format!("{what} ({reasons})")));
    if !isolation.seccomp {
        return lacks("system calls cannot be filtered: seccomp is switched off");
    }
    if !isolation.namespaces && isolation.landlock_abi < LANDLOCK_ENOUGH {
        return lacks("files cannot be protected: neither a mount namespace nor landlock");
    }
    if !isolation.namespaces && spec.limits.processes {
        return lacks("processes are to be allowed and there is no pid namespace to hold them");
    }
    Ok(isolation)
}

fn supervise(spec: &LaunchSpec) -> Result<LaunchReply, Failure> {
    sys::close_on_exec_from(3).map_err(failed("close_range"))?;
    let (stdout, stdout_end) = sys::pipe().map_err(failed("pipe"))?;
    let (stderr, stderr_end) = sys::pipe().map_err(failed("pipe"))?;
    let (report, report_end) = sys::pipe().map_err(failed("pipe"))?;
    let (told, tell) = sys::pipe().map_err(failed("pipe"))?;
    let (launcher, alive) = sys::pipe().map_err(failed("pipe"))?;
    let files = Files {
        stdin: sys::sealed_file(spec.stdin.as_bytes()).map_err(failed("memfd"))?,
        stdout: stdout_end,
        stderr: stderr_end,
        code: sys::sealed_file(spec.code.as_bytes()).map_err(failed("memfd"))?,
        report: report_end,
    };
    let isolation = isolate(spec)?;
    let began = Instant::now();
    let pid = match sys::fork().map_err(failed("fork"))? {
        sys::Fork::Parent(pid) => pid,
        sys::Fork::Child => {
            drop(alive);
            let mut tell = File::from(tell);
            let stage = Stage { spec, isolation, launcher };
            let reason = confine::run(stage, &files, |isolation| {
                let line = serde_json::to_string(isolation).unwrap_or_default();
                // If nobody reads it any more, the launcher is gone, and this process soon too.
                let _ = writeln!(&tell, "{line}");
            });
            let _ = tell.write_all(reason.as_bytes());
            sys::exit(127)
        }
    };
    drop((files, tell, launcher));
    let keep = spec.limits.output_bytes;
    let mut streams = [
        Stream::new(stdout, keep)?,
        Stream::new(stderr, keep)?,
        Stream::new(report, REPORT_BYTES)?,
    ];
    let early = sys::pidfd(pid)
        .map_err(|e| Failure::Unavailable(format!("runs cannot be watched: pidfd_open: {e}")))
        .and_then(|pidfd| watch(&pidfd, &mut streams, began + spec.limits.wall()));
    if !matches!(early, Ok(None)) {
        sys::kill(pid);
    }
    // Returns after everything in the pid namespace is gone too.
    let (status, cpu) = sys::wait(pid).map_err(failed("wait4"))?;
    let wall = began.elapsed().as_secs_f64();
    let early = early?;
    let [stdout, stderr, report] = streams.map(|mut stream| {
        // What was written last; every writer has ended.
        stream.drain();
        stream
    });
    let isolation = began_with(told)?;
    let ended = match early {
        Some(ended) => ended,
        None if stdout.over || stderr.over || report.over => Ended::Output,
        None if libc::WIFSIGNALED(status) => Ended::Signal(libc::WTERMSIG(status)),
        None => Ended::Exit(libc::WEXITSTATUS(status)),
    };
    let (stdout, stderr, report) = (stdout.text(), stderr.text(), report.text());
    Ok(LaunchReply::Ran { ended, cpu, wall, stdout, stderr, report, isolation })
}

/// What the child said before it became the interpreter.
fn began_with(told: OwnedFd) -> Result<Isolation, Failure> {
    let mut text = String::new();
    File::from(told).read_to_string(&mut text).map_err(failed("the run's isolation"))?;
    let (line, reason) = text.split_once('\n').unwrap_or(("", &text));
    if !reason.is_empty() {
        return Err(if reason.starts_with("seccomp") || reason.starts_with("giving up root") {
            Failure::Unavailable(reason.to_owned())
        } else {
            Failure::Failed(reason.to_owned())
        });
    }
    serde_json::from_str(line)
        .map_err(|_| Failure::Failed("the run ended before the interpreter was started".to_owned()))
}

/// Reads until the child ends: `None`; or says why it must be ended.
fn watch(
    pidfd: &OwnedFd,
    streams: &mut [Stream; 3],
    deadline: Instant,
) -> Result<Option<Ended>, Failure> {
    let event = |fd: i32, events| libc::pollfd { fd, events, revents: 0 };
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(Some(Ended::Deadline));
        }
        let input = io::stdin().as_raw_fd();
        let mut fds = vec![event(pidfd.as_raw_fd(), libc::POLLIN), event(input, 0)];
        // Closed streams are left out: poll ignores negative descriptors.
        fds.extend(streams.iter().map(|s| event(s.descriptor(), libc::POLLIN)));
        let left = left + Duration::from_millis(1);
        sys::poll(&mut fds, left.as_millis().min(60_000) as libc::c_int).map_err(failed("poll"))?;
        if fds[1].revents != 0 {
            return Err(Failure::Failed("the daemon went away".to_owned()));
        }
        for (stream, fd) in streams.iter_mut().zip(&fds[2..]) {
            if fd.revents != 0 {
                stream.drain();
            }
            if stream.over {
                return Ok(Some(Ended::Output));
            }
        }
        if fds[0].revents != 0 {
            return Ok(None);
        }
    }
}

/// One of the child's pipes and what came through it.
struct Stream {
    pipe: Option<File>,
    kept: Vec<u8>,
    bound: usize,
    over: bool,
}

impl Stream {
    fn new(pipe: OwnedFd, bound: usize) -> Result<Self, Failure> {
        sys::set_nonblocking(&pipe).map_err(failed("pipe"))?;
        Ok(Self { pipe: Some(pipe.into()), kept: Vec::new(), bound, over: false })
    }

    fn descriptor(&self) -> i32 {
        self.pipe.as_ref().map_or(-1, AsRawFd::as_raw_fd)
    }

    /// Takes what is there, up to the bound.
    fn drain(&mut self) {
        let mut chunk = [0; 16 * 1024];
        while let Some(pipe) = &mut self.pipe {
            match pipe.read(&mut chunk) {
                Ok(0) => self.pipe = None,
                Ok(count) => {
                    let room = (self.bound - self.kept.len()).min(count);
                    self.kept.extend_from_slice(&chunk[..room]);
                    if room < count {
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
