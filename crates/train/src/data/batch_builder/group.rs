//! A group with what training needs.

use std::collections::BTreeMap;

use hone_core::types::{Group, Sample, TokenId, UnixMillis};

/// One trainable completion with its rewards.
#[derive(Clone, Debug)]
pub(crate) struct GroupMember {
    pub(crate) sample: Sample,
    /// Value of each reward part that the group lists and its route weights. Missing values are
    /// absent.
    pub(crate) parts: BTreeMap<String, f64>,
    /// Origin of the parts that are clients' feedback.
    pub(crate) feedback: BTreeMap<String, FeedbackOrigin>,
    /// Weights below 1 that `feedback_cap` gave to parts.
    pub(crate) cap_weights: BTreeMap<String, f64>,
    /// Whether it is older than `train.max_staleness`, or recorded by another process.
    pub(crate) late: bool,
    /// The conversation that it is a turn of, if a client received it.
    pub(crate) conversation: Option<[u8; 16]>,
}

/// Origin of a feedback value; of several ratings, that of the last one.
#[derive(Clone, Debug)]
pub(crate) struct FeedbackOrigin {
    /// Time of arrival.
    pub(crate) created: UnixMillis,
    /// Identifies the rater.
    pub(crate) key_id: Option<String>,
}

/// A group with everything that training needs from the ledger.
#[derive(Clone, Debug)]
pub(crate) struct BatchGroup {
    pub(crate) group: Group,
    pub(crate) prompt_ids: Vec<TokenId>,
    /// Weight of each reward part on the group's route.
    pub(crate) weights: BTreeMap<String, f64>,
    pub(crate) members: Vec<GroupMember>,
    /// Whether ratings of quarantined API keys were left out.
    pub(crate) without_quarantined: bool,
    /// Whether all values are ratings by clients.
    pub(crate) is_rated: bool,
}

impl BatchGroup {
    /// Tokens of the prompt and all completions, which share one shard.
    pub(crate) fn tokens(&self) -> usize {
        self.prompt_ids.len() + self.lengths().sum::<usize>()
    }

    /// Tokens of the prompt and the longest completion.
    pub(crate) fn longest_tokens(&self) -> usize {
        self.prompt_ids.len() + self.lengths().max().unwrap_or_default()
    }

    fn lengths(&self) -> impl Iterator<Item = usize> {
        self.members.iter().map(|member| member.sample.ids.len())
    }
}
