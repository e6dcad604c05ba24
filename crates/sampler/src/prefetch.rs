//! Hints to the processor's caches.

/// Values of f32 in a cache line.
pub(crate) const CACHE_LINE: usize = 16;

/// Starts to load the cache line at this address, which may be any, into the second-level cache.
#[inline(always)]
pub(crate) fn prefetch<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a prefetch is a hint that neither reads memory nor faults, for any address; every
        // x86-64 processor has it (SSE).
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
