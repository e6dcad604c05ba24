//! From ready groups in the ledger to the samples of one optimizer step, in this order:
//!
//! 1. `batch_builder` loads ready groups with their samples and rewards, and corrections: a `TrainBatch`.
//! 2. `feedback_cap` limits the part of the batch's feedback that comes from one API key.
//! 3. `AdaptiveWeights` sets the current weights of adaptive reward parts.
//! 4. `advantage` computes advantages; each member that has one, and each correction, becomes a `TrainSample`.
//! 5. `packing`, called by the learner, splits the step into shards and lays each out for one forward pass.
//!
//! `RecordedGroup` has the groups of a ledger that another process wrote, which replace step 1.
//! `draw_replayed` draws groups of earlier steps, which pass through the same steps.

pub(crate) mod advantage;
pub(crate) mod batch_builder;
pub(crate) mod feedback_cap;
pub(crate) mod head;
pub(crate) mod packing;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use hone_core::types::{Group, GroupId, GroupState, SampleId};
use hone_reward::{AdaptiveState, AdaptiveWeight, Routes};
use hone_store::{Ledger, Store, StoreError};

use batch_builder::{BatchGroup, TrainBatch, VersionAges};
use packing::TrainSample;

// Current weights of adaptive reward parts; a part of the checkpoint.

/// State of every adaptive part that was observed: route -> part -> state.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct AdaptiveWeights(BTreeMap<String, BTreeMap<String, AdaptiveState>>);

impl AdaptiveWeights {
    /// Replaces the configured weights of the batch's adaptive parts with their current ones.
    pub(crate) fn apply(&self, routes: &Routes, batch: &mut TrainBatch) {
        for group in &mut batch.groups {
            for (part, weight) in &mut group.weights {
                if let Some(adaptive) = self.adaptive(routes, &group.group.route, part) {
                    *weight = adaptive.weight();
                }
            }
        }
    }

    pub(crate) fn observe(&mut self, routes: &Routes, batch: &TrainBatch) {
        for group in &batch.groups {
            let route = &group.group.route;
            for part in group.weights.keys() {
                let Some(mut adaptive) = self.adaptive(routes, route, part) else { continue };
                adaptive.observe(group.members.iter().map(|m| m.parts.get(part).copied()));
                let parts = self.0.entry(route.clone()).or_default();
                parts.insert(part.clone(), adaptive.state());
            }
        }
    }

    /// `(route, part, weight)` of every adaptive part that was observed.
    pub(crate) fn all(&self) -> impl Iterator<Item = (&str, &str, f64)> {
        self.0.iter().flat_map(|(route, parts)| {
            parts.iter().map(move |(part, state)| (route.as_str(), part.as_str(), state.weight))
        })
    }

    /// The configured adaptive weight of a part with its saved state; `None` for fixed weights.
    fn adaptive(&self, routes: &Routes, route: &str, part: &str) -> Option<AdaptiveWeight> {
        let parts = &routes.get(route)?.parts;
        let mut adaptive = parts.iter().find(|p| p.name == part)?.adaptive.clone()?;
        if let Some(state) = self.0.get(route).and_then(|parts| parts.get(part)) {
            adaptive.restore(*state);
        }
        Some(adaptive)
    }
}

// Groups of earlier steps that a step trains on again. The draw depends on the ledger, `train.seed` and the
// number of steps alone, so it is the same when a step is repeated after a restart.

