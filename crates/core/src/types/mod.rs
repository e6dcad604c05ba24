//! Plain data of the learning loop: conversations, samples, rewards, groups and policy versions.
//!
//! These types do no I/O and round-trip through `serde`. Log-probabilities are natural logarithms
//! everywhere; times are Unix milliseconds. The ledger stores records without names: the order of their fields
//! and variants is its format, in which only an enum may get further variants, at its end.

mod aggregate;
mod ids;
mod lineage;
mod records;
mod sampling;

use std::collections::BTreeSet;
use std::time::{SystemTime, UNIX_EPOCH};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::digest::{Digest, hex};

pub use aggregate::{Aggregate, aggregate, latest_per_rater};
pub use ids::{GroupId, InteractionId, PolicyVersion, RewardId, SampleId, TokenId, new_uuid};
pub use lineage::Lineage;
pub use records::{
    Continuation, Group, GroupState, Interaction, Message, PolicyCheck, PolicyRecord, PolicyState,
    PromptSource, Rating, Reward, RewardSource, Role, Sample, SampleOrigin, StepRecord, TokenSpan,
    VersionProbe, session_of,
};
pub use sampling::{EndRules, FinishReason, SamplingParams};

// Wall-clock time as records store it.

/// Milliseconds since the Unix epoch.
pub type UnixMillis = u64;

/// The current time.
pub fn now_ms() -> UnixMillis {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

// What constrains the text of a completion.

/// The texts that a completion may have. `hone_engine::grammar` compiles and enforces it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GrammarSpec {
    /// Any JSON object.
    JsonObject,
    /// The JSON values that a schema accepts; the schema as JSON text, whose order of properties is
    /// that of the completion.
    JsonSchema(String),
    /// The texts that a regular expression matches from their beginning to their end.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// The texts of a grammar in llguidance's variant of Lark.
    Lark(String),
}

// The API of a request.

/// The API of a request, with what the record of its prompt has for that API alone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClientEndpoint {
    /// OpenAI's chat or text completions. Also that of a dataset's row.
    #[default]
    Completions,
    /// OpenAI's Responses.
    Responses(ResponseOptions),
    /// Anthropic's messages.
    Messages,
}

impl ClientEndpoint {
    /// Whether the API is that of completions.
    pub fn is_completions(&self) -> bool {
        *self == Self::Completions
    }
}

/// What a request for a response has beside its conversation and the sampling parameters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResponseOptions {
    /// Whether the first message has the request's `instructions`, which do not apply to the response that
    /// continues this one.
    pub instructions: bool,
    /// The response that this one continues.
    pub previous: Option<InteractionId>,
    /// The client's name of the JSON schema that the text follows.
    pub schema_name: Option<String>,
}

// Who asks and who rates: an API key, and the end user that its client names.
//
// A client is identified by its API key's id, such as `2bd806c97f0e`. If the client names its end user,
// a dot and a hash follow, as in `2bd806c97f0e.9f86d081884c`. Without a key only these remain. Records
// have this text where they identify a client, so that the end users of one key count as raters of their
// own, and the ledger never has an end user's name.

/// Precedes the hash of the end user.
const SEPARATOR: char = '.';

/// Identifies a client: the id of its API key, and of the end user that it names.
pub fn rater_id(key_id: Option<&str>, end_user: Option<&str>) -> Option<String> {
    let Some(user) = end_user else { return key_id.map(str::to_owned) };
    let key = key_id.unwrap_or_default();
    // With the key, so that equal names of two clients have different hashes.
    let hash = hex(&Digest::new().field(key).field(user).prefix::<6>());
    Some(format!("{key}{SEPARATOR}{hash}"))
}

/// The id of the API key in [`rater_id`]'s text; `None` without a key.
pub fn key_of_rater(rater: &str) -> Option<&str> {
    let key = rater.split(SEPARATOR).next().unwrap_or_default();
    (!key.is_empty()).then_some(key)
}

/// Whether `id`, of an API key or of one of its end users, concerns a rater.
pub fn concerns_rater(id: &str, rater: &str) -> bool {
    id == rater || key_of_rater(rater) == Some(id)
}

/// Whether one of `ids` concerns a rater.
pub fn include_rater(ids: &BTreeSet<String>, rater: &str) -> bool {
    ids.contains(rater) || key_of_rater(rater).is_some_and(|key| ids.contains(key))
}

// Functions that a model may call, and its calls.

/// A call of a function by the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(from = "OpenAiCall", into = "OpenAiCall")]
pub struct ToolCall {
    /// Identifies the call within its conversation.
    pub id: String,
    /// The function.
    pub name: String,
    /// The arguments as the model wrote them: normally a JSON object, but nothing guarantees it.
    pub arguments: String,
}

