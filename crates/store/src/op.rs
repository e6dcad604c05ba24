//! Operations on the ledger and their results.
//!
//! Operations are stored in an outbox, and in the segments of a fleet. There, the order of the variants of [`Op`] and of
//! the fields of its parts is the format; [`Op`] may get further variants before the last one. Records are stored as in
//! their tables, with a version of their own.

use std::collections::{BTreeMap, BTreeSet};

use postcard::experimental::serialized_size;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use uuid::Uuid;

use hone_core::types::{
    Aggregate, Group, GroupId, GroupState, Interaction, InteractionId, PolicyRecord, PolicyVersion,
    Reward, RewardId, Sample, SampleId, StepRecord, TokenId, UnixMillis, new_uuid, now_ms,
};

use crate::format::codec::{LedgerRecord, as_record, stored_as_is};

/// Reason of groups dropped because all their feedback is quarantined.
pub const QUARANTINED: &str = "quarantined";

/// Reason of groups dropped because another group has their members, which must be recorded before:
/// otherwise they stay ready. It is no outcome of a rating.
pub const MERGED: &str = "merged";

/// Reason of groups dropped because all their members were erased, and of ratings and corrections that were
/// erased while they waited.
pub const ERASED: &str = "erased";

/// Reason of groups dropped because a server hands them over to the trainer. It is no outcome of a rating.
pub const SHIPPED: &str = "shipped";

/// Whether the ledger records what it commits for other processes, and for whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outbox {
    /// The ledger belongs to the only process.
    Off,
    /// The ledger of a server, whose trainer is another process: ready groups and ratings do not wait here, and
    /// feedback on completions of other servers is accepted.
    Server,
    /// The ledger of a trainer: its outbox has all that another ledger needs to become equal.
    Trainer,
}

impl Outbox {
    /// Whether other processes need an operation.
    pub(crate) fn ships(self, op: &Op) -> bool {
        match op {
            Op::Audit(_) | Op::Expire(_) | Op::ExpireSteps(_) | Op::Shipped(_) => false,
            // A server learns of versions and steps from the trainer.
            Op::Policy(_) | Op::Step(_) | Op::TakeIn(_) | Op::ExpireHeld(_) => {
                self == Self::Trainer
            }
            _ => self != Self::Off,
        }
    }
}

