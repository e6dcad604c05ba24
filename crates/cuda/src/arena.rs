//! Device memory by a plan: one allocation for each purpose, in named regions.
//!
//! A plan is checked against the free memory of the device before anything is allocated, so that a model that
//! does not fit is refused at the start, with figures. Nothing is allocated later, which captured graphs need.

use std::sync::Arc;

use crate::error::{GpuError, Result, mib};

/// Regions begin at multiples of this number of bytes, which suits all loads and cuBLASLt.
const ALIGNMENT: u64 = 256;

/// Where allocations come from: a device, or a fake one in tests.
pub trait DeviceMemory {
    /// Bytes that can be allocated.
    ///
    /// # Errors
    /// If the device does not answer.
    fn free_bytes(&self) -> Result<u64>;

    /// Allocates `bytes` and returns their address.
    ///
    /// # Errors
    /// If the device refuses.
    fn allocate(&self, bytes: u64) -> Result<u64>;

    /// Frees what [`Self::allocate`] returned. Errors are for the device's next call.
    fn release(&self, address: u64);
}

/// What one purpose needs, in named regions.
#[derive(Clone, Debug, Default)]
pub struct ArenaPlan {
    purpose: String,
    /// Name, first byte and bytes.
    regions: Vec<(String, u64, u64)>,
    total: u64,
}

impl ArenaPlan {
    /// A plan without regions.
    pub fn new(purpose: &str) -> Self {
        Self { purpose: purpose.to_owned(), ..Self::default() }
    }

    /// Adds a region.
    pub fn add(&mut self, name: &str, bytes: u64) {
        self.regions.push((name.to_owned(), self.total, bytes));
        let aligned = bytes.checked_next_multiple_of(ALIGNMENT).unwrap_or(u64::MAX);
        self.total = self.total.saturating_add(aligned);
    }

    /// What the memory is for.
    pub fn purpose(&self) -> &str {
        &self.purpose
    }

    /// Bytes of all regions.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Refuses plans that do not fit into `free` bytes, of which `reserve` bytes are left for the driver, other
    /// libraries and other processes.
    ///
    /// # Errors
    /// With the figures of each plan.
    pub fn check(plans: &[Self], free: u64, reserve: u64) -> Result<()> {
        let needed = plans.iter().fold(0, |sum: u64, plan| sum.saturating_add(plan.total));
        let available = free.saturating_sub(reserve);
        if needed <= available {
            return Ok(());
        }
        let part = |plan: &Self| format!("{} {}", plan.purpose, mib(plan.total));
        let parts = plans.iter().map(part).collect::<Vec<_>>().join(", ");
        let reserved = match reserve {
            0 => String::new(),
            reserve => format!(" beside a reserve of {}", mib(reserve)),
        };
        Err(GpuError::PlanTooLarge { needed, available, reserved, parts })
    }
}

/// Bytes on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaRegion {
    /// Address of the first byte.
    pub address: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// The memory of a plan. It is freed when the arena is dropped.
#[derive(Debug)]
pub struct Arena<M: DeviceMemory> {
    memory: Arc<M>,
    plan: ArenaPlan,
    address: u64,
}

impl<M: DeviceMemory> Arena<M> {
    /// Allocates all plans, or none: before the first allocation [`ArenaPlan::check`] compares their sum with the free
    /// memory.
    ///
    /// # Errors
    /// If the plans do not fit, with the figures of each, or the device refuses.
    pub fn allocate(memory: &Arc<M>, plans: Vec<ArenaPlan>, reserve: u64) -> Result<Vec<Self>> {
        ArenaPlan::check(&plans, memory.free_bytes()?, reserve)?;
        let open = |plan: ArenaPlan| {
            // An empty allocation is an error to the driver.
            let address = memory.allocate(plan.total.max(ALIGNMENT))?;
            Ok(Self { memory: Arc::clone(memory), plan, address })
        };
        plans.into_iter().map(open).collect()
    }

    /// The region of this name.
    ///
    /// # Errors
    /// If the plan has none.
    pub fn region(&self, name: &str) -> Result<ArenaRegion> {
        let found = self.plan.regions.iter().find(|region| region.0 == name);
        let (_, first, bytes) = found.ok_or_else(|| {
            GpuError::Misuse(format!("no region `{name}` in the memory of {}", self.plan.purpose))
        })?;
        Ok(ArenaRegion { address: self.address + first, bytes: *bytes })
    }
}

