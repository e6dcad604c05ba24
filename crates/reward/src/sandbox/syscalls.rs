//! The system calls that the program may make: a list of what an interpreter needs, nothing else.
//!
//! What is not listed does not exist (`ENOSYS`, which C libraries know how to fall back from);
//! what people expect to exist is refused (`EPERM`), so that Python says `PermissionError`. Calls
//! of a foreign architecture kill the process.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// What the filter leaves open beyond what every program needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Open {
    /// Threads: only where they are counted apart from the rest of the machine.
    pub threads: bool,
    /// Processes: only in a pid namespace.
    pub processes: bool,
    /// Signals: only in a pid namespace.
    pub signals: bool,
    /// Changing directories and files: only where there is a scratch directory.
    pub writing: bool,
}

/// Allowed whatever their arguments.
const ALLOWED: &[libc::c_long] = &[
    // Files: landlock and the mounts say which.
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_pwrite64,
    libc::SYS_lseek,
    libc::SYS_openat,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    libc::SYS_getcwd,
    libc::SYS_chdir,
    libc::SYS_fchdir,
    libc::SYS_fcntl,
    libc::SYS_flock,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_pipe2,
    libc::SYS_sendfile,
    libc::SYS_fadvise64,
    libc::SYS_umask,
    // Memory: RLIMIT_AS says how much.
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    // Waiting and time.
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_eventfd2,
    libc::SYS_recvfrom,
    libc::SYS_futex,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    libc::SYS_times,
    libc::SYS_setitimer,
    libc::SYS_getitimer,
    libc::SYS_restart_syscall,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_getcpu,
    // Signals to itself.
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigsuspend,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sigaltstack,
    // Itself.
    libc::SYS_execve,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_gettid,
    libc::SYS_getpgid,
    libc::SYS_getsid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getresuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getresgid,
    libc::SYS_getgroups,
    libc::SYS_getrusage,
    libc::SYS_uname,
    libc::SYS_sysinfo,
    libc::SYS_getrandom,
    libc::SYS_set_tid_address,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
];

/// The older names of the above, on the architecture that has them.
#[cfg(target_arch = "x86_64")]
const ALLOWED_OLD: &[libc::c_long] = &[
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_access,
    libc::SYS_readlink,
    libc::SYS_getdents,
    libc::SYS_dup2,
    libc::SYS_pipe,
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_epoll_wait,
    libc::SYS_alarm,
    libc::SYS_pause,
    libc::SYS_time,
    libc::SYS_arch_prctl,
    libc::SYS_getrlimit,
    libc::SYS_getpgrp,
];
#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_OLD: &[libc::c_long] = &[];

/// Allowed with a scratch directory.
const WRITING: &[libc::c_long] = &[
    libc::SYS_mkdirat,
    libc::SYS_unlinkat,
    libc::SYS_renameat2,
    libc::SYS_ftruncate,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_mkdir,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_rmdir,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_unlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_rename,
];

/// Refused with `EPERM` rather than missing. Calls that [`Open`] allows are taken out again.
const REFUSED: &[libc::c_long] = &[
    libc::SYS_socket,
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_sendmsg,
    libc::SYS_sendmmsg,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_send_signal,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_setsid,
    libc::SYS_setpgid,
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setresuid,
    libc::SYS_bpf,
    libc::SYS_io_uring_setup,
    libc::SYS_kexec_load,
    libc::SYS_memfd_create,
    libc::SYS_shmget,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchownat,
    libc::SYS_truncate,
    libc::SYS_mkdirat,
    libc::SYS_unlinkat,
    libc::SYS_linkat,
    libc::SYS_symlinkat,
    libc::SYS_clone,
    libc::SYS_kill,
    libc::SYS_tkill,
    libc::SYS_tgkill,
    libc::SYS_seccomp,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_fork,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_vfork,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_mkdir,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_rmdir,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_unlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chmod,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_symlink,
];

/// New namespaces, which a clone must not make.
const NEW_NAMESPACES: libc::c_int = libc::CLONE_NEWNS
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWCGROUP;

/// `prctl` options: a thread's name, and naming memory, which C libraries do.
const PRCTL: [u64; 3] = [15, 16, 0x5356_4d41];

/// `ioctl` requests: is it a terminal, close on exec, bytes to read.
const IOCTL: [u64; 4] = [0x5401, 0x5450, 0x5451, 0x541b];

