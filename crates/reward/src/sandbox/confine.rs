//! The child's steps between fork and exec: the restrictions that a process can only put on itself.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::Command;

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus, Scope, path_beneath_rules,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{Resource, Signal, geteuid, set_parent_process_death_signal, setsid};
use rustix::thread::{
    Gid, Uid, UnshareFlags, set_no_new_privs, set_thread_groups, set_thread_res_gid,
    set_thread_res_uid,
};

use super::namespaces::{DEVICES, DIRECTORY, USER};
use super::sys::{self, at};
use super::syscalls;
use super::syscalls::Permitted;
use super::{Isolation, IsolationLayer};
use super::{LaunchSpec, Limits};

/// The first Landlock ABI that can replace a mount namespace: version 3 (Linux 6.2) also restricts
/// truncation.
pub(super) const LANDLOCK_ENOUGH: u32 = 3;

const ENVIRONMENT: [(&str, &str); 4] =
    [("LANG", "C.UTF-8"), ("HOME", DIRECTORY), ("TMPDIR", DIRECTORY), ("PATH", "")];

/// Threads that may exist at the same time.
const THREADS: u64 = 16;

/// Confines this process and executes the interpreter with `files` as its descriptors 0 to 4;
/// returns only if a step failed, with the reason.
///
/// `isolation` has the layers that the launcher has set up; `report` gets it complete, just before system calls are
/// filtered. `launcher` is a pipe that closes when the launcher ends.
pub(super) fn run(
    spec: &LaunchSpec,
    isolation: Isolation,
    launcher: &OwnedFd,
    files: &[OwnedFd; 5],
    report: &mut File,
) -> String {
    match prepare(spec, isolation, launcher, files, report) {
        Ok(program) => {
            let error = sys::exec(program, spec.limits.memory_mb << 20);
            format!("starting the interpreter: {error}")
        }
        Err(reason) => reason,
    }
}

fn prepare(
    spec: &LaunchSpec,
    mut isolation: Isolation,
    launcher: &OwnedFd,
    files: &[OwnedFd; 5],
    report: &mut File,
) -> Result<Command, String> {
    let (interpreter, arguments) = spec.argv.split_first().ok_or("the command: it is empty")?;
    let mut program = Command::new(interpreter);
    program.args(arguments).env_clear().envs(ENVIRONMENT);
    place(files).map_err(at("descriptors"))?;
    setsid().map_err(at("setsid"))?;
    if geteuid().is_root() {
        become_user().map_err(at("giving up root"))?;
        isolation.user_id = Some(USER);
    }
    // The kernel counts threads by user and user namespace: in its own, this run counts alone.
    let alone = isolation.user_namespace
        || (isolation.namespaces && sys::unshare(UnshareFlags::NEWUSER).is_ok());
    isolation.user_namespace = alone;
    // After the change of user, which would reset it.
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(at("the parent's death signal"))?;
    if has_ended(launcher) {
        sys::exit(1);
    }
    set_limits(&spec.limits, alone).map_err(at("limits"))?;
    set_no_new_privs(true).map_err(at("no_new_privs"))?;
    if isolation.landlock_abi > 0 {
        let status = landlock(&spec.readable).map_err(at("landlock"))?;
        if status == RulesetStatus::NotEnforced {
            return Err("landlock: the kernel supports it but did not enforce it".to_owned());
        }
    }
    let directory = if isolation.namespaces { DIRECTORY } else { "/" };
    std::env::set_current_dir(directory).map_err(at("the working directory"))?;
    let line = serde_json::to_string(&isolation).unwrap_or_default();
    // Fails only if the launcher has died, and then this process is killed too.
    let _ = writeln!(report, "{line}");
    if !spec.without.contains(&IsolationLayer::Seccomp) {
        let permitted = Permitted { threads: alone, signals: isolation.namespaces };
        syscalls::restrict(permitted).map_err(at("seccomp"))?;
    }
    Ok(program)
}

/// Puts the files on descriptors 0 to 4. Copies them to 16 and above first, so that none is
/// overwritten before it is copied.
fn place(files: &[OwnedFd; 5]) -> io::Result<()> {
    let above = files.each_ref().map(|fd| fcntl_dupfd_cloexec(fd, 16));
    for (target, fd) in (0..).zip(above) {
        sys::duplicate_onto(&fd?, target)?;
    }
    Ok(())
}

/// Gives up root permanently: groups, group, user, and with the user every capability. These calls
/// change one thread only, and this process has one.
fn become_user() -> io::Result<()> {
    let (user, group) = (Uid::from_raw(USER), Gid::from_raw(USER));
    set_thread_groups(&[])?;
    set_thread_res_gid(group, group, group)?;
    set_thread_res_uid(user, user, user)?;
    // Must fail now; otherwise the process has kept privileges.
    if set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT).is_ok() {
        return Err(io::Error::other("root could be regained after it was given up"));
    }
    Ok(())
}

/// Whether the launcher has ended and so closed its end of the pipe.
fn has_ended(launcher: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(launcher, PollFlags::empty())];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) != Ok(0)
}

/// Sets every limit but the address space, which [`sys::exec`] sets.
fn set_limits(limits: &Limits, alone: bool) -> io::Result<()> {
    sys::limit(Resource::Cpu, limits.cpu_seconds())?;
    sys::limit(Resource::Fsize, 0)?;
    sys::limit(Resource::Nofile, 64)?;
    sys::limit(Resource::Core, 0)?;
    sys::limit(Resource::Memlock, 0)?;
    sys::limit(Resource::Msgqueue, 0)?;
    if alone {
        sys::limit(Resource::Nproc, THREADS)?;
    }
    Ok(())
}

/// Restricts file access to reading `readable`, and to [`DEVICES`]. Also forbids TCP, and signals and
/// abstract sockets to processes outside, as far as the kernel's ABI version supports it.
fn landlock(readable: &[PathBuf]) -> Result<RulesetStatus, landlock::RulesetError> {
    let abi = ABI::V6;
    let status = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(abi))?
        .handle_access(AccessNet::from_all(abi))?
        .scope(Scope::from_all(abi))?
        .create()?
        .add_rules(path_beneath_rules(readable, AccessFs::from_read(abi)))?
        .add_rules(path_beneath_rules(DEVICES, AccessFs::ReadFile | AccessFs::WriteFile))?
        .restrict_self()?;
    Ok(status.ruleset)
}
