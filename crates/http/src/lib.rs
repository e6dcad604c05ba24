//! The HTTP surface: an OpenAI-compatible API over an [`Engine`](hone_engine::Engine), feedback,
//! and the operator's routes.
//!
//! `routes` lists every route, with the OpenAPI document, and `serve` runs them. `auth` checks keys and
//! `observe` measures and logs each request. `body` declares and reads the fields of requests. `error` alone
//! maps errors to status codes. `generate` samples for every endpoint that generates text. Each of four dialects
//! has a function `from_wire`, which makes the one internal request of a body, and a type that implements
//! `ToWire`, which makes the response of what is sampled: `chat`, `text` (completions), `responses` (OpenAI's
//! Responses) and `messages` (Anthropic's API). `stored` has the endpoints of recorded completions, `operator` those of
//! `/admin`, probes and metrics, `data` those that erase, back up and audit, `console` the page for operators and what
//! only it reads.
//!
//! Invariants: every response is JSON, except streams and `/metrics`; every error has OpenAI's shape, or
//! Anthropic's on `/v1/messages`; a completion is queued for the ledger before its last byte is sent, or
//! leaves nothing there if it is not to be stored; of an API key, only the first digits of its hash are
//! stored or logged.

mod auth;
mod body;
mod chat;
pub mod config;
mod console;
mod data;
mod error;
mod feedback;
mod generate;
mod graders;
mod messages;
mod observe;
mod operator;
mod responses;
mod routes;
mod serve;
mod state;
mod stored;
mod text;

pub use auth::KeyRing;
pub use feedback::posted::rate as count_evidence;
pub use routes::router;
pub use serve::{Startup, Tls, serve};
pub use state::{
    AppState, DiskLimit, FleetLink, LearningLimits, PolicyControl, ServedSink, ShareErasure,
    TrainControl,
};
