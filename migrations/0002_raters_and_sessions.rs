//! Schema 2: the newest rating of each rater, sample and part; the interactions of each session;
//! the quarantined API keys.
//!
//! A released migration never changes, so it contains its own copy of schema 1's feedback record.
//! The table of sessions starts empty: interactions recorded earlier belong to no session.

use std::collections::BTreeMap;

use redb::{ReadableTable, TableDefinition, WriteTransaction};
use serde::Deserialize;

use crate::StoreError;

type Id = [u8; 16];
/// Sample, part and API key id.
type RatingKey = (Id, String, Option<String>);

/// Description for the log.
pub(crate) const DESCRIPTION: &str = "ratings by rater, sessions, and the quarantine";

/// A feedback record of schema 1.
#[derive(Deserialize)]
struct Feedback {
    _id: Id,
    sample: Id,
    name: String,
    value: Option<f64>,
    _source: Source,
    created: u64,
    _idempotency_key: Option<String>,
    _comment: Option<String>,
    key_id: Option<String>,
}

#[derive(Deserialize)]
enum Source {
    Grader,
    Feedback,
}

/// Creates the tables, and fills the ratings from the recorded feedback.
pub(crate) fn run(tx: &WriteTransaction) -> Result<(), StoreError> {
    tx.open_table(TableDefinition::<(Option<&str>, &str, &Id), ()>::new(
        "interactions_by_session",
    ))?;
    tx.open_table(TableDefinition::<&str, (&str, u64)>::new("quarantine"))?;
    let feedback = tx.open_table(TableDefinition::<&Id, &[u8]>::new("feedback"))?;
    let mut newest: BTreeMap<RatingKey, (u64, Id)> = BTreeMap::new();
    for row in feedback.iter()? {
        let (id, bytes) = row?;
        let row = read(bytes.value())?;
        if row.value.is_some() {
            // Ids increase with time, so they order posts of the same millisecond.
            let rating = (row.created, *id.value());
            let newest = newest.entry((row.sample, row.name, row.key_id)).or_insert(rating);
            *newest = (*newest).max(rating);
        }
    }
    let mut ratings =
        tx.open_table(TableDefinition::<(&Id, &str, Option<&str>), &Id>::new("ratings"))?;
    for ((sample, name, rater), (_, id)) in &newest {
        ratings.insert((sample, name.as_str(), rater.as_deref()), id)?;
    }
    Ok(())
}

fn read(bytes: &[u8]) -> Result<Feedback, StoreError> {
    let corrupt = |reason: String| StoreError::Corrupt { table: "feedback", reason };
    match bytes.split_first() {
        Some((1, rest)) => postcard::from_bytes(rest).map_err(|error| corrupt(error.to_string())),
        Some((version, _)) => Err(corrupt(format!("value version {version}"))),
        None => Err(corrupt("no bytes".to_owned())),
    }
}
