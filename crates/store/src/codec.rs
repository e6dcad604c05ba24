//! Rows to bytes and back: one version byte, then postcard of the record of that version.

use serde::Serialize;
use serde::de::DeserializeOwned;

use hone_core::types::{Group, Interaction, PolicyRecord, Reward, Sample, StepRecord};

use super::StoreError;
use super::records::{
    GroupV1, InteractionV1, PolicyRecordV1, RewardV1, SampleV1, StepRecordV1, Stored,
};

/// The version byte of values written today. Bytes of older versions stay readable.
const VALUE_VERSION: u8 = 1;

/// What is kept in a table, and how.
pub(super) trait Row: Sized {
    /// Its table, for messages.
    const TABLE: &'static str;
    /// The stored form under [`VALUE_VERSION`] 1.
    type V1: Stored<Self> + Serialize + DeserializeOwned;
}

macro_rules! rows {
    ($($plain:ident: $v1:ident in $table:literal),+ $(,)?) => {$(
        impl Row for $plain {
            const TABLE: &'static str = $table;
            type V1 = $v1;
        }
    )+};
}

rows!(
    Interaction: InteractionV1 in "interactions",
    Sample: SampleV1 in "samples",
    Reward: RewardV1 in "rewards",
    Group: GroupV1 in "groups",
    PolicyRecord: PolicyRecordV1 in "policy_versions",
    StepRecord: StepRecordV1 in "steps",
);

/// The bytes of a row.
pub(super) fn encode<R: Row>(row: &R) -> Result<Vec<u8>, StoreError> {
    postcard::to_extend(&R::V1::store(row), vec![VALUE_VERSION])
        .map_err(|e| StoreError::Database(format!("a value cannot be encoded: {e}")))
}

/// The row of some bytes.
pub(super) fn decode<R: Row>(bytes: &[u8]) -> Result<R, StoreError> {
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
