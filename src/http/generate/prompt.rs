//! Makes a prompt's tokens and its record.

use std::collections::BTreeMap;

use serde_json::Value;

use hone_core::types::{
    ChatOptions, ClientEndpoint, GrammarSpec, Interaction, InteractionId, Message, PromptSource,
    SamplingParams, TokenId, now_ms, rater_id,
};
use hone_engine::{Codec, EngineError, ToolFormat};

use super::tokenizer_places::INLINE_BYTES;
use crate::http::auth::Caller;
use crate::http::body::invalid;
use crate::http::error::ApiError;
use crate::http::state::AppState;

/// How the model writes calls of functions.
pub fn tool_format(state: &AppState) -> ToolFormat {
    state.config.tool_format.or(state.engine.codec().tool_format())
}

/// The tokens of a conversation; `generate` adds the generation prompt.
pub async fn tokenize(
    state: &AppState,
    messages: &[Message],
    options: &ChatOptions,
    generate: bool,
) -> Result<Vec<TokenId>, ApiError> {
    let size = size(messages, options);
    let (messages, options, format) = (messages.to_vec(), options.clone(), tool_format(state));
    encode(state, size, move |codec| codec.chat(&messages, &options, format, generate)).await
}

/// The length in bytes of what a chat template may write: texts, names, reasoning, calls, functions and
/// variables.
pub fn size(messages: &[Message], options: &ChatOptions) -> usize {
    let length = |text: &Option<String>| text.as_ref().map_or(0, String::len);
    let said = messages.iter().map(|message| {
        let calls = message.tool_calls.iter().map(|call| call.name.len() + call.arguments.len());
        message.content.len()
            + length(&message.name)
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

/// Runs `work`, whose texts have `size` bytes together, where it delays no other request.
pub async fn encode<T: Send + 'static>(
    state: &AppState,
    size: usize,
    work: impl FnOnce(&Codec) -> Result<T, EngineError> + Send + 'static,
) -> Result<T, ApiError> {
    let codec = state.engine.codec();
    if size <= INLINE_BYTES {
        return Ok(work(codec)?);
    }
    let codec = codec.clone();
    let done = tokio::task::spawn_blocking(move || work(&codec)).await;
    Ok(done.map_err(|error| ApiError::logged("the tokenizer panicked", &error))??)
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
