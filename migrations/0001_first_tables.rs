//! Schema 1: the tables of the first release.
//!
//! A released migration never changes, so it defines its tables itself and does not use the current
//! schema.

use redb::{TableDefinition, WriteTransaction};

use crate::StoreError;

type Id = [u8; 16];
type IdPair = (&'static Id, &'static Id);

/// Description for the log.
pub(crate) const DESCRIPTION: &str = "the first tables";

/// Creates the empty tables of schema 1.
pub(crate) fn run(tx: &WriteTransaction) -> Result<(), StoreError> {
    for table in ["interactions", "samples", "feedback", "groups"] {
        tx.open_table(TableDefinition::<&Id, &[u8]>::new(table))?;
    }
    for table in ["policy_versions", "steps"] {
        tx.open_table(TableDefinition::<u64, &[u8]>::new(table))?;
    }
    for index in [
        "groups_by_interaction",
        "interactions_by_prompt",
        "feedback_by_sample",
        "turns_by_interaction",
    ] {
        tx.open_table(TableDefinition::<IdPair, ()>::new(index))?;
    }
    tx.open_table(TableDefinition::<IdPair, (bool, u32)>::new("samples_by_interaction"))?;
    tx.open_table(TableDefinition::<IdPair, Option<u32>>::new("turns_by_digest"))?;
    tx.open_table(TableDefinition::<(&Id, &str), &[u8]>::new("rewards"))?;
    tx.open_table(TableDefinition::<(u64, &Id), ()>::new("ready_groups"))?;
    tx.open_table(TableDefinition::<(u64, &Id, &str), ()>::new("ungrouped_feedback"))?;
    tx.open_table(TableDefinition::<(Option<&str>, &str), (&Id, &Id)>::new("idempotency_keys"))?;
    tx.open_table(TableDefinition::<(&Id, &str, Option<&str>), &Id>::new("ratings"))?;
    tx.open_table(TableDefinition::<(Option<&str>, &str, &Id), ()>::new(
        "interactions_by_session",
    ))?;
    tx.open_table(TableDefinition::<(Option<&str>, &Id), ()>::new("interactions_by_key"))?;
    tx.open_table(TableDefinition::<(&str, &Id), ()>::new("held_out_prompts"))?;
    tx.open_table(TableDefinition::<&Id, u64>::new("erased_interactions"))?;
    tx.open_table(TableDefinition::<&str, (&str, u64)>::new("quarantine"))?;
    Ok(())
}