/// One write. A batch of operations is one transaction.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Op {
    /// Records a prompt.
    Interaction(#[serde(with = "as_record")] Box<Interaction>),
    /// Records a completion.
    Sample(#[serde(with = "as_record")] Box<Sample>),
    /// Makes a conversation findable by the digest of what was said ([`Ledger::turns`](crate::Ledger::turns)).
    /// Has no effect if the prompt is not recorded.
    Turn {
        /// Digest of the messages of the prompt, and of the choice if there is one.
        digest: [u8; 16],
        /// The prompt.
        interaction: InteractionId,
        /// The index of the served choice that ends the conversation; `None` for the prompt alone.
        choice: Option<u32>,
    },
    /// Records a grader's value, in place of an earlier one for the same sample and part.
    Reward(#[serde(with = "as_record")] Box<Reward>),
    /// Records ratings of one client, each in place of the same rater's earlier one for the same sample and
    /// part, and combines them with the ratings of the other raters: all, or no one of them. Records nothing
    /// if the first entry's idempotency key is known.
    Feedback(Vec<FeedbackEntry>),
    /// Records one rating for each turn of a conversation whose choice was recorded. Records nothing if
    /// the first entry's idempotency key is known.
    Conversation(Vec<FeedbackEntry>),
    /// Records a client's corrected text for one completion, as a group of its own, together with a
    /// rating if there is one. It replaces the correction of the same client for the same choice that
    /// waits for the trainer. Records nothing if the idempotency key is known.
    Correction(Box<CorrectionEntry>),
    /// Replaces the metadata of a prompt, and with it the prompt's session.
    Metadata(InteractionId, BTreeMap<String, String>),
    /// Erases a prompt with its completions, their rewards and the feedback on them. Groups that
    /// contain them keep their other members. Later records of the prompt are ignored.
    Erase(InteractionId, UnixMillis),
    /// Erases a prompt as [`Self::Erase`] does, because it is older than the ledger keeps. No trace remains,
    /// also no empty group.
    Expire(InteractionId),
    /// Erases one piece of feedback, with its correction if it is one. The other raters' ratings of the same
    /// completion and part stay, and their mean is the part's value.
    EraseFeedback(RewardId),
    /// Removes the records of steps up to this one, and the measurements and checks of versions that they made.
    ExpireSteps(u64),
    /// Quarantines an API key. If it is quarantined already, the first reason stays.
    Quarantine(QuarantinedKey),
    /// Ends the quarantine of an API key. Feedback whose group was dropped with the reason
    /// [`QUARANTINED`] waits for a group again.
    Release(String),
    /// Records or replaces a group.
    Group(#[serde(with = "as_record")] Box<Group>),
    /// Changes a group's state.
    GroupState(GroupId, GroupState),
    /// Takes members out of a ready group and records them as a dropped group of their own, with the
    /// reason. Has no effect on a group in another state.
    DropMembers {
        /// The group.
        group: GroupId,
        /// The members. Others than those of the group are ignored.
        members: Vec<SampleId>,
        /// Why they are not trained on.
        reason: String,
    },
    /// Records or replaces a policy version.
    Policy(#[serde(with = "as_record")] Box<PolicyRecord>),
    /// Records an optimizer step and marks its groups as `Trained`.
    Step(#[serde(with = "as_record")] Box<StepRecord>),
    /// Removes the batches up to this sequence from the outbox, because they are in the store.
    Shipped(u64),
    /// Applies batches of another process ([`Store::take_in`](crate::Store::take_in)).
    TakeIn(Box<TakeIn>),
    /// Drops the feedback that was taken in before this time and is held for its completion.
    ExpireHeld(UnixMillis),
    /// Passes on how many requests a version answered during a canary, and how many of them failed. Not recorded.
    Answers(BTreeMap<PolicyVersion, AnswerCounts>),
    /// Records what an operator did.
    #[serde(skip)]
    Audit(Box<AuditRecord>),
}

impl Op {
    /// Whether a client posted it.
    pub(crate) fn is_feedback(&self) -> bool {
        self.table() == "feedback"
    }

    /// The choices that a client's feedback concerns, one for each row, and the rater.
    pub(crate) fn posts(&self) -> (Vec<(InteractionId, u32)>, Option<&str>) {
        match self {
            Self::Feedback(entries) | Self::Conversation(entries) => (
                entries.iter().map(|entry| (entry.interaction, entry.choice)).collect(),
                entries.first().and_then(|entry| entry.key_id.as_deref()),
            ),
            Self::Correction(entry) => {
                let rows = 1 + usize::from(entry.rating.is_some());
                (vec![(entry.interaction, entry.choice); rows], entry.key_id.as_deref())
            }
            _ => (Vec::new(), None),
        }
    }

    /// The prompts and the rows of feedback that it has texts or ratings of.
    fn subjects(&self, id: RewardId) -> Vec<Uuid> {
        match self {
            Self::Interaction(row) => vec![row.id.0],
            Self::Sample(row) => vec![row.interaction.0],
            Self::Turn { interaction, .. } | Self::Metadata(interaction, _) => vec![interaction.0],
            _ => {
                let posts = self.posts().0.into_iter().enumerate();
                posts.flat_map(|(row, (prompt, _))| [prompt.0, id_of_turn(id, row).0]).collect()
            }
        }
    }

    /// The memory that the operation takes, about.
    pub(crate) fn bytes(&self) -> usize {
        /// What every operation takes at least.
        const LEAST: usize = 256;
        fn of(record: &impl Serialize) -> usize {
            serialized_size(record).unwrap_or_default()
        }
        fn entry(entry: &FeedbackEntry) -> usize {
            LEAST + entry.comment.as_ref().map_or(0, String::len)
        }
        LEAST
            + match self {
                Self::Interaction(prompt) => of(&**prompt),
                Self::Sample(sample) => of(&**sample),
                Self::Group(group) => of(&**group),
                Self::Policy(record) => of(&**record),
                Self::Step(record) => of(&**record),
                Self::Metadata(_, metadata) => of(metadata),
                Self::DropMembers { members, .. } => of(members),
                Self::Feedback(entries) | Self::Conversation(entries) => {
                    entries.iter().map(entry).sum()
                }
                Self::Correction(posted) => posted.text.len() + 4 * posted.ids.len(),
                Self::TakeIn(other) => of(other),
                _ => 0,
            }
    }

    /// The table that the operation writes, as a metric label.
    pub(crate) fn table(&self) -> &'static str {
        match self {
            Self::Interaction(_) | Self::Metadata(..) | Self::Erase(..) | Self::Expire(_) => {
                "interactions"
            }
            Self::Sample(_) => "samples",
            Self::Turn { .. } => "turns",
            Self::Reward(_) => "rewards",
            Self::Feedback(_) | Self::Conversation(_) | Self::Correction(_) => "feedback",
            Self::Quarantine(_) | Self::Release(_) => "quarantine",
            Self::Group(_) | Self::GroupState(..) | Self::DropMembers { .. } => "groups",
            Self::Policy(_) => "policy_versions",
            Self::Step(_) | Self::ExpireSteps(_) => "steps",
            Self::EraseFeedback(_) => "erased_feedback",
            Self::Audit(_) => "audit",
            Self::Shipped(_) => "outbox",
            Self::TakeIn(_) => "intake",
            Self::ExpireHeld(_) => "held",
            Self::Answers(_) => "answers",
        }
    }
}

/// The id of row `number` of a conversation, a preference or a correction with a rating. It is a
/// function of the operation's id, so that a repeated operation finds the rows that it created.
pub(crate) fn id_of_turn(id: RewardId, number: usize) -> RewardId {
    RewardId(Uuid::from_u128(id.0.as_u128() ^ number as u128))
}

/// Batches of a log, by sequence.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TakeIn {
    /// The log; nil for the trainer's.
    pub(crate) log: Uuid,
    /// When they were taken in.
    pub(crate) at: UnixMillis,
    pub(crate) batches: Vec<(u64, LoggedBatch)>,
}

/// A batch of an outbox, or a post that is held.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct LoggedBatch {
    /// When it was recorded.
    pub(crate) at: UnixMillis,
    /// The operations, each with its id.
    pub(crate) ops: Vec<(Op, RewardId)>,
}

stored_as_is!(LoggedBatch in "outbox";);

impl LoggedBatch {
    /// When an encoded batch was recorded, without decoding the rest.
    pub(crate) fn time(encoded: &[u8]) -> Option<UnixMillis> {
        Some(postcard::take_from_bytes(encoded.get(1..)?).ok()?.0)
    }

    /// Removes the operations that concern one of these prompts and rows of feedback.
    pub(crate) fn erase(&mut self, gone: &BTreeSet<Uuid>) {
        self.ops.retain(|(op, id)| !op.subjects(*id).iter().any(|id| gone.contains(id)));
        for (op, _) in &mut self.ops {
            if let Op::TakeIn(other) = op {
                other.batches.iter_mut().for_each(|(_, batch)| batch.erase(gone));
            }
        }
    }
}

/// Requests to one version.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnswerCounts {
    /// Those that ended.
    pub requests: u64,
    /// Those of them that failed.
    pub failures: u64,
}

/// One piece of feedback, as a client posts it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FeedbackEntry {
    /// The completion it rates.
    pub interaction: InteractionId,
    /// Index among the completion's served choices.
    pub choice: u32,
    /// The reward part.
    pub name: String,
    /// The rating; `None` for a comment alone, which is not trained on.
    pub value: Option<f64>,
    /// The client's remark.
    pub comment: Option<String>,
    /// Posts of one API key with the same idempotency key count once.
    pub idempotency_key: Option<String>,
    /// Identifies the rater: the API key, and its end user ([`rater_id`](hone_core::types::rater_id)).
    pub key_id: Option<String>,
    /// When it arrived.
    pub created: UnixMillis,
    /// How the newest ratings of all raters for one sample and part become the value to train on.
    pub aggregate: Aggregate,
    /// Set by a server that does not have the completion. The trainer then decides who rates, and may refuse.
    pub elsewhere: Option<Elsewhere>,
}

