//! HTTP calls to webhooks, judges and graders' endpoints.
//!
//! An [`Endpoint`] posts JSON to one URL. Each attempt has a deadline and a size limit; failures are
//! retried with backoff where the service has not processed the request, and a circuit breaker stops
//! the calls while the service keeps failing. [`ChatEndpoint`] adds the OpenAI chat protocol. Calls
//! run in the caller's task; every attempt, circuit change and missing value goes to [`CallEvents`],
//! which logs and counts it.

mod breaker;
mod chat;
mod endpoint;
mod error;
mod events;
mod limits;
mod retry;

pub(super) use chat::ChatEndpoint;
pub(super) use endpoint::Endpoint;
pub use error::CallError;
pub(super) use events::CallEvents;
pub use limits::CallLimits;
pub(super) use limits::{call_limits, check_url};
