//! Resident memory of this process, from Linux's `/proc/self`. Every value is 0 on other systems.
//! [`trim`] reduces it.

use std::fs;

/// Bytes of memory that are resident now.
pub fn resident() -> u64 {
    status("VmRSS:")
}

/// Largest number of resident bytes since the process started, or since [`reset_peak`].
pub fn peak_resident() -> u64 {
    status("VmHWM:")
}

/// Sets [`peak_resident`] to the current value (`/proc/pid/clear_refs` in proc(5)). Returns whether
/// the system allowed it.
pub fn reset_peak() -> bool {
    fs::write("/proc/self/clear_refs", "5").is_ok()
}

/// Returns freed pages to the operating system. glibc keeps them for later allocations; with another
/// C library this does nothing. Stops all threads that allocate meanwhile.
pub fn trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: malloc_trim takes no pointer and may be called at any time from any thread.
        unsafe { libc::malloc_trim(0) };
    }
}

/// The bytes of an entry of `/proc/self/status` that is given in kB.
fn status(key: &str) -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default();
    line.split_whitespace().next().and_then(|kb| kb.parse::<u64>().ok()).unwrap_or_default() << 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn touched_memory_is_resident() {
        // Other tests allocate and free at the same time, so only this block is certain.
        let block = std::hint::black_box(vec![1_u8; 64 << 20]);
        assert!(resident() >= 64 << 20, "{}", resident());
        assert!(peak_resident() >= 64 << 20, "{}", peak_resident());
        drop(block);
        trim();
    }
}
