//! Rollout with a real ledger and a fake engine.

mod feedback;
mod flow;
mod groups;
mod siblings;
pub(crate) mod world;
