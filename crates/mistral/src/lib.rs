//! mistral.rs behind the [`Engine`](hone_engine::Engine) and [`Publisher`](hone_engine::Publisher)
//! traits, with hot swaps of policy versions.
//!
//! This is the only crate that links mistral.rs.

mod engine;
mod hot_swap;

pub use engine::MistralEngine;
