//! Endpoints beside chat completions and feedback on one of them, and what is kept of requests.

mod completions;
mod feedback;
pub mod messages;
mod openapi;
mod stored;
mod storing;
mod tokenize;
