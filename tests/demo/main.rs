//! The demo: its model, its dataset, and its session over HTTP.

#![expect(clippy::unwrap_used, reason = "tests may fail loudly")]

mod dataset;
mod embedded_model;
mod over_http;
mod real;
mod visitors;
