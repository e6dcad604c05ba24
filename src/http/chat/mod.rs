//! `POST /v1/chat/completions`.
//!
//! `fields` declares the fields of the body. `request` validates it with `messages`, `tools` and `constraint`
//! (its grammar), `answer` divides
//! what is sampled into the parts of a message, `wire` defines the shapes of responses, `stream` sends them
//! as server-sent events. [`generate`](super::generate) samples and records. `stored` has the endpoints of
//! recorded completions.

mod answer;
mod constraint;
pub(super) mod fields;
mod forced;
pub(super) mod messages;
pub(super) mod request;
pub(super) mod stored;
mod stream;
pub(super) mod tools;
pub(super) mod wire;

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};

use hone_core::types::{ChatOptions, ToolChoice};
use hone_engine::answer::AnswerForm;
use hone_engine::{CompiledGrammar, Engine, ToolFormat};

use self::answer::Answers;
use self::constraint::RequestedGrammar;
use self::request::ChatRequest;
use self::wire::ChatCompletion;
use super::auth::Caller;
use super::body::JsonObject;
use super::error::ApiError;
use super::generate::admit::{BYTES_PER_TOKEN, WantedTokens, admit};
use super::generate::prompt::{PromptContext, size, tokenize, tool_format};
use super::generate::run::RequestRun;
use super::generate::types::SamplingRequest;
use super::generate::{models, with_version};
use super::state::AppState;

/// `POST /v1/chat/completions`
pub(super) async fn create(
    State(state): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    JsonObject(body): JsonObject,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let vocab = state.engine.info().vocab;
    let request = request::read(&body, state.config.default_max_tokens, vocab)?;
    models::check(&state, &request.model)?;
    let wanted = WantedTokens {
        params: &request.params,
        choices: request.choices as usize,
        prompt_tokens: size(&request.messages, &request.chat) / BYTES_PER_TOKEN,
    };
    let permit = admit(&state, &caller, &body, &wanted)?;
    let format = tool_format(&state);
    let forced = force(&state, format, &request.chat).await?;
    let requested = request.grammar.or(forced);
    let grammar = compile(&state.engine, requested.as_ref()).await?;
    let prompt_ids = tokenize(&state, &request.messages, &request.chat, true).await?;
    let codec = state.engine.codec();
    let form = AnswerForm::new(codec, &prompt_ids, &request.chat, format);
    let form = if grammar.is_some() { form.constrained(&request.chat) } else { form };
    let ChatRequest { model, messages, chat, params, stop, metadata, user, store, .. } = request;
    let context = PromptContext {
        model,
        metadata,
        params,
        stop,
        chat,
        caller,
        user: user.clone(),
        store,
        grammar: requested.map(|grammar| grammar.spec),
    };
    let template = codec.template_hash();
    let interaction = Arc::new(context.interaction(&state, messages, prompt_ids, template));
    let run = SamplingRequest {
        prompts: vec![interaction.clone()],
        choices: request.choices,
        logprobs: request.logprobs,
        grammar,
        token_ids: request.token_ids,
        user,
        stored: context.is_kept(&state),
    };
    let answers = Answers::new(&form, interaction.id, run.choices);
    let mut run = RequestRun::new(state, &run, arrived).with_permit(permit);
    if request.stream {
        let (version, response) =
            stream::respond(run, interaction, answers, request.include_usage).await?;
        return Ok(with_version(response, version));
    }
    let (choices, usage) = answers.collect(&mut run).await?;
    let completion = ChatCompletion {
        prompt_token_ids: run.wants_token_ids().then(|| interaction.prompt_ids.clone()),
        ..ChatCompletion::new(&interaction, run.version(), choices, usage)
    };
    Ok(with_version(Json(completion).into_response(), Some(run.version())))
}

/// The grammar that the choice of functions forces. Large schemas take long to check.
async fn force(
    state: &AppState,
    format: ToolFormat,
    options: &ChatOptions,
) -> Result<Option<RequestedGrammar>, ApiError> {
    if matches!(options.tool_choice, ToolChoice::None | ToolChoice::Auto) {
        return Ok(None);
    }
    let (codec, options) = (state.engine.codec().clone(), options.clone());
    let read = tokio::task::spawn_blocking(move || forced::read(&codec, format, &options)).await;
    read.map_err(|error| ApiError::logged("checking functions panicked", &error))?
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
        error => ApiError::logged("a grammar cannot be compiled", &error),
    })
}
