//! The HTTP surface over a real socket, with an engine that answers from a script.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests may fail loudly")]

mod admin;
mod chat;
mod feedback;
mod graders;
mod hang_up;
mod refusals;
mod server;
mod shutdown;
mod streaming;
