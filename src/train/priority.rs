//! Which threads give way.

/// Lets the kernel prefer the serving threads over this one.
pub(crate) fn lower_priority(nice: i32) {
    #[cfg(target_os = "linux")]
    if nice > 0 {
        // SAFETY: setpriority takes three integers and touches no memory of ours; on Linux,
        // PRIO_PROCESS with id 0 concerns the calling thread alone.
        let failed = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) } != 0;
        if failed {
            tracing::warn!(nice, "a thread's priority could not be lowered");
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _unsupported = nice;
}
