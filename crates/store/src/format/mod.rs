//! The file format: tables, stored records and their encoding.

pub(crate) mod codec;
mod records;
mod stored;

use redb::TableDefinition;

// Tables of the current schema.
//
// A change needs a new file in `migrations/` and a new [`VERSION`]. [`codec`](super::codec)
// encodes the values. Keys are UUIDv7 bytes, so key order is creation order.

/// The schema version that this binary reads and writes.
pub(crate) const VERSION: u32 = 1;

/// The bytes of a UUIDv7.
pub(crate) type Id = [u8; 16];
/// An encoded record.
pub(crate) type Bytes = &'static [u8];
/// Key of an index: a record, and one that belongs to it.
pub(crate) type IdPair = (&'static Id, &'static Id);

/// [`META_SCHEMA`] -> the schema version. This table's definition never changes.
pub(crate) const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
/// The key of the version in [`META`].
pub(crate) const META_SCHEMA: &str = "schema";

/// Prompts by id.
pub(crate) const INTERACTIONS: TableDefinition<&Id, &[u8]> = TableDefinition::new("interactions");
/// Completions by id.
pub(crate) const SAMPLES: TableDefinition<&Id, &[u8]> = TableDefinition::new("samples");
/// `(sample, part name)` -> the part's current value.
pub(crate) const REWARDS: TableDefinition<(&Id, &str), &[u8]> = TableDefinition::new("rewards");
/// Every piece of feedback, including replaced ones, by reward id.
pub(crate) const FEEDBACK: TableDefinition<&Id, &[u8]> = TableDefinition::new("feedback");
/// Groups by id.
pub(crate) const GROUPS: TableDefinition<&Id, &[u8]> = TableDefinition::new("groups");
/// Policy versions by number.
pub(crate) const POLICIES: TableDefinition<u64, &[u8]> = TableDefinition::new("policy_versions");
/// Optimizer steps by number.
pub(crate) const STEPS: TableDefinition<u64, &[u8]> = TableDefinition::new("steps");

/// Index: `(interaction, sample)` -> `(served, choice)`.
pub(crate) const SAMPLES_OF: TableDefinition<IdPair, (bool, u32)> =
    TableDefinition::new("samples_by_interaction");
/// Index: `(interaction, group)`.
pub(crate) const GROUPS_OF: TableDefinition<IdPair, ()> =
    TableDefinition::new("groups_by_interaction");
/// Index: `(created, group)` of groups in state `Ready`.
pub(crate) const READY: TableDefinition<(u64, &Id), ()> = TableDefinition::new("ready_groups");
/// Index: `(created, sample, part name)` of feedback that no group trains on yet.
pub(crate) const UNGROUPED: TableDefinition<(u64, &Id, &str), ()> =
    TableDefinition::new("ungrouped_feedback");
/// Index: `(API key id, idempotency key)` -> `(sample, reward)` of the first feedback with that
/// key.
pub(crate) const IDEMPOTENCY: TableDefinition<(Option<&str>, &str), (&Id, &Id)> =
    TableDefinition::new("idempotency_keys");
/// Index: `(sample, part name, rater)` -> the newest feedback of that rater: an API key id, with the
/// hash of an end user if the client names one. All posts without both count as one rater.
pub(crate) const RATINGS: TableDefinition<(&Id, &str, Option<&str>), &Id> =
    TableDefinition::new("ratings");
/// Index: `(API key id, session, interaction)` of prompts with `metadata.session_id`.
pub(crate) const SESSIONS: TableDefinition<(Option<&str>, &str, &Id), ()> =
    TableDefinition::new("interactions_by_session");
/// Index: `(prompt digest, interaction)` of live interactions.
pub(crate) const SAME_PROMPT: TableDefinition<IdPair, ()> =
    TableDefinition::new("interactions_by_prompt");
/// Index: `(API key id, interaction)` of chat completions.
pub(crate) const BY_KEY: TableDefinition<(Option<&str>, &Id), ()> =
    TableDefinition::new("interactions_by_key");
/// Index: `(sample, feedback)` of every piece of feedback; a correction belongs to the sample that it
/// corrects.
pub(crate) const FEEDBACK_OF: TableDefinition<IdPair, ()> =
    TableDefinition::new("feedback_by_sample");
/// Index: `(digest of a conversation, interaction)` -> the served choice that ends the conversation; `None` if
/// it is the prompt alone.
pub(crate) const TURNS: TableDefinition<IdPair, Option<u32>> =
    TableDefinition::new("turns_by_digest");
/// Index: `(interaction, digest)` of [`TURNS`], for erasure.
pub(crate) const TURNS_OF: TableDefinition<IdPair, ()> =
    TableDefinition::new("turns_by_interaction");
/// Erased interaction -> when. Records that arrive later are ignored.
pub(crate) const ERASED: TableDefinition<&Id, u64> = TableDefinition::new("erased_interactions");
/// Index: `(route, interaction)` of prompts that only exams use.
pub(crate) const HELD_OUT: TableDefinition<(&str, &Id), ()> =
    TableDefinition::new("held_out_prompts");
/// API key id or rater -> `(reason as JSON, since)` of its quarantine.
pub(crate) const QUARANTINE: TableDefinition<&str, (&str, u64)> =
    TableDefinition::new("quarantine");
