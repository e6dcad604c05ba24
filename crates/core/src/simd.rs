//! Runs a loop with the widest vector instructions of the processor.
//!
//! Hone is compiled for any x86-64 (SSE2) or AArch64 (NEON) processor. [`dispatch`] compiles a
//! [`SimdTask`] once for each instruction set that [`pulp`] knows (SSE2, AVX2 and AVX-512 on
//! x86-64) and selects one at run time.

use pulp::{Arch, Simd, WithSimd};

/// A loop worth vectorizing.
///
/// Mark `run` and what it calls `#[inline(always)]`: the compiler vectorizes only what is inlined
/// into the function that enables the instructions.
pub trait SimdTask {
    /// The result of the loop.
    type Output;

    /// Runs the loop. `FUSED` is true where `f32::mul_add` is one instruction. A loop that ignores
    /// it and uses no `mul_add` gives the same bits on every processor, because Rust never
    /// contracts a product and a sum by itself.
    fn run<const FUSED: bool>(self) -> Self::Output;
}

/// `a b + c`, rounded once if `FUSED`.
#[inline(always)]
pub fn mul_add<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// A task in the form that [`pulp`] compiles for each instruction set.
pub(crate) struct Vectorized<T>(pub T);

impl<T: SimdTask> WithSimd for Vectorized<T> {
    type Output = T::Output;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> T::Output {
        if S::IS_SCALAR { self.0.run::<false>() } else { self.0.run::<true>() }
    }
}

/// Runs `task` with the widest vectors of the processor.
pub fn dispatch<T: SimdTask>(task: T) -> T::Output {
    Arch::new().dispatch(Vectorized(task))
}
