//! Admits the requests of all dialects, and begins the answers of conversations.

use std::sync::Arc;
use std::time::Instant;

use hone_core::types::{
    ChatOptions, GrammarSpec, Interaction, InteractionId, Message, PromptSource, TokenId, now_ms,
    rater_id, session_of,
};
use hone_engine::EngineError;
use hone_engine::answer::AnswerForm;

use super::prompt::{ChatPrompt, chat_prompt, size, tool_format};
use super::run::{RequestRun, SamplingRequest};
use super::{ClientRequest, Usage};
use crate::auth::{Caller, KeyPermit};
use crate::chat::answer::Answers;
use crate::chat::constraint::CallRules;
use crate::error::{ApiError, ErrorCode};
use crate::state::{AppState, Call};

/// The alias of the served model.
const DEFAULT_MODEL: &str = "default";
/// Usual bytes of a token.
pub const BYTES_PER_TOKEN: usize = 4;

/// Answers that are being sampled.
pub struct AnswerRun {
    pub run: RequestRun,
    pub interaction: Arc<Interaction>,
    pub answers: Answers,
}

impl AnswerRun {
    pub fn usage(&self) -> Usage {
        self.answers.usage(self.run.usage())
    }
}

/// The names of the served model.
pub fn model_names(state: &AppState) -> Vec<&str> {
    let mut names = vec![DEFAULT_MODEL];
    let own = std::iter::once(&state.engine.info().name);
    for name in own.chain(&state.config.model_aliases) {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    names
}

/// 404 for a name that is not served.
pub fn check_model(state: &AppState, name: &str) -> Result<(), ApiError> {
    let names = model_names(state);
    if names.contains(&name) {
        return Ok(());
    }
    let quoted: Vec<String> = names.iter().map(|n| format!("{n:?}")).collect();
    let message = format!("model is {name:?}: it must be {}", quoted.join(" or "));
    Err(ApiError::new(ErrorCode::ModelNotFound, message).param("model"))
}

/// Checks what a conversation may use, before the work on its prompt, and starts to sample its answers.
///
/// # Errors
/// 404 for an unknown model, 429 by a limit, 400 for a grammar or a prompt that the model cannot have.
pub async fn begin(
    Call(state, caller): Call,
    mut request: ClientRequest,
    arrived: Instant,
) -> Result<AnswerRun, ApiError> {
    let messages = std::mem::take(&mut request.messages);
    let (chat, names) = (&request.chat, request.names);
    let permit = request.admit(&state, &caller, 1, size(&messages, chat) / BYTES_PER_TOKEN)?;
    let format = tool_format(&state);
    let grammar = match &request.grammar {
        Some(requested) => Some(requested.compile(state.engine.codec()).await?),
        None => None,
    };
    let session = session_of(&request.metadata);
    let ChatPrompt { ids, continues } =
        chat_prompt(&state, &caller, names.prompt, &messages, chat, session).await?;
    check_length(&state, names.prompt, &ids)?;
    let codec = state.engine.codec();
    let grammar = match grammar {
        None if chat.constrains_calls() => {
            let rules = CallRules {
                codec: codec.clone(),
                format,
                options: chat.clone(),
                opens_reasoning: codec.opens_reasoning(&ids),
                parameters_field: names.parameters,
            };
            Some(rules.compile().await?)
        }
        grammar => grammar,
    };
    let spec = grammar.as_ref().map(|grammar| grammar.spec().clone());
    let form = AnswerForm::new(codec, &ids, chat, format).constrained(spec.as_ref());
    let template = codec.template_hash();
    let interaction = request.interaction(&state, &caller, messages, ids, template, spec);
    let interaction = Arc::new(Interaction { continues, ..interaction });
    let answers = Answers::new(&form, interaction.id, request.choices);
    let prompts = vec![interaction.clone()];
    let stored = request.is_kept(&state, &caller);
    // The interaction has the functions now, whose schemas can be as long as the body.
    request.chat = ChatOptions::default();
    let sampling = SamplingRequest { request, prompts, grammar, stored, permit, arrived };
    Ok(AnswerRun { run: RequestRun::new(state, sampling), interaction, answers })
}

/// Refuses a prompt that does not fit into the model's context.
pub fn check_length(state: &AppState, field: &str, ids: &[TokenId]) -> Result<(), ApiError> {
    let longest = state.engine.info().context;
    if ids.len() < longest { Ok(()) } else { Err(ApiError::too_long(field, ids.len(), longest)) }
}

impl ClientRequest {
    /// Admits a request for this many prompts and estimated tokens, and returns what its key permits, or refuses it.
    pub fn admit(
        &self,
        state: &AppState,
        caller: &Caller,
        prompts: usize,
        prompt_tokens: usize,
    ) -> Result<Option<KeyPermit>, ApiError> {
        check_model(state, &self.model)?;
        let (name, max_tokens) = (self.names.max_tokens, self.params.max_tokens);
        // 0 permits all.
        let most = state.config.max_tokens;
        if most > 0 && max_tokens > most {
            let message =
                format!("{name} is {max_tokens}: it must be at most {most} (server.max_tokens)");
            return Err(ApiError::field(name, message));
        }
        let choices = self.choices as usize * prompts;
        let longest = u64::from(max_tokens).min(state.engine.info().context as u64);
        let completions = (choices as u64).saturating_mul(longest);
        let permit = caller.begin(completions.saturating_add(prompt_tokens as u64))?;
        // If the engine never can admit it, repeating the request is of no use, so the answer names the field.
        // Waiting requests take turns between keys.
        let owner = caller.key_id.as_deref().map(Arc::from);
        state.engine.admits(&owner, choices).map_err(|error| match error {
            EngineError::TooManyChoices { choices, most } => {
                let name = if self.choices > 1 { "n" } else { self.names.prompt };
                let message = format!(
                    "{name} asks for {choices} choices at once: there can be at most {most} (engine.slots, \
                     and engine.queue or a key's share of it)"
                );
                ApiError::field(name, message)
            }
            error => error.into(),
        })?;
        Ok(permit)
    }

    /// Whether the request is recorded: by `store` or else `server.store`, unless its route or key keeps nothing.
    pub fn is_kept(&self, state: &AppState, caller: &Caller) -> bool {
        let route = state.routes.find(&self.model, &self.metadata);
        self.store.unwrap_or(state.config.store)
            && route.is_none_or(|route| route.store)
            && caller.key.as_ref().is_none_or(|key| key.store)
    }

    /// The record of a prompt. `template_hash` is empty for a prompt that no template rendered.
    pub fn interaction(
        &self,
        state: &AppState,
        caller: &Caller,
        messages: Vec<Message>,
        prompt_ids: Vec<TokenId>,
        template_hash: &str,
        grammar: Option<GrammarSpec>,
    ) -> Interaction {
        let route = state.routes.find(&self.model, &self.metadata);
        let kept = self.is_kept(state, caller);
        let mut interaction = Interaction {
            id: if kept { InteractionId::new() } else { InteractionId::unstored() },
            created: now_ms(),
            source: PromptSource::Live,
            // No route has an empty name, so an unmatched request is never scored.
            route: route.map(|r| r.name.clone()).unwrap_or_default(),
            model: self.model.clone(),
            endpoint: self.endpoint.clone(),
            key_id: rater_id(caller.key_id.as_deref(), self.user.as_deref()),
            messages,
            metadata: self.metadata.clone(),
            params: self.params.clone(),
            prompt_ids,
            template_hash: template_hash.to_owned(),
            stop: self.stop.clone(),
            held_out: false,
            chat: self.chat.clone(),
            grammar,
            continues: None,
        };
        interaction.held_out = kept
            && route.is_some_and(|route| route.has_graders())
            && is_held_out(&interaction, state.holdout_share);
        interaction
    }
}

/// Whether only exams use a prompt. Equal prompts give the same answer, so no copy of it is trained on.
fn is_held_out(interaction: &Interaction, share: f64) -> bool {
    let [a, b, c, d, ..] = interaction.prompt_digest();
    let place = u32::from_le_bytes([a, b, c, d]);
    (f64::from(place) / f64::from(u32::MAX)) < share
}