impl<M: DeviceMemory> Drop for Arena<M> {
    fn drop(&mut self) {
        self.memory.release(self.address);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Mutex;

    use super::*;

    /// Counts what is allocated; refuses more than it has, and allocation number `fails_at`.
    #[derive(Debug)]
    struct CountingMemory {
        total: u64,
        fails_at: usize,
        state: Mutex<(usize, BTreeMap<u64, u64>)>,
    }

    impl CountingMemory {
        fn new(total: u64, fails_at: usize) -> Arc<Self> {
            Arc::new(Self { total, fails_at, state: Mutex::default() })
        }

        fn used(&self) -> u64 {
            self.state.lock().unwrap().1.values().sum()
        }
    }

    impl DeviceMemory for CountingMemory {
        fn free_bytes(&self) -> Result<u64> {
            Ok(self.total - self.used())
        }

        fn allocate(&self, bytes: u64) -> Result<u64> {
            let free = self.free_bytes()?;
            let (count, live) = &mut *self.state.lock().unwrap();
            *count += 1;
            if bytes > free || *count == self.fails_at {
                return Err(GpuError::Misuse("out of memory".into()));
            }
            let address = *count as u64 * (1 << 40);
            live.insert(address, bytes);
            Ok(address)
        }

        fn release(&self, address: u64) {
            let known = self.state.lock().unwrap().1.remove(&address);
            assert!(known.is_some(), "{address} was freed twice");
        }
    }

    fn plan(purpose: &str, regions: &[(&str, u64)]) -> ArenaPlan {
        let mut plan = ArenaPlan::new(purpose);
        regions.iter().for_each(|(name, bytes)| plan.add(name, *bytes));
        plan
    }

    #[test]
    fn regions_are_aligned_and_apart() {
        let memory = CountingMemory::new(10_000, 0);
        let plans = vec![plan("pages", &[("keys", 1), ("none", 0), ("values", 300)])];
        let arena = &Arena::allocate(&memory, plans, 0).unwrap()[0];
        let [keys, none, values] = ["keys", "none", "values"].map(|n| arena.region(n).unwrap());
        assert_eq!([keys.bytes, none.bytes, values.bytes], [1, 0, 300]);
        assert_eq!([keys.address % 256, values.address - keys.address], [0, 256]);
        assert_eq!(memory.used(), 768);
        let error = arena.region("scores").unwrap_err().to_string();
        assert_eq!(error, "no region `scores` in the memory of pages");
    }

    #[test]
    fn a_plan_that_does_not_fit_is_refused_with_figures() {
        let memory = CountingMemory::new(10 << 20, 0);
        let plans =
            || vec![plan("weights", &[("all", 8 << 20)]), plan("pages", &[("all", 1 << 20)])];
        let error = Arena::allocate(&memory, plans(), 3 << 19).unwrap_err().to_string();
        let expected = "9.0 MiB of device memory are needed, but 8.5 MiB are free beside a reserve of 1.5 MiB: \
                        weights 8.0 MiB, pages 1.0 MiB";
        assert_eq!((error.as_str(), memory.used()), (expected, 0));
        let huge = vec![plan("pages", &[("all", u64::MAX / 2), ("more", u64::MAX / 2 + 9)])];
        assert!(matches!(
            Arena::allocate(&memory, huge, 0),
            Err(GpuError::PlanTooLarge { needed: u64::MAX, .. })
        ));
        assert_eq!(Arena::allocate(&memory, plans(), 0).unwrap().len(), 2);
    }

    #[test]
    fn swaps_leak_nothing() {
        let memory = CountingMemory::new(4_096, 0);
        let adapter = || vec![plan("adapter", &[("a", 700), ("b", 700)])];
        let mut served = Arena::allocate(&memory, adapter(), 0).unwrap();
        for _ in 0..1_000 {
            served = Arena::allocate(&memory, adapter(), 0).unwrap();
            assert_eq!(memory.used(), 1_536);
        }
        drop(served);
        assert_eq!((memory.used(), memory.state.lock().unwrap().0), (0, 1_001));
        // What was allocated before a failure is freed.
        let memory = CountingMemory::new(4_096, 2);
        assert!(Arena::allocate(&memory, [adapter(), adapter()].concat(), 0).is_err());
        assert_eq!(memory.used(), 0);
    }
}
