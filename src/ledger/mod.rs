//! `hone db`: what it shows and exports of the ledger of a stopped daemon.

pub(crate) mod inspect;
mod parquet;
pub(crate) mod row;
pub(crate) mod trl;
