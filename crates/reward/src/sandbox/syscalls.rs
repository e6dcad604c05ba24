//! The seccomp filters: the system calls that the program may make.
//!
//! The first filter allows the calls that an interpreter needs. Every other call fails with `ENOSYS`,
//! for which C libraries have fallbacks. The second filter makes the calls that programs expect to
//! exist fail with `EPERM`, so that Python raises `PermissionError`. A call of a foreign
//! architecture kills the process.

use std::collections::BTreeMap;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// A list of system calls.
macro_rules! calls {
    ($($name:ident)*) => { &[$(libc::$name),*] };
}

/// A list of system calls that only x86-64 has.
#[cfg(target_arch = "x86_64")]
macro_rules! x86_calls {
    ($($name:ident)*) => { calls!($($name)*) };
}
#[cfg(not(target_arch = "x86_64"))]
macro_rules! x86_calls {
    ($($name:ident)*) => {
        &[]
    };
}

/// The calls permitted in addition to those that every program needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Permitted {
    /// New threads: only if the kernel counts them separately from the rest of the machine's.
    pub threads: bool,
    /// Signals: only in a pid namespace.
    pub signals: bool,
}

/// Allowed with any arguments.
const ALLOWED: &[libc::c_long] = calls! {
    // Files: Landlock and the mounts decide which.
    SYS_read SYS_readv SYS_pread64 SYS_preadv SYS_write SYS_writev SYS_pwrite64 SYS_lseek
    SYS_openat SYS_close SYS_close_range SYS_fstat SYS_newfstatat SYS_statx SYS_statfs
    SYS_fstatfs SYS_faccessat SYS_faccessat2 SYS_readlinkat SYS_getdents64 SYS_getcwd SYS_chdir
    SYS_fchdir SYS_fcntl SYS_flock SYS_dup SYS_dup3 SYS_pipe2 SYS_sendfile SYS_fadvise64
    SYS_umask
    // Memory, up to RLIMIT_AS.
    SYS_brk SYS_mmap SYS_munmap SYS_mprotect SYS_mremap SYS_madvise SYS_membarrier
    // Waiting and time.
    SYS_ppoll SYS_pselect6 SYS_epoll_create1 SYS_epoll_ctl SYS_epoll_pwait SYS_eventfd2
    SYS_recvfrom SYS_futex SYS_nanosleep SYS_clock_nanosleep SYS_clock_gettime SYS_clock_getres
    SYS_gettimeofday SYS_times SYS_setitimer SYS_getitimer SYS_restart_syscall SYS_sched_yield
    SYS_sched_getaffinity SYS_getcpu
    // The process's own signal handling.
    SYS_rt_sigaction SYS_rt_sigprocmask SYS_rt_sigreturn SYS_rt_sigpending SYS_rt_sigsuspend
    SYS_rt_sigtimedwait SYS_sigaltstack
    // The process itself.
    SYS_execve SYS_exit SYS_exit_group SYS_wait4 SYS_waitid SYS_getpid SYS_getppid SYS_gettid
    SYS_getpgid SYS_getsid SYS_getuid SYS_geteuid SYS_getresuid SYS_getgid SYS_getegid
    SYS_getresgid SYS_getgroups SYS_getrusage SYS_uname SYS_sysinfo SYS_getrandom
    SYS_set_tid_address SYS_set_robust_list SYS_rseq
};

/// Older names of the above.
const ALLOWED_X86: &[libc::c_long] = x86_calls! {
    SYS_open SYS_stat SYS_lstat SYS_access SYS_readlink SYS_getdents SYS_dup2 SYS_pipe SYS_poll
    SYS_select SYS_epoll_wait SYS_alarm SYS_pause SYS_time SYS_arch_prctl SYS_getrlimit
    SYS_getpgrp
};

/// Fail with `EPERM`, unless [`Permitted`] allows them.
const REFUSED: &[libc::c_long] = calls! {
    SYS_socket SYS_connect SYS_bind SYS_listen SYS_accept SYS_accept4 SYS_sendmsg SYS_sendmmsg
    SYS_ptrace SYS_process_vm_readv SYS_process_vm_writev SYS_pidfd_open SYS_pidfd_getfd
    SYS_pidfd_send_signal SYS_mount SYS_umount2 SYS_pivot_root SYS_chroot SYS_unshare SYS_setns
    SYS_setsid SYS_setpgid SYS_setuid SYS_setgid SYS_setresuid SYS_bpf SYS_io_uring_setup
    SYS_kexec_load SYS_memfd_create SYS_shmget SYS_fchmod SYS_fchmodat SYS_fchownat
    SYS_truncate SYS_mkdirat SYS_unlinkat SYS_linkat SYS_symlinkat SYS_clone SYS_kill SYS_tkill
    SYS_tgkill SYS_seccomp
};
const REFUSED_X86: &[libc::c_long] = x86_calls! {
    SYS_fork SYS_vfork SYS_mkdir SYS_rmdir SYS_unlink SYS_chmod SYS_symlink
};

