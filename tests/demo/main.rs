//! The demo: its model, its dataset, and its session over HTTP.

mod dataset;
mod embedded_model;
mod over_http;
mod real;
mod safety;
