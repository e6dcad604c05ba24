//! Validates a chat request, field by field.
//!
//! [`FIELDS`] declares the fields. `messages` and `tools` read the conversation and what is added to it.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use hone_core::types::{ChatOptions, ClientEndpoint, SamplingParams, TokenId};

use super::constraint::RequestedGrammar;
use super::conversation::{ConversationRequest, FieldNames};
use super::fields::{
    FIELDS, MAX_BIASES, MAX_STOP, MAX_STOP_TOKENS, METADATA, stop_form, stop_texts,
};
use super::{constraint, messages, tools};
use crate::http::body::{Fields, invalid};
use crate::http::error::ApiError;

/// A valid request.
#[derive(Debug, PartialEq)]
pub(super) struct ChatRequest {
    pub(super) conversation: ConversationRequest,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
}

/// Validates a body. `vocab` bounds the token ids of `logit_bias`.
pub(super) fn read(
    body: &Map<String, Value>,
    default_max_tokens: u32,
    vocab: usize,
) -> Result<ChatRequest, ApiError> {
    let fields = Fields::of(body, FIELDS)?;
    let model = fields.text("model")?.ok_or_else(|| fields.missing("model", "a model's name"))?;
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let grammar = constraint::read(&fields)?;
    let params = params(&fields, default_max_tokens, vocab)?;
    let chat = tools::read(&fields)?;
    refuse_contradictions(&fields, grammar.as_ref(), &chat, &params)?;
    let conversation = ConversationRequest {
        model: model.to_owned(),
        endpoint: ClientEndpoint::Completions,
        messages: messages::read(&fields)?,
        chat,
        params,
        stop: stop(&fields)?,
        grammar,
        choices: to_u32(fields.whole("n")).unwrap_or(1),
        logprobs: logprobs(&fields)?,
        token_ids: fields.boolean("return_token_ids")?.unwrap_or(false),
        metadata: metadata(&fields)?,
        user: fields.text("user")?.map(str::to_owned),
        store: fields.boolean("store")?,
        fields: field_names(&fields),
    };
    Ok(ChatRequest { conversation, stream, include_usage: include_usage(&fields, stream)? })
}

/// Refuses what contradicts a grammar or a forced call.
pub(in crate::http) fn refuse_contradictions(
    fields: &Fields<'_>,
    grammar: Option<&RequestedGrammar>,
    chat: &ChatOptions,
    params: &SamplingParams,
) -> Result<(), ApiError> {
    if let Some(grammar) = grammar.filter(|_| chat.forces_call()) {
        let allowed = format_args!("\"none\" or \"auto\" beside {}", grammar.field);
        return Err(fields.invalid("tool_choice", allowed));
    }
    let is_constrained = grammar.is_some() || chat.constrains_calls();
    if is_constrained && (params.min_tokens > 0 || params.ignore_eos) {
        let name = if params.ignore_eos { "ignore_eos" } else { "min_tokens" };
        return Err(fields.invalid(name, "absent if the text is constrained"));
    }
    Ok(())
}

fn field_names(fields: &Fields<'_>) -> FieldNames {
    let newer = fields.get("max_completion_tokens").is_some();
    FieldNames {
        max_tokens: if newer { "max_completion_tokens" } else { "max_tokens" },
        messages: "messages",
        parameters: "function.parameters",
    }
}

pub(in crate::http) fn params(
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
    match (fields.whole("max_completion_tokens"), fields.whole("max_tokens")) {
        (Some(new), Some(old)) if new != old => {
            let allowed = format_args!("absent, or equal to max_completion_tokens ({new})");
            Err(fields.invalid("max_tokens", allowed))
        }
        (new, old) => Ok(to_u32(new.or(old))),
    }
}

pub(in crate::http) fn to_u32(value: Option<i64>) -> Option<u32> {
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
        if let Some(bias) = inner.number(name, -100.0..=100.0)? {
            biases.insert(id, bias as f32);
        }
    }
    Ok(biases)
}

pub(in crate::http) fn stop(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let allowed = format!("a string or {}", stop_form(MAX_STOP));
    let convert = |value: &Value| match value {
        Value::Array(list) => stop_texts(list, MAX_STOP),
        text => stop_texts(std::slice::from_ref(text), MAX_STOP),
    };
    Ok(fields.read("stop", allowed, convert)?.unwrap_or_default())
}

fn logprobs(fields: &Fields<'_>) -> Result<Option<u8>, ApiError> {
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.whole("top_logprobs");
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::http::body::testing::assert_agreement;

    #[test]
    fn the_reader_accepts_what_the_schema_does() {
        let base = json!({
            "model": "default",
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "logprobs": true,
            "stream": true,
        });
        // The compiler of grammars refuses an empty list.
        let except = ["guided_choice"];
        assert_agreement(FIELDS, &base, &except, |body| read(body, 256, 1000).map(drop));
    }
}
