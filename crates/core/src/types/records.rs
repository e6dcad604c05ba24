//! The records of the ledger.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

use super::ids::{GroupId, InteractionId, PolicyVersion, RewardId, SampleId, TokenId};
use super::sampling::{EndRules, FinishReason, SamplingParams};
use super::{ChatOptions, ToolCall};
use super::{ClientEndpoint, GrammarSpec, SEPARATOR, UnixMillis, key_of_rater, now_ms};
use crate::digest::Digest;

/// Where a prompt came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PromptSource {
    /// A client's request.
    Live,
    /// A row of the dataset.
    Dataset,
}

/// How a conversation goes on from a recorded completion, which the client returned as a message of the
/// assistant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Continuation {
    /// The first prompt of the conversation.
    pub conversation: InteractionId,
    /// The prompt of the last recorded completion among the messages; if the client edited the only one,
    /// that of the edited one.
    pub interaction: InteractionId,
    /// The completion's index among the served choices.
    pub choice: u32,
    /// Number of the first tokens that are exactly those of that prompt and that completion; 0 if the
    /// tokenizer encoded them again.
    pub prefix_tokens: u32,
    /// Whether the next message of the assistant is another one than the policy's.
    pub edited: bool,
}

/// One prompt, exactly as the model received it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interaction {
    /// The key, and the client's completion id.
    pub id: InteractionId,
    /// When the request arrived, or the row was drawn.
    pub created: UnixMillis,
    /// Live traffic or dataset.
    pub source: PromptSource,
    /// The route whose rewards apply.
    pub route: String,
    /// The model name in the client's request.
    pub model: String,
    /// The API of the request.
    #[serde(default, skip_serializing_if = "ClientEndpoint::is_completions")]
    pub endpoint: ClientEndpoint,
    /// Identifies the client's API key and its end user without revealing them ([`rater_id`](super::rater_id)).
    pub key_id: Option<String>,
    /// The conversation.
    pub messages: Vec<Message>,
    /// The client's `metadata`, or the other columns of the dataset's row.
    pub metadata: BTreeMap<String, String>,
    /// The sampling parameters of the request.
    pub params: SamplingParams,
    /// The tokens of the rendered prompt.
    pub prompt_ids: Vec<TokenId>,
    /// First 16 hexadecimal digits of the SHA-256 of the chat template; empty for a text that a client
    /// wrote as a whole, which no template rendered.
    pub template_hash: String,
    /// The client's stop strings, which end the siblings of its completion too.
    pub stop: Vec<String>,
    /// Whether only exams use the prompt, so that a policy is not examined on what it was trained on.
    pub held_out: bool,
    /// The request's functions and the variables of its chat template.
    #[serde(default, skip_serializing_if = "ChatOptions::is_default")]
    pub chat: ChatOptions,
    /// What constrains the completions, and the siblings that they are compared with.
    pub grammar: Option<GrammarSpec>,
    /// The recorded completion that the conversation goes on from, if the messages contain one. It may have
    /// been erased since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub continues: Option<Continuation>,
}

impl Interaction {
    /// A new prompt of now, of completions, without what a request may leave out and without tokens.
    pub fn new(source: PromptSource, route: impl Into<String>, messages: Vec<Message>) -> Self {
        let route = route.into();
        Self {
            id: InteractionId::of_route(&route),
            created: now_ms(),
            source,
            route,
            model: "default".to_owned(),
            endpoint: ClientEndpoint::Completions,
            key_id: None,
            messages,
            metadata: BTreeMap::new(),
            params: SamplingParams::default(),
            prompt_ids: Vec::new(),
            template_hash: String::new(),
            stop: Vec::new(),
            held_out: false,
            chat: ChatOptions::default(),
            grammar: None,
            continues: None,
        }
    }

    /// Identifies the client's API key alone.
    pub fn api_key(&self) -> Option<&str> {
        self.key_id.as_deref().and_then(key_of_rater)
    }

    /// First 16 bytes of the SHA-256 of the prompt's tokens, which equal prompts share.
    pub fn prompt_digest(&self) -> [u8; 16] {
        self.prompt_ids.iter().fold(Digest::new(), |all, id| all.bytes(id.to_le_bytes())).prefix()
    }

    /// Where its completions end.
    pub fn end_rules(&self) -> EndRules {
        EndRules {
            stop: self.stop.iter().cloned().collect(),
            stop_token_ids: self.params.stop_token_ids.iter().copied().collect(),
            min_tokens: self.params.min_tokens,
            ignore_eos: self.params.ignore_eos,
        }
    }

    /// Whether the prompt is a text without roles, which the client gave as a whole. `messages` has it as
    /// one message of a user.
    pub fn is_text(&self) -> bool {
        self.template_hash.is_empty()
    }

