//! Rewards: named, weighted parts that score completions, and the routes that select them.
//!
//! A route's reward has parts of two sorts. A *grader* computes a value from a completion; a
//! *feedback* part takes the values that clients post. [`kinds`] lists every kind of part with its
//! parameters and documentation. [`Routes`] is built once from the configuration: it matches a
//! request to a [`Route`], whose graders then score any completion.
//!
//! # Tasks and threads
//!
//! The crate keeps no task or thread of its own. [`Route::grade`] runs a route's graders
//! concurrently within the caller's task. Most compute at once; webhooks, judges and model graders
//! wake on the HTTP answer or on the timer of a retry, Python on the exit of its sandbox process.
//!
//! # Guarantees
//!
//! - A sample that cannot be scored has the value `None`, never 0.
//! - [`Route::grade`] returns one value per sample and part, in order; every value is finite.
//! - Scoring never panics across that boundary: a grader that panics loses its own values only.
//! - What cannot work (a pattern, a formula, a missing sandbox) is refused when the routes are
//!   built; the error names the route, the part and the key.

pub mod code;
pub mod feedback;
pub mod grader;
pub mod judge;
pub mod kinds;
mod math;
mod remote;
mod reward_fn;
pub mod routes;
pub mod sandbox;
pub mod text;
pub mod tools;
pub mod webhook;

pub use kinds::{KindEntry, catalogue};
pub use remote::{CallError, CallLimits};
pub use reward_fn::{RewardFn, ScoreInput, record};
pub use routes::{
    AdaptiveState, AdaptiveWeight, MissingPart, PartCoverage, RewardError, RewardPart, Route,
    Routes,
};
pub use tools::{GraderEndpoint, LazySandbox, Tools};
