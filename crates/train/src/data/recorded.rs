//! Groups that another process recorded, for training without a daemon.

use std::collections::{BTreeMap, BTreeSet};

use hone_core::types::{Group, SampleId, TokenId};
use hone_reward::Routes;
use hone_store::{RecordSource, StoreError};

use super::batch_builder::{self, BatchGroup};

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
    /// Token ids of the prompt.
    pub prompt_ids: &'a [TokenId],
    /// Sampled token ids, the stop token included.
    pub ids: &'a [TokenId],
    /// Natural-log probability of each of `ids` under the behavior policy at `temperature`, without
    /// grammar and without truncation by top-p, top-k or min-p.
    pub logprobs: Vec<f32>,
    /// For each of `ids` whether the grammar forced it; empty if it forced none.
    pub masked: Vec<bool>,
    /// Sampling temperature.
    pub temperature: f32,
    /// Weight times value of each reward part, by name. Missing values are absent.
    pub rewards: BTreeMap<&'a str, f64>,
}

impl RecordedSample<'_> {
    /// Of one value for each token, those of the tokens that the policy chose.
    pub fn chosen(&self, values: &[f32]) -> Vec<f32> {
        let masked = self.masked.iter().copied().chain(std::iter::repeat(false));
        values.iter().zip(masked).filter(|(_, masked)| !masked).map(|(value, _)| *value).collect()
    }
}

impl RecordedGroup {
    /// Reads the completions and rewards of a group. Completions that cannot be trained on or have no
    /// reward are left out, and so are ratings of the `quarantined` API keys. The others are treated as
    /// late feedback: a truncated importance weight corrects for the policy that sampled them.
    ///
    /// # Errors
    /// If a record cannot be read.
    pub fn load(
        source: &impl RecordSource,
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
        let BatchGroup { group, prompt_ids, weights, members, .. } = &self.batch;
        members.iter().map(move |member| {
            let reward = |(name, value): (&String, &f64)| {
                let (part, weight) = weights.get_key_value(name)?;
                Some((part.as_str(), weight * value))
            };
            RecordedSample {
                id: member.sample.id,
                route: &group.route,
                prompt_ids,
                ids: &member.sample.ids,
                logprobs: batch_builder::full_logprobs(&member.sample),
                masked: batch_builder::masked(&member.sample),
                temperature: member.sample.params.temperature,
                rewards: member.parts.iter().filter_map(reward).collect(),
            }
        })
    }
}
