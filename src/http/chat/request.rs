//! Validates a chat request, field by field.
//!
//! The fields are those of OpenAI and vLLM. A field that Hone cannot support, and that would change
//! the response, is refused: always ([`UNSUPPORTED`]) or unless it has its default value
//! ([`ACCEPTED_IF`]). A field that would change nothing is accepted ([`IGNORED`]). Every other field
//! is refused as unknown, as in OpenAI's API, so that a misspelled field is not silently ignored.
//! `messages` and `tools` read the conversation and what is added to it.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use hone_core::types::{Endpoint, SamplingParams, TokenId};

use super::conversation::{Conversation, FieldNames};
use super::{constraint, messages, tools};
use crate::http::body::{Fields, invalid};
use crate::http::error::ApiError;

/// Largest `n`.
pub(in crate::http) const MAX_CHOICES: i64 = 8;
/// OpenAI's limits of `metadata`: number of pairs, characters of a key, characters of a value.
const METADATA: (usize, usize, usize) = (16, 64, 512);
/// OpenAI's limit of stop strings.
const MAX_STOP: usize = 4;
/// OpenAI's limit of `top_logprobs`.
pub(in crate::http) const MAX_TOP_LOGPROBS: i64 = 20;
/// Most stop tokens of a request.
const MAX_STOP_TOKENS: usize = 64;

/// Fields that [`read`] uses.
const KNOWN: [&str; 38] = [
    "chat_template_kwargs",
    "frequency_penalty",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "ignore_eos",
    "include_stop_str_in_output",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "metadata",
    "min_p",
    "min_tokens",
    "model",
    "n",
    "parallel_tool_calls",
    "presence_penalty",
    "reasoning_effort",
    "repetition_penalty",
    "response_format",
    "return_token_ids",
    "seed",
    "stop",
    "stop_token_ids",
    "store",
    "stream",
    "stream_options",
    "structured_outputs",
    "temperature",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_k",
    "top_p",
    "user",
];

/// Fields without effect: they control OpenAI's service, its billing and its caches, or features
/// that a supported request does not use.
const IGNORED: [&str; 6] = [
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "verbosity",
];

/// Fields that would change the response. Refused unless null, false or empty.
const UNSUPPORTED: [&str; 16] = [
    "allowed_token_ids",
    "audio",
    "bad_words",
    "best_of",
    "early_stopping",
    "function_call",
    "functions",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "logits_processors",
    "prompt_logprobs",
    "return_tokens_as_token_ids",
    "truncate_prompt_tokens",
    "use_beam_search",
    "vllm_xargs",
    "web_search_options",
];

/// A valid request.
#[derive(Debug, PartialEq)]
pub(super) struct ChatRequest {
    pub(super) conversation: Conversation,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
}

/// Validates a body. `vocab` bounds the token ids of `logit_bias`.
pub(super) fn read(
    body: &Map<String, Value>,
    default_max_tokens: u32,
    vocab: usize,
) -> Result<ChatRequest, ApiError> {
    let fields = Fields::new(body);
    refuse_unsupported(&fields)?;
    let model = fields.text("model")?.ok_or_else(|| fields.missing("model", "a model's name"))?;
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let grammar = constraint::read(&fields)?;
    let params = params(&fields, default_max_tokens, vocab)?;
    let chat = tools::read(&fields)?;
    if let Some(grammar) = grammar.as_ref().filter(|_| chat.forces_call()) {
        let allowed = format_args!("\"none\" or \"auto\" beside {}", grammar.field);
        return Err(fields.invalid("tool_choice", allowed));
    }
    let is_constrained = grammar.is_some() || chat.forces_call();
    if is_constrained && (params.min_tokens > 0 || params.ignore_eos) {
        let name = if params.ignore_eos { "ignore_eos" } else { "min_tokens" };
        return Err(fields.invalid(name, "absent if the text is constrained"));
    }
    let conversation = Conversation {
        model: model.to_owned(),
        endpoint: Endpoint::Completions,
        messages: messages::read(&fields)?,
        chat,
        params,
        stop: stop(&fields)?,
        grammar,
        choices: to_u32(fields.integer("n", 1..=MAX_CHOICES)?).unwrap_or(1),
        logprobs: logprobs(&fields)?,
        token_ids: fields.boolean("return_token_ids")?.unwrap_or(false),
        metadata: metadata(&fields)?,
        user: fields.text("user")?.map(str::to_owned),
        store: fields.boolean("store")?,
        fields: field_names(&fields),
    };
    Ok(ChatRequest { conversation, stream, include_usage: include_usage(&fields, stream)? })
}

