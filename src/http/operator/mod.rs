//! What operators and their tools use: `/admin`, the probes and the metrics.
//!
//! `control` has the daemon's parts as traits that the routes act on.

pub(super) mod admin;
pub(super) mod control;
pub(super) mod health;
