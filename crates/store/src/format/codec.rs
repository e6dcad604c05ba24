//! Encodes records: one version byte, then postcard of the stored form.

use serde::Serialize;
use serde::de::DeserializeOwned;

use hone_core::types::{Group, Interaction, PolicyRecord, Reward, Sample, StepRecord};

use super::records::{GroupV1, InteractionV1, PolicyRecordV1, RewardV1, SampleV1, StepRecordV1};
use super::stored::StoredForm;
use crate::error::StoreError;

/// The version byte of every record.
pub(crate) const RECORD_VERSION: u8 = 1;

/// A record that a table stores.
pub(crate) trait LedgerRecord: Sized {
    /// The table, for error messages.
    const TABLE: &'static str;
    /// The stored form of [`RECORD_VERSION`].
    type Stored: StoredForm<Self> + Serialize + DeserializeOwned;
}

macro_rules! ledger_records {
    ($($plain:ident in $table:literal as $stored:ident;)+) => {$(
        impl LedgerRecord for $plain {
            const TABLE: &'static str = $table;
            type Stored = $stored;
        }
    )+};
}

ledger_records!(
    Interaction in "interactions" as InteractionV1;
    Sample in "samples" as SampleV1;
    Reward in "rewards" as RewardV1;
    Group in "groups" as GroupV1;
    PolicyRecord in "policy_versions" as PolicyRecordV1;
    StepRecord in "steps" as StepRecordV1;
);

/// Encodes a record.
pub(crate) fn encode<R: LedgerRecord>(record: &R) -> Result<Vec<u8>, StoreError> {
    Ok(postcard::to_extend(&R::Stored::store(record), vec![RECORD_VERSION])?)
}

/// Decodes a record. Extra bytes are an error.
pub(crate) fn decode<R: LedgerRecord>(bytes: &[u8]) -> Result<R, StoreError> {
    let reason = match bytes.split_first() {
        Some((&RECORD_VERSION, rest)) => match postcard::take_from_bytes::<R::Stored>(rest) {
            Ok((stored, [])) => return Ok(stored.load()),
            Ok((_, extra)) => format!("{} bytes too many", extra.len()),
            Err(error) => error.to_string(),
        },
        Some((version, _)) => format!("value version {version}"),
        None => "no bytes".to_owned(),
    };
    Err(StoreError::Corrupt { table: R::TABLE, reason })
}