/// Which completions of other servers a client may rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Elsewhere {
    /// All.
    Any,
    /// Those of its API key.
    Own,
}

/// The text that a completion should have been, as a client posts it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CorrectionEntry {
    /// The corrected completion.
    pub interaction: InteractionId,
    /// Index among the completion's served choices.
    pub choice: u32,
    /// The corrected text.
    pub text: String,
    /// Its tokens, the stop token included.
    pub ids: Vec<TokenId>,
    /// Why it is not trained on; `None` if it waits for the trainer.
    pub unused: Option<String>,
    /// The rating that was posted with it. Its idempotency key is ignored.
    pub rating: Option<FeedbackEntry>,
    /// The client's remark.
    pub comment: Option<String>,
    /// Posts of one API key with the same idempotency key count once.
    pub idempotency_key: Option<String>,
    /// Identifies the rater: the API key, and its end user ([`rater_id`](hone_core::types::rater_id)).
    pub key_id: Option<String>,
    /// When it arrived.
    pub created: UnixMillis,
}

/// An action of an operator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct AuditRecord {
    /// The key, in the order of the actions.
    #[schemars(with = "String")]
    pub id: Uuid,
    /// When the action ended.
    pub at: UnixMillis,
    /// The name of the API key; `local` for a program on the server's machine without a key, and `command` for
    /// a command of `hone db`.
    pub actor: String,
    /// What was done, such as `policies.activate`.
    pub action: String,
    /// What it was done to, such as a version or the id of a key; empty if there is only one.
    pub target: String,
    /// Further values, without texts of clients.
    pub detail: Value,
    /// `ok`, or the error.
    pub outcome: String,
}

