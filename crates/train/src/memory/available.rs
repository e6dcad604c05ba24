//! The memory that the system and the process's control group leave.

use std::fs;

/// Bytes that the process can still allocate: the minimum of the system's available memory and the
/// remainder of the process's control group. `None` if the system reports neither.
pub fn available_memory() -> Option<usize> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let group = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"].map(read);
    available(&read("/proc/meminfo"), &group[0], &group[1])
}

/// [`available_memory`] from the contents of `/proc/meminfo` and of a control group's `memory.max` and
/// `memory.current` (version 2), which are empty if a file does not exist.
fn available(meminfo: &str, limit: &str, used: &str) -> Option<usize> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib: Option<usize> = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    let system = kib.map(|kib| kib << 10);
    let bytes = |text: &str| text.trim().parse::<usize>().ok();
    // Without a limit the content is `max`.
    let group = bytes(limit).zip(bytes(used)).map(|(limit, used)| limit.saturating_sub(used));
    system.into_iter().chain(group).min()
}

#[cfg(test)]
mod tests {
    use super::available;

    #[test]
    fn available_memory_is_the_minimum_of_system_and_control_group() {
        let meminfo = "MemTotal:  24000 kB\nMemAvailable:    1000 kB\n";
        assert_eq!(available(meminfo, "", ""), Some(1_024_000));
        assert_eq!(available(meminfo, "max\n", "5000\n"), Some(1_024_000));
        assert_eq!(available(meminfo, "500000\n", "100000\n"), Some(400_000));
        assert_eq!(available("", "500000\n", "600000\n"), Some(0));
        assert_eq!(available("", "max\n", "5\n"), None);
    }
}
