//! The few Linux calls that the launcher needs, each behind a safe signature.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// A C call's answer: -1 is the error in `errno`.
fn check(answer: libc::c_long) -> io::Result<libc::c_long> {
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer) }
}

/// Takes over a descriptor that a call has just made.
fn own(answer: libc::c_long) -> io::Result<OwnedFd> {
    let fd = check(answer)? as RawFd;
    // SAFETY: the kernel has just returned this descriptor and nothing else holds it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A path for C.
pub(super) fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| io::ErrorKind::InvalidInput.into())
}

/// Reading and writing end of a new pipe, closed on exec.
pub(super) fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends: [RawFd; 2] = [-1; 2];
    // SAFETY: `ends` has room for the two descriptors.
    check(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }.into())?;
    Ok((own(ends[0].into())?, own(ends[1].into())?))
}

/// A file in memory with this content, at its beginning, that nobody can change any more.
pub(super) fn sealed_file(content: &[u8]) -> io::Result<OwnedFd> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name is a literal that ends in zero.
    let mut file = File::from(own(unsafe { libc::memfd_create(c"input".as_ptr(), flags) }.into())?);
    file.write_all(content)?;
    let seals = libc::F_SEAL_SEAL | libc::F_SEAL_WRITE | libc::F_SEAL_GROW | libc::F_SEAL_SHRINK;
    // SAFETY: both calls take an open descriptor and numbers.
    unsafe {
        check(libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals).into())?;
        check(libc::lseek(file.as_raw_fd(), 0, libc::SEEK_SET))?;
    }
    Ok(file.into())
}

/// A second descriptor, at least `least`, closed on exec.
pub(super) fn duplicate(fd: &OwnedFd, least: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: an open descriptor and numbers.
    own(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, least) }.into())
}

/// Makes `target` mean what `fd` means; it stays open on exec.
pub(super) fn duplicate_onto(fd: &OwnedFd, target: RawFd) -> io::Result<()> {
    // SAFETY: only called in the child just before exec, where no owner of `target` is used again.
    check(unsafe { libc::dup2(fd.as_raw_fd(), target) }.into()).map(drop)
}

/// Marks every descriptor from `first` on to be closed on exec.
pub(super) fn close_on_exec_from(first: libc::c_uint) -> io::Result<()> {
    let flags: libc::c_uint = 4; // CLOSE_RANGE_CLOEXEC
    // SAFETY: numbers only, and nothing is closed yet.
    check(unsafe { libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, flags) })
        .map(drop)
}

/// Makes reading an empty pipe an error instead of a wait.
pub(super) fn set_nonblocking(fd: &OwnedFd) -> io::Result<()> {
    // SAFETY: an open descriptor and numbers.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) }.into()).map(drop)
}

/// Leaves the namespaces of `flags`.
pub(super) fn unshare(flags: libc::c_int) -> io::Result<()> {
    // SAFETY: numbers only; the process has one thread.
    check(unsafe { libc::unshare(flags) }.into()).map(drop)
}

/// Whether the process is root as far as the kernel is concerned.
pub(super) fn is_root() -> bool {
    // SAFETY: cannot fail, touches no memory.
    unsafe { libc::geteuid() == 0 }
}

/// User and group id.
pub(super) fn ids() -> (libc::uid_t, libc::gid_t) {
    // SAFETY: cannot fail, touches no memory.
    unsafe { (libc::geteuid(), libc::getegid()) }
}

/// Gives up root for good: groups, group, user, and with the user every capability.
pub(super) fn become_user(id: u32) -> io::Result<()> {
    // SAFETY: an empty list of groups is not read; the rest are numbers.
    unsafe {
        check(libc::setgroups(0, std::ptr::null()).into())?;
        check(libc::setresgid(id, id, id).into())?;
        check(libc::setresuid(id, id, id).into())?;
        // Must fail now; if it does not, something kept the privileges.
        if id != 0 && libc::setresuid(0, 0, 0) == 0 {
            return Err(io::Error::other("root could be taken back after it was given up"));
        }
    }
    Ok(())
}

/// `mount(2)`; `None` is a null pointer.
pub(super) fn mount(
    source: &CStr,
    target: &CStr,
    kind: Option<&CStr>,
    flags: libc::c_ulong,
    data: Option<&CStr>,
) -> io::Result<()> {
    let pointer = |text: Option<&CStr>| text.map_or(std::ptr::null(), CStr::as_ptr);
    // SAFETY: every pointer is null or a string that ends in zero and outlives the call.
    let done = unsafe {
        libc::mount(
            source.as_ptr(),
            target.as_ptr(),
            pointer(kind),
            flags,
            pointer(data).cast::<libc::c_void>(),
        )
    };
    check(done.into()).map(drop)
}

/// Adds attributes (`MOUNT_ATTR_*`) to a mount and everything below it.
pub(super) fn add_mount_attributes(target: &CStr, attributes: u64) -> io::Result<()> {
    // `struct mount_attr`: attributes to set, to clear, propagation, user namespace.
    let settings: [u64; 4] = [attributes, 0, 0, 0];
    // SAFETY: the path ends in zero; the kernel reads `size_of_val(&settings)` bytes of settings.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            libc::AT_FDCWD,
            target.as_ptr(),
            libc::AT_RECURSIVE,
            settings.as_ptr(),
            size_of_val(&settings),
        )
    };
    check(done).map(drop)
}

/// Makes the working directory the root and lets go of the old root.
pub(super) fn pivot_here() -> io::Result<()> {
    // SAFETY: literals that end in zero. Pivoting onto itself stacks the old root on the new one,
    // from where it is detached (pivot_root(2), "pivot_root(".", ".")").
    unsafe {
        check(libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()))?;
        check(libc::umount2(c".".as_ptr(), libc::MNT_DETACH).into())?;
        check(libc::chdir(c"/".as_ptr()).into())?;
    }
    Ok(())
}

