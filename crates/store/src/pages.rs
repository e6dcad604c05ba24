//! Queries of whole tables, page by page, for exports and for browsing.

use std::ops::Bound;

use redb::ReadableTable;

use hone_core::types::{Interaction, InteractionId, PolicyVersion, Sample};

use crate::error::StoreError;
use crate::file::Ledger;
use crate::format;
use crate::format::codec::decode;

impl Ledger {
    /// At most `limit` prompts after `after`, oldest first.
    ///
    /// # Errors
    /// If the file or a record cannot be read.
    pub fn interactions_after(
        &self,
        after: Option<InteractionId>,
        limit: usize,
    ) -> Result<Vec<Interaction>, StoreError> {
        self.read(|tx| {
            let rows = tx.open_table(format::INTERACTIONS)?;
            let first = match &after {
                Some(id) => Bound::Excluded(id.0.as_bytes()),
                None => Bound::Unbounded,
            };
            let page = rows.range::<&format::Id>((first, Bound::Unbounded))?.take(limit);
            page.map(|row| decode(row?.1.value())).collect()
        })
    }

    /// At most `limit` completions, newest first; those of one version if it is given.
    ///
    /// # Errors
    /// If the file or a record cannot be read.
    pub fn newest_samples(
        &self,
        version: Option<PolicyVersion>,
        limit: usize,
    ) -> Result<Vec<Sample>, StoreError> {
        self.read(|tx| {
            let rows = tx.open_table(format::SAMPLES)?;
            let mut found = Vec::new();
            for row in rows.iter()?.rev() {
                if found.len() == limit {
                    break;
                }
                let sample: Sample = decode(row?.1.value())?;
                if version.is_none_or(|version| sample.version == version) {
                    found.push(sample);
                }
            }
            Ok(found)
        })
    }
}
