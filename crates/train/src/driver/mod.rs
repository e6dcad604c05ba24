//! TODO

pub(crate) mod handle;
mod progress;
mod publication;
mod reporting;
mod trainer;
pub(crate) mod worker;
