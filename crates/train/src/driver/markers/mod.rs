//! Durable markers of what the trainer has begun, beside its checkpoints.

mod activation;
mod attempt;

pub(super) use activation::ActivationMarker;
pub(super) use attempt::{AttemptMarker, StepAttempt};
