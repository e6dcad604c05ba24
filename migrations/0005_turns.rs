//! Schema 5: the turns of conversations by what was said, so that a conversation goes on from recorded tokens.
//!
//! Both tables start empty: conversations that were recorded earlier are tokenized again when they go on.
//!
//! Interactions have a fourth stored form, with the API of the request and the completion that they go on
//! from. Records in the earlier forms stay readable, so they are not rewritten: they are of the completions API
//! and go on from none.

use redb::{TableDefinition, WriteTransaction};

use crate::StoreError;

type Id = [u8; 16];

/// Description for the log.
pub(crate) const DESCRIPTION: &str = "turns of conversations";

/// Creates the tables.
pub(crate) fn run(tx: &WriteTransaction) -> Result<(), StoreError> {
    tx.open_table(TableDefinition::<(&Id, &Id), Option<u32>>::new("turns_by_digest"))?;
    tx.open_table(TableDefinition::<(&Id, &Id), ()>::new("turns_by_interaction"))?;
    Ok(())
}
