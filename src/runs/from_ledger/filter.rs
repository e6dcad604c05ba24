//! The options that select records: time, route and policy version.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use anyhow::ensure;
use chrono::{DateTime, NaiveDate};
use clap::Args;

use hone_core::types::UnixMillis;

/// Policy versions from `first` to `last`, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VersionRange {
    pub first: u64,
    pub last: u64,
}

impl FromStr for VersionRange {
    type Err = String;

    /// Reads `7` or `3-7`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        match (first.trim().parse(), last.trim().parse()) {
            (Ok(first), Ok(last)) if first <= last => Ok(Self { first, last }),
            _ => Err("it must be a version such as 7, or a range such as 3-7".to_owned()),
        }
    }
}

impl fmt::Display for VersionRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self { first, last } if first == last => write!(f, "{first}"),
            Self { first, last } => write!(f, "{first}-{last}"),
        }
    }
}

/// Reads a time of RFC 3339 such as `2026-01-31T08:00:00Z`, or a day, which begins at midnight UTC.
pub(super) fn parse_time(text: &str) -> Result<UnixMillis, String> {
    let day = || NaiveDate::parse_from_str(text, "%Y-%m-%d").ok()?.and_hms_opt(0, 0, 0);
    let parsed = match DateTime::parse_from_rfc3339(text) {
        Ok(time) => Some(time.timestamp_millis()),
        Err(_) => day().map(|midnight| midnight.and_utc().timestamp_millis()),
    };
    parsed.and_then(|millis| UnixMillis::try_from(millis).ok()).ok_or_else(|| {
        "it must be a time such as 2026-01-31T08:00:00Z, or a day such as 2026-01-31".to_owned()
    })
}

/// Which records a run uses. Lists that are empty permit all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub struct LedgerFilter {
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
}

impl LedgerFilter {
    pub(super) fn holds(&self, route: &str, version: u64, created: UnixMillis) -> bool {
        self.holds_time(created)
            && (self.routes.is_empty() || self.routes.iter().any(|name| name == route))
            && (self.policies.is_empty() || self.policies.iter().any(|p| p.contains(version)))
    }

    fn holds_time(&self, created: UnixMillis) -> bool {
        self.since.is_none_or(|since| created >= since)
            && self.until.is_none_or(|until| created < until)
    }
}

impl VersionRange {
    fn contains(self, version: u64) -> bool {
        (self.first..=self.last).contains(&version)
    }
}

/// What the records of a ledger have, for errors that list it.
#[derive(Clone, Debug, Default)]
pub(super) struct Present {
    routes: BTreeSet<String>,
    versions: BTreeSet<u64>,
    /// When the completions ended.
    times: BTreeSet<UnixMillis>,
}

impl Present {
    pub(super) fn add(&mut self, route: &str, version: u64, created: UnixMillis) {
        if !self.routes.contains(route) {
            self.routes.insert(route.to_owned());
        }
        self.versions.insert(version);
        self.times.insert(created);
    }

    /// Checks that every option of a filter selects a record.
    ///
    /// # Errors
    /// The first option that selects none, with what the ledger has instead.
    pub(super) fn check(&self, filter: &LedgerFilter) -> anyhow::Result<()> {
        let (Some(first), Some(last)) = (self.times.first(), self.times.last()) else {
            anyhow::bail!("the ledger has no completion that was scored or rated")
        };
        for route in &filter.routes {
            let known: Vec<&str> = self.routes.iter().map(String::as_str).collect();
            ensure!(
                self.routes.contains(route),
                "--route is {route}: the records have the routes {}",
                known.join(", ")
            );
        }
        for range in &filter.policies {
            ensure!(
                self.versions.iter().any(|version| range.contains(*version)),
                "--policy is {range}: the records have the policy versions {}",
                ranges(&self.versions)
            );
        }
        if !self.times.iter().any(|created| filter.holds_time(*created)) {
            let shown = |name: &str, time: Option<UnixMillis>| {
                time.map(|time| format!("{name} is {}", show_time(time)))
            };
            let limits = [shown("--since", filter.since), shown("--until", filter.until)];
            let limits: Vec<String> = limits.into_iter().flatten().collect();
            let (limits, from, to) = (limits.join(" and "), show_time(*first), show_time(*last));
            anyhow::bail!("{limits}: the records are from {from} to {to}")
        }
        Ok(())
    }
}

