//! Plain data shared by every part: what is asked, sampled, rewarded, grouped and published.
//!
//! Invariant: nothing here does I/O, and everything here round-trips through `serde`.
//! Log-probabilities are natural logarithms everywhere; times are Unix milliseconds.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// A vocabulary index.
pub type TokenId = u32;

/// Milliseconds since the Unix epoch.
pub type UnixMillis = u64;

/// The current time as [`UnixMillis`].
pub fn now_ms() -> UnixMillis {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

macro_rules! uuid_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub struct $name(pub Uuid);

        impl $name {
            /// A fresh time-ordered id (UUIDv7).
            #[expect(clippy::new_without_default, reason = "a default id would be a random one")]
            pub fn new() -> Self {
                Self(Uuid::now_v7())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0.simple())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0.simple())
            }
        }
    };
}

uuid_id!(
    /// One prompt that was served or drawn from a dataset.
    InteractionId
);
uuid_id!(
    /// One completion: the exact tokens of one sampling.
    SampleId
);
uuid_id!(
    /// The samples of one prompt that are trained on together.
    GroupId
);
uuid_id!(
    /// One piece of feedback or one score.
    RewardId
);

impl InteractionId {
    /// The id that clients see, as in `chatcmpl-0190…`.
    pub fn completion_id(self) -> String {
        format!("chatcmpl-{}", self.0.simple())
    }

    /// Reads what [`Self::completion_id`] wrote; `None` for anything else.
    pub fn from_completion_id(text: &str) -> Option<Self> {
        let hex = text.strip_prefix("chatcmpl-")?;
        (hex.len() == 32).then(|| Uuid::try_parse(hex).ok().map(Self))?
    }
}

/// Which weights produced a completion. Version 0 is the base model without an adapter.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct PolicyVersion(pub u64);

impl PolicyVersion {
    /// The base model, adapters off: also the reference policy.
    pub const BASE: Self = Self(0);

    /// `hone-v7`: what `system_fingerprint` says.
    pub fn fingerprint(self) -> String {
        format!("hone-v{}", self.0)
    }
}

impl fmt::Display for PolicyVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Who said a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions of the operator.
    System,
    /// OpenAI's newer name for `system`.
    Developer,
    /// The person asking.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
}

impl Role {
    /// The name that chat templates use.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::Developer => "developer",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Who said it.
    pub role: Role,
    /// What was said.
    pub content: String,
}

/// How tokens are drawn. The behaviour policy is `softmax(logits / temperature)`, truncated by
/// `top_k`, then `top_p`, then `min_p`, and renormalised over what is left.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// 0 is greedy; otherwise logits are divided by it.
    pub temperature: f32,
    /// Keep the smallest set of tokens whose mass reaches this; 1 keeps all.
    pub top_p: f32,
    /// Keep this many tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep tokens with at least this share of the top token's probability; 0 keeps all.
    pub min_p: f32,
    /// OpenAI's presence penalty, subtracted from logits of tokens already sampled.
    pub presence_penalty: f32,
    /// OpenAI's frequency penalty, subtracted times the count.
    pub frequency_penalty: f32,
    /// Added to logits by token id.
    pub logit_bias: BTreeMap<TokenId, f32>,
    /// Seed of this request's random numbers.
    pub seed: u64,
    /// At most this many tokens, the stop token included.
    pub max_tokens: u32,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: BTreeMap::new(),
            seed: 0,
            max_tokens: 256,
        }
    }
}

impl SamplingParams {
    /// Why a sample drawn like this cannot be trained on; `None` when it can.
    ///
    /// Only plain temperature sampling has the behaviour distribution the trainer recomputes,
    /// `softmax(logits / temperature)` (facts: truncated sampling biases the ratio).
    pub fn untrainable_reason(&self) -> Option<&'static str> {
        if self.temperature <= 0.0 {
            Some("greedy")
        } else if self.top_p < 1.0 {
            Some("top_p")
        } else if self.top_k > 0 {
            Some("top_k")
        } else if self.min_p > 0.0 {
            Some("min_p")
        } else if self.presence_penalty != 0.0 || self.frequency_penalty != 0.0 {
            Some("penalty")
        } else if !self.logit_bias.is_empty() {
            Some("logit_bias")
        } else {
            None
        }
    }
}

/// Why a completion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// A stop token or a stop string.
    Stop,
    /// `max_tokens` or the context was reached.
    Length,
    /// The client hung up.
    Cancelled,
}

impl FinishReason {
    /// OpenAI's word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
        }
    }
}

/// Where an interaction's prompt came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PromptSource {
    /// A client asked it.
    Live,
    /// A line of the dataset.
    Dataset,
}

/// One prompt, exactly as the model saw it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interaction {
    /// The key; the client's completion id.
    pub id: InteractionId,
    /// When it was asked.
    pub created: UnixMillis,
    /// Live traffic or dataset.
    pub source: PromptSource,
    /// The route whose rewards apply.
    pub route: String,
    /// The model name the client asked for.
    pub model: String,
    /// Which API key asked; never the key itself.
    pub key_id: Option<String>,
    /// The conversation.
    pub messages: Vec<Message>,
    /// The client's `metadata`; a dataset's extra columns.
    pub metadata: BTreeMap<String, String>,
    /// How the client asked for it to be sampled.
    pub params: SamplingParams,
    /// The exact prompt ids.
    pub prompt_ids: Vec<TokenId>,
    /// First 16 hex digits of the SHA-256 of the chat template.
    pub template_hash: String,
}