/// Allowed `prctl` options: `PR_SET_NAME`, `PR_GET_NAME`, `PR_SET_VMA`, with which C libraries name
/// memory, and `PR_SET_NO_NEW_PRIVS`, which `apply_filter` sets again before the second filter.
const PRCTL: [u64; 4] = [15, 16, 0x5356_4d41, 38];

/// Allowed `ioctl` requests: `TCGETS` (is it a terminal), `FIONCLEX`, `FIOCLEX`, `FIONREAD`.
const IOCTL: [u64; 4] = [0x5401, 0x5450, 0x5451, 0x541b];

/// Filters the system calls of this process from now on.
/// Errors: the refusal of the kernel or of the filter compiler.
pub(super) fn restrict(permitted: Permitted) -> Result<(), String> {
    let filters = compile(permitted).map_err(|e| e.to_string())?;
    filters.iter().try_for_each(|filter| seccompiler::apply_filter(filter)).map_err(|error| {
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        format!("{error}{}", cause.map(|c| format!(": {c}")).unwrap_or_default())
    })
}

/// The `ENOSYS` filter, which still allows `seccomp`, and the `EPERM` filter, which refuses it. If
/// both refuse a call, the kernel returns the error of the filter installed last (seccomp(2)).
fn compile(permitted: Permitted) -> Result<[BpfProgram; 2], BackendError> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    let mut first = allowed(permitted)?;
    // The second filter leaves out calls that are allowed under conditions: if the conditions do
    // not hold, the first filter returns `ENOSYS`.
    let refused = REFUSED.iter().chain(REFUSED_X86).filter(|call| !first.contains_key(call));
    let mut second: Rules = refused.map(|&call| (call, vec![])).collect();
    first.insert(libc::SYS_seccomp, vec![]);
    second.insert(libc::SYS_seccomp, vec![]);
    if permitted.threads {
        second.insert(libc::SYS_clone, vec![clone_flags(libc::CLONE_THREAD, 0)?]);
    }
    let enosys = SeccompAction::Errno(libc::ENOSYS as u32);
    let eperm = SeccompAction::Errno(libc::EPERM as u32);
    Ok([
        SeccompFilter::new(first, enosys, SeccompAction::Allow, arch)?.try_into()?,
        SeccompFilter::new(second, SeccompAction::Allow, eperm, arch)?.try_into()?,
    ])
}

fn allowed(permitted: Permitted) -> Result<Rules, BackendError> {
    let mut rules = Rules::new();
    let mut allow = |calls: &[libc::c_long]| rules.extend(calls.iter().map(|&c| (c, vec![])));
    allow(ALLOWED);
    allow(ALLOWED_X86);
    if permitted.signals {
        allow(calls! { SYS_kill SYS_tkill SYS_tgkill });
    }
    let is = |argument, value| when(argument, SeccompCmpOp::Eq, value);
    // Its own limits (pid 0), which can only decrease.
    rules.insert(libc::SYS_prlimit64, vec![is(0, 0)?]);
    rules.insert(libc::SYS_prctl, PRCTL.map(|o| is(0, o)).into_iter().collect::<Result<_, _>>()?);
    rules.insert(libc::SYS_ioctl, IOCTL.map(|r| is(1, r)).into_iter().collect::<Result<_, _>>()?);
    // asyncio's wake-up channel: a connected pair, and sending without an address.
    rules.insert(libc::SYS_socketpair, vec![is(0, libc::AF_UNIX as u64)?]);
    rules.insert(libc::SYS_sendto, vec![is(4, 0)?]);
    // `clone3` passes its flags in memory, where no filter can read them, so it is not allowed.
    if permitted.threads {
        let thread = libc::CLONE_THREAD;
        rules.insert(libc::SYS_clone, vec![clone_flags(thread, thread)?]);
    }
    Ok(rules)
}

/// Holds if the flags under `mask` equal `value`.
fn clone_flags(mask: libc::c_int, value: libc::c_int) -> Result<SeccompRule, BackendError> {
    when(0, SeccompCmpOp::MaskedEq(u64::from(mask as u32)), value as u64)
}

fn when(argument: u8, operator: SeccompCmpOp, value: u64) -> Result<SeccompRule, BackendError> {
    // The kernel reads numbers as 32 bits; addresses (argument 4) must be compared whole.
    let width = if argument == 4 { SeccompCmpArgLen::Qword } else { SeccompCmpArgLen::Dword };
    SeccompRule::new(vec![SeccompCondition::new(argument, width, operator, value)?])
}