/// Versions as ranges: `0-3, 7`.
fn ranges(versions: &BTreeSet<u64>) -> String {
    let mut found: Vec<VersionRange> = Vec::new();
    for version in versions {
        match found.last_mut() {
            Some(range) if range.last + 1 == *version => range.last = *version,
            _ => found.push(VersionRange { first: *version, last: *version }),
        }
    }
    let shown: Vec<String> = found.iter().map(ToString::to_string).collect();
    shown.join(", ")
}

/// A time as [`parse_time`] reads it.
fn show_time(time: UnixMillis) -> String {
    let known = i64::try_from(time).ok().and_then(DateTime::from_timestamp_millis);
    known.map_or_else(|| time.to_string(), |t| t.format("%Y-%m-%dT%H:%M:%S%.3fZ").to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_and_times_are_read() {
        let range = |text: &str| text.parse::<VersionRange>();
        assert_eq!(range("7"), Ok(VersionRange { first: 7, last: 7 }));
        assert_eq!(range("3-7").map(|r| r.to_string()), Ok("3-7".to_owned()));
        for wrong in ["", "-", "7-3", "x", "-1", "3-"] {
            assert!(range(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parse_time("1970-01-02"), Ok(86_400_000));
        assert_eq!(parse_time("1970-01-01T01:00:00+01:00"), Ok(0));
        assert_eq!(parse_time("1970-01-01T00:00:01.5Z"), Ok(1500));
        for wrong in ["", "yesterday", "2026-13-01", "1960-01-01", "2026-01-31 08:00"] {
            assert!(parse_time(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn every_option_must_hold() {
        let all = LedgerFilter::default();
        assert!(all.holds("a", 3, 0));
        let filter = LedgerFilter {
            since: Some(10),
            until: Some(20),
            routes: vec!["a".to_owned(), "b".to_owned()],
            policies: vec![VersionRange { first: 1, last: 2 }, VersionRange { first: 5, last: 5 }],
        };
        assert!(filter.holds("a", 1, 10) && filter.holds("b", 5, 19));
        assert!(!filter.holds("a", 1, 9) && !filter.holds("a", 1, 20));
        assert!(!filter.holds("c", 1, 10) && !filter.holds("a", 3, 10));
    }

    #[test]
    fn an_option_without_a_record_is_named_with_what_there_is() {
        let mut present = Present::default();
        let refused = |present: &Present, filter: LedgerFilter| {
            present.check(&filter).unwrap_err().to_string()
        };
        let error = refused(&present, LedgerFilter::default());
        assert_eq!(error, "the ledger has no completion that was scored or rated");
        for (route, version) in [("users", 0), ("graded", 1), ("users", 2), ("users", 5)] {
            present.add(route, version, 1_700_000_000_000 + version * 1000);
        }
        let all = LedgerFilter::default();
        present.check(&all).unwrap();
        let policies = vec![VersionRange { first: 3, last: 4 }];
        for (filter, error) in [
            (
                LedgerFilter { routes: vec!["other".to_owned()], ..all.clone() },
                "--route is other: the records have the routes graded, users",
            ),
            (
                LedgerFilter { policies, ..all.clone() },
                "--policy is 3-4: the records have the policy versions 0-2, 5",
            ),
            (
                LedgerFilter { since: Some(1_800_000_000_000), ..all },
                "--since is 2027-01-15T08:00:00.000Z: the records are from 2023-11-14T22:13:20.000Z to \
                 2023-11-14T22:13:25.000Z",
            ),
        ] {
            assert_eq!(refused(&present, filter), error);
        }
    }
}
