//! The HTTP surface over a real socket, with a scripted engine.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests may fail loudly")]

mod access;
mod admin;
mod chat;
mod corrections;
mod disconnects;
mod endpoints;
mod feedback;
mod graders;
mod pairs;
mod prospects;
mod refusals;
mod server;
mod shutdown;
mod streaming;
