//! The configuration: its keys and defaults, and how it is loaded and validated.
//!
//! Invariant: only [`load`] reads the environment; every other module receives its section as a
//! struct. `configs/default.toml` contains each key with its default; a test compares both.

mod effective;
mod load;
mod run;
mod schema;
mod server;
mod trl;
mod validate;

pub use effective::{differences, effective};
pub use load::{environment_names, load, load_from, parse};
pub use run::{EarlyStopConfig, RunConfig};
pub use schema::{Config, DataConfig, LogConfig, LogFormat, ModelConfig};
pub use server::{
    ConnectionsConfig, GraderLimits, KeyConfig, KeyExpiry, KeyHash, KeyLimits, KeyScope,
    ServerConfig, TlsConfig, hash_key,
};
pub use trl::{Counterpart, counterpart, trl_names};
pub use validate::{ConfigError, validate};

#[cfg(test)]
mod tests;
