//! The features of what clients rated in a batch.

use std::collections::BTreeMap;

use hone_model::Model;

use crate::data::batch_builder::TrainBatch;
use crate::error::Result;
use crate::learning::features::features;

/// Features of the prompts and completions of a batch that clients rated.
#[derive(Clone, Debug, Default)]
pub(crate) struct RatedFeatures {
    /// Of each group's prompt, `[groups, features]`; empty without a rating.
    pub prompts: Vec<Vec<f64>>,
    /// Of rated completions, by the indices of group and member.
    pub completions: BTreeMap<(usize, usize), Vec<f64>>,
}

impl RatedFeatures {
    /// The features by one pass of the base over the rated groups' prompts, and over the rated completions of routes that
    /// `needs_completions` names. Texts with ids outside the vocabulary have no features: the step refuses them.
    ///
    /// # Errors
    /// If a tensor operation fails.
    pub fn of(
        base: &Model,
        batch: &TrainBatch,
        needs_completions: impl Fn(&str) -> bool,
    ) -> Result<Self> {
        let (mut places, mut texts) = (Vec::new(), Vec::new());
        for (index, group) in batch.groups.iter().enumerate() {
            let rated =
                group.members.iter().enumerate().filter(|(_, one)| !one.feedback.is_empty());
            let needs_completions = needs_completions(&group.group.route);
            let is_known =
                |ids: &[u32]| ids.iter().all(|id| (*id as usize) < base.spec().vocab_size);
            for (member, one) in rated.take(if needs_completions { usize::MAX } else { 1 }) {
                let ids = if needs_completions { &one.sample.ids[..] } else { &[] };
                if is_known(&group.prompt_ids) && is_known(ids) {
                    places.push((index, member));
                    texts.push((&group.prompt_ids[..], ids));
                }
            }
        }
        let mut all =
            Self { prompts: vec![Vec::new(); batch.groups.len()], completions: BTreeMap::new() };
        for (place, found) in places.into_iter().zip(features(base, &texts)?) {
            all.prompts[place.0] = found.prompt;
            if !found.completion.is_empty() {
                all.completions.insert(place, found.completion);
            }
        }
        Ok(all)
    }
}
