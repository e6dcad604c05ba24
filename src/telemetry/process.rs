//! What the system tells of this process. Figures that it does not tell are 0.

use std::fs;

/// A line of `/proc/self/status` that is in kB, in bytes.
fn status(key: &str) -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default();
    line.split_whitespace().next().and_then(|kb| kb.parse::<u64>().ok()).unwrap_or_default() << 10
}

/// Bytes of memory that are resident now.
pub fn resident() -> u64 {
    status("VmRSS:")
}

/// The most bytes that have been resident since the start, or since [`reset_peak`].
pub fn peak_resident() -> u64 {
    status("VmHWM:")
}

/// Starts [`peak_resident`] anew from what is resident now; whether the system allowed it (see
/// `/proc/pid/clear_refs` in proc(5)).
pub fn reset_peak() -> bool {
    fs::write("/proc/self/clear_refs", "5").is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn memory_that_is_touched_shows() {
        // Other tests take and give memory meanwhile, so only what this one holds is sure.
        let block = std::hint::black_box(vec![1_u8; 64 << 20]);
        assert!(resident() >= 64 << 20, "{}", resident());
        assert!(peak_resident() >= 64 << 20, "{}", peak_resident());
        drop(block);
    }
}
