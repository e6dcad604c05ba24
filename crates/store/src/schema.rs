//! Tables of the current schema: names, keys and what the values are.
//!
//! A change here needs a new file under `migrations/` and a new [`VERSION`]. Values are encoded by
//! [`super::codec`]; keys are UUIDv7 bytes, so key order is time order.

use redb::TableDefinition;

/// The schema that this binary reads and writes.
pub(super) const VERSION: u32 = 2;

/// A UUIDv7.
pub(super) type Id = [u8; 16];

/// `schema` -> the version. This table's definition never changes.
pub(super) const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
/// The key of the version in [`META`].
pub(super) const META_SCHEMA: &str = "schema";

/// Prompts.
pub(super) const INTERACTIONS: TableDefinition<&Id, &[u8]> = TableDefinition::new("interactions");
/// Completions.
pub(super) const SAMPLES: TableDefinition<&Id, &[u8]> = TableDefinition::new("samples");
/// `(sample, part name)` -> the part's current value.
pub(super) const REWARDS: TableDefinition<(&Id, &str), &[u8]> = TableDefinition::new("rewards");
/// Every piece of feedback that was ever recorded, replaced ones included, by reward id.
pub(super) const FEEDBACK: TableDefinition<&Id, &[u8]> = TableDefinition::new("feedback");
/// Groups.
pub(super) const GROUPS: TableDefinition<&Id, &[u8]> = TableDefinition::new("groups");
/// Policy versions.
pub(super) const POLICIES: TableDefinition<u64, &[u8]> = TableDefinition::new("policy_versions");
/// Optimiser steps.
pub(super) const STEPS: TableDefinition<u64, &[u8]> = TableDefinition::new("steps");

/// Index: `(interaction, sample)` -> `(served, choice)`.
pub(super) const SAMPLES_OF: TableDefinition<(&Id, &Id), (bool, u32)> =
    TableDefinition::new("samples_by_interaction");
/// Index: `(interaction, group)`.
pub(super) const GROUPS_OF: TableDefinition<(&Id, &Id), ()> =
    TableDefinition::new("groups_by_interaction");
/// Index: `(created, group)` of groups in state `Ready`.
pub(super) const READY: TableDefinition<(u64, &Id), ()> = TableDefinition::new("ready_groups");
/// Index: `(created, sample, part name)` of feedback that no group trains on yet.
pub(super) const UNGROUPED: TableDefinition<(u64, &Id, &str), ()> =
    TableDefinition::new("ungrouped_feedback");
/// Index: `(API key id, idempotency key)` -> `(sample, reward)` of the feedback it first named.
pub(super) const IDEMPOTENCY: TableDefinition<(Option<&str>, &str), (&Id, &Id)> =
    TableDefinition::new("idempotency_keys");
/// Index: `(sample, part name, rater)` -> the feedback that is this rater's newest rating. The rater
/// is an API key id; all who post without one are one rater.
pub(super) const RATINGS: TableDefinition<(&Id, &str, Option<&str>), &Id> =
    TableDefinition::new("ratings");
/// Index: `(API key id, session, interaction)` of prompts with `metadata.session_id`.
pub(super) const SESSIONS: TableDefinition<(Option<&str>, &str, &Id), ()> =
    TableDefinition::new("interactions_by_session");
/// API key id -> why its feedback is set aside (JSON), and since when.
pub(super) const QUARANTINE: TableDefinition<&str, (&str, u64)> =
    TableDefinition::new("quarantine");
