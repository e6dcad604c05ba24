//! Encodes records: one version byte, then postcard of the stored form of that version.

use serde::Serialize;
use serde::de::DeserializeOwned;

use hone_core::types::{Group, Interaction, PolicyRecord, Reward, Sample, StepRecord};

use super::records::{GroupV1, InteractionV1, PolicyRecordV1, RewardV1, SampleV1, StepRecordV1};
use super::stored::StoredForm;
use crate::error::StoreError;

/// A record that a table stores.
pub(crate) trait LedgerRecord: Sized {
    /// The table, for error messages.
    const TABLE: &'static str;
    /// The version byte that this binary writes. Every older version stays readable.
    const VERSION: u8;
    /// The stored form of that version.
    type Current: StoredForm<Self> + Serialize;

    /// Decodes the stored form of `version` and returns the bytes after it; `None` if this binary
    /// does not know the version.
    fn read(version: u8, bytes: &[u8]) -> Option<postcard::Result<(Self, &[u8])>>;
}

/// Decodes a stored form and converts it; returns the bytes after it too.
fn read_as<R, F: DeserializeOwned>(
    bytes: &[u8],
    load: impl FnOnce(F) -> R,
) -> postcard::Result<(R, &[u8])> {
    let (stored, rest) = postcard::take_from_bytes(bytes)?;
    Ok((load(stored), rest))
}

macro_rules! ledger_records {
    ($($plain:ident in $table:literal: $($old:literal $form:ident,)* now $version:literal $current:ident;)+) => {$(
        impl LedgerRecord for $plain {
            const TABLE: &'static str = $table;
            const VERSION: u8 = $version;
            type Current = $current;

            fn read(version: u8, bytes: &[u8]) -> Option<postcard::Result<(Self, &[u8])>> {
                match version {
                    $($old => Some(read_as(bytes, $form::load)),)*
                    $version => Some(read_as(bytes, <$current as StoredForm<Self>>::load)),
                    _ => None,
                }
            }
        }
    )+};
}

ledger_records!(
    Interaction in "interactions": now 1 InteractionV1;
    Sample in "samples": now 1 SampleV1;
    Reward in "rewards": now 1 RewardV1;
    Group in "groups": now 1 GroupV1;
    PolicyRecord in "policy_versions": now 1 PolicyRecordV1;
    StepRecord in "steps": now 1 StepRecordV1;
);

/// Encodes a record in the current version.
pub(crate) fn encode<R: LedgerRecord>(record: &R) -> Result<Vec<u8>, StoreError> {
    Ok(postcard::to_extend(&R::Current::store(record), vec![R::VERSION])?)
}

/// Decodes a record of any known version. Extra bytes are an error.
pub(crate) fn decode<R: LedgerRecord>(bytes: &[u8]) -> Result<R, StoreError> {
    let corrupt = |reason: String| StoreError::Corrupt { table: R::TABLE, reason };
    let Some((&version, rest)) = bytes.split_first() else {
        return Err(corrupt("no bytes".to_owned()));
    };
    match R::read(version, rest) {
        Some(Ok((record, []))) => Ok(record),
        Some(Ok((_, extra))) => Err(corrupt(format!("{} bytes too many", extra.len()))),
        Some(Err(error)) => Err(corrupt(error.to_string())),
        None => Err(corrupt(format!("value version {version}"))),
    }
}
