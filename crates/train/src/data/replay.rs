//! Groups of earlier steps that a step trains on again.
//!
//! Only samples of versions that the weights descend from are drawn. The draw depends on the ledger,
//! `train.seed` and the number of steps alone, so it is the same when a step is repeated after a restart.

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use hone_core::types::{GroupId, GroupState};
use hone_reward::Routes;
use hone_store::{Store, StoreError};

use super::batch_builder::{BatchGroup, TrainBatch, VersionAges};
use super::recorded::RecordedGroup;
use crate::config::TrainConfig;

/// Draws groups of the last `train.replay.window_steps` of `steps` steps, without replacement, that have
/// at most `most` members together. Their members are weighted like late feedback, because older policies
/// have sampled them. Groups that `fits` refuses are left out, and so are those with a member of a version
/// that the weights do not descend from or without the log-probability of every token.
///
/// # Errors
/// If the ledger cannot be read.
pub(crate) fn draw(
    store: &Store,
    routes: &Routes,
    ages: &VersionAges,
    config: &TrainConfig,
    steps: u64,
    most: usize,
    fits: impl Fn(&BatchGroup) -> bool,
) -> Result<TrainBatch, StoreError> {
    let mut batch = TrainBatch::default();
    let first = steps.saturating_sub(config.replay.window_steps) + 1;
    let count = usize::try_from((steps + 1).saturating_sub(first)).unwrap_or(usize::MAX);
    if count == 0 || most == 0 {
        return Ok(batch);
    }
    let mut candidates: Vec<(u64, GroupId)> = Vec::new();
    for record in store.steps(first, count)?.into_iter().filter(|record| record.step <= steps) {
        candidates.extend(record.groups.iter().map(|group| (record.step, *group)));
    }
    let mut random = ChaCha8Rng::seed_from_u64(config.seed);
    random.set_stream(steps);
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
