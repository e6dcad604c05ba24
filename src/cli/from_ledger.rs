//! The arguments of `hone train` for recorded completions.

use std::path::PathBuf;

use clap::Args;

use hone_core::types::UnixMillis;

use crate::runs::from_ledger::filter::{LedgerFilter, VersionRange, parse_time};

/// The part of `hone train` that is for recorded completions.
#[derive(Debug, Args)]
pub struct FromLedgerArgs {
    /// Train on the records of a stopped daemon, its data directory or ledger file, instead of a dataset
    #[arg(long, value_name = "DIR", conflicts_with = "dataset")]
    pub from_ledger: Option<PathBuf>,
    /// Use completions from this time on: RFC 3339, or a day
    #[arg(long, value_name = "TIME", requires = "from_ledger", value_parser = parse_time)]
    pub since: Option<UnixMillis>,
    /// Use completions before this time
    #[arg(long, value_name = "TIME", requires = "from_ledger", value_parser = parse_time)]
    pub until: Option<UnixMillis>,
    /// Use the records of a route; repeatable
    #[arg(long = "route", value_name = "NAME", requires = "from_ledger")]
    pub routes: Vec<String>,
    /// Use completions of a policy version such as 7, or of a range such as 3-7; repeatable
    #[arg(long = "policy", value_name = "VERSIONS", requires = "from_ledger")]
    pub policies: Vec<VersionRange>,
    /// Share of the recorded prompts to hold out
    #[arg(long, value_name = "SHARE", requires = "from_ledger", default_value_t = 0.1)]
    pub holdout: f64,
}

impl FromLedgerArgs {
    /// Which records the flags select.
    pub fn filter(&self) -> LedgerFilter {
        let Self { since, until, routes, policies, .. } = self;
        let (routes, policies) = (routes.clone(), policies.clone());
        LedgerFilter { since: *since, until: *until, routes, policies }
    }
}
