//! A differentiable decoder-only transformer.
//!
//! One block serves every model family; [`ModelSpec`](crate::ModelSpec) selects its options. Weights
//! are tensors under Hugging Face names. They are constants for a frozen base; tensors of `Var`s are
//! trained.
//!
//! Sequences are packed end to end without padding, and sequences with the same beginning may share
//! it ([`Segments`]). [`Model::forward_saving`] and [`Model::backward`] go layer by layer, so that a
//! layer's activations can be recomputed instead of kept. A frozen base on the CPU uses fused kernels;
//! everything else uses candle graphs.

mod attention;
mod block;
mod fused_layer;
mod head;
mod layers;
mod model;
mod segments;
mod token_stats;

pub use block::Block;
pub use head::{head_packed_values, head_upcast_values, logits_in_memory};
pub use model::{Model, SavedActivations};
pub use segments::{Segment, Segments};
pub use token_stats::token_stats;

#[cfg(test)]
mod tests;
