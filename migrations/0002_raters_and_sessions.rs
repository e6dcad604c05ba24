//! Schema 2: one rating per rater, sample and name; which interactions belong to a session; whose
//! feedback is set aside.
//!
//! Frozen like every released migration: the layout of schema 1's feedback rows stands here again.
//! Sessions begin with what is served from now on.

use std::collections::BTreeMap;

use redb::{ReadableTable, TableDefinition, WriteTransaction};
use serde::Deserialize;

use crate::StoreError;

type Id = [u8; 16];
type Rated = (Id, String, Option<String>);

/// For the log.
pub(crate) const DESCRIPTION: &str = "ratings by rater, sessions, and the quarantine";

/// A feedback row of schema 1, up to the last field that is read here.
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

/// Adds the tables, and from the feedback on record each rater's newest rating.
pub(crate) fn run(tx: &WriteTransaction) -> Result<(), StoreError> {
    tx.open_table(TableDefinition::<(Option<&str>, &str, &Id), ()>::new(
        "interactions_by_session",
    ))?;
    tx.open_table(TableDefinition::<&str, (&str, u64)>::new("quarantine"))?;
    let feedback = tx.open_table(TableDefinition::<&Id, &[u8]>::new("feedback"))?;
    let mut newest: BTreeMap<Rated, (u64, Id)> = BTreeMap::new();
    for row in feedback.iter()? {
        let (id, bytes) = row?;
        let row = read(bytes.value())?;
        if row.value.is_some() {
            // Ids are in order of time: of equal times the later row is the later post.
            let rating = (row.created, *id.value());
            let kept = newest.entry((row.sample, row.name, row.key_id)).or_insert(rating);
            *kept = (*kept).max(rating);
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
