//! The HTTP surface over a real socket, with a scripted engine.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests may fail loudly"
)]

mod access;
mod admin;
mod chat;
mod console;
mod disconnects;
mod endpoints;
mod feedback;
mod fuzz;
mod graders;
mod refusals;
mod responses;
mod server;
mod streaming;
