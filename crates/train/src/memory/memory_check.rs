//! Whether the machine has the memory that a [`MemoryPlan`](crate::MemoryPlan) asks for.

use std::fs;

use hone_model::ModelSpec;

use super::MemoryPlan;
use crate::config::{Recompute, TrainConfig};
use crate::error::{LearnError, Result};
use crate::memory::BaseMemory;

/// Bytes that may still be taken: what the system calls available, or, where the process's control
/// group has less left, that. `None` where the system tells neither.
pub fn available_memory() -> Option<usize> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let group = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"].map(read);
    available(&read("/proc/meminfo"), &group[0], &group[1])
}

/// From the texts of `/proc/meminfo` and of a control group's `memory.max` and `memory.current`
/// (version 2); empty ones tell nothing.
fn available(meminfo: &str, limit: &str, used: &str) -> Option<usize> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib: Option<usize> = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    let system = kib.map(|kib| kib << 10);
    let bytes = |text: &str| text.trim().parse::<usize>().ok();
    // Without a limit the file says `max`.
    let group = bytes(limit).zip(bytes(used)).map(|(limit, used)| limit.saturating_sub(used));
    match (system, group) {
        (Some(system), Some(group)) => Some(system.min(group)),
        (system, group) => system.or(group),
    }
}

/// Refuses a run that cannot fit into the bytes available, with its base or, where that is loaded,
/// without it: `threads` and shards as in [`MemoryPlan::new`].
///
/// # Errors
/// [`LearnError::Memory`] with both figures, and what the same run needs with every layer computed
/// again.
pub(crate) fn check_room(
    spec: &ModelSpec,
    base: BaseMemory,
    config: &TrainConfig,
    threads: usize,
    (available, loaded): (usize, bool),
) -> Result<()> {
    let needed = |config: &TrainConfig| {
        let plan = MemoryPlan::new(spec, base, config, threads, 0);
        plan.total() - if loaded { plan.base } else { 0 }
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
    fn the_scarcer_of_system_and_group_counts() {
        let meminfo = "MemTotal:  24000 kB\nMemAvailable:    1000 kB\n";
        assert_eq!(available(meminfo, "", ""), Some(1_024_000));
        assert_eq!(available(meminfo, "max\n", "5000\n"), Some(1_024_000));
        assert_eq!(available(meminfo, "500000\n", "100000\n"), Some(400_000));
        assert_eq!(available("", "500000\n", "600000\n"), Some(0));
        assert_eq!(available("", "max\n", "5\n"), None);
    }

    #[test]
    fn a_run_that_cannot_fit_is_refused_with_the_figures() {
        let (spec, config) = (tiny_spec(), tiny_config());
        let base = BaseMemory::new(&spec, BaseDtype::Auto, |_| Ok(DType::F32)).unwrap();
        let total = MemoryPlan::new(&spec, base, &config, 1, 0).total();
        check_room(&spec, base, &config, 1, (total, false)).unwrap();
        let refused = check_room(&spec, base, &config, 1, (total - 1, false)).unwrap_err();
        check_room(&spec, base, &config, 1, (total - 1, true)).unwrap();
        let LearnError::Memory { needed, least, .. } = &refused else {
            panic!("{refused}");
        };
        assert_eq!(*needed, total.div_ceil(1 << 20));
        assert!(least <= needed);
        assert!(refused.to_string().contains("train.recompute"), "{refused}");
    }
}
