//! Hone serves a language model and hones it on what its users reward.
//!
//! ```text
//!             clients (OpenAI SDKs)                       graders, users
//!                   |  chat completions                         |  feedback
//!                   v                                           v
//!   http  ->  engine (mistral.rs, policy version v)  ->  store (redb ledger)  <-  reward
//!                   ^        |  shadow groups                   |
//!                   |        +---------- rollout <--------------+
//!                   |                                           v
//!                policy  <-  adapter v+1  <-  train (candle, GRPO, LoRA)
//! ```
//!
//! Who may import whom (`tests/architecture.rs` holds this; there are no cycles): everyone may use
//! [`types`], [`telemetry`] and [`config`]'s structs. [`engine`], [`store`] and [`dataset`] import
//! nothing further. [`reward`] imports store. [`rollout`] imports engine, store, reward and dataset.
//! [`policy`] imports engine (for publishing) and store. [`train`] imports engine's model directory,
//! store, reward's routes (for weights) and policy. [`native`] imports engine (trait, sampler, codec)
//! and train (model, lora). [`http`] imports all of those; [`app`],
//! [`demo`], [`runs`] and [`mod@bench`] everything.

pub mod app;
pub mod bench;
pub mod cli;
pub mod config;
pub mod dataset;
pub mod demo;
pub mod engine;
pub mod http;
pub mod native;
pub mod policy;
pub mod reward;
pub mod rollout;
pub mod runs;
pub mod store;
pub mod telemetry;
pub mod train;
pub mod types;
