//! Whether rows can be read and refer to rows that exist, and whether each index is true.

use std::fmt::Display;

use redb::{ReadOnlyTable, ReadTransaction, ReadableTable};
use uuid::Uuid;

use hone_core::types::{
    Group, GroupState, Interaction, PolicyRecord, Reward, RewardSource, Sample, SampleOrigin,
    StepRecord,
};

use super::codec::decode;
use super::schema::Id;
use super::{StoreError, reader, schema};

/// How many problems are spelled out.
const SPELLED_OUT: usize = 100;

/// What is wrong.
#[derive(Default)]
pub(super) struct Problems {
    /// How many.
    pub(super) count: u64,
    /// The first of them.
    pub(super) first: Vec<String>,
}

impl Problems {
    fn add(&mut self, table: &str, key: impl Display, what: impl Display) {
        self.count += 1;
        if self.first.len() < SPELLED_OUT {
            self.first.push(format!("{table} {key}: {what}"));
        }
    }

    fn unless(&mut self, right: bool, table: &str, key: impl Display, what: &str) {
        if !right {
            self.add(table, key, what);
        }
    }
}

type Rows<K> = ReadOnlyTable<K, &'static [u8]>;
type Pair = (&'static Id, &'static Id);

struct Checker<'t> {
    tx: &'t ReadTransaction,
    interactions: Rows<&'static Id>,
    samples: Rows<&'static Id>,
    rewards: Rows<(&'static Id, &'static str)>,
    feedback: Rows<&'static Id>,
    groups: Rows<&'static Id>,
    policies: Rows<u64>,
    samples_of: ReadOnlyTable<Pair, (bool, u32)>,
    groups_of: ReadOnlyTable<Pair, ()>,
    ready: ReadOnlyTable<(u64, &'static Id), ()>,
    problems: Problems,
}

/// Everything that is wrong in a snapshot.
pub(super) fn references(tx: &ReadTransaction) -> Result<Problems, StoreError> {
    let mut checker = Checker {
        tx,
        interactions: tx.open_table(schema::INTERACTIONS)?,
        samples: tx.open_table(schema::SAMPLES)?,
        rewards: tx.open_table(schema::REWARDS)?,
        feedback: tx.open_table(schema::FEEDBACK)?,
        groups: tx.open_table(schema::GROUPS)?,
        policies: tx.open_table(schema::POLICIES)?,
        samples_of: tx.open_table(schema::SAMPLES_OF)?,
        groups_of: tx.open_table(schema::GROUPS_OF)?,
        ready: tx.open_table(schema::READY)?,
        problems: Problems::default(),
    };
    checker.prompts_and_samples()?;
    checker.rewards()?;
    checker.groups()?;
    checker.training()?;
    checker.indexes()?;
    Ok(checker.problems)
}

