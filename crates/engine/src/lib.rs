//! Token generation: the traits between Hone and the code that computes logits, and everything that
//! all implementations share.
//!
//! [`Engine`] generates tokens and [`Publisher`] changes the policy version that an engine serves.
//! `hone-mistral` implements both on mistral.rs, `hone-sampler` implements them natively, and
//! [`FakeEngine`] implements them without a model for tests. [`ModelDir`] reads a model directory and
//! [`Codec`] translates between messages and token ids. [`admission`] schedules slots, [`sampling`]
//! draws tokens from logits, [`grammar`] constrains them, and [`run`] turns drawn tokens into the events
//! of a [`Generation`]. [`tools`] has the formats of calls, and [`answer`] divides an answer into reasoning,
//! text and calls.
//!
//! # Threads and tasks
//!
//! Only [`FakeEngine`] starts tasks, one for each generation, and [`Codec::compile_grammar`] a thread for
//! each grammar that is not known. Elsewhere the implementation's own
//! threads compute logits and push tokens into a [`run::GenerationRun`]. They never wait for a
//! reader, because the channel holds every event of a generation. A caller of [`Engine::generate`]
//! waits for a slot; the end of another generation, an activation or the shutdown wakes it.
//!
//! # Guarantees
//!
//! - A request is pinned to one policy version by its lease: all tokens of a [`Generation`] come
//!   from `Generation::version`. Publishing never fails, delays or alters a running generation.
//! - Log-probabilities are natural logarithms under the behavior policy: after penalties, biases,
//!   temperature, grammar and truncation. At temperature 0 they are those of `softmax(logits)` of the
//!   tokens that the grammar permits.
//! - The seed, the parameters and the logits determine the sampled tokens.
//! - Live requests go before shadow requests, and may preempt running ones. The queue of live
//!   requests is bounded, also for each API key, and API keys take turns in it.
//! - Dropping a [`Generation`] cancels it and frees its slot.

pub mod admission;
pub mod answer;
mod api;
pub mod codec;
mod config;
mod error;
pub mod grammar;
pub mod run;
pub mod sampling;
pub mod template;
pub mod testing;
pub mod tools;

pub use api::{
    Completion, Engine, EngineLoad, Event, GenerateRequest, Generation, ModelInfo, Priority, Probe,
    Publisher, Token, TokenRecords,
};
pub use codec::{Codec, TextStream};
pub use config::{EngineBackend, EngineConfig};
pub use error::{EngineError, SampleError};
pub use grammar::{CompiledGrammar, GrammarError};
pub use hone_model::ModelDir;
pub use testing::FakeEngine;
pub use tools::ToolFormat;
