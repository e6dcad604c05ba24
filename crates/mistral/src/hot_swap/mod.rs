//! Loads pipelines and swaps them into running engines.

mod adapter;
mod loader;
mod swap;

pub(crate) use adapter::Adapter;
pub(crate) use loader::PipelineLoader;
pub(crate) use swap::SwapPipeline;
