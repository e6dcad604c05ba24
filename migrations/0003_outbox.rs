//! Schema 3: what a fleet's processes need to record for each other.

use redb::{TableDefinition, WriteTransaction};

use crate::StoreError;

/// Description for the log.
pub(crate) const DESCRIPTION: &str = "tables of an outbox and of what was taken in";

/// Creates the empty tables.
pub(crate) fn run(tx: &WriteTransaction) -> Result<(), StoreError> {
    tx.open_table(TableDefinition::<u64, &[u8]>::new("outbox"))?;
    tx.open_table(TableDefinition::<&[u8; 16], u64>::new("own_log"))?;
    tx.open_table(TableDefinition::<&[u8; 16], u64>::new("intake_positions"))?;
    tx.open_table(TableDefinition::<(&[u8; 16], &[u8; 16]), &[u8]>::new("held_feedback"))?;
    Ok(())
}
