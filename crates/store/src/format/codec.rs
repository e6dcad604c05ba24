//! Encodes records: one version byte, then postcard of the stored form of that version.

use serde::Serialize;
use serde::de::DeserializeOwned;

use hone_core::types::{Group, Interaction, PolicyRecord, Reward, Sample, StepRecord};

use super::records::{
    GroupV1, InteractionV1, PolicyRecordV1, RewardV1, SampleV1, StepRecordV1, StoredForm,
};
use crate::error::StoreError;

/// The version byte that this binary writes. Every older version stays readable.
const VALUE_VERSION: u8 = 1;

/// A record that a table stores.
pub(crate) trait LedgerRecord: Sized {
    /// The table, for error messages.
    const TABLE: &'static str;
    /// The stored form of version 1.
    type V1: StoredForm<Self> + Serialize + DeserializeOwned;
}

macro_rules! ledger_records {
    ($($plain:ident: $v1:ident in $table:literal),+ $(,)?) => {$(
        impl LedgerRecord for $plain {
            const TABLE: &'static str = $table;
            type V1 = $v1;
        }
    )+};
}

ledger_records!(
    Interaction: InteractionV1 in "interactions",
    Sample: SampleV1 in "samples",
    Reward: RewardV1 in "rewards",
    Group: GroupV1 in "groups",
    PolicyRecord: PolicyRecordV1 in "policy_versions",
    StepRecord: StepRecordV1 in "steps",
);

/// Encodes a record in the current version.
pub(crate) fn encode<R: LedgerRecord>(record: &R) -> Result<Vec<u8>, StoreError> {
    Ok(postcard::to_extend(&R::V1::store(record), vec![VALUE_VERSION])?)
}

/// Decodes a record of any known version. Extra bytes are an error.
pub(crate) fn decode<R: LedgerRecord>(bytes: &[u8]) -> Result<R, StoreError> {
    let corrupt = |reason: String| StoreError::Corrupt { table: R::TABLE, reason };
    match bytes.split_first() {
        Some((&VALUE_VERSION, rest)) => match postcard::take_from_bytes::<R::V1>(rest) {
            Ok((stored, [])) => Ok(stored.load()),
            Ok((_, extra)) => Err(corrupt(format!("{} bytes too many", extra.len()))),
            Err(error) => Err(corrupt(error.to_string())),
        },
        Some((version, _)) => Err(corrupt(format!("value version {version}"))),
        None => Err(corrupt("no bytes".to_owned())),
    }
}