/// Served to a client or sampled in its shadow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SampleOrigin {
    /// A client received it.
    Served,
    /// Sampled for training only.
    Shadow,
}

/// One completion, exactly as sampled.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// The key.
    pub id: SampleId,
    /// Its prompt.
    pub interaction: InteractionId,
    /// Index among the served choices (`n`); 0 for shadows.
    pub choice: u32,
    /// Served or shadow.
    pub origin: SampleOrigin,
    /// When it ended.
    pub created: UnixMillis,
    /// Sampled ids, the stop token included.
    pub ids: Vec<TokenId>,
    /// Natural-log probability of each id under the behaviour policy; as long as `ids`.
    pub logprobs: Vec<f32>,
    /// Least probability mass that truncation kept at any token; 1 without truncation.
    pub kept_mass: f32,
    /// Decoded text, stop token and stop string excluded.
    pub text: String,
    /// Why it ended.
    pub finish: FinishReason,
    /// The one policy version that produced every token.
    pub version: PolicyVersion,
    /// How it was sampled, seed included.
    pub params: SamplingParams,
    /// Why it must not be trained on; `None` when it may.
    pub untrainable: Option<String>,
}

impl Interaction {
    /// The conversation that the prompt is a turn of: `metadata.session_id`, unless it is empty.
    pub fn session(&self) -> Option<&str> {
        self.metadata.get("session_id").map(String::as_str).filter(|session| !session.is_empty())
    }
}

/// Who gave a reward part its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RewardSource {
    /// A built-in or configured grader.
    Grader,
    /// `POST /v1/feedback`.
    Feedback,
}

/// One named part of one sample's reward.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reward {
    /// The key.
    pub id: RewardId,
    /// The sample it judges.
    pub sample: SampleId,
    /// The part's name, unique within a route.
    pub name: String,
    /// The value; `None` when it could not be scored, which is not zero.
    pub value: Option<f64>,
    /// Grader or client.
    pub source: RewardSource,
    /// When it arrived.
    pub created: UnixMillis,
    /// The client's key for not counting it twice.
    pub idempotency_key: Option<String>,
    /// The client's remark.
    pub comment: Option<String>,
    /// Which API key gave it.
    pub key_id: Option<String>,
}

/// What one rater said of one sample under one name.
#[derive(Clone, Debug, PartialEq)]
pub struct Rating {
    /// Which API key gave it. Whoever has none is one rater, since nothing tells them apart.
    pub key_id: Option<String>,
    /// The value.
    pub value: f64,
    /// When.
    pub created: UnixMillis,
}

/// Where a group is on its way to the trainer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupState {
    /// Sampled and scored; waits for the trainer.
    Ready,
    /// Consumed by this optimiser step.
    Trained(u64),
    /// Never to be trained on, and why (`stale`, `unscored`, …).
    Dropped(String),
}

/// Samples of one prompt that are trained on together; one member when only feedback is known.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Group {
    /// The key.
    pub id: GroupId,
    /// The prompt.
    pub interaction: InteractionId,
    /// The route whose weights and running baselines apply.
    pub route: String,
    /// Its samples.
    pub members: Vec<SampleId>,
    /// The parts this group trains on (late feedback makes a group of its own part alone).
    pub parts: Vec<String>,
    /// The oldest version among its members.
    pub oldest_version: PolicyVersion,
    /// When it became complete.
    pub created: UnixMillis,
    /// Where it is.
    pub state: GroupState,
}

/// What became of a policy version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyState {
    /// Written, not yet served.
    Candidate,
    /// Being served.
    Active,
    /// Was served; a newer or older version replaced it.
    Retired,
    /// Never served; `reason` says why.
    Rejected,
}

/// One version of the policy and where it came from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PolicyRecord {
    /// The key.
    pub version: PolicyVersion,
    /// The version its weights were trained on from.
    pub parent: Option<PolicyVersion>,
    /// The optimiser step that made it.
    pub step: u64,
    /// PEFT directory relative to the data directory; `None` for the base.
    pub adapter: Option<String>,
    /// SHA-256 of `adapter_model.safetensors`, in hex.
    pub sha256: Option<String>,
    /// What was measured when it was made.
    pub metrics: BTreeMap<String, f64>,
    /// What became of it.
    pub state: PolicyState,
    /// Why it was rejected or rolled back to.
    pub reason: Option<String>,
    /// When it was made.
    pub created: UnixMillis,
}

/// One optimiser step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// The key, from 1.
    pub step: u64,
    /// Groups it consumed.
    pub groups: Vec<GroupId>,
    /// What was measured.
    pub metrics: BTreeMap<String, f64>,
    /// When it ended.
    pub created: UnixMillis,
}
