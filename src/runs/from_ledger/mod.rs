//! `hone train --from-ledger`: training on the records of a daemon, without a daemon.
//!
//! 1. `read_records` takes the completions that can be trained on from the ledger, which is never changed, and
//!    counts the others. [`filter`] has the options that select records.
//! 2. Some prompts are held out.
//! 3. The groups of the other prompts are ordered into steps.
//! 4. [`train`] takes the steps with [`hone_train::OfflineTrainer`], and writes a data directory as
//!    `hone train` does.
//! 5. [`estimate`] compares the policies before and after on the held-out records, and the report shows
//!    the result.

pub mod estimate;
pub mod filter;
pub mod train;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use anyhow::ensure;
use serde::{Deserialize, Serialize};

use hone_core::digest::Digest;
use hone_core::types::{GroupState, Sample, SampleOrigin};
use hone_reward::Routes;
use hone_store::{Ledger, MERGED};
use hone_train::RecordedGroup;

use estimate::{PolicyEstimate, RELIABLE_SHARE};
use filter::{LedgerFilter, Present};
use hone_report::terminal::{MISSING, markdown, table};

// Which prompts a run holds out.

/// 2^64, exactly.
const KEYS: f64 = 18_446_744_073_709_551_616.0;

/// The records of a run.
struct Split {
    train: Vec<UsableGroup>,
    held_out: Vec<UsableGroup>,
}

/// Whether a prompt is held out, by its digest and the share to hold out. It does not depend on the other
/// prompts, so a later run on a longer ledger holds out the same ones.
fn is_held_out(prompt: [u8; 16], share: f64) -> bool {
    let key = Digest::new().field("hold out of recorded prompts").bytes(prompt).prefix();
    (u64::from_le_bytes(key) as f64) < share * KEYS
}

/// Holds out a share of the prompts, and those that only the exams of the daemon used. All records of a
/// prompt are on the same side.
///
/// # Errors
/// If one side would be empty.
fn split(records: Vec<UsableGroup>, share: f64) -> anyhow::Result<Split> {
    let prompts = records.iter().map(|r| r.prompt).collect::<BTreeSet<_>>().len();
    let (held_out, train): (Vec<_>, Vec<_>) = records
        .into_iter()
        .partition(|record| record.reserved || is_held_out(record.prompt, share));
    let plural = if prompts == 1 { "" } else { "s" };
    ensure!(
        !held_out.is_empty(),
        "--holdout is {share}: of {prompts} recorded prompt{plural} it holds out none; use a larger \
         share"
    );
    ensure!(
        !train.is_empty(),
        "--holdout is {share}: of {prompts} recorded prompt{plural} it leaves none to train on; use a \
         smaller share"
    );
    Ok(Split { train, held_out })
}

// Reads the records of a ledger, and counts those that cannot be used.

/// Why a record cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecordSkip {
    /// A client wrote the text, so no policy has a probability of it.
    Correction,
    Untrainable,
    NoLogProbabilities,
    TooLong,
    /// The configuration has no route of this name, so its rewards have no weights.
    UnknownRoute,
    Quarantined,
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
    pub found: u64,
    pub used: u64,
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

struct UsableGroup {
    group: RecordedGroup,
    prompt: [u8; 16],
    /// Whether only the exams of the daemon used the prompt.
    reserved: bool,
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
fn read_records(
    ledger: &Ledger,
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

// The result of a run on records, for the terminal and for the report.

/// The result of a run on the records of a ledger.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RecordReport {
    /// The ledger's file.
    pub ledger: String,
    /// The records that pass the filter.
    pub records: RecordCounts,
    pub train_prompts: usize,
    /// Records to train on: completions of groups.
    pub train_records: usize,
    pub held_out_prompts: usize,
    pub held_out_records: usize,
    /// Samples that steps left out, because the policy has moved too far away from them. A sample of
    /// several steps counts for each of them.
    pub left_out: u64,
    pub skipped_batches: u64,
    /// Mean recorded reward of the held-out completions.
    pub mean_reward: f64,
    pub before: PolicyEstimate,
    pub after: PolicyEstimate,
}

impl RecordReport {
    /// What makes an estimate unreliable; `None` if both are reliable.
    fn warning(&self) -> Option<String> {
        let estimates = [("before", &self.before), ("after", &self.after)];
        let doubtful: Vec<&str> =
            estimates.iter().filter(|(_, e)| !e.reliable).map(|(name, _)| *name).collect();
        (!doubtful.is_empty()).then(|| {
            format!(
                "the estimated reward {} training is unreliable: fewer than {:.0} % of the held-out \
                 records are effective, because the policy is far from those that sampled them",
                doubtful.join(" and "),
                100.0 * RELIABLE_SHARE
            )
        })
    }
}

/// Markdown: what the records are, and the measurements on the held-out completions.
impl fmt::Display for RecordReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { train_records, train_prompts, held_out_records, held_out_prompts, .. } = self;
        writeln!(f, "- {} records in `{}`", self.records.found, self.ledger)?;
        let skipped = self.records.skipped_text();
        if !skipped.is_empty() {
            writeln!(f, "- not used: {skipped}")?;
        }
        writeln!(
            f,
            "- trained on {train_records} records of {train_prompts} prompts, {held_out_records} of \
             {held_out_prompts} prompts held out"
        )?;
        if self.left_out > 0 {
            let moved = "samples from which the policy has moved away";
            writeln!(f, "- left out of steps: {} {moved}", self.left_out)?;
        }
        writeln!(f, "- mean recorded reward of held-out records: {:.4}\n", self.mean_reward)?;
        let value =
            |value: Option<f64>| value.map_or_else(|| MISSING.to_owned(), |v| format!("{v:.4}"));
        let rows = self.before.values().into_iter().zip(self.after.values());
        let rows = rows
            .map(|((_, name, before), (.., after))| [name.to_owned(), value(before), value(after)]);
        write!(f, "{}", markdown(table(["held-out records", "before", "after"], rows, 1)))?;
        match self.warning() {
            Some(warning) => writeln!(f, "\n**Warning**: {warning}."),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
