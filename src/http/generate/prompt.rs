//! Makes a prompt's tokens and its record.

use std::collections::BTreeMap;

use serde_json::Value;

use hone_core::types::{
    ChatOptions, ClientEndpoint, GrammarSpec, Interaction, InteractionId, Message, PromptSource,
    SamplingParams, TokenId, now_ms, rater_id,
};
use hone_engine::{Codec, EngineError, ToolFormat};

use crate::http::AppState;
use crate::http::auth::Caller;
use crate::http::body::invalid;
use crate::http::error::ApiError;

/// Bytes of texts, or ids of a list, that a request may have for each token of the model's context. A usual text
/// has about four bytes a token, so four times the context can be counted.
const SIZE_PER_TOKEN: usize = 16;
/// What a request may have whatever the context is.
const LEAST_SIZE: usize = 64 << 10;
/// Bytes of texts that are tokenized on the thread of the request: this takes about a millisecond.
const INLINE_SIZE: usize = 1 << 10;
/// Bytes that count for each message and each call beside their texts. A chat template marks them with several
/// tokens.
const MARKS: usize = 16;

/// What a request gives to the tokenizer.
#[derive(Clone, Copy)]
pub enum TextSize {
    /// Bytes of texts.
    Bytes(usize),
    /// Token ids.
    Ids(usize),
}

/// How the model writes calls of functions.
pub fn tool_format(state: &AppState) -> ToolFormat {
    state.config.tool_format.or(state.engine.codec().tool_format())
}

/// The tokens of a conversation, which the request has in `field`; `generate` adds the generation prompt.
pub async fn tokenize(
    state: &AppState,
    field: &str,
    messages: &[Message],
    options: &ChatOptions,
    generate: bool,
) -> Result<Vec<TokenId>, ApiError> {
    let size = size(messages, options);
    let (messages, options, format) = (messages.to_vec(), options.clone(), tool_format(state));
    let work = move |codec: &Codec| codec.chat(&messages, &options, format, generate);
    encode(state, field, TextSize::Bytes(size), work).await
}

/// The length in bytes of what a chat template may write: texts, names, reasoning, calls, ids, functions,
/// variables and the marks of messages.
pub fn size(messages: &[Message], options: &ChatOptions) -> usize {
    let length = |text: &Option<String>| text.as_ref().map_or(0, String::len);
    let said = messages.iter().map(|message| {
        let calls = message.tool_calls.iter();
        let calls = calls.map(|c| MARKS + c.id.len() + c.name.len() + c.arguments.len());
        MARKS
            + message.content.len()
            + length(&message.name)
            + length(&message.tool_call_id)
            + length(&message.reasoning)
            + calls.sum::<usize>()
    });
    let functions = options.tools.iter().map(|tool| {
        let schema = tool.parameters.as_ref().map_or(0, |schema| schema.to_string().len());
        tool.name.len() + length(&tool.description) + schema
    });
    let variables = options.template_variables.iter();
    let variables = variables.map(|(name, value)| name.len() + value.to_string().len());
    said.sum::<usize>() + functions.sum::<usize>() + variables.sum::<usize>()
}

/// Runs `work` on texts of this size, which the request has in `field`, where it delays no other request.
/// Every text of a client that becomes tokens passes here or [`encode_apart`].
pub async fn encode<T: Send + 'static>(
    state: &AppState,
    field: &str,
    size: TextSize,
    work: impl FnOnce(&Codec) -> Result<T, EngineError> + Send + 'static,
) -> Result<T, ApiError> {
    check_size(state, field, size)?;
    match size {
        TextSize::Bytes(..=INLINE_SIZE) | TextSize::Ids(..=INLINE_SIZE) => {
            Ok(work(state.engine.codec())?)
        }
        _ => encode_apart(state, work).await,
    }
}

/// [`encode`] for texts that were measured before, however short they are: a list may have many of them.
pub async fn encode_apart<T: Send + 'static>(
    state: &AppState,
    work: impl FnOnce(&Codec) -> Result<T, EngineError> + Send + 'static,
) -> Result<T, ApiError> {
    let codec = state.engine.codec().clone();
    let done = state.tokenizing.run(move || work(&codec)).await;
    Ok(done.map_err(|error| ApiError::logged("the tokenizer panicked", &error))??)
}