fn field_names(fields: &Fields<'_>) -> FieldNames {
    let newer = fields.get("max_completion_tokens").is_some();
    FieldNames {
        max_tokens: if newer { "max_completion_tokens" } else { "max_tokens" },
        messages: "messages",
        parameters: "function.parameters",
    }
}

fn refuse_unsupported(fields: &Fields<'_>) -> Result<(), ApiError> {
    for name in fields.names() {
        let value = fields.get(name).unwrap_or(&Value::Null);
        if UNSUPPORTED.contains(&name) {
            let is_default = match value {
                Value::Bool(false) => true,
                Value::Array(items) => items.is_empty(),
                Value::Object(map) => map.is_empty(),
                Value::Number(number) => {
                    number.as_i64() == Some(if name == "best_of" { 1 } else { 0 })
                }
                _ => false,
            };
            if !is_default {
                let message = format!("{name} is not supported: leave it out");
                return Err(ApiError::unsupported(name, message));
            }
        } else if !ACCEPTED_IF.iter().any(|(known, _)| *known == name)
            && !KNOWN.contains(&name)
            && !IGNORED.contains(&name)
        {
            return Err(ApiError::unsupported(name, format!("{name} is not a known field")));
        }
    }
    for (name, accepts) in ACCEPTED_IF {
        if let Some(value) = fields.get(name)
            && !accepts(value)
        {
            let message = format!("{name} is {value}: only the default is supported");
            return Err(ApiError::unsupported(name, message));
        }
    }
    Ok(())
}

