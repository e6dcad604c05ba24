//! Loops compiled for the processor they run on.
//!
//! Unlike the trainer's, sums are fused multiply-adds wherever the processor has them. Every sum has
//! one order, so all processors that have them give the same bits.

/// A loop worth vectorising. Mark `run` `#[inline(always)]`: it must be inlined into each version.
pub(super) trait Task {
    /// What it gives.
    type Output;
    /// Runs it; `FUSED` where [`madd`] is one instruction.
    fn run<const FUSED: bool>(self) -> Self::Output;
}

/// `a b + c`
#[inline(always)]
pub(super) fn madd<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
fn with_avx512<T: Task>(task: T) -> T::Output {
    task.run::<true>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn with_avx2<T: Task>(task: T) -> T::Output {
    task.run::<true>()
}

/// Whether the processor has the parts of AVX-512 that [`dispatch`] uses.
#[cfg(target_arch = "x86_64")]
pub(super) fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512bw")
}

/// Whether the processor has AVX2 and fused multiply-adds.
#[cfg(target_arch = "x86_64")]
pub(super) fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

/// Runs a loop in the widest vectors that the processor has.
pub(super) fn dispatch<T: Task>(task: T) -> T::Output {
    #[cfg(target_arch = "x86_64")]
    {
        if has_avx512() && has_avx2() {
            // SAFETY: the processor has every feature that the function is compiled for.
            return unsafe { with_avx512(task) };
        }
        if has_avx2() {
            // SAFETY: the processor has both features.
            return unsafe { with_avx2(task) };
        }
    }
    task.run::<false>()
}