    /// The id that the client got.
    pub fn completion_id(&self) -> String {
        match self.endpoint {
            ClientEndpoint::Completions if self.is_text() => self.id.text_completion_id(),
            ClientEndpoint::Completions => self.id.completion_id(),
            ClientEndpoint::Responses(_) => self.id.response_id(),
            ClientEndpoint::Messages => self.id.message_id(),
        }
    }

    /// The conversation that this prompt belongs to: `metadata.session_id`, unless it is empty.
    pub fn session(&self) -> Option<&str> {
        session_of(&self.metadata)
    }

    /// First 16 bytes of a SHA-256 that all prompts of one conversation share: those of one session of an
    /// API key, or else those that go on from the same first prompt.
    pub fn conversation(&self) -> [u8; 16] {
        let first = self.continues.as_ref().map_or(self.id, |from| from.conversation);
        match self.session() {
            Some(session) => {
                Digest::new().field(self.api_key().unwrap_or_default()).field(session).prefix()
            }
            None => Digest::new().bytes(first.0.as_bytes()).prefix(),
        }
    }

    /// First 16 bytes of a SHA-256 of what one version answers during a canary: the session, or else the end user, or
    /// else this prompt.
    pub fn unit(&self) -> [u8; 16] {
        let user = self.key_id.as_deref().filter(|rater| rater.contains(SEPARATOR));
        match self.session().or(user) {
            Some(name) => Digest::new().field(name).prefix(),
            None => Digest::new().bytes(self.id.0.as_bytes()).prefix(),
        }
    }
}

/// The session that a request's metadata names: `session_id`, unless it is empty.
pub fn session_of(metadata: &BTreeMap<String, String>) -> Option<&str> {
    metadata.get("session_id").map(String::as_str).filter(|session| !session.is_empty())
}

/// Whether a client received a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SampleOrigin {
    /// A client received it.
    Served,
    /// Sampled for training only.
    Shadow,
    /// Written by a client in place of a served completion; no policy sampled it.
    Correction,
}

/// One completion, exactly as sampled.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// The key.
    pub id: SampleId,
    /// Its prompt.
    pub interaction: InteractionId,
    /// Index among the served choices (`n`), for a correction that of the corrected one; 0 for shadow
    /// samples.
    pub choice: u32,
    /// Served, shadow or correction.
    pub origin: SampleOrigin,
    /// When sampling ended.
    pub created: UnixMillis,
    /// Sampled tokens, the stop token included.
    pub ids: Vec<TokenId>,
    /// Natural-log probability of each token under the behavior policy; as long as `ids`. Empty for a
    /// correction, which no policy sampled.
    pub logprobs: Vec<f32>,
    /// Probability mass that truncation and the grammar kept at each token; empty if they kept all.
    /// The log-probability before both is `logprobs + ln(kept)`.
    pub kept: Vec<f32>,
    /// Positions of tokens that the grammar forced, in order. They carry no gradient.
    pub forced: Vec<TokenSpan>,
    /// Decoded text without stop token, and without stop string unless the parameters include it.
    pub text: String,
    /// Why sampling ended.
    pub finish: FinishReason,
    /// The version that produced every token; a sample never mixes versions. For a correction, the
    /// version of the corrected completion.
    pub version: PolicyVersion,
    /// The sampling parameters, seed included.
    pub params: SamplingParams,
    /// Why the sample must not be trained on; `None` if it may be.
    pub untrainable: Option<String>,
}

impl Sample {
    /// A new, empty completion of now.
    pub fn new(interaction: InteractionId, origin: SampleOrigin, version: PolicyVersion) -> Self {
        Self {
            id: SampleId::new(),
            interaction,
            choice: 0,
            origin,
            created: now_ms(),
            ids: Vec::new(),
            logprobs: Vec::new(),
            kept: Vec::new(),
            forced: Vec::new(),
            text: String::new(),
            finish: FinishReason::Stop,
            version,
            params: SamplingParams::default(),
            untrainable: None,
        }
    }
}

/// Who set the value of a reward part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RewardSource {
    /// A built-in or configured grader.
    Grader,
    /// A client, with `POST /v1/feedback`.
    Feedback,
}

/// One named part of one sample's reward.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reward {
    /// The key.
    pub id: RewardId,
    /// The judged sample.
    pub sample: SampleId,
    /// The part's name, unique within a route.
    pub name: String,
    /// The value; `None` if the sample could not be scored, which is different from 0.
    pub value: Option<f64>,
    /// Grader or client.
    pub source: RewardSource,
    /// When the value arrived.
    pub created: UnixMillis,
    /// The client's key that makes repeated posts count once.
    pub idempotency_key: Option<String>,
    /// The client's remark.
    pub comment: Option<String>,
    /// Identifies the rater: the API key that posted it, and its end user ([`rater_id`](super::rater_id)).
    pub key_id: Option<String>,
}

