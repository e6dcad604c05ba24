//! Schema 4: tools, tool calls and reasoning in conversations.
//!
//! Interactions have a third stored form from this schema on. Records in the earlier forms stay
//! readable, so they are not rewritten, and no table changes. The number keeps earlier versions of
//! Hone, which cannot read the new form, from opening the file.

use redb::WriteTransaction;

use crate::StoreError;

/// Description for the log.
pub(crate) const DESCRIPTION: &str = "tools, tool calls and reasoning in conversations";

/// Changes no table.
pub(crate) fn run(_: &WriteTransaction) -> Result<(), StoreError> {
    Ok(())
}
