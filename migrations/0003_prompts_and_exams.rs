//! Schema 3: the live interactions with the same prompt, and the prompts of each route's exams.
//!
//! Both tables start empty: interactions recorded earlier have no siblings and are in no exam.
//! Interactions, samples and policy versions have a second stored form from this schema on. Records
//! in the first form stay readable, so they are not rewritten.

use redb::{TableDefinition, WriteTransaction};

use crate::StoreError;

type Id = [u8; 16];

/// Description for the log.
pub(crate) const DESCRIPTION: &str = "interactions by prompt, and prompts of exams";

/// Creates the tables.
pub(crate) fn run(tx: &WriteTransaction) -> Result<(), StoreError> {
    tx.open_table(TableDefinition::<(&Id, &Id), ()>::new("interactions_by_prompt"))?;
    tx.open_table(TableDefinition::<(&str, &Id), ()>::new("held_out_prompts"))?;
    Ok(())
}