/// Draws groups of a range of steps, which ends with the last one, without replacement, with at most `most`
/// members together, which are weighted like late feedback. Groups that `fits` refuses are left out, and those
/// with a member of a version that the weights do not descend from or without all log-probabilities.
pub(crate) fn draw_replayed(
    store: &Store,
    routes: &Routes,
    ages: &VersionAges,
    seed: u64,
    steps: RangeInclusive<u64>,
    most: usize,
    fits: impl Fn(&BatchGroup) -> bool,
) -> Result<TrainBatch, StoreError> {
    let mut batch = TrainBatch::default();
    if steps.is_empty() || most == 0 {
        return Ok(batch);
    }
    let (first, last) = steps.into_inner();
    let count = usize::try_from(last + 1 - first).unwrap_or(usize::MAX);
    let mut candidates: Vec<(u64, GroupId)> = Vec::new();
    for record in store.steps(first, count)?.into_iter().filter(|record| record.step <= last) {
        candidates.extend(record.groups.iter().map(|group| (record.step, *group)));
    }
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(last);
    candidates.shuffle(&mut random);
    let quarantined = store.quarantined()?.into_iter().map(|key| key.key_id).collect();
    let mut samples = 0;
    for (step, id) in candidates {
        if samples == most {
            break;
        }
        let Some(group) = store.group(id)? else { continue };
        let is_trained = group.state == GroupState::Trained(step) && !group.is_correction();
        if !is_trained || group.members.len() > most - samples {
            continue;
        }
        let group = RecordedGroup::load(store, routes, &quarantined, group)?.batch;
        let is_usable = group.members.iter().all(|member| {
            let sample = &member.sample;
            ages.of(sample.version).is_some() && sample.logprobs.len() == sample.ids.len()
        });
        if is_usable && !group.members.is_empty() && fits(&group) {
            samples += group.members.len();
            batch.groups.push(group);
        }
    }
    Ok(batch)
}

// Groups that another process recorded, for training without a daemon.

/// A recorded group with its prompt, its trainable completions and their rewards.
#[derive(Clone, Debug)]
pub struct RecordedGroup {
    pub(crate) batch: BatchGroup,
}

/// A completion of a [`RecordedGroup`].
#[derive(Clone, Debug, PartialEq)]
pub struct RecordedSample<'a> {
    /// The key in the ledger. Several groups may have the same completion, with other parts.
    pub id: SampleId,
    /// The route whose weights apply.
    pub route: &'a str,
    /// The completion, without an advantage.
    pub sample: TrainSample,
    /// Weight times value of each reward part, by name. Missing values are absent.
    pub rewards: BTreeMap<&'a str, f64>,
}

impl RecordedGroup {
    /// Reads the completions and rewards of a group. Completions that cannot be trained on or have no
    /// reward are left out, and so are ratings of the `quarantined` API keys. The others are treated as
    /// late feedback: a truncated importance weight corrects for the policy that sampled them.
    ///
    /// # Errors
    /// If a record cannot be read.
    pub fn load(
        source: &Ledger,
        routes: &Routes,
        quarantined: &BTreeSet<String>,
        group: Group,
    ) -> Result<Self, StoreError> {
        let mut batch = batch_builder::load(source, routes, quarantined, group)?;
        for member in &mut batch.members {
            member.late = true;
        }
        Ok(Self { batch })
    }

    /// The record of the group.
    pub fn group(&self) -> &Group {
        &self.batch.group
    }

    /// Number of completions.
    pub fn len(&self) -> usize {
        self.batch.members.len()
    }

    /// Whether no completion can be trained on.
    pub fn is_empty(&self) -> bool {
        self.batch.members.is_empty()
    }

    /// Whether ratings of quarantined API keys were left out.
    pub fn without_quarantined(&self) -> bool {
        self.batch.without_quarantined
    }

    /// The completions.
    pub fn samples(&self) -> impl Iterator<Item = RecordedSample<'_>> {
        let BatchGroup { group, weights, members, .. } = &self.batch;
        members.iter().map(move |member| {
            let reward = |(name, value): (&String, &f64)| {
                let (part, weight) = weights.get_key_value(name)?;
                Some((part.as_str(), weight * value))
            };
            RecordedSample {
                id: member.sample.id,
                route: &group.route,
                sample: self.batch.train_sample(member, 0.0),
                rewards: member.parts.iter().filter_map(reward).collect(),
            }
        })
    }
}