/// Puts the filters on this process, for good.
///
/// # Errors
/// Says what the kernel, or the compiler of filters, refused.
pub(super) fn restrict(open: Open) -> Result<(), String> {
    let compiled = compile(open).map_err(|e| e.to_string())?;
    compiled.iter().try_for_each(|filter| seccompiler::apply_filter(filter)).map_err(|error| {
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        format!("{error}{}", cause.map(|c| format!(": {c}")).unwrap_or_default())
    })
}

/// The allowing filter, which still lets `seccomp` through, and the refusing one, which does not.
/// Where both object, the kernel takes the answer of the one put on last (seccomp(2)).
fn compile(open: Open) -> Result<[BpfProgram; 2], seccompiler::BackendError> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    let allowed = allowed(open)?;
    let refused: Rules =
        REFUSED.iter().filter(|call| !allowed.contains_key(call)).map(|&c| (c, vec![])).collect();
    // A call allowed under conditions must not be refused outright by the second filter: failing
    // its conditions, it is missing (`ENOSYS`).
    let mut first = allowed;
    let enosys = SeccompAction::Errno(libc::ENOSYS as u32);
    let eperm = SeccompAction::Errno(libc::EPERM as u32);
    first.insert(libc::SYS_seccomp, vec![]);
    let mut second = refused;
    second.insert(libc::SYS_seccomp, vec![]);
    if open.threads && !open.processes {
        second.insert(libc::SYS_clone, vec![clone_flags(libc::CLONE_THREAD, 0)?]);
    }
    Ok([
        SeccompFilter::new(first, enosys, SeccompAction::Allow, arch)?.try_into()?,
        SeccompFilter::new(second, SeccompAction::Allow, eperm, arch)?.try_into()?,
    ])
}

fn allowed(open: Open) -> Result<Rules, seccompiler::BackendError> {
    let mut rules: Rules = ALLOWED.iter().chain(ALLOWED_OLD).map(|&call| (call, vec![])).collect();
    if open.writing {
        rules.extend(WRITING.iter().map(|&call| (call, vec![])));
    }
    if open.signals {
        let calls = [libc::SYS_kill, libc::SYS_tkill, libc::SYS_tgkill];
        rules.extend(calls.map(|call| (call, vec![])));
    }
    let is = |argument, value| when(argument, SeccompCmpOp::Eq, value);
    // Its own limits (pid 0): they can only go down.
    rules.insert(libc::SYS_prlimit64, vec![is(0, 0)?]);
    // 38 is PR_SET_NO_NEW_PRIVS, which `apply_filter` sets again before the second filter.
    let options = PRCTL.into_iter().chain([38]).map(|option| is(0, option));
    rules.insert(libc::SYS_prctl, options.collect::<Result<_, _>>()?);
    rules.insert(libc::SYS_ioctl, IOCTL.map(|r| is(1, r)).into_iter().collect::<Result<_, _>>()?);
    // What asyncio wakes itself with: a connected pair, and sending without an address.
    rules.insert(libc::SYS_socketpair, vec![is(0, libc::AF_UNIX as u64)?]);
    rules.insert(libc::SYS_sendto, vec![is(4, 0)?]);
    // Threads and processes. `clone3` hides its flags in memory, so it does not exist.
    if open.processes {
        rules.insert(libc::SYS_clone, vec![clone_flags(NEW_NAMESPACES, 0)?]);
        #[cfg(target_arch = "x86_64")]
        rules.extend([libc::SYS_fork, libc::SYS_vfork].map(|call| (call, vec![])));
        rules.extend([libc::SYS_setsid, libc::SYS_setpgid].map(|call| (call, vec![])));
    } else if open.threads {
        let thread = libc::CLONE_THREAD;
        rules.insert(libc::SYS_clone, vec![clone_flags(thread, thread)?]);
    }
    Ok(rules)
}

/// The flags under `mask` are `value`.
fn clone_flags(
    mask: libc::c_int,
    value: libc::c_int,
) -> Result<SeccompRule, seccompiler::BackendError> {
    when(0, SeccompCmpOp::MaskedEq(u64::from(mask as u32)), value as u64)
}

fn when(
    argument: u8,
    operator: SeccompCmpOp,
    value: u64,
) -> Result<SeccompRule, seccompiler::BackendError> {
    // Numbers are read as the 32 bits that the kernel uses; addresses must be compared whole.
    let width = if argument == 4 { SeccompCmpArgLen::Qword } else { SeccompCmpArgLen::Dword };
    SeccompRule::new(vec![SeccompCondition::new(argument, width, operator, value)?])
}