/// What [`fork`] returns to whom.
pub(super) enum Fork {
    /// To the new process.
    Child,
    /// To the old one, with the new one's id.
    Parent(libc::pid_t),
}

/// Splits the process.
pub(super) fn fork() -> io::Result<Fork> {
    // SAFETY: the process has one thread, so the child inherits no lock that is held.
    let pid = check(unsafe { libc::fork() }.into())?;
    Ok(if pid == 0 { Fork::Child } else { Fork::Parent(pid as libc::pid_t) })
}

/// A descriptor that becomes readable when the process ends (Linux 5.3).
pub(super) fn pidfd(pid: libc::pid_t) -> io::Result<OwnedFd> {
    // SAFETY: numbers only.
    own(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })
}

/// Starts a session, and with it a process group, of its own.
pub(super) fn new_session() -> io::Result<()> {
    // SAFETY: no arguments.
    check(unsafe { libc::setsid() }.into()).map(drop)
}

/// `prctl` with one number.
pub(super) fn prctl(option: libc::c_int, value: libc::c_ulong) -> io::Result<()> {
    let zero: libc::c_ulong = 0;
    // SAFETY: only called with options that take a number.
    check(unsafe { libc::prctl(option, value, zero, zero, zero) }.into()).map(drop)
}

/// Sends `SIGKILL`.
pub(super) fn kill(pid: libc::pid_t) {
    // SAFETY: numbers only. The process is our child and not yet waited for, so the id is its own.
    unsafe { libc::kill(pid, libc::SIGKILL) };
}

/// Waits for the process: its wait status, and the processor seconds it used.
pub(super) fn wait(pid: libc::pid_t) -> io::Result<(libc::c_int, f64)> {
    let mut status = 0;
    // SAFETY: `rusage` is plain numbers, for which zeros are a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    loop {
        // SAFETY: both pointers are to locals that outlive the call.
        match check(unsafe { libc::wait4(pid, &raw mut status, 0, &raw mut usage) }.into()) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
            Ok(_) => break,
        }
    }
    let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
    Ok((status, seconds(usage.ru_utime) + seconds(usage.ru_stime)))
}

/// Waits until one of the descriptors has an event, or for so many milliseconds.
pub(super) fn poll(fds: &mut [libc::pollfd], milliseconds: libc::c_int) -> io::Result<()> {
    // SAFETY: pointer and length are of one slice.
    let done = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, milliseconds) };
    match check(done.into()) {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
        other => other.map(drop),
    }
}

/// The resources `RLIMIT_*` names.
#[cfg(target_env = "gnu")]
pub(super) type Resource = libc::__rlimit_resource_t;
/// The resources `RLIMIT_*` names.
#[cfg(not(target_env = "gnu"))]
pub(super) type Resource = libc::c_int;

/// Sets a limit, soft and hard, never above the hard limit there is.
pub(super) fn limit(resource: Resource, value: u64) -> io::Result<()> {
    let mut bounds = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both calls get a pointer to a local that outlives them.
    unsafe {
        check(libc::getrlimit(resource, &raw mut bounds).into())?;
        let value = bounds.rlim_max.min(value as libc::rlim_t);
        bounds = libc::rlimit { rlim_cur: value, rlim_max: value };
        check(libc::setrlimit(resource, &raw const bounds).into()).map(drop)
    }
}

/// The version of Landlock's interface that the kernel offers; 0 where there is none.
pub(super) fn landlock_abi() -> u32 {
    let version_flag: libc::c_uint = 1;
    let nothing = std::ptr::null::<libc::c_void>();
    // SAFETY: with this flag the kernel reads no memory (landlock_create_ruleset(2)).
    let abi =
        unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, nothing, 0_usize, version_flag) };
    u32::try_from(abi).unwrap_or(0)
}

/// A program with its arguments and environment, made ready so that starting it allocates nothing.
pub(super) struct Program {
    strings: Vec<CString>,
    arguments: Vec<*const libc::c_char>,
    environment: Vec<*const libc::c_char>,
}

impl Program {
    /// `arguments[0]` is the file.
    pub(super) fn new(arguments: &[String], environment: &[&str]) -> io::Result<Self> {
        let all = arguments.iter().map(String::as_str).chain(environment.iter().copied());
        let strings: Vec<CString> = all.map(CString::new).collect::<Result<_, _>>()?;
        if arguments.is_empty() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let list = |strings: &[CString]| {
            strings.iter().map(|s| s.as_ptr()).chain([std::ptr::null()]).collect()
        };
        let (first, second) = strings.split_at(arguments.len());
        let (arguments, environment) = (list(first), list(second));
        Ok(Self { strings, arguments, environment })
    }

    /// Becomes it under an address space of so many bytes; returns only the error.
    ///
    /// The limit is set here, between the last allocation and the call, because the launcher may
    /// itself be larger than what the program is allowed.
    pub(super) fn exec(&self, address_space: u64) -> io::Error {
        if let Err(error) = limit(libc::RLIMIT_AS, address_space) {
            return error;
        }
        let Some(file) = self.strings.first() else { return io::ErrorKind::InvalidInput.into() };
        // SAFETY: strings that end in zero and are owned by `self`, in lists that end in null.
        unsafe {
            libc::execve(file.as_ptr(), self.arguments.as_ptr(), self.environment.as_ptr());
        }
        io::Error::last_os_error()
    }
}

/// Ends the process at once, running nothing.
pub(super) fn exit(code: libc::c_int) -> ! {
    // SAFETY: does not return, touches no memory.
    unsafe { libc::_exit(code) }
}
