//! Sampling for clients, which every endpoint that generates text shares.
//!
//! A dialect makes a [`ClientRequest`] of a body, whose common fields this module declares and reads. `prompt` makes a
//! prompt's tokens, of a conversation from recorded ones where it can. `run` checks limits before any work, samples the
//! choices, reads their tokens in time, and records them. `sse` answers with what a dialect makes of them. `model` has
//! the names and the tokenizer of the served model.
//!
//! Each choice is a separate generation of exactly one policy version. The choices of one request
//! have different versions only if a version was published while some waited for slots. Then
//! `x-hone-policy-version` is the version of the first choice to start (streaming) or of choice 0
//! (otherwise); each streamed chunk's `system_fingerprint` and each ledger record has the version of
//! its own choice.

pub mod model;
pub mod prompt;
pub mod run;
pub mod sse;

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::task::{JoinError, spawn_blocking};

use hone_core::types::{
    ChatOptions, ClientEndpoint, FinishReason, Message, PolicyVersion, SamplingParams, TokenId,
};
use hone_engine::Token;

use super::body::{Field, Fields, invalid, maybe_flag, open};
use super::chat::constraint::RequestedGrammar;
use super::error::ApiError;

// Bounds how many long texts are tokenized at once: no engine slot does, and a byte takes about 70 bytes of memory.

/// The places of long texts that are tokenized at once.
static TOKENIZER_PLACES: Semaphore = Semaphore::const_new(4);

/// Waits for a place and runs `work` on a blocking thread. Fails if `work` panicked.
async fn tokenize_apart<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, JoinError> {
    // The semaphore is never closed.
    let place = TOKENIZER_PLACES.acquire().await;
    // The work cannot be interrupted, so it keeps its place if the client leaves.
    let work = move || {
        let _place = place;
        work()
    };
    spawn_blocking(work).await
}

/// A valid request for text.
#[derive(Debug, PartialEq)]
pub struct ClientRequest {
    pub model: String,
    pub endpoint: ClientEndpoint,
    /// The conversation; empty for texts without roles.
    pub messages: Vec<Message>,
    /// Functions, and variables of the chat template.
    pub chat: ChatOptions,
    /// Sampling parameters, with the client's seed or a random one.
    pub params: SamplingParams,
    pub stop: Vec<String>,
    /// What constrains the text.
    pub grammar: Option<RequestedGrammar>,
    /// Number of choices for each prompt.
    pub choices: u32,
    /// Number of alternatives per token; `None` if no log-probabilities are requested.
    pub logprobs: Option<u8>,
    /// Whether the response has the tokens of prompt and choices.
    pub token_ids: bool,
    /// Whether log-probabilities include that of a stop token, which has no text.
    pub reports_stop: bool,
    pub metadata: BTreeMap<String, String>,
    /// The client's id of its end user, who meets one version throughout a canary.
    pub user: Option<String>,
    /// Whether the client wants the completion to be kept.
    pub store: Option<bool>,
    pub stream: bool,
    pub names: FieldNames,
}

/// The fields of a request that errors may refer to after it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FieldNames {
    /// The token limit.
    pub max_tokens: &'static str,
    /// The conversation or the texts.
    pub prompt: &'static str,
    /// The schema of a function's arguments, within an entry of `tools`.
    pub parameters: &'static str,
}

/// The progress of one choice since its last update.
pub struct ChoiceUpdate {
    /// Index among the choices of all prompts, those of the first prompt first.
    pub index: u32,
    pub version: PolicyVersion,
    pub started: bool,
    /// The token that was sampled; `None` at the start and at the end.
    pub id: Option<TokenId>,
    /// Text that became complete with this token, or at the end.
    pub text: String,
    /// The tokens that `text` completes, without stop tokens; empty unless requested.
    pub tokens: Vec<Token>,
    /// The tokens since the last update that had some; empty unless requested.
    pub token_ids: Vec<TokenId>,
    pub finish: Option<FinishReason>,
}

/// Reported for a probability of 0, whose logarithm JSON cannot represent; OpenAI's value.
const MIN_LOGPROB: f32 = -9999.0;

/// A log-probability as responses have it.
pub fn shown_logprob(logprob: f32) -> f32 {
    // A NaN compares as false, so it is replaced too.
    if logprob > MIN_LOGPROB { logprob } else { MIN_LOGPROB }
}

/// Token counts. Sampled stop tokens are included.
#[derive(Clone, Copy, Default, Serialize, JsonSchema)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub total_tokens: usize,
    /// Absent for a recorded completion.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_tokens_details: Option<PromptTokens>,
    /// Absent if the model has no reasoning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens_details: Option<CompletionTokens>,
}

