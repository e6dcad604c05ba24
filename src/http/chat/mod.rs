//! `POST /v1/chat/completions`, and what every endpoint of conversations shares.
//!
//! `fields` declares the fields of a request, `read` validates them with `messages`, `tools` and
//! `constraint` (its grammar), `wire` defines the shapes of responses, which `ChatStream` sends as server-sent
//! events. `stored` has the endpoints of recorded completions.
//!
//! Shared are `conversation`, which admits a request and starts to sample its answers (with `calls`, the
//! grammar of an answer whose calls are constrained), and `answer`, which divides what is sampled into the
//! parts of a message. [`generate`](super::generate) samples and records.

pub(super) mod answer;
mod calls;
pub(super) mod constraint;
pub(super) mod conversation;
pub(super) mod fields;
pub(super) mod messages;
pub(super) mod stored;
pub(super) mod tools;
pub(super) mod wire;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde_json::{Map, Value};

use hone_core::types::{
    ChatOptions, ClientEndpoint, Interaction, PolicyVersion, SamplingParams, TokenId,
};

use self::conversation::{begin, collect};
use self::wire::{ChatCompletion, Choice};
use super::AppState;
use super::auth::Caller;
use super::body::JsonObject;
use super::generate::with_version;
use crate::http::body::{Fields, invalid};
use crate::http::error::ApiError;
use crate::http::generate::run::RequestRun;
use crate::http::generate::sse::RunEvents;
use crate::http::generate::{ChoiceUpdate, Usage, sse};
use answer::{Answers, MessageUpdate};
use constraint::RequestedGrammar;
use conversation::{AnswerRun, ConversationRequest, FieldNames};
use fields::{FIELDS, MAX_BIASES, MAX_STOP, MAX_STOP_TOKENS, METADATA, stop_form, stop_texts};
use wire::{ChatChunk, Delta, Logprobs, StreamChoice};

/// `POST /v1/chat/completions`
pub(super) async fn create(
    State(state): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    JsonObject(body): JsonObject,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let vocab = state.engine.info().vocab;
    let request = read(&body, state.config.default_max_tokens, vocab)?;
    let ChatRequest { conversation, stream, include_usage } = request;
    let begun = begin(state, caller, conversation, arrived).await?;
    if stream {
        let (version, response) = respond(begun, include_usage).await?;
        return Ok(with_version(response, version));
    }
    let AnswerRun { mut run, interaction, answers } = begun;
    let (messages, usage) = collect(answers, &mut run).await?;
    let codec = run.state.engine.codec();
    let choices = messages.into_iter().zip(0..).map(|(message, index)| {
        let logprobs = run.wants_logprobs().then(|| Logprobs::new(codec, &message.tokens));
        Choice::new(index, message, logprobs, run.wants_token_ids())
    });
    let completion = ChatCompletion {
        prompt_token_ids: run.wants_token_ids().then(|| interaction.prompt_ids.clone()),
        ..ChatCompletion::new(&interaction, run.version(), choices.collect(), usage)
    };
    Ok(with_version(Json(completion).into_response(), Some(run.version())))
}

// Streams a completion as server-sent events: for each choice a role event, events with the changes of
// its message and an event with the finish reason; then usage, if requested; then `[DONE]`. A failure
// after the first byte ends the stream with an `error` event and without `[DONE]`.

struct ChatStream {
    run: RequestRun,
    interaction: Arc<Interaction>,
    answers: Answers,
    /// The version of the first choice to start, if that was before the headers.
    version: Option<PolicyVersion>,
    include_usage: bool,
}

/// Starts the run before it responds, so that a refusal still has its status code, unless the run waits too
/// long. Returns the version of the first choice to start, if one has started.
async fn respond(
    begun: AnswerRun,
    include_usage: bool,
) -> Result<(Option<PolicyVersion>, Response), ApiError> {
    let AnswerRun { mut run, interaction, answers } = begun;
    let (version, keep_alive) = (run.start_in_time().await?, run.keep_alive());
    let events = ChatStream { run, interaction, answers, version, include_usage };
    Ok((version, sse::respond(sse::events_of(events), keep_alive)))
}

impl RunEvents for ChatStream {
    fn run(&mut self) -> &mut RequestRun {
        &mut self.run
    }

    fn of(&mut self, updates: Vec<ChoiceUpdate>) -> Result<String, ApiError> {
        let Some(&ChoiceUpdate { index, version, .. }) = updates.last() else {
            return Ok(String::new());
        };
        let started = updates.iter().any(|update| update.started);
        let updates = self.answers.update(updates)?;
        let mut events = String::new();
        let mut add = |delta, logprobs, token_ids, finish_reason| {
            let choice = StreamChoice { index, delta, logprobs, finish_reason, token_ids };
            events.push_str(&self.chunk(version, vec![choice], None));
        };
        if started {
            let empty = Delta::text(String::new());
            add(Delta { role: Some("assistant"), ..empty }, None, None, None);
        }
        let codec = self.run.state.engine.codec();
        for MessageUpdate { parts, tokens, token_ids, end } in updates {
            let mut deltas: Vec<Delta> = parts.into_iter().map(Delta::from).collect();
            if deltas.is_empty() && !tokens.is_empty() {
                deltas.push(Delta::text(String::new()));
            }
            // The first change has the log-probabilities and ids of all tokens that completed the changes.
            let mut logprobs = self.run.wants_logprobs().then(|| Logprobs::new(codec, &tokens));
            let mut token_ids = self.run.wants_token_ids().then_some(token_ids);
            for delta in deltas {
                add(delta, logprobs.take(), token_ids.as_mut().map(std::mem::take), None);
            }
            if let Some(end) = end {
                add(Delta::default(), None, token_ids, Some(end.as_str()));
            }
        }
        Ok(events)
    }

    fn last(&mut self) -> String {
        let mut events = String::new();
        if self.include_usage {
            let version = self.version.unwrap_or_else(|| self.run.version());
            let usage = self.answers.usage(self.run.usage());
            events = self.chunk(version, Vec::new(), Some(usage));
        }
        events.push_str(&sse::event(sse::DONE));
        events
    }
}

impl ChatStream {
    fn chunk(
        &self,
        version: PolicyVersion,
        choices: Vec<StreamChoice>,
        usage: Option<Usage>,
    ) -> String {
        let interaction = &self.interaction;
        let begins = choices.iter().any(|choice| choice.delta.role.is_some());
        let prompt_token_ids =
            (begins && self.run.wants_token_ids()).then_some(interaction.prompt_ids.as_slice());
        sse::json_event(&ChatChunk {
            id: &interaction.id.completion_id(),
            object: "chat.completion.chunk",
            created: interaction.created / 1000,
            model: &interaction.model,
            system_fingerprint: version.fingerprint(),
            choices,
            usage: self.include_usage.then_some(usage),
            prompt_token_ids,
        })
    }
}

// Validates a chat request, field by field.
//
// [`FIELDS`] declares the fields. `messages` and `tools` read the conversation and what is added to it.

/// A valid request.
#[derive(Debug, PartialEq)]
struct ChatRequest {
    conversation: ConversationRequest,
    stream: bool,
    include_usage: bool,
}

/// Validates a body. `vocab` bounds the token ids of `logit_bias`.
fn read(
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