impl Checker<'_> {
    fn prompts_and_samples(&mut self) -> Result<(), StoreError> {
        let p = &mut self.problems;
        reader::each(self.tx, schema::INTERACTIONS, |key, row: Result<Interaction, _>| {
            match row {
                Ok(row) => {
                    p.unless(row.id.0.as_bytes() == key, "interactions", row.id, "wrong key")
                }
                Err(error) => p.add("interactions", name(key), error),
            }
            Ok(())
        })?;
        reader::each(self.tx, schema::SAMPLES, |key, row: Result<Sample, _>| {
            let row = match row {
                Ok(row) => row,
                Err(error) => {
                    p.add("samples", name(key), error);
                    return Ok(());
                }
            };
            let prompt = row.interaction.0.as_bytes();
            let indexed = self.samples_of.get((prompt, key))?.map(|v| v.value());
            let expected = (row.origin == SampleOrigin::Served, row.choice);
            let has_prompt = self.interactions.get(prompt)?.is_some();
            p.unless(row.id.0.as_bytes() == key, "samples", row.id, "wrong key");
            p.unless(has_prompt, "samples", row.id, "its interaction is missing");
            p.unless(indexed == Some(expected), "samples", row.id, "its index entry is wrong");
            let paired = row.ids.len() == row.logprobs.len();
            p.unless(paired, "samples", row.id, "ids and log-probabilities differ in number");
            Ok(())
        })
    }

    fn rewards(&mut self) -> Result<(), StoreError> {
        let p = &mut self.problems;
        reader::each(self.tx, schema::REWARDS, |(sample, part), row: Result<Reward, _>| {
            let key = format!("{} {part}", name(sample));
            match row {
                Ok(row) => {
                    let right = row.sample.0.as_bytes() == sample && row.name == part;
                    p.unless(right, "rewards", &key, "wrong key");
                    let known = self.samples.get(sample)?.is_some();
                    p.unless(known, "rewards", &key, "its sample is missing");
                }
                Err(error) => p.add("rewards", key, error),
            }
            Ok(())
        })?;
        reader::each(self.tx, schema::FEEDBACK, |key, row: Result<Reward, _>| {
            match row {
                Ok(row) => {
                    p.unless(row.id.0.as_bytes() == key, "feedback", row.id, "wrong key");
                    let current = self.rewards.get((row.sample.0.as_bytes(), row.name.as_str()))?;
                    p.unless(current.is_some(), "feedback", row.id, "its reward is missing");
                }
                Err(error) => p.add("feedback", name(key), error),
            }
            Ok(())
        })
    }

    fn groups(&mut self) -> Result<(), StoreError> {
        let p = &mut self.problems;
        reader::each(self.tx, schema::GROUPS, |key, row: Result<Group, _>| {
            let row = match row {
                Ok(row) => row,
                Err(error) => {
                    p.add("groups", name(key), error);
                    return Ok(());
                }
            };
            let prompt = row.interaction.0.as_bytes();
            let has_prompt = self.interactions.get(prompt)?.is_some();
            let indexed = self.groups_of.get((prompt, key))?.is_some();
            let waits = self.ready.get((row.created, key))?.is_some();
            p.unless(row.id.0.as_bytes() == key, "groups", row.id, "wrong key");
            p.unless(has_prompt, "groups", row.id, "its interaction is missing");
            p.unless(indexed, "groups", row.id, "its index entry is missing");
            let right = waits == (row.state == GroupState::Ready);
            p.unless(right, "groups", row.id, "the index of ready groups disagrees");
            for member in &row.members {
                let known = self.samples.get(member.0.as_bytes())?.is_some();
                p.unless(known, "groups", row.id, "a member is missing");
            }
            Ok(())
        })
    }

    fn training(&mut self) -> Result<(), StoreError> {
        let p = &mut self.problems;
        reader::each(self.tx, schema::POLICIES, |key, row: Result<PolicyRecord, _>| {
            match row {
                Ok(row) => {
                    p.unless(row.version.0 == key, "policy_versions", key, "wrong key");
                    if let Some(parent) = row.parent {
                        let known = self.policies.get(parent.0)?.is_some();
                        p.unless(known, "policy_versions", key, "its parent is missing");
                    }
                }
                Err(error) => p.add("policy_versions", key, error),
            }
            Ok(())
        })?;
        reader::each(self.tx, schema::STEPS, |key, row: Result<StepRecord, _>| {
            match row {
                Ok(row) => {
                    p.unless(row.step == key, "steps", key, "wrong key");
                    for group in &row.groups {
                        let known = self.groups.get(group.0.as_bytes())?.is_some();
                        p.unless(known, "steps", key, "a group is missing");
                    }
                }
                Err(error) => p.add("steps", key, error),
            }
            Ok(())
        })
    }

    /// Whether index entries name rows that exist; the rows' own checks look the other way.
    fn indexes(&mut self) -> Result<(), StoreError> {
        let p = &mut self.problems;
        for entry in self.samples_of.iter()? {
            let sample = *entry?.0.value().1;
            let known = self.samples.get(&sample)?.is_some();
            p.unless(known, "samples_by_interaction", name(&sample), "no such sample");
        }
        for entry in self.groups_of.iter()? {
            let group = *entry?.0.value().1;
            let known = self.groups.get(&group)?.is_some();
            p.unless(known, "groups_by_interaction", name(&group), "no such group");
        }
        for entry in self.ready.iter()? {
            let group = *entry?.0.value().1;
            let known = self.groups.get(&group)?.is_some();
            p.unless(known, "ready_groups", name(&group), "no such group");
        }
        for entry in self.tx.open_table(schema::IDEMPOTENCY)?.iter()? {
            let reward = *entry?.1.value().1;
            let known = self.feedback.get(&reward)?.is_some();
            p.unless(known, "idempotency_keys", name(&reward), "no such feedback");
        }
        for entry in self.tx.open_table(schema::RATINGS)?.iter()? {
            let reward = *entry?.1.value();
            let known = self.feedback.get(&reward)?.is_some();
            p.unless(known, "ratings", name(&reward), "no such feedback");
        }
        for entry in self.tx.open_table(schema::SESSIONS)?.iter()? {
            let prompt = *entry?.0.value().2;
            let known = self.interactions.get(&prompt)?.is_some();
            p.unless(known, "interactions_by_session", name(&prompt), "no such interaction");
        }
        for entry in self.tx.open_table(schema::UNGROUPED)?.iter()? {
            let key = entry?.0;
            let (created, sample, part) = key.value();
            let right = match self.rewards.get((sample, part))? {
                Some(bytes) => waits_since(bytes.value(), created),
                None => false,
            };
            p.unless(right, "ungrouped_feedback", name(sample), "no such feedback");
        }
        Ok(())
    }
}

/// Whether a reward is feedback of that time; one that cannot be read is reported elsewhere.
fn waits_since(bytes: &[u8], created: u64) -> bool {
    decode::<Reward>(bytes)
        .map_or(true, |r| r.source == RewardSource::Feedback && r.created == created)
}

fn name(id: &Id) -> String {
    Uuid::from_bytes(*id).simple().to_string()
}
