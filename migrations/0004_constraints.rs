//! Schema 4: the grammar of an interaction, the tokens that it forced, and further sampling parameters.
//!
//! No table changes. Interactions and samples have a third stored form from this schema on. Records in
//! the earlier forms stay readable, so they are not rewritten: they have no grammar and no forced token,
//! and the new parameters have their defaults.

use redb::WriteTransaction;

use crate::StoreError;

/// Description for the log.
pub(crate) const DESCRIPTION: &str = "grammars, forced tokens and sampling parameters";

/// Changes no table.
pub(crate) fn run(_tx: &WriteTransaction) -> Result<(), StoreError> {
    Ok(())
}