/// Refuses a field that has much more than a usual prompt of the model can have, before any work on it.
pub fn check_size(state: &AppState, field: &str, size: TextSize) -> Result<(), ApiError> {
    let most = state.engine.info().context.saturating_mul(SIZE_PER_TOKEN).max(LEAST_SIZE);
    let (size, unit) = match size {
        TextSize::Bytes(size) => (size, "bytes"),
        TextSize::Ids(size) => (size, "ids"),
    };
    if size <= most {
        return Ok(());
    }
    Err(ApiError::too_large(field, format!("{field} has {size} {unit}: it may have {most}")))
}

/// The token ids in a list at `path` of a body, each below `vocab`.
pub fn token_ids(path: &str, list: &[Value], vocab: usize) -> Result<Vec<TokenId>, ApiError> {
    let id = |(at, value): (usize, &Value)| {
        let found = value.as_u64().and_then(|id| TokenId::try_from(id).ok());
        let found = found.filter(|id| (*id as usize) < vocab);
        let allowed = format_args!("a token id below {vocab}");
        found.ok_or_else(|| invalid(&format!("{path}[{at}]"), value, allowed))
    };
    list.iter().enumerate().map(id).collect()
}

/// What the prompts of one request have in common.
pub struct PromptContext {
    pub model: String,
    pub endpoint: ClientEndpoint,
    pub metadata: BTreeMap<String, String>,
    pub params: SamplingParams,
    pub stop: Vec<String>,
    /// Functions, and variables of the chat template.
    pub chat: ChatOptions,
    pub caller: Caller,
    /// The client's name of its end user.
    pub user: Option<String>,
    /// The field `store` of the request.
    pub store: Option<bool>,
    /// What constrains the text.
    pub grammar: Option<GrammarSpec>,
}

impl PromptContext {
    /// Whether the request is recorded and learned from. The client decides with the field `store`, or
    /// else `server.store` does. A route or a key that keeps nothing overrules both.
    pub fn is_kept(&self, state: &AppState) -> bool {
        let route = state.routes.find(&self.model, &self.metadata);
        self.store.unwrap_or(state.config.store)
            && route.is_none_or(|route| route.store)
            && self.caller.key.as_ref().is_none_or(|key| key.store)
    }

    /// The record of a prompt. `template_hash` is empty for a prompt that no template rendered.
    pub fn interaction(
        &self,
        state: &AppState,
        messages: Vec<Message>,
        prompt_ids: Vec<TokenId>,
        template_hash: &str,
    ) -> Interaction {
        let route = state.routes.find(&self.model, &self.metadata);
        let kept = self.is_kept(state);
        let mut interaction = Interaction {
            id: if kept { InteractionId::new() } else { InteractionId::unstored() },
            created: now_ms(),
            source: PromptSource::Live,
            // No route has an empty name, so an unmatched request is never scored.
            route: route.map(|r| r.name.clone()).unwrap_or_default(),
            model: self.model.clone(),
            endpoint: self.endpoint.clone(),
            key_id: rater_id(self.caller.key_id.as_deref(), self.user.as_deref()),
            messages,
            metadata: self.metadata.clone(),
            params: self.params.clone(),
            prompt_ids,
            template_hash: template_hash.to_owned(),
            stop: self.stop.clone(),
            held_out: false,
            chat: self.chat.clone(),
            grammar: self.grammar.clone(),
            continues: None,
        };
        interaction.held_out = kept
            && route.is_some_and(|route| route.has_graders())
            && is_held_out(&interaction, state.holdout_share);
        interaction
    }
}

/// Whether only exams use a prompt. Equal prompts give the same answer, so that no copy of an exam's
/// prompt is trained on.
fn is_held_out(interaction: &Interaction, share: f64) -> bool {
    let [a, b, c, d, ..] = interaction.prompt_digest();
    let place = u32::from_le_bytes([a, b, c, d]);
    (f64::from(place) / f64::from(u32::MAX)) < share
}