impl Reward {
    /// A new value of a grader, of now.
    pub fn graded(sample: SampleId, name: impl Into<String>, value: Option<f64>) -> Self {
        Self {
            id: RewardId::new(),
            sample,
            name: name.into(),
            value,
            source: RewardSource::Grader,
            created: now_ms(),
            idempotency_key: None,
            comment: None,
            key_id: None,
        }
    }
}

/// The newest value of one rater for one sample and reward part.
#[derive(Clone, Debug, PartialEq)]
pub struct Rating {
    /// Identifies the rater ([`rater_id`](super::rater_id)). All posts without a key and an end user count as one rater,
    /// because they cannot be distinguished.
    pub key_id: Option<String>,
    /// The value.
    pub value: f64,
    /// When it arrived.
    pub created: UnixMillis,
}

/// Progress of a group toward training.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupState {
    /// Sampled and scored; waits for the trainer.
    Ready,
    /// Consumed by this optimizer step.
    Trained(u64),
    /// Never trained on, with the reason (`stale`, `unscored`, …; `merged` if another group has its
    /// members).
    Dropped(String),
}

/// Samples of one prompt that are trained on together; those with feedback if only feedback scores
/// them, usually a single one. Their interactions may differ then, but not their prompts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Group {
    /// The key.
    pub id: GroupId,
    /// The first member's prompt.
    pub interaction: InteractionId,
    /// The route whose part weights and running baselines apply.
    pub route: String,
    /// The samples.
    pub members: Vec<SampleId>,
    /// The reward parts to train on; late feedback makes a group for its own part only.
    pub parts: Vec<String>,
    /// The oldest policy version among the members, for the limit on staleness.
    pub oldest_version: PolicyVersion,
    /// When the group was complete.
    pub created: UnixMillis,
    /// Progress toward training.
    pub state: GroupState,
}

impl Group {
    /// Whether the group is a client's correction: it has the id of its only sample, and no reward
    /// part, because nothing is compared.
    pub fn is_correction(&self) -> bool {
        self.parts.is_empty() && matches!(&self.members[..], [own] if own.0 == self.id.0)
    }
}

/// Life cycle of a policy version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PolicyState {
    /// Written, not served yet.
    Candidate,
    /// Being served.
    Active,
    /// Was served until another version replaced it.
    Retired,
    /// Never served; `reason` explains why.
    Rejected,
    /// Served to a share of the traffic until it is promoted or rolled back.
    Canary,
    /// Served as a canary or as the active version, and withdrawn; `reason` explains why.
    RolledBack,
}

impl PolicyState {
    /// The name in JSON and in tables.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Candidate => "candidate",
            Self::Active => "active",
            Self::Retired => "retired",
            Self::Rejected => "rejected",
            Self::Canary => "canary",
            Self::RolledBack => "rolled_back",
        }
    }

    /// Whether the version was the active one at some time and may be activated again.
    pub fn was_promoted(self) -> bool {
        matches!(self, Self::Active | Self::Retired)
    }
}

/// The result of one check that a version had to pass before all traffic gets it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PolicyCheck {
    /// The check, such as `parity/serving`.
    pub name: String,
    /// Whether the version passed.
    pub passed: bool,
    /// The measurement; `None` where nothing could be measured.
    pub value: Option<f64>,
    /// The bound that the measurement was compared with.
    pub bound: Option<f64>,
    /// The measurement in words, with its unit and the number of samples.
    pub detail: String,
}

/// What another process compares its engine with before it serves a version: the trainer's log-probabilities at a
/// temperature of 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VersionProbe {
    /// The prompt.
    pub prompt: Vec<TokenId>,
    /// A completion of it.
    pub tokens: Vec<TokenId>,
    /// The log-probability of each token of the completion.
    pub logprobs: Vec<f32>,
    /// Largest mean difference that the trainer permits its own engine, in nats for each token.
    pub bound: f64,
}

/// One version of the policy and its origin.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PolicyRecord {
    /// The key.
    pub version: PolicyVersion,
    /// The version that training started from.
    pub parent: Option<PolicyVersion>,
    /// The optimizer step that made it.
    pub step: u64,
    /// PEFT directory relative to the data directory; `None` for the base model.
    pub adapter: Option<String>,
    /// SHA-256 of `adapter_model.safetensors` in hexadecimal.
    pub sha256: Option<String>,
    /// Measurements of the step that made it, by name.
    pub metrics: BTreeMap<String, f64>,
    /// Life cycle.
    pub state: PolicyState,
    /// Why it was rejected or rolled back, or why an operator or a recovery made it active.
    pub reason: Option<String>,
    /// When it was made.
    pub created: UnixMillis,
    /// Whether an operator keeps its files.
    pub pinned: bool,
    /// The checks before its promotion, in their order. The last one failed if it was rejected.
    pub checks: Vec<PolicyCheck>,
}

