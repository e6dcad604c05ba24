//! Resident memory, the cache's part of it, and the plan that the daemon printed at its start.

use std::fmt;

use serde::Serialize;

use hone_core::memory::{peak_resident, resident};

use crate::demo::client::Scrape;

const MIB: f64 = (1 << 20) as f64;

/// Parts of the plan that are caches.
const CACHES: [&str; 4] = ["ledger cache", "kept adapters", "sampler cache", "conversations"];

/// Parts of the plan that are activations: of passes of the native engine, and of a step.
const ACTIVATIONS: [&str; 4] =
    ["sampler buffers", "layer inputs", "kept activations", "one layer or logits"];

/// Resident memory at one moment, in MiB.
#[derive(Clone, Copy, Debug)]
pub(super) struct MemoryReading {
    /// Of the whole process.
    pub resident: f64,
    /// Of the pages of the native engine's cache that sequences use or that are kept.
    pub cache: f64,
}

impl MemoryReading {
    pub fn now(scrape: &Scrape) -> Self {
        let pages = scrape.value("hone_engine_cache_pages").unwrap_or(0.0);
        let capacity = scrape.value("hone_engine_cache_capacity_pages").unwrap_or(0.0).max(1.0);
        let planned = planned(scrape, &["sampler cache"]);
        Self { resident: resident() as f64 / MIB, cache: planned * pages / capacity }
    }

    /// Resident memory without the cache's pages.
    pub fn outside(&self) -> f64 {
        self.resident - self.cache
    }
}

/// The process's memory, its clients and their threads included, in MiB.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryStats {
    /// Largest resident memory since the start of the process.
    pub resident_peak_mib: f64,
    /// The peak of the plan.
    pub planned_peak_mib: f64,
    /// The weights as they are stored.
    pub base_mib: f64,
    /// The planned caches.
    pub caches_mib: f64,
    /// The planned activations.
    pub activations_mib: f64,
    /// The planned cache of keys and values of the native engine, and its pages in use or kept at the end.
    /// The plan counts all of it.
    pub sampler_cache_mib: [f64; 2],
}

impl MemoryStats {
    pub(super) fn now(scrape: &Scrape) -> Self {
        Self {
            resident_peak_mib: peak_resident() as f64 / MIB,
            planned_peak_mib: scrape.value("hone_memory_planned_peak_bytes").unwrap_or(0.0) / MIB,
            base_mib: planned(scrape, &["base weights"]),
            caches_mib: planned(scrape, &CACHES),
            activations_mib: planned(scrape, &ACTIVATIONS),
            sampler_cache_mib: [
                planned(scrape, &["sampler cache"]),
                MemoryReading::now(scrape).cache,
            ],
        }
    }
}

/// Planned parts together, in MiB.
fn planned(scrape: &Scrape, parts: &[&str]) -> f64 {
    parts.iter().map(|part| scrape.labelled("hone_memory_planned_bytes", part)).sum::<f64>() / MIB
}

impl fmt::Display for MemoryStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { resident_peak_mib, planned_peak_mib, .. } = self;
        let Self { base_mib, caches_mib, activations_mib, .. } = self;
        let [cache, filled] = self.sampler_cache_mib;
        writeln!(
            f,
            "memory               {resident_peak_mib:.0} MiB at most, {:.2} of {planned_peak_mib:.0} planned; \
             {:.2} times base {base_mib:.0}, caches {caches_mib:.0} and activations {activations_mib:.0}",
            resident_peak_mib / planned_peak_mib,
            resident_peak_mib / (base_mib + caches_mib + activations_mib)
        )?;
        write!(f, "  sampler cache      {filled:.0} of {cache:.0} planned MiB hold something")
    }
}

#[cfg(test)]
mod tests {
    use hone_core::metrics::Metrics;

    use super::*;

    #[test]
    fn the_plan_and_the_cache_are_read_from_the_metrics() {
        let metrics = Metrics::new().unwrap();
        let parts = [("base weights", 100), ("sampler cache", 64), ("ledger cache", 8)];
        for (part, mib) in parts.into_iter().chain([("one layer or logits", 3), ("gradients", 7)]) {
            metrics.memory_planned.with_label_values(&[part]).set(mib << 20);
        }
        metrics.memory_planned_peak.set(200 << 20);
        metrics.engine_cache_capacity.set(64);
        metrics.engine_cache_pages.with_label_values(&["used"]).set(3);
        metrics.engine_cache_pages.with_label_values(&["cached"]).set(13);
        let scrape = Scrape::new(metrics.encode().unwrap());
        let stats = MemoryStats::now(&scrape);
        assert_eq!(
            [stats.planned_peak_mib, stats.base_mib, stats.caches_mib, stats.activations_mib],
            [200.0, 100.0, 72.0, 3.0]
        );
        assert_eq!(stats.sampler_cache_mib, [64.0, 16.0]);
        let reading = MemoryReading::now(&scrape);
        assert_eq!(reading.cache, 16.0);
        assert_eq!(reading.outside(), reading.resident - 16.0);
    }
}
