//! The object store that the servers and the trainer of a fleet share. Nothing else connects them.
//!
//! | key | module | written with |
//! | --- | --- | --- |
//! | `log/<id>/<first sequence>.seg` | [`segment`], [`ship`], [`read`] | create-only put |
//! | `manifest.json` | [`manifest`], [`lease`] | compare-and-swap |
//! | `<kind>/<digest>/<file>`, `<kind>/<digest>.json` | [`folder`] | put of verified content |
//!
//! This crate knows no ledger: [`ship::OutboxSource`] and [`read::Intake`] stand for it. A trainer is fenced twice: a
//! change of the manifest needs the epoch of its lease, and all trainers write one log, whose keys can be created only
//! once. Clocks only decide when a standby may take the lease.

pub mod bucket;
pub mod folder;
pub mod lease;
pub mod manifest;
pub mod probe;
pub mod read;
pub mod segment;
pub mod ship;
