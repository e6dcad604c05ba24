//! Whether the processor can multiply integers.

/// Whether the processor has VNNI, and AVX-512 otherwise complete as the other kernels need it.
pub(super) fn has_instructions() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        use pulp::Arch;
        matches!(Arch::new(), Arch::V4(_)) && is_x86_feature_detected!("avx512vnni")
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}