/// Parts of the prompt's tokens.
#[derive(Clone, Copy, Serialize, JsonSchema)]
pub struct PromptTokens {
    /// Those whose keys and values came from the engine's prefix cache.
    pub cached_tokens: usize,
}

/// Parts of the completion's tokens.
#[derive(Clone, Copy, Serialize, JsonSchema)]
pub struct CompletionTokens {
    pub reasoning_tokens: usize,
}

impl Usage {
    pub fn new(prompt_tokens: usize, completion_tokens: usize) -> Self {
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            ..Self::default()
        }
    }

    /// Tokens of the prompt that came from the engine's prefix cache; 0 if that is unknown.
    pub fn cached_tokens(&self) -> usize {
        self.prompt_tokens_details.map_or(0, |details| details.cached_tokens)
    }
}

// The fields that requests of every dialect share, and their reader.

pub const MAX_CHOICES: i64 = 8;
/// OpenAI's limits of `metadata`: number of pairs, characters of a key, characters of a value.
const METADATA: (usize, usize, usize) = (16, 64, 512);
/// OpenAI's limit of stop strings.
const MAX_STOP: usize = 4;
/// Characters of a stop string. It is recorded with the request and compared at each token.
const MAX_STOP_CHARS: usize = 256;
/// Entries of `logit_bias`, which is recorded with the request and with each choice.
const MAX_BIASES: usize = 1024;
/// OpenAI's limit of `top_logprobs`.
pub const MAX_TOP_LOGPROBS: i64 = 20;
const MAX_STOP_TOKENS: usize = 64;
/// Largest number of tokens that a field may name.
pub const MAX_TOKENS: i64 = u32::MAX as i64;

/// How texts are sampled, and what every request for texts has.
pub const SAMPLING: &[Field] = &[
    Field::json("model", model_schema, "The name of the model.").required(),
    Field::number("temperature", 0.0, 2.0, "0 is greedy; default 1."),
    Field::number("top_p", 0.0, 1.0, "Mass of the tokens that are kept; default 1."),
    Field::number("min_p", 0.0, 1.0, "Least share of the greatest probability; default 0."),
    Field::integer("top_k", -1, MAX_TOKENS, "Tokens that are kept; 0 and -1 keep all."),
    Field::number("presence_penalty", -2.0, 2.0, "Default 0."),
    Field::number("frequency_penalty", -2.0, 2.0, "Default 0."),
    Field::json(
        "repetition_penalty",
        || json!({"type": "number", "exclusiveMinimum": 0, "maximum": 100}),
        "As in vLLM; default 1.",
    ),
    Field::json("logit_bias", bias_schema, "Token id to a bias."),
    Field::json("seed", seed_schema, "Without one the server draws it."),
    Field::json("stop", stop_schema, "The text ends before these strings."),
    Field::json(
        "stop_token_ids",
        || json!({"type": "array", "items": token_schema(), "maxItems": MAX_STOP_TOKENS}),
        "Tokens that end the text, as in vLLM.",
    ),
    Field::flag("include_stop_str_in_output", "Whether the text keeps its stop string."),
    Field::json("min_tokens", token_schema, "Tokens before a stop token can be sampled."),
    Field::flag("ignore_eos", "Whether the model's own stop tokens are never sampled."),
    Field::flag("stream", "Whether events are sent while the text is sampled."),
    Field::text("user", "The client's name of its end user."),
    Field::json("metadata", metadata_schema, "Selects the route and holds references of rewards."),
    Field::flag("store", "False keeps nothing of the request."),
    Field::ignored("service_tier"),
];

/// What requests for completions have, whose answers have choices.
pub const CHOICES: &[Field] = &[
    Field::integer("max_tokens", 1, MAX_TOKENS, "Most tokens of a choice."),
    Field::integer("n", 1, MAX_CHOICES, "Number of choices; default 1."),
    Field::json("stream_options", stream_schema, "Only with `stream`."),
];

/// The schema of a model's name. `default` is always one.
pub fn model_schema() -> Value {
    json!({"anyOf": [{"const": "default"}, {"type": "string"}]})
}

pub fn token_schema() -> Value {
    json!({"type": "integer", "minimum": 0, "maximum": MAX_TOKENS})
}

pub fn metadata_schema() -> Value {
    let (pairs, key_chars, value_chars) = METADATA;
    json!({
        "type": "object",
        "maxProperties": pairs,
        "propertyNames": {"maxLength": key_chars},
        "additionalProperties": {"type": "string", "maxLength": value_chars},
    })
}

