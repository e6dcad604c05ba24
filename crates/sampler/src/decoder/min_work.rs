//! The work that pays for another thread.

/// Least work of a thread, for each kind of parallel loop. Results do not depend on it.
#[derive(Clone, Copy, Debug)]
pub(super) struct MinWork {
    /// Multiplications with a weight. Those of a few columns count as 16, because to read a weight takes as long.
    pub weights: usize,
    /// Multiplications with an adapter, which the processors' own caches hold.
    pub adapter: usize,
    /// Multiplications of attention.
    pub attention: usize,
    /// Elements of an element-wise loop.
    pub elements: usize,
    /// Values of queries, keys and values that are written to the cache, each key to another cache line.
    pub row_values: usize,
}

impl MinWork {
    /// For threads that may have to be woken.
    pub const SLEEPING: Self = Self {
        weights: 1 << 19,
        adapter: 1 << 19,
        attention: 1 << 17,
        elements: 1 << 15,
        row_values: usize::MAX,
    };

    /// For threads that poll for work.
    pub const POLLING: Self =
        Self { adapter: 1 << 16, elements: 1 << 13, row_values: 1 << 12, ..Self::SLEEPING };

    /// All loops are parallel.
    #[cfg(test)]
    pub const NONE: Self =
        Self { weights: 1, adapter: 1, attention: 1, elements: 1, row_values: 1 };
}
