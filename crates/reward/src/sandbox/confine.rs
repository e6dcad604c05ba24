//! The last steps before the interpreter: everything that a process can only do to itself.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus, Scope, path_beneath_rules,
};

use super::namespaces::SCRATCH;
use super::spec::LaunchSpec;
use super::syscalls::Open;
use super::{Isolation, IsolationLayer, sys, syscalls};

/// The least Landlock that can stand in for a mount namespace: from version 3 on it also holds
/// truncation (Linux 6.2).
pub(super) const LANDLOCK_ENOUGH: u32 = 3;

/// What the interpreter finds in its environment.
const ENVIRONMENT: [&str; 4] = ["LANG=C.UTF-8", "HOME=/scratch", "TMPDIR=/scratch", "PATH="];

/// The program's descriptors.
pub(super) struct Files {
    /// Standard input.
    pub stdin: OwnedFd,
    /// Standard output.
    pub stdout: OwnedFd,
    /// Standard error.
    pub stderr: OwnedFd,
    /// Descriptor 3.
    pub code: OwnedFd,
    /// Descriptor 4.
    pub report: OwnedFd,
}

/// What the launcher has found out before it split.
pub(super) struct Stage<'a> {
    /// The run.
    pub spec: &'a LaunchSpec,
    /// Namespaces, so far.
    pub isolation: Isolation,
    /// Closes when the launcher ends.
    pub launcher: OwnedFd,
}

/// Confines this process and becomes the interpreter; returns only if a step failed.
///
/// `tell` gets what the run is confined by, just before that.
pub(super) fn run(stage: Stage<'_>, files: &Files, tell: impl FnOnce(&Isolation)) -> String {
    match prepare(stage, files, tell) {
        Ok((program, space)) => format!("starting the interpreter: {}", program.exec(space)),
        Err(reason) => reason,
    }
}

fn prepare(
    stage: Stage<'_>,
    files: &Files,
    tell: impl FnOnce(&Isolation),
) -> Result<(sys::Program, u64), String> {
    let Stage { spec, mut isolation, launcher } = stage;
    let program = sys::Program::new(&spec.argv, &ENVIRONMENT).map_err(said("the command"))?;
    place(files).map_err(said("descriptors"))?;
    sys::new_session().map_err(said("setsid"))?;
    if sys::is_root() {
        sys::become_user(spec.uid).map_err(said("giving up root"))?;
        isolation.user_id = Some(spec.uid);
    }
    // Threads are counted by user and user namespace; in one of its own this run counts alone.
    let alone = isolation.user_namespace
        || (isolation.namespaces && sys::unshare(libc::CLONE_NEWUSER).is_ok());
    isolation.user_namespace = alone;
    // After the change of user, which would undo it.
    sys::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong)
        .map_err(said("the parent's death signal"))?;
    if gone(&launcher) {
        sys::exit(1);
    }
    limits(spec, alone).map_err(said("limits"))?;
    sys::prctl(libc::PR_SET_NO_NEW_PRIVS, 1).map_err(said("no_new_privs"))?;
    let writable = isolation.namespaces && spec.limits.scratch_mb > 0;
    if isolation.landlock_abi > 0 {
        let status = landlock(&spec.readable, writable).map_err(|e| format!("landlock: {e}"))?;
        if status == RulesetStatus::NotEnforced {
            return Err("landlock: the kernel has it and did not enforce it".to_owned());
        }
    }
    let directory = if isolation.namespaces { SCRATCH } else { "/" };
    std::env::set_current_dir(directory).map_err(said("the working directory"))?;
    tell(&isolation);
    if !spec.without.contains(&IsolationLayer::Seccomp) {
        let open = Open {
            threads: alone,
            processes: spec.limits.processes,
            signals: isolation.namespaces,
            writing: writable,
        };
        syscalls::restrict(open).map_err(|e| format!("seccomp: {e}"))?;
    }
    Ok((program, spec.limits.address_space()))
}

fn said(what: &'static str) -> impl Fn(std::io::Error) -> String {
    move |error| format!("{what}: {error}")
}

/// Puts the files on descriptors 0 to 4. Moved up first, so that none is overwritten before it is
/// copied.
fn place(files: &Files) -> std::io::Result<()> {
    let wanted = [&files.stdin, &files.stdout, &files.stderr, &files.code, &files.report];
    let above = wanted.map(|fd| sys::duplicate(fd, 16));
    for (target, fd) in (0..).zip(above) {
        sys::duplicate_onto(&fd?, target)?;
    }
    Ok(())
}

/// Whether the launcher has ended: its end of the pipe is closed.
fn gone(launcher: &OwnedFd) -> bool {
    use std::os::fd::AsRawFd;

    let mut fds = [libc::pollfd { fd: launcher.as_raw_fd(), events: 0, revents: 0 }];
    sys::poll(&mut fds, 0).is_err() || fds[0].revents != 0
}

/// Every limit but the address space, which [`sys::Program::exec`] sets.
fn limits(spec: &LaunchSpec, alone: bool) -> std::io::Result<()> {
    let limits = &spec.limits;
    sys::limit(libc::RLIMIT_CPU, limits.cpu_seconds())?;
    sys::limit(libc::RLIMIT_FSIZE, limits.file_bytes())?;
    sys::limit(libc::RLIMIT_NOFILE, 64)?;
    sys::limit(libc::RLIMIT_CORE, 0)?;
    sys::limit(libc::RLIMIT_MEMLOCK, 0)?;
    sys::limit(libc::RLIMIT_MSGQUEUE, 0)?;
    if alone {
        sys::limit(libc::RLIMIT_NPROC, limits.tasks)?;
    }
    Ok(())
}

/// Leaves nothing to be opened but `readable`, and the scratch directory if `writable`; no TCP, no
/// signals or abstract sockets out of here, as far as the kernel's version goes.
fn landlock(readable: &[PathBuf], writable: bool) -> Result<RulesetStatus, landlock::RulesetError> {
    let abi = ABI::V6;
    let devices = ["/dev/null", "/dev/zero", "/dev/urandom"].map(Path::new);
    let scratch = writable.then_some(SCRATCH);
    let all = AccessFs::from_all(abi);
    let status = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(all)?
        .handle_access(AccessNet::from_all(abi))?
        .scope(Scope::from_all(abi))?
        .create()?
        .add_rules(path_beneath_rules(readable, AccessFs::from_read(abi)))?
        .add_rules(path_beneath_rules(devices, AccessFs::ReadFile | AccessFs::WriteFile))?
        .add_rules(path_beneath_rules(scratch, all & !AccessFs::Execute))?
        .restrict_self()?;
    Ok(status.ruleset)
}

/// The version of Landlock's interface here; 0 where there is none or it is not wanted.
pub(super) fn landlock_abi(without: &[IsolationLayer]) -> u32 {
    if without.contains(&IsolationLayer::Landlock) { 0 } else { sys::landlock_abi() }
}
