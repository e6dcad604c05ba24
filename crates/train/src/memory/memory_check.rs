//! Compares a [`MemoryPlan`] with the available memory.

use std::fs;

use hone_model::ModelSpec;

use super::{BaseMemory, MemoryPlan, shard_tokens};
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

/// What a run has to share the machine with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryRoom {
    /// Bytes that the process can still allocate.
    pub available: usize,
    /// Bytes that other parts of the process will need, such as the copy that a publication loads.
    pub reserved: usize,
    /// Whether the base weights are already loaded, so that they do not count.
    pub base_is_loaded: bool,
    /// Threads of the trainer's pool.
    pub threads: usize,
}

impl MemoryRoom {
    fn needed(
        &self,
        spec: &ModelSpec,
        base: BaseMemory,
        config: &TrainConfig,
        tokens: usize,
    ) -> usize {
        let plan = MemoryPlan::new(spec, base, config, self.threads, tokens);
        self.reserved + plan.total() - if self.base_is_loaded { plan.base } else { 0 }
    }

    /// The longest sample, and shard, in tokens that a step can compute: `train.max_tokens`, or what
    /// fits, at most `context`.
    ///
    /// # Errors
    /// [`LearnError::Memory`] with the needed and the available memory if `train.max_tokens` does not
    /// fit, or not even the trainer's usual shards, and what the same run needs if it recomputes every
    /// layer.
    pub fn longest_sample(
        &self,
        spec: &ModelSpec,
        base: BaseMemory,
        config: &TrainConfig,
        context: usize,
    ) -> Result<usize> {
        let wanted = config.max_tokens;
        let fits = |tokens: usize| self.needed(spec, base, config, tokens) <= self.available;
        if !fits(wanted) {
            let least = TrainConfig { recompute: Recompute::Always, ..config.clone() };
            let mib = |bytes: usize| bytes.div_ceil(1 << 20);
            return Err(LearnError::Memory {
                needed: mib(self.needed(spec, base, config, wanted)),
                available: self.available >> 20,
                least: mib(self.needed(spec, base, &least, wanted)),
            });
        }
        if wanted > 0 {
            return Ok(wanted);
        }
        // The plan grows with the tokens. The usual shards fit, so the search starts there.
        let (mut low, mut high) = (shard_tokens(spec).min(context), context);
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if fits(middle) { low = middle } else { high = middle - 1 }
        }
        Ok(low)
    }
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

    fn room(available: usize, base_is_loaded: bool) -> MemoryRoom {
        MemoryRoom { available, reserved: 0, base_is_loaded, threads: 1 }
    }

    #[test]
    fn a_run_that_does_not_fit_is_refused_with_the_needed_memory() {
        let (spec, config) = (tiny_spec(), tiny_config());
        let base = BaseMemory::new(&spec, BaseDtype::Auto, |_| Ok(DType::F32)).unwrap();
        let total = MemoryPlan::new(&spec, base, &config, 1, 0).total();
        let longest =
            |room: MemoryRoom, config: &TrainConfig| room.longest_sample(&spec, base, config, 4096);
        assert_eq!(longest(room(total, false), &config).unwrap(), 256);
        let refused = longest(room(total - 1, false), &config).unwrap_err();
        longest(room(total - 1, true), &config).unwrap();
        let LearnError::Memory { needed, least, .. } = &refused else {
            panic!("{refused}");
        };
        assert_eq!(*needed, total.div_ceil(1 << 20));
        assert!(least <= needed);
        assert!(refused.to_string().contains("train.recompute"), "{refused}");
        // What other parts will need is not available.
        let reserved = MemoryRoom { reserved: 1, ..room(total, false) };
        assert!(longest(reserved, &config).is_err());
    }

    #[test]
    fn the_longest_sample_follows_from_the_memory() {
        let (spec, config) = (tiny_spec(), tiny_config());
        let base = BaseMemory::new(&spec, BaseDtype::Auto, |_| Ok(DType::F32)).unwrap();
        let plan = |tokens| MemoryPlan::new(&spec, base, &config, 1, tokens).total();
        let longest = |available, config: &TrainConfig| {
            room(available, false).longest_sample(&spec, base, config, 4096)
        };
        for tokens in [300, 1000, 4095] {
            assert_eq!(longest(plan(tokens), &config).unwrap(), tokens);
            assert_eq!(longest(plan(tokens) - 1, &config).unwrap(), tokens - 1);
        }
        assert_eq!(longest(usize::MAX, &config).unwrap(), 4096, "the context is a bound");
        let set = TrainConfig { max_tokens: 700, ..config.clone() };
        assert_eq!(longest(plan(700), &set).unwrap(), 700);
        assert!(longest(plan(700) - 1, &set).is_err());
    }
}
