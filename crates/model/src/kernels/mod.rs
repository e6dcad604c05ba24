//! CPU kernels of the transformer: loops over slices, matrix products, and their dispatch to the
//! vector instructions of the processor.

pub mod custom_op;
pub mod float;
pub mod linear;
pub mod matmul;
pub mod ops;
pub mod parallel;
pub mod rowwise;
pub mod simd;
