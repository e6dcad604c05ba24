//! TODO

pub(crate) mod adaptive_weights;
pub mod advantage;
pub(crate) mod batch_builder;
pub(crate) mod feedback_cap;
pub(crate) mod packing;