/// A field, and a function that returns whether a value is accepted.
type AcceptedIf = (&'static str, fn(&Value) -> bool);

/// Fields of which only the default value is supported.
const ACCEPTED_IF: [AcceptedIf; 4] = [
    ("length_penalty", |v| v.as_f64() == Some(1.0)),
    ("modalities", |v| v.as_array().is_some_and(|list| list.iter().all(|m| m == "text"))),
    ("skip_special_tokens", |v| v == true),
    ("spaces_between_special_tokens", |v| v == true),
];

pub(in crate::http) fn params(
    fields: &Fields<'_>,
    default_max_tokens: u32,
    vocab: usize,
) -> Result<SamplingParams, ApiError> {
    let default = SamplingParams::default();
    let single = |value: Option<f64>, otherwise: f32| value.map_or(otherwise, |v| v as f32);
    // -1 is vLLM's value for all tokens, as 0 is here.
    let top_k = fields.integer("top_k", -1..=i64::from(u32::MAX))?.map(|k| k.max(0));
    let max_tokens = max_tokens(fields)?.unwrap_or(default_max_tokens);
    Ok(SamplingParams {
        temperature: single(fields.number("temperature", 0.0..=2.0)?, default.temperature),
        // 0 keeps only the most probable token, as does any positive mass below that token's own.
        top_p: single(fields.number("top_p", 0.0..=1.0)?, default.top_p).max(f32::MIN_POSITIVE),
        top_k: to_u32(top_k).unwrap_or(default.top_k),
        min_p: single(fields.number("min_p", 0.0..=1.0)?, default.min_p),
        presence_penalty: single(fields.number("presence_penalty", -2.0..=2.0)?, 0.0),
        frequency_penalty: single(fields.number("frequency_penalty", -2.0..=2.0)?, 0.0),
        logit_bias: logit_bias(fields, vocab)?,
        seed: seed(fields)?,
        max_tokens,
        repetition_penalty: repetition_penalty(fields)?,
        min_tokens: to_u32(fields.integer("min_tokens", 0..=i64::from(max_tokens))?).unwrap_or(0),
        ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
        stop_token_ids: stop_token_ids(fields, vocab)?,
        include_stop: fields.boolean("include_stop_str_in_output")?.unwrap_or(false),
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

/// The client's seed (a negative one reinterpreted as unsigned), or a random one. The ledger records
/// either.
fn seed(fields: &Fields<'_>) -> Result<u64, ApiError> {
    let convert = |v: &Value| v.as_u64().or_else(|| v.as_i64().map(i64::cast_unsigned));
    Ok(fields.read("seed", "a whole number of 64 bits", convert)?.unwrap_or_else(rand::random))
}

/// `max_completion_tokens`, or its older name `max_tokens`.
fn max_tokens(fields: &Fields<'_>) -> Result<Option<u32>, ApiError> {
    let limit = 1..=i64::from(u32::MAX);
    let new = fields.integer("max_completion_tokens", limit.clone())?;
    let old = fields.integer("max_tokens", limit)?;
    match (new, old) {
        (Some(new), Some(old)) if new != old => {
            let allowed = format_args!("absent, or equal to max_completion_tokens ({new})");
            Err(fields.invalid("max_tokens", allowed))
        }
        _ => Ok(to_u32(new.or(old))),
    }
}

pub(in crate::http) fn to_u32(value: Option<i64>) -> Option<u32> {
    value.map(|v| u32::try_from(v).unwrap_or(u32::MAX))
}

fn logit_bias(fields: &Fields<'_>, vocab: usize) -> Result<BTreeMap<TokenId, f32>, ApiError> {
    let Some(map) = fields.object("logit_bias")? else { return Ok(BTreeMap::new()) };
    let inner = Fields::at("logit_bias", fields.get("logit_bias").unwrap_or(&Value::Null))?;
    let mut biases = BTreeMap::new();
    for name in map.keys() {
        let id = name.parse::<TokenId>().ok().filter(|id| (*id as usize) < vocab);
        let Some(id) = id else {
            let message =
                format!("logit_bias has the key {name:?}: it must be an id below {vocab}");
            return Err(ApiError::field("logit_bias", message));
        };
        if let Some(bias) = inner.number(name, -100.0..=100.0)? {
            biases.insert(id, bias as f32);
        }
    }
    Ok(biases)
}

pub(in crate::http) fn stop(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let allowed = format!("a string or a list of up to {MAX_STOP} strings, none empty");
    let convert = |value: &Value| {
        let texts: Option<Vec<String>> = match value {
            Value::Array(list) => list.iter().map(|v| v.as_str().map(str::to_owned)).collect(),
            other => other.as_str().map(|text| vec![text.to_owned()]),
        };
        texts.filter(|texts| texts.len() <= MAX_STOP && !texts.iter().any(String::is_empty))
    };
    Ok(fields.read("stop", allowed, convert)?.unwrap_or_default())
}

fn logprobs(fields: &Fields<'_>) -> Result<Option<u8>, ApiError> {
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=MAX_TOP_LOGPROBS)?;
    match (wanted, top) {
        (true, top) => Ok(Some(u8::try_from(top.unwrap_or(0)).unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(fields.invalid("top_logprobs", "absent unless logprobs is true")),
    }
}

pub(in crate::http) fn metadata(fields: &Fields<'_>) -> Result<BTreeMap<String, String>, ApiError> {
    let (pairs, key_chars, value_chars) = METADATA;
    let Some(map) = fields.object("metadata")? else { return Ok(BTreeMap::new()) };
    if map.len() > pairs {
        return Err(ApiError::field(
            "metadata",
            format!("metadata has {} pairs: it may have {pairs}", map.len()),
        ));
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

pub(in crate::http) fn include_usage(fields: &Fields<'_>, stream: bool) -> Result<bool, ApiError> {
    let Some(value) = fields.get("stream_options") else { return Ok(false) };
    if !stream {
        return Err(fields.invalid("stream_options", "absent unless stream is true"));
    }
    Ok(Fields::at("stream_options", value)?.boolean("include_usage")?.unwrap_or(false))
}
