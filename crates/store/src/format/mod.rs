//! The file format: tables and the encoding of their records.
//!
//! A change needs a new file in `migrations/` and a new [`VERSION`]. Keys are UUIDv7 bytes, so key order is
//! creation order.

pub(crate) mod codec;

use redb::{
    Key as RedbKey, ReadTransaction, ReadableTable, ReadableTableMetadata, Table, TableDefinition,
    Value, WriteTransaction,
};

use crate::error::StoreError;

/// The schema version that this binary reads and writes.
pub(crate) const VERSION: u32 = 3;

/// The bytes of a UUIDv7.
pub(crate) type Id = [u8; 16];
pub(crate) type Bytes = &'static [u8];
/// Key of an index: a record, and one that belongs to it.
pub(crate) type IdPair = (&'static Id, &'static Id);

type Key = &'static Id;
type Text = &'static str;

/// [`META_SCHEMA`] -> the schema version. This table's definition never changes.
pub(crate) const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
pub(crate) const META_SCHEMA: &str = "schema";

/// Declares each table's definition, and its place in [`LedgerTables`].
macro_rules! tables {
    ($($(#[$doc:meta])* $table:ident, $field:ident, $name:literal: $key:ty => $value:ty;)+) => {
        $(
            $(#[$doc])*
            pub(crate) const $table: TableDefinition<'static, $key, $value> =
                TableDefinition::new($name);
        )+

        /// Every table, opened in one write transaction.
        pub(crate) struct LedgerTables<'t> {
            $(pub(crate) $field: Table<'t, $key, $value>,)+
        }

        impl<'t> LedgerTables<'t> {
            pub(crate) fn new(tx: &'t WriteTransaction) -> Result<Self, StoreError> {
                Ok(Self { $($field: tx.open_table($table)?,)+ })
            }
        }

        /// Writes the rows of a snapshot, without the pages that replaced and erased rows leave, into an
        /// empty database. The caller makes the transaction durable.
        pub(crate) fn copy_all(from: &ReadTransaction, to: &WriteTransaction) -> Result<(), StoreError> {
            copy_table(from, to, META)?;
            $(copy_table(from, to, $table)?;)+
            Ok(())
        }

        /// Every row as text, by table.
        #[cfg(test)]
        pub(crate) fn dump(
            tx: &ReadTransaction,
        ) -> Result<std::collections::BTreeMap<&'static str, Vec<String>>, StoreError> {
            let mut dumped = std::collections::BTreeMap::new();
            $(
                let mut rows = Vec::new();
                for row in tx.open_table($table)?.iter()? {
                    let (key, value) = row?;
                    rows.push(format!("{:?}: {:?}", key.value(), value.value()));
                }
                dumped.insert($name, rows);
            )+
            Ok(dumped)
        }

        /// Bytes of the rows and of the pages that hold them, without free pages.
        pub(crate) fn live_bytes(tx: &ReadTransaction) -> Result<u64, StoreError> {
            Ok(0 $(+ table_bytes(tx, $table)?)+)
        }
    };
}

/// Bytes of the records that are not a prompt's: of steps and versions, of what operators did, and of the outbox.
pub(crate) fn history_bytes(tx: &ReadTransaction) -> Result<u64, StoreError> {
    let logs = table_bytes(tx, AUDIT)? + table_bytes(tx, OUTBOX)?;
    Ok(table_bytes(tx, STEPS)? + table_bytes(tx, POLICIES)? + logs)
}

fn copy_table<K: RedbKey + 'static, V: Value + 'static>(
    from: &ReadTransaction,
    to: &WriteTransaction,
    table: TableDefinition<'static, K, V>,
) -> Result<(), StoreError> {
    let mut copy = to.open_table(table)?;
    for row in from.open_table(table)?.iter()? {
        let (key, value) = row?;
        copy.insert(key.value(), value.value())?;
    }
    Ok(())
}

fn table_bytes<K: RedbKey + 'static, V: Value + 'static>(
    tx: &ReadTransaction,
    table: TableDefinition<'static, K, V>,
) -> Result<u64, StoreError> {
    let stats = tx.open_table(table)?.stats()?;
    Ok(stats.stored_bytes() + stats.metadata_bytes() + stats.fragmented_bytes())
}

tables!(
    /// Prompts by id.
    INTERACTIONS, interactions, "interactions": Key => Bytes;
    /// Completions by id.
    SAMPLES, samples, "samples": Key => Bytes;
    /// `(sample, part name)` -> the part's current value.
    REWARDS, rewards, "rewards": (Key, Text) => Bytes;
    /// Every piece of feedback, including replaced ones, by reward id.
    FEEDBACK, feedback, "feedback": Key => Bytes;
    /// Groups by id.
    GROUPS, groups, "groups": Key => Bytes;
    /// Policy versions by number.
    POLICIES, policies, "policy_versions": u64 => Bytes;
    /// Optimizer steps by number.
    STEPS, steps, "steps": u64 => Bytes;
    /// Index: `(interaction, sample)` -> `(served, choice)`.
    SAMPLES_OF, samples_of, "samples_by_interaction": IdPair => (bool, u32);
    /// Index: `(interaction, group)`.
    GROUPS_OF, groups_of, "groups_by_interaction": IdPair => ();
    /// Index: `(created, group)` of groups in state `Ready`.
    READY, ready, "ready_groups": (u64, Key) => ();
    /// Index: `(created, sample, part name)` of feedback that no group trains on yet.
    UNGROUPED, ungrouped, "ungrouped_feedback": (u64, Key, Text) => ();
    /// Index: `(API key id, idempotency key)` -> `(sample, reward)` of the first feedback with that key.
    IDEMPOTENCY, idempotency, "idempotency_keys": (Option<Text>, Text) => (Key, Key);
    /// Index: `(sample, part name, rater)` -> the newest feedback of that rater: an API key id, with the
    /// hash of an end user if the client names one. All posts without both count as one rater.
    RATINGS, ratings, "ratings": (Key, Text, Option<Text>) => Key;
    /// Index: `(API key id, session, interaction)` of prompts with `metadata.session_id`.
    SESSIONS, sessions, "interactions_by_session": (Option<Text>, Text, Key) => ();
    /// Index: `(prompt digest, interaction)` of live interactions.
    SAME_PROMPT, same_prompt, "interactions_by_prompt": IdPair => ();
    /// Index: `(API key id, interaction)` of chat completions.
    BY_KEY, by_key, "interactions_by_key": (Option<Text>, Key) => ();
    /// Index: `(sample, feedback)` of every piece of feedback; a correction belongs to the sample that it
    /// corrects.
    FEEDBACK_OF, feedback_of, "feedback_by_sample": IdPair => ();
    /// Index: `(digest of a conversation, interaction)` -> the served choice that ends the conversation;
    /// `None` if it is the prompt alone.
    TURNS, turns, "turns_by_digest": IdPair => Option<u32>;
    /// Index: `(interaction, digest)` of [`TURNS`], for erasure.
    TURNS_OF, turns_of, "turns_by_interaction": IdPair => ();
    /// Erased interaction -> when. Records that arrive later are ignored.
    ERASED, erased, "erased_interactions": Key => u64;
    /// Index: `(route, interaction)` of prompts that only exams use.
    HELD_OUT, held_out, "held_out_prompts": (Text, Key) => ();
    /// API key id or rater -> `(reason as JSON, since)` of its quarantine.
    QUARANTINE, quarantine, "quarantine": Text => (Text, u64);
    /// What operators did, as JSON, by the record's id.
    AUDIT, audit, "audit": Key => Text;
    /// Committed batches that are not in a fleet's store yet, by sequence, without gaps.
    OUTBOX, outbox, "outbox": u64 => Bytes;
    /// The id of this ledger's log, nil for a trainer's -> the last sequence that was shipped. No row without an outbox.
    OWN_LOG, own_log, "own_log": Key => u64;
    /// The id of another ledger's log -> the last sequence that was taken in.
    POSITIONS, positions, "intake_positions": Key => u64;
    /// `(interaction, id of the operation)` -> feedback that was taken in before its completion.
    HELD, held, "held_feedback": IdPair => Bytes;
);
