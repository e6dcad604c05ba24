//! Schema 4: the interactions of each API key, the feedback on each sample, what was erased, grammars, and
//! tools in conversations.
//!
//! The interactions by key start empty: those that were recorded earlier are not listed. The feedback is
//! indexed, so that it can be erased with its sample.
//!
//! Interactions and samples have a third stored form, with tools and calls, the grammar, the tokens that it
//! forced and further sampling parameters. Records in the earlier forms stay readable, so they are not
//! rewritten: they have no tool, no grammar and no forced token, and the new parameters have their defaults.

use redb::{ReadableTable, TableDefinition, WriteTransaction};

use crate::StoreError;

type Id = [u8; 16];

/// Description for the log.
pub(crate) const DESCRIPTION: &str =
    "completions by key, feedback by completion, erasure, grammars, sampling parameters and tools";

/// Creates the tables, and fills the index of the feedback.
pub(crate) fn run(tx: &WriteTransaction) -> Result<(), StoreError> {
    tx.open_table(TableDefinition::<(Option<&str>, &Id), ()>::new("interactions_by_key"))?;
    tx.open_table(TableDefinition::<&Id, u64>::new("erased_interactions"))?;
    let feedback = tx.open_table(TableDefinition::<&Id, &[u8]>::new("feedback"))?;
    let mut index = tx.open_table(TableDefinition::<(&Id, &Id), ()>::new("feedback_by_sample"))?;
    for row in feedback.iter()? {
        let (id, bytes) = row?;
        index.insert((&sample_of(bytes.value())?, id.value()), ())?;
    }
    Ok(())
}

/// The sample of a feedback record of version 1: its version, the row's id and the sample's id come first.
fn sample_of(bytes: &[u8]) -> Result<Id, StoreError> {
    let corrupt =
        || StoreError::Corrupt { table: "feedback", reason: "no record of version 1".to_owned() };
    let Some((1, rest)) = bytes.split_first() else { return Err(corrupt()) };
    let sample = rest.get(16..32).and_then(|id| Id::try_from(id).ok());
    sample.ok_or_else(corrupt)
}
