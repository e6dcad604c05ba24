//! Models and datasets of the Hugging Face hub, fetched into a cache.
//!
//! The cache has the layout of the hub's own clients (`models--OWNER--NAME/snapshots/COMMIT/FILE` and
//! `refs/BRANCH`), so it can be shared with them. What the cache holds needs no network: Hone reads
//! a commit that it has, and never looks for a newer one.
//!
//! The token goes only to the configured endpoint. The hub redirects downloads to other hosts, whose
//! addresses are signed; requests to them carry no token.

mod cache;
mod client;
mod dataset;
mod error;
mod model;

pub use client::{Hub, HubConfig};
pub use dataset::{DatasetQuery, HubDataset, SCHEME, check_revision, dataset_id};
pub use error::HubError;
