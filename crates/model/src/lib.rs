//! The transformer, its LoRA adapters and the embedded model.
//!
//! Trainer and sampler share this crate: both compute with the same frozen base and the same
//! adapters.

pub mod adapter;
pub mod embedded;
pub mod error;
pub mod files;
pub mod kernels;
pub mod spec;
pub mod testing;
pub mod transformer;

pub use error::{ModelError, Result};
pub use spec::ModelSpec;
pub use transformer::Model;