fn bias_schema() -> Value {
    json!({
        "type": "object",
        "maxProperties": MAX_BIASES,
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": ["number", "null"], "minimum": -100, "maximum": 100},
    })
}

pub fn seed_schema() -> Value {
    json!({"type": "integer", "minimum": i64::MIN, "maximum": u64::MAX})
}

fn stop_schema() -> Value {
    json!({"anyOf": [stop_text_schema(), stops_schema(MAX_STOP)]})
}

/// The schema of a list of up to `most` stop strings.
pub fn stops_schema(most: usize) -> Value {
    json!({"type": "array", "items": stop_text_schema(), "maxItems": most})
}

fn stop_text_schema() -> Value {
    json!({"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS})
}

/// What a list of up to `most` stop strings must be, for error messages.
pub fn stop_form(most: usize) -> String {
    format!("a list of up to {most} strings of 1 to {MAX_STOP_CHARS} characters")
}

/// The stop strings in a list of up to `most`; `None` if it is no such list.
pub fn stop_texts(list: &[Value], most: usize) -> Option<Vec<String>> {
    let is_valid = |text: &&str| (1..=MAX_STOP_CHARS).contains(&text.chars().count());
    let text = |value: &Value| value.as_str().filter(is_valid).map(str::to_owned);
    list.iter().map(text).collect::<Option<Vec<_>>>().filter(|texts| texts.len() <= most)
}

fn stream_schema() -> Value {
    let mut flag = maybe_flag();
    flag["description"] = "Whether an event with the usage is sent at the end.".into();
    open(0, &[("include_usage", flag)])
}

/// Reads what every dialect has beside `metadata`, for one choice. `max_tokens` is the default, `vocab` bounds ids.
pub fn read(
    fields: &Fields<'_>,
    metadata: BTreeMap<String, String>,
    max_tokens: u32,
    vocab: usize,
    names: FieldNames,
) -> Result<ClientRequest, ApiError> {
    let model = fields.required("model", "a model's name")?;
    let stream = fields.is_set("stream")?;
    Ok(ClientRequest {
        model: model.to_owned(),
        endpoint: ClientEndpoint::Completions,
        messages: Vec::new(),
        chat: ChatOptions::default(),
        params: params(fields, max_tokens, vocab)?,
        stop: stop(fields)?,
        grammar: None,
        choices: 1,
        logprobs: None,
        token_ids: false,
        reports_stop: false,
        metadata,
        user: fields.owned("user")?,
        store: fields.boolean("store")?,
        stream,
        names,
    })
}

fn params(
    fields: &Fields<'_>,
    default_max_tokens: u32,
    vocab: usize,
) -> Result<SamplingParams, ApiError> {
    let default = SamplingParams::default();
    let single = |name: &str, otherwise: f32| fields.float(name).map_or(otherwise, |v| v as f32);
    // -1 is vLLM's value for all tokens, as 0 is here.
    let top_k = fields.whole("top_k").map(|k| k.max(0));
    let max_tokens = max_tokens(fields)?.unwrap_or(default_max_tokens);
    Ok(SamplingParams {
        temperature: single("temperature", default.temperature),
        // 0 keeps only the most probable token, as does any positive mass below that token's own.
        top_p: single("top_p", default.top_p).max(f32::MIN_POSITIVE),
        top_k: to_u32(top_k).unwrap_or(default.top_k),
        min_p: single("min_p", default.min_p),
        presence_penalty: single("presence_penalty", 0.0),
        frequency_penalty: single("frequency_penalty", 0.0),
        logit_bias: logit_bias(fields, vocab)?,
        seed: seed(fields)?,
        max_tokens,
        repetition_penalty: repetition_penalty(fields)?,
        min_tokens: to_u32(fields.integer("min_tokens", 0, max_tokens.into())?).unwrap_or(0),
        ignore_eos: fields.is_set("ignore_eos")?,
        stop_token_ids: stop_token_ids(fields, vocab)?,
        include_stop: fields.is_set("include_stop_str_in_output")?,
    })
}

fn repetition_penalty(fields: &Fields<'_>) -> Result<f32, ApiError> {
    let allowed = "a number above 0 and at most 100";
    let convert = |v: &Value| {
        let penalty = v.as_f64()? as f32;
        (penalty > 0.0 && penalty <= 100.0).then_some(penalty)
    };
    Ok(fields.read("repetition_penalty", allowed, convert)?.unwrap_or(1.0))
}

fn stop_token_ids(fields: &Fields<'_>, vocab: usize) -> Result<Vec<TokenId>, ApiError> {
    let allowed = format!("a list of up to {MAX_STOP_TOKENS} ids below {vocab}");
    let id = |v: &Value| {
        let id = TokenId::try_from(v.as_u64()?).ok()?;
        ((id as usize) < vocab).then_some(id)
    };
    let convert = |value: &Value| {
        let ids: Vec<TokenId> = value.as_array()?.iter().map(id).collect::<Option<_>>()?;
        (ids.len() <= MAX_STOP_TOKENS).then_some(ids)
    };
    Ok(fields.read("stop_token_ids", allowed, convert)?.unwrap_or_default())
}

/// The client's seed (a negative one reinterpreted as unsigned), or a random one.
fn seed(fields: &Fields<'_>) -> Result<u64, ApiError> {
    let convert = |v: &Value| v.as_u64().or_else(|| v.as_i64().map(i64::cast_unsigned));
    Ok(fields.read("seed", "a whole number of 64 bits", convert)?.unwrap_or_else(rand::random))
}

/// `max_completion_tokens`, or its older name `max_tokens`.
fn max_tokens(fields: &Fields<'_>) -> Result<Option<u32>, ApiError> {
    match (fields.whole("max_completion_tokens"), fields.whole("max_tokens")) {
        (Some(new), Some(old)) if new != old => {
            let allowed = format_args!("absent, or equal to max_completion_tokens ({new})");
            Err(fields.invalid("max_tokens", allowed))
        }
        (new, old) => Ok(to_u32(new.or(old))),
    }
}

pub fn to_u32(value: Option<i64>) -> Option<u32> {
    value.map(|v| u32::try_from(v).unwrap_or(u32::MAX))
}

fn logit_bias(fields: &Fields<'_>, vocab: usize) -> Result<BTreeMap<TokenId, f32>, ApiError> {
    let Some(map) = fields.object("logit_bias")? else { return Ok(BTreeMap::new()) };
    if map.len() > MAX_BIASES {
        let message = format!("logit_bias has {} entries: it may have {MAX_BIASES}", map.len());
        return Err(ApiError::field("logit_bias", message));
    }
    let inner = Fields::at("logit_bias", fields.get("logit_bias").unwrap_or(&Value::Null))?;
    let mut biases = BTreeMap::new();
    for name in map.keys() {
        let id = name.parse::<TokenId>().ok().filter(|id| (*id as usize) < vocab);
        let Some(id) = id else {
            let message =
                format!("logit_bias has the key {name:?}: it must be an id below {vocab}");
            return Err(ApiError::field("logit_bias", message));
        };
        if let Some(bias) = inner.number(name, -100.0, 100.0)? {
            biases.insert(id, bias as f32);
        }
    }
    Ok(biases)
}

fn stop(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let allowed = format!("a string or {}", stop_form(MAX_STOP));
    let convert = |value: &Value| match value {
        Value::Array(list) => stop_texts(list, MAX_STOP),
        text => stop_texts(std::slice::from_ref(text), MAX_STOP),
    };
    Ok(fields.read("stop", allowed, convert)?.unwrap_or_default())
}

pub fn metadata(fields: &Fields<'_>) -> Result<BTreeMap<String, String>, ApiError> {
    let (pairs, key_chars, value_chars) = METADATA;
    let Some(map) = fields.object("metadata")? else { return Ok(BTreeMap::new()) };
    if map.len() > pairs {
        let message = format!("metadata has {} pairs: it may have {pairs}", map.len());
        return Err(ApiError::field("metadata", message));
    }
    let mut metadata = BTreeMap::new();
    for (key, value) in map {
        if key.chars().count() > key_chars {
            let message =
                format!("metadata has the key {key:?}: it may have {key_chars} characters");
            return Err(ApiError::field("metadata", message));
        }
        let text = value.as_str().filter(|text| text.chars().count() <= value_chars);
        let text = text.ok_or_else(|| {
            let allowed = format_args!("a string of at most {value_chars} characters");
            invalid(&format!("metadata.{key}"), value, allowed)
        })?;
        metadata.insert(key.clone(), text.to_owned());
    }
    Ok(metadata)
}

pub fn include_usage(fields: &Fields<'_>, stream: bool) -> Result<bool, ApiError> {
    let Some(value) = fields.get("stream_options") else { return Ok(false) };
    if !stream {
        return Err(fields.invalid("stream_options", "absent unless stream is true"));
    }
    Fields::at("stream_options", value)?.is_set("include_usage")
}
