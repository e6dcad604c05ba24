//! Compares a [`MemoryPlan`] with the available memory.

use std::fs;

use hone_model::ModelSpec;

use super::{BaseMemory, MemoryPlan};
use crate::config::{Recompute, TrainConfig};
use crate::error::{LearnError, Result};

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

/// Checks that a run fits into `available` bytes. If the base weights are already loaded, they do
/// not count.
///
/// # Errors
/// [`LearnError::Memory`] with the needed and the available memory, and what the same run needs if
/// it recomputes every layer.
pub(crate) fn check_memory(
    spec: &ModelSpec,
    base: BaseMemory,
    config: &TrainConfig,
    threads: usize,
    available: usize,
    base_is_loaded: bool,
) -> Result<()> {
    let needed = |config: &TrainConfig| {
        let plan = MemoryPlan::new(spec, base, config, threads, 0);
        plan.total() - if base_is_loaded { plan.base } else { 0 }
    };
    let planned = needed(config);
    if planned <= available {
        return Ok(());
    }
    let least = needed(&TrainConfig { recompute: Recompute::Always, ..config.clone() });
    let mib = |bytes: usize| bytes.div_ceil(1 << 20);
    Err(LearnError::Memory { needed: mib(planned), available: available >> 20, least: mib(least) })
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use hone_model::adapter::BaseDtype;
    use hone_model::testing::tiny_spec;

    use super::*;
    use crate::testing::tiny_config;

    #[test]
    fn available_memory_is_the_minimum_of_system_and_control_group() {
        let meminfo = "MemTotal:  24000 kB\nMemAvailable:    1000 kB\n";
        assert_eq!(available(meminfo, "", ""), Some(1_024_000));
        assert_eq!(available(meminfo, "max\n", "5000\n"), Some(1_024_000));
        assert_eq!(available(meminfo, "500000\n", "100000\n"), Some(400_000));
        assert_eq!(available("", "500000\n", "600000\n"), Some(0));
        assert_eq!(available("", "max\n", "5\n"), None);
    }

    #[test]
    fn a_run_that_does_not_fit_is_refused_with_the_needed_memory() {
        let (spec, config) = (tiny_spec(), tiny_config());
        let base = BaseMemory::new(&spec, BaseDtype::Auto, |_| Ok(DType::F32)).unwrap();
        let total = MemoryPlan::new(&spec, base, &config, 1, 0).total();
        check_memory(&spec, base, &config, 1, total, false).unwrap();
        let refused = check_memory(&spec, base, &config, 1, total - 1, false).unwrap_err();
        check_memory(&spec, base, &config, 1, total - 1, true).unwrap();
        let LearnError::Memory { needed, least, .. } = &refused else {
            panic!("{refused}");
        };
        assert_eq!(*needed, total.div_ceil(1 << 20));
        assert!(least <= needed);
        assert!(refused.to_string().contains("train.recompute"), "{refused}");
    }
}
