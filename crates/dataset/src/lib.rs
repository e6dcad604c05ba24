//! Prompts from files: read, checked, split, and sampled in an order that a run can resume.
//!
//! ```text
//! file -> read -> rows -> prompt -> prompts -> split -> train -> PromptSampler -> draws
//!                                                '-> held_out       ^ rewards
//! ```
//!
//! This crate starts no thread. [`Dataset::open`] reads a file completely on the caller's thread,
//! and [`PromptSampler`] keeps everything in memory. Callers may rely on this:
//!
//! - A prompt is never both trained on and held out.
//! - The same file, configuration and saved state give the same draws.
//! - No content of a file causes a panic.

mod config;
mod curriculum;
mod dataset;
mod error;
mod prompt;
mod read;
mod sampler;

pub use config::{
    DatasetConfig, FewShot, MixConfig, OnBadRow, PromptOrder, SamplingStrategy, StageConfig,
};
pub use curriculum::{Curriculum, CurriculumStage, Filter};
pub use dataset::{Dataset, DatasetReport, check};
pub use error::{BadRow, DatasetError, RowPlace};
pub use prompt::{ANSWER, Prompt, PromptId, with_configured_context};
pub use sampler::{Draw, LiveMix, PromptOutcome, PromptSampler, PromptSamplerState};

#[cfg(test)]
mod tests;