impl AuditRecord {
    /// A record of now.
    pub fn new(actor: &str, action: &str, target: &str, detail: Value, outcome: &str) -> Self {
        Self {
            id: new_uuid(),
            at: now_ms(),
            actor: actor.to_owned(),
            action: action.to_owned(),
            target: target.to_owned(),
            detail,
            outcome: outcome.to_owned(),
        }
    }
}

/// An API key, or an end user of one, whose feedback is recorded but not trained on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuarantinedKey {
    /// Identifies the key or the end user ([`rater_id`](hone_core::types::rater_id)).
    pub key_id: String,
    /// The reason as JSON. The ledger does not interpret it.
    pub reason: String,
    /// When the quarantine began.
    pub since: UnixMillis,
}

/// The result of an [`Op::Feedback`], [`Op::Conversation`] or [`Op::Correction`].
#[derive(Clone, Debug, PartialEq)]
pub enum FeedbackOutcome {
    /// Recorded for this served sample; of several samples, for the first.
    Recorded(SampleId),
    /// The idempotency key was recorded earlier, for this sample.
    Duplicate(SampleId),
    /// The completion does not exist.
    UnknownCompletion,
    /// The completion has no such choice.
    UnknownChoice,
    /// Recorded for this number of turns.
    Credited(usize),
    /// The idempotency key was recorded earlier, for this number of turns.
    AlreadyCredited(usize),
    /// The idempotency key was recorded earlier, for another target or another content.
    Reused,
    /// The completion is not in this ledger, and the trainer records the feedback when it has the completion.
    Forwarded,
}

impl FeedbackOutcome {
    /// Whether the operation changed anything, here or at the trainer.
    pub(crate) fn is_recorded(&self) -> bool {
        match self {
            Self::Recorded(_) | Self::Forwarded => true,
            Self::Credited(turns) => *turns > 0,
            _ => false,
        }
    }
}

/// The result of a committed batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Committed {
    /// One outcome for each [`Op::Feedback`], [`Op::Conversation`] and [`Op::Correction`] of the batch, in
    /// order.
    pub feedback: Vec<FeedbackOutcome>,
    /// The ratings that [`Op::TakeIn`] recorded, held ones included, each with its sample and the version of that.
    pub ratings: Vec<(FeedbackEntry, SampleId, PolicyVersion)>,
    /// What [`Op::Answers`] in an [`Op::TakeIn`] said.
    pub answers: Vec<(PolicyVersion, AnswerCounts)>,
}
