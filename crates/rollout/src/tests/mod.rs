//! The scheduler against the real ledger and the fake engine.

mod feedback;
mod flow;
mod groups;
mod world;
