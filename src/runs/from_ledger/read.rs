//! Reads the records of a ledger, and counts those that cannot be used.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::ensure;
use serde::{Deserialize, Serialize};

use hone_core::types::{GroupState, Sample, SampleOrigin};
use hone_reward::Routes;
use hone_store::{LedgerReader, MERGED, RecordSource};
use hone_train::RecordedGroup;

use super::filter::{LedgerFilter, Present};

/// Why a record cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecordSkip {
    /// A client wrote the text, so no policy has a probability of it.
    Correction,
    /// Its sampling parameters do not permit training, for example greedy decoding.
    Untrainable,
    /// Not every token has a recorded log-probability.
    NoLogProbabilities,
    /// Longer than `train.max_tokens`, or than the memory permits.
    TooLong,
    /// The configuration has no route of this name, so its rewards have no weights.
    UnknownRoute,
    /// Only quarantined API keys rated it.
    Quarantined,
    /// No reward has a value and a weight.
    NoReward,
}

impl RecordSkip {
    /// The reason in words.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Correction => "written by a client",
            Self::Untrainable => "not trainable",
            Self::NoLogProbabilities => "without log-probabilities",
            Self::TooLong => "too long",
            Self::UnknownRoute => "of a route that the configuration lacks",
            Self::Quarantined => "rated by quarantined keys",
            Self::NoReward => "without a reward",
        }
    }

    /// Why a completion with a prompt of `prompt` tokens cannot be used; `None` if it can.
    fn of(sample: &Sample, prompt: usize, longest: usize) -> Option<Self> {
        let has_logprobs = sample.logprobs.len() == sample.ids.len()
            && !sample.ids.is_empty()
            && sample.logprobs.iter().all(|logprob| logprob.is_finite());
        if sample.origin == SampleOrigin::Correction {
            Some(Self::Correction)
        } else if sample.untrainable.is_some() {
            Some(Self::Untrainable)
        } else if !has_logprobs {
            Some(Self::NoLogProbabilities)
        } else if prompt + sample.ids.len() > longest {
            Some(Self::TooLong)
        } else {
            None
        }
    }
}

/// Number of records that pass the filter: completions of groups.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordCounts {
    /// All of them.
    pub found: u64,
    /// Those that can be used.
    pub used: u64,
    /// The others, by reason.
    pub skipped: BTreeMap<RecordSkip, u64>,
}

impl RecordCounts {
    fn skip(&mut self, reason: RecordSkip, count: usize) {
        if count > 0 {
            *self.skipped.entry(reason).or_default() += count as u64;
        }
    }

    /// The skipped ones in words: `12 too long, 3 without a reward`; empty if there are none.
    pub fn skipped_text(&self) -> String {
        let shown = |(reason, count): (&RecordSkip, &u64)| format!("{count} {}", reason.as_str());
        let all: Vec<String> = self.skipped.iter().map(shown).collect();
        all.join(", ")
    }
}

/// A group that can be trained on.
pub(super) struct UsableGroup {
    pub(super) group: RecordedGroup,
    /// The digest of its prompt.
    pub(super) prompt: [u8; 16],
    /// Whether only the exams of the daemon used the prompt.
    pub(super) reserved: bool,
}

/// The groups of a ledger whose completions pass `filter`, oldest first. Completions that cannot be used
/// leave their groups, and a group without completions is left out. `longest` is the longest sample that
/// can be trained on, in tokens.
///
/// A group that the daemon dropped is used too: it was too old for the live policy, or all its rewards
/// were equal, which importance weights and other policies change.
///
/// # Errors
/// If a record cannot be read, an option of the filter selects no record, or no record can be used.
pub(super) fn read(
    ledger: &LedgerReader,
    routes: &Routes,
    filter: &LedgerFilter,
    longest: usize,
) -> anyhow::Result<(Vec<UsableGroup>, RecordCounts)> {
    let reserved: BTreeSet<[u8; 16]> = ledger.held_out_prompts()?.into_iter().collect();
    let quarantined = ledger.quarantined()?.into_iter().map(|key| key.key_id).collect();
    let (mut records, mut counts) = (Vec::new(), RecordCounts::default());
    let mut present = Present::default();
    for mut group in ledger.groups()? {
        // Another group has its members.
        if matches!(&group.state, GroupState::Dropped(reason) if reason == MERGED) {
            continue;
        }
        let Some(interaction) = ledger.interaction(group.interaction)? else { continue };
        let mut members = Vec::with_capacity(group.members.len());
        for id in &group.members {
            let Some(sample) = ledger.sample(*id)? else { continue };
            let (version, created) = (sample.version.0, sample.created);
            present.add(&group.route, version, created);
            if !filter.holds(&group.route, version, created) {
                continue;
            }
            counts.found += 1;
            match RecordSkip::of(&sample, interaction.prompt_ids.len(), longest) {
                Some(reason) => counts.skip(reason, 1),
                None => members.push(*id),
            }
        }
        let has_route = routes.get(&group.route).is_some();
        let usable = members.len();
        group.members = members;
        let group = RecordedGroup::load(ledger, routes, &quarantined, group)?;
        let reason = if !has_route {
            RecordSkip::UnknownRoute
        } else if group.without_quarantined() {
            RecordSkip::Quarantined
        } else {
            RecordSkip::NoReward
        };
        counts.skip(reason, usable.saturating_sub(group.len()));
        if group.is_empty() {
            continue;
        }
        counts.used += group.len() as u64;
        let prompt = interaction.prompt_digest();
        let reserved = interaction.held_out || reserved.contains(&prompt);
        records.push(UsableGroup { group, prompt, reserved });
    }
    present.check(filter)?;
    ensure!(
        counts.found > 0,
        "no record passes all of --since, --until, --route and --policy; each of them selects some"
    );
    ensure!(
        counts.used > 0,
        "of {} records, 0 can be trained on: {}; rewards need the weights in the daemon's --config",
        counts.found,
        counts.skipped_text()
    );
    Ok((records, counts))
}
