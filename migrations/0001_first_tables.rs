//! Schema 1: the first tables.
//!
//! A released migration never changes, so it defines its tables itself and does not use the current
//! schema.

use redb::{TableDefinition, WriteTransaction};

use crate::StoreError;

type Id = [u8; 16];

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
    tx.open_table(TableDefinition::<(&Id, &str), &[u8]>::new("rewards"))?;
    tx.open_table(TableDefinition::<(&Id, &Id), (bool, u32)>::new("samples_by_interaction"))?;
    tx.open_table(TableDefinition::<(&Id, &Id), ()>::new("groups_by_interaction"))?;
    tx.open_table(TableDefinition::<(u64, &Id), ()>::new("ready_groups"))?;
    tx.open_table(TableDefinition::<(u64, &Id, &str), ()>::new("ungrouped_feedback"))?;
    tx.open_table(TableDefinition::<(Option<&str>, &str), (&Id, &Id)>::new("idempotency_keys"))?;
    Ok(())
}
