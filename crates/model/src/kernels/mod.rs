//! CPU kernels of the transformer over plain slices, and candle graphs of the same operations.

pub mod compute;
pub mod exp;
pub(crate) mod float;
pub(crate) mod linear;
pub mod matmul;
pub(crate) mod ops;
pub mod parallel;
pub(crate) mod reductions;
pub(crate) mod rowwise;
pub mod storage;
#[cfg(target_arch = "x86_64")]
pub mod transpose;
