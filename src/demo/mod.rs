//! STUB.

pub mod embedded;
pub mod task;
