//! Safe functions for the Linux calls that rustix lacks or leaves unsafe.

use std::ffi::CStr;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus};
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::mount::MountAttrFlags;
use rustix::process::{Pid, Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{UnshareFlags, unshare_unsafe};

/// An error of one step.
pub(super) fn at<E: Display>(step: &str) -> impl Fn(E) -> String + '_ {
    move |error| format!("{step}: {error}")
}

/// Converts the return value of a C call: -1 means that `errno` has the error.
fn check(answer: libc::c_long) -> io::Result<libc::c_long> {
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer) }
}

/// An immutable in-memory file with this content, positioned at its start.
pub(super) fn sealed_file(content: &[u8]) -> io::Result<OwnedFd> {
    let fd = memfd_create(c"input", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut file = File::from(fd);
    file.write_all(content)?;
    let seals = SealFlags::SEAL | SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK;
    fcntl_add_seals(&file, seals)?;
    file.rewind()?;
    Ok(file.into())
}

/// Makes `target` a copy of `fd` that stays open on exec.
pub(super) fn duplicate_onto(fd: &OwnedFd, target: RawFd) -> io::Result<()> {
    // SAFETY: only called in the child just before exec, where no owner of `target` is used again.
    check(unsafe { libc::dup2(fd.as_raw_fd(), target) }.into()).map(drop)
}

/// Sets the close-on-exec flag of every descriptor from `first` on.
pub(super) fn close_on_exec_from(first: libc::c_uint) -> io::Result<()> {
    let (last, flags) = (libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC);
    // SAFETY: passes numbers only, and closes nothing yet.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) }).map(drop)
}

/// Moves this process, or its children for `NEWPID`, into new namespaces.
pub(super) fn unshare(namespaces: UnshareFlags) -> io::Result<()> {
    // SAFETY: no caller passes `FILES`, so descriptors stay shared.
    Ok(unsafe { unshare_unsafe(namespaces) }?)
}

/// Adds attributes to a mount and every mount below it.
pub(super) fn add_mount_attributes(target: &CStr, attributes: MountAttrFlags) -> io::Result<()> {
    // `struct mount_attr`: attributes to set, to clear, propagation, user namespace.
    let settings: [u64; 4] = [attributes.bits().into(), 0, 0, 0];
    // SAFETY: `target` ends in NUL; the kernel reads `size_of_val(&settings)` bytes of `settings`.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            libc::AT_FDCWD,
            target.as_ptr(),
            libc::AT_RECURSIVE,
            settings.as_ptr(),
            size_of_val(&settings),
        )
    };
    check(answer).map(drop)
}

/// Duplicates the process; returns the child's id in the parent and `None` in the child.
pub(super) fn fork() -> io::Result<Option<Pid>> {
    // SAFETY: the process has one thread, so the child inherits no held lock.
    let pid = check(unsafe { libc::fork() }.into())?;
    Ok(Pid::from_raw(pid as libc::pid_t))
}

/// Waits for a child; returns its exit status and the processor time that it used.
pub(super) fn wait(pid: Pid) -> io::Result<(ExitStatus, Duration)> {
    let mut status = 0;
    // SAFETY: `rusage` consists of numbers, for which zero is valid.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    let pid = pid.as_raw_nonzero().get();
    // SAFETY: both pointers are to locals that outlive the call.
    let mut wait = || check(unsafe { libc::wait4(pid, &raw mut status, 0, &raw mut usage) }.into());
    while let Err(error) = wait() {
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    let time = |t: libc::timeval| Duration::new(t.tv_sec as u64, 1_000 * t.tv_usec as u32);
    Ok((ExitStatus::from_raw(status), time(usage.ru_utime) + time(usage.ru_stime)))
}

/// Lowers a soft and hard limit to `value`; a lower hard limit stays.
pub(super) fn limit(resource: Resource, value: u64) -> io::Result<()> {
    let value = Some(getrlimit(resource).maximum.map_or(value, |most| most.min(value)));
    Ok(setrlimit(resource, Rlimit { current: value, maximum: value })?)
}

/// The kernel's Landlock ABI version; 0 without Landlock.
pub(super) fn landlock_abi() -> u32 {
    let version_flag: libc::c_uint = 1;
    let attributes = std::ptr::null::<libc::c_void>();
    // SAFETY: with this flag the kernel reads no memory (landlock_create_ruleset(2)).
    let abi = unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, attributes, 0_usize, version_flag)
    };
    u32::try_from(abi).unwrap_or(0)
}

/// Executes a program with an address space of `bytes`; returns only the error.
///
/// The limit is set between the last allocation and the call, because the launcher may itself be
/// larger than what the program is allowed.
pub(super) fn exec(mut program: Command, bytes: u64) -> io::Error {
    // SAFETY: the closure makes two system calls and allocates nothing.
    unsafe { program.pre_exec(move || limit(Resource::As, bytes)) }.exec()
}

/// Ends the process at once, without exit handlers.
pub(super) fn exit(code: libc::c_int) -> ! {
    // SAFETY: does not return and touches no memory.
    unsafe { libc::_exit(code) }
}