/// [`ToolCall`] in OpenAI's JSON.
#[derive(Clone, Serialize, Deserialize, JsonSchema)]
struct OpenAiCall {
    #[serde(default)]
    id: String,
    #[serde(default = "function_type")]
    r#type: String,
    function: CalledFunction,
}

#[derive(Clone, Serialize, Deserialize, JsonSchema)]
struct CalledFunction {
    name: String,
    /// A text, or an object as in datasets for transformers.
    #[schemars(with = "String")]
    arguments: Value,
}

fn function_type() -> String {
    "function".to_owned()
}

impl From<OpenAiCall> for ToolCall {
    fn from(call: OpenAiCall) -> Self {
        let arguments = match call.function.arguments {
            Value::String(text) => text,
            other => other.to_string(),
        };
        Self { id: call.id, name: call.function.name, arguments }
    }
}

impl From<ToolCall> for OpenAiCall {
    fn from(call: ToolCall) -> Self {
        let function = CalledFunction { name: call.name, arguments: Value::String(call.arguments) };
        Self { id: call.id, r#type: function_type(), function }
    }
}

/// A function that the model may call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tool {
    /// The name that calls have, unique within a request.
    pub name: String,
    /// What it does and when to call it.
    pub description: Option<String>,
    /// JSON schema of its arguments, with the client's order of keys; `None` without arguments.
    pub parameters: Option<Value>,
    /// Whether arguments must satisfy the schema.
    pub strict: bool,
}

/// Whether the model may or must call functions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolChoice {
    /// It must not.
    None,
    /// It decides.
    #[default]
    Auto,
    /// It must call at least one.
    Required,
    /// It must call this one.
    Function(String),
}

/// What a request adds to its messages: functions, and variables of the chat template.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChatOptions {
    /// The functions that the model may call.
    pub tools: Vec<Tool>,
    /// Whether it may or must call them.
    pub tool_choice: ToolChoice,
    /// Whether one answer may have several calls.
    pub parallel_tool_calls: bool,
    /// Variables of the chat template, such as `enable_thinking`, with the client's values.
    pub template_variables: Map<String, Value>,
}

impl Default for ChatOptions {
    fn default() -> Self {
        Self {
            tools: Vec::new(),
            tool_choice: ToolChoice::Auto,
            parallel_tool_calls: true,
            template_variables: Map::new(),
        }
    }
}

impl ChatOptions {
    /// Whether a request without these options has the same prompt and the same answer.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// The functions that the model sees and may call: no function if the choice forbids it.
    pub fn callable(&self) -> &[Tool] {
        if self.tool_choice == ToolChoice::None { &[] } else { &self.tools }
    }

    /// Whether the model must call a function.
    pub fn forces_call(&self) -> bool {
        matches!(self.tool_choice, ToolChoice::Required | ToolChoice::Function(_))
    }

    /// Whether a grammar constrains the calls of an answer: it must have one, or arguments must satisfy a
    /// schema.
    pub fn constrains_calls(&self) -> bool {
        self.forces_call() || self.callable().iter().any(|tool| tool.strict)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_users_of_a_key_are_raters_of_that_key() {
        let alice = rater_id(Some("2bd806c97f0e"), Some("alice")).unwrap();
        let bob = rater_id(Some("2bd806c97f0e"), Some("bob")).unwrap();
        assert!(alice != bob && alice.len() == 25 && !alice.contains("alice"), "{alice}");
        assert_eq!(key_of_rater(&alice), Some("2bd806c97f0e"));
        assert_eq!(rater_id(Some("2bd806c97f0e"), None).as_deref(), Some("2bd806c97f0e"));
        assert_ne!(rater_id(Some("72ee9d4355cc"), Some("alice")).unwrap()[12..], alice[12..]);
        // Without a key, an end user is a rater, and of no key.
        assert_eq!(rater_id(None, None), None);
        let open = rater_id(None, Some("alice")).unwrap();
        assert_eq!((open.len(), key_of_rater(&open)), (13, None));
    }

    #[test]
    fn an_id_concerns_a_key_with_its_end_users_or_one_of_them() {
        let alice = rater_id(Some("2bd806c97f0e"), Some("alice")).unwrap();
        let bob = rater_id(Some("2bd806c97f0e"), Some("bob")).unwrap();
        assert!(concerns_rater("2bd806c97f0e", &alice) && concerns_rater(&alice, &alice));
        assert!(!concerns_rater(&alice, &bob) && !concerns_rater(&alice, "2bd806c97f0e"));
        assert!(!concerns_rater("2bd806c97f0", &alice));
        let ids = |id: &str| BTreeSet::from([id.to_owned()]);
        assert!(include_rater(&ids("2bd806c97f0e"), &alice));
        assert!(include_rater(&ids(&alice), &alice) && !include_rater(&ids(&alice), &bob));
        assert!(!include_rater(&BTreeSet::new(), &alice));
    }
}
