//! Schema 2: the record of what operators did.

use redb::{TableDefinition, WriteTransaction};

use crate::StoreError;

/// Description for the log.
pub(crate) const DESCRIPTION: &str = "a table of operators' actions";

/// Creates the empty table.
pub(crate) fn run(tx: &WriteTransaction) -> Result<(), StoreError> {
    tx.open_table(TableDefinition::<&[u8; 16], &str>::new("audit"))?;
    Ok(())
}