/// One optimizer step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// The key, from 1.
    pub step: u64,
    /// The groups that it consumed.
    pub groups: Vec<GroupId>,
    /// Measurements, by name.
    pub metrics: BTreeMap<String, f64>,
    /// When it ended.
    pub created: UnixMillis,
}

// Positions within a sequence of tokens.

/// Consecutive positions of a sequence: `start` is the first one, `end` the one after the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenSpan {
    /// The first position.
    pub start: u32,
    /// The position after the last one.
    pub end: u32,
}

impl TokenSpan {
    /// Adds a position after all positions of ordered spans: to the last span if it is adjacent.
    pub fn append(spans: &mut Vec<Self>, position: usize) {
        let start = u32::try_from(position).unwrap_or(u32::MAX);
        let end = start.saturating_add(1);
        match spans.last_mut() {
            Some(last) if last.end == start => last.end = end,
            _ => spans.push(Self { start, end }),
        }
    }

    /// For each of `len` positions whether a span contains it.
    pub fn mask(spans: &[Self], len: usize) -> Vec<bool> {
        let mut mask = vec![false; len];
        for span in spans {
            let (start, end) = (span.start as usize, (span.end as usize).min(len));
            if let Some(positions) = mask.get_mut(start..end) {
                positions.fill(true);
            }
        }
        mask
    }
}

// Conversations.

/// The author of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions of the operator.
    System,
    /// OpenAI's newer name for `system`.
    Developer,
    /// The person who asks.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
}

impl Role {
    /// The name in chat templates.
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

/// One message of a conversation. In JSON it has OpenAI's shape; fields without a value are absent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Message {
    /// The author.
    pub role: Role,
    /// The text; empty for an assistant's message that only calls tools, whose content may be null.
    #[serde(deserialize_with = "null_as_default")]
    pub content: String,
    /// The name of the participant, or of the function whose result this is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What the assistant thought before its text.
    #[serde(
        default,
        rename = "reasoning_content",
        alias = "reasoning",
        skip_serializing_if = "Option::is_none"
    )]
    pub reasoning: Option<String>,
    /// The assistant's calls, in their order.
    #[serde(default, deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// The call whose result this is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
}

impl Message {
    /// A message of text alone.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self {
            role,
            content: content.into(),
            name: None,
            reasoning: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
        }
    }
}

fn null_as_default<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: Default + Deserialize<'de>,
    D: Deserializer<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_and_masks_describe_the_same_positions() {
        let mut spans = Vec::new();
        for position in [0, 1, 4, 6, 7, 8] {
            TokenSpan::append(&mut spans, position);
        }
        let span = |start, end| TokenSpan { start, end };
        assert_eq!(spans, [span(0, 2), span(4, 5), span(6, 9)]);
        let mask = TokenSpan::mask(&spans, 8);
        assert_eq!(mask, [true, true, false, false, true, false, true, true]);
        assert_eq!(TokenSpan::mask(&[span(5, 9), span(3, 1)], 4), [false; 4]);
    }

    mod chat {
        use serde_json::{Value, json};

        use super::super::*;

        #[test]
        fn a_message_of_text_has_two_fields() {
            let message = Message::new(Role::User, "Hi");
            let shown = serde_json::to_value(&message).unwrap();
            assert_eq!(shown, json!({"role": "user", "content": "Hi"}));
            let nulls = json!({"role": "user", "content": "Hi", "name": null, "tool_calls": null,
                           "tool_call_id": null, "reasoning_content": null});
            assert_eq!(serde_json::from_value::<Message>(nulls).unwrap(), message);
        }

        #[test]
        fn calls_have_openais_shape() {
            let call = json!({"id": "call_1", "type": "function",
                          "function": {"name": "add", "arguments": "{\"a\": 1}"}});
            let mut shown = json!({"role": "assistant", "content": null, "reasoning_content": "hm",
                               "tool_calls": [call]});
            let message: Message = serde_json::from_value(shown.clone()).unwrap();
            shown["content"] = json!("");
            assert_eq!(message.tool_calls[0].arguments, "{\"a\": 1}");
            assert_eq!(message.reasoning.as_deref(), Some("hm"));
            assert_eq!(serde_json::to_value(&message).unwrap(), shown);
        }

        #[test]
        fn arguments_may_be_an_object_as_in_transformers() {
            let call = json!({"function": {"name": "add", "arguments": {"b": 2, "a": [1]}}});
            let call: ToolCall = serde_json::from_value(call).unwrap();
            assert_eq!((call.id.as_str(), call.name.as_str()), ("", "add"));
            let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
            assert_eq!(arguments, json!({"b": 2, "a": [1]}));
        }
    }
}
