//! Begins the answers to a conversation, for every endpoint that has messages.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use hone_core::types::{
    ChatOptions, ClientEndpoint, Interaction, Message, SamplingParams, session_of,
};
use hone_engine::answer::AnswerForm;
use hone_engine::{CompiledGrammar, Engine};

use super::answer::{Answers, WholeMessage};
use super::calls::CallRules;
use super::constraint::RequestedGrammar;
use crate::http::AppState;
use crate::http::auth::Caller;
use crate::http::error::ApiError;
use crate::http::generate::admit::{BYTES_PER_TOKEN, WantedTokens, admit};
use crate::http::generate::continuation::{ChatPrompt, chat_prompt};
use crate::http::generate::models;
use crate::http::generate::prompt::{PromptContext, size, tool_format};
use crate::http::generate::run::RequestRun;
use crate::http::generate::{SamplingRequest, Usage};

/// A valid request for the next message of a conversation.
#[derive(Debug, PartialEq)]
pub struct ConversationRequest {
    pub model: String,
    pub endpoint: ClientEndpoint,
    pub messages: Vec<Message>,
    /// Functions, and variables of the chat template.
    pub chat: ChatOptions,
    /// Sampling parameters, with the client's seed or a random one.
    pub params: SamplingParams,
    pub stop: Vec<String>,
    /// What constrains the text.
    pub grammar: Option<RequestedGrammar>,
    pub choices: u32,
    /// Number of alternatives per token; `None` if no log-probabilities are requested.
    pub logprobs: Option<u8>,
    /// Whether the response has the tokens of prompt and choices.
    pub token_ids: bool,
    pub metadata: BTreeMap<String, String>,
    /// The client's id of its end user, who meets one version throughout a canary.
    pub user: Option<String>,
    /// Whether the client wants the completion to be kept.
    pub store: Option<bool>,
    pub fields: FieldNames,
}

/// The fields of a request that errors may refer to after it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FieldNames {
    /// The token limit.
    pub max_tokens: &'static str,
    /// The conversation.
    pub messages: &'static str,
    /// The schema of a function's arguments, within an entry of `tools`.
    pub parameters: &'static str,
}

/// Answers that are being sampled.
pub struct AnswerRun {
    pub run: RequestRun,
    pub interaction: Arc<Interaction>,
    pub answers: Answers,
}

/// Checks what a conversation may use, before the work of rendering and tokenizing it, and starts to sample
/// its answers.
///
/// # Errors
/// 404 for an unknown model, 429 by a limit, 400 for a grammar or a prompt that the model cannot have.
pub async fn begin(
    state: Arc<AppState>,
    caller: Caller,
    conversation: ConversationRequest,
    arrived: Instant,
) -> Result<AnswerRun, ApiError> {
    let ConversationRequest {
        model,
        endpoint,
        messages,
        chat,
        params,
        stop,
        metadata,
        user,
        store,
        ..
    } = conversation;
    let fields = conversation.fields;
    models::check(&state, &model)?;
    let wanted = WantedTokens {
        params: &params,
        max_tokens_field: fields.max_tokens,
        choices: conversation.choices as usize,
        choices_field: "n",
        prompt_tokens: size(&messages, &chat) / BYTES_PER_TOKEN,
    };
    let permit = admit(&state, &caller, &wanted)?;
    let format = tool_format(&state);
    let grammar = compile(&state.engine, conversation.grammar.as_ref()).await?;
    let session = session_of(&metadata);
    let ChatPrompt { ids: prompt_ids, continues } =
        chat_prompt(&state, &caller, fields.messages, &messages, &chat, session).await?;
    let longest = state.engine.info().context;
    if prompt_ids.len() >= longest {
        return Err(ApiError::too_long(fields.messages, prompt_ids.len(), longest));
    }
    let codec = state.engine.codec();
    let rules = || CallRules {
        codec: codec.clone(),
        format,
        options: chat.clone(),
        opens_reasoning: codec.opens_reasoning(&prompt_ids),
        parameters_field: fields.parameters,
    };
    let grammar = match grammar {
        None if chat.constrains_calls() => Some(rules().compile().await?),
        grammar => grammar,
    };
    let spec = grammar.as_ref().map(|grammar| grammar.spec().clone());
    let form = AnswerForm::new(codec, &prompt_ids, &chat, format).constrained(spec.as_ref());
    let context = PromptContext {
        model,
        endpoint,
        metadata,
        params,
        stop,
        chat,
        caller,
        user: user.clone(),
        store,
        grammar: spec,
    };
    let template = codec.template_hash();
    let interaction = context.interaction(&state, messages, prompt_ids, template);
    let interaction = Arc::new(Interaction { continues, ..interaction });
    let request = SamplingRequest {
        prompts: vec![interaction.clone()],
        choices: conversation.choices,
        logprobs: conversation.logprobs,
        grammar,
        token_ids: conversation.token_ids,
        reports_stop: false,
        user,
        stored: context.is_kept(&state),
    };
    let answers = Answers::new(&form, interaction.id, request.choices);
    let run = RequestRun::new(state, &request, arrived).with_permit(permit);
    Ok(AnswerRun { run, interaction, answers })
}

/// Runs to the end and returns the messages of all choices.
pub async fn collect(
    mut answers: Answers,
    run: &mut RequestRun,
) -> Result<(Vec<WholeMessage>, Usage), ApiError> {
    run.read_whole();
    while let Some(update) = run.next().await {
        answers.keep(update?)?;
    }
    let usage = answers.usage(run.usage());
    Ok((answers.into_messages(), usage))
}

async fn compile(
    engine: &Arc<dyn Engine>,
    requested: Option<&RequestedGrammar>,
) -> Result<Option<Arc<CompiledGrammar>>, ApiError> {
    let Some(requested) = requested else { return Ok(None) };
    let compiled = engine.codec().compile_grammar(&requested.spec).await;
    compiled.map(Some).map_err(|error| match error {
        error if error.is_refusal() => {
            ApiError::field(&requested.field, format!("{}: {error}", requested.field))
        }
        error => error.into(),
    })
}
