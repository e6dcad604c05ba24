//! Accepted and refused configurations, by section.

mod advice;
mod dataset;
mod effective;
mod objective;
mod server;
mod shipped;
mod trl;
