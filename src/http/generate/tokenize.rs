//! `POST /tokenize` and `POST /detokenize`, as in vLLM: texts to token ids and back, without sampling.
//! Nothing is recorded.
//!
//! No engine slot bounds these requests, and a tokenizer needs about 70 bytes of memory for each byte of a
//! text. So a text has a maximum length, and few long ones are computed at once.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};

use hone_core::types::TokenId;
use hone_engine::Codec;

use super::models;
use super::prompt;
use super::prompt::{encode, token_ids};
use crate::http::body::{Field, FieldTable, Fields, JsonObject};
use crate::http::chat::fields::{model_schema, token_schema};
use crate::http::chat::{messages, tools};
use crate::http::error::ApiError;
use crate::http::state::AppState;

/// Bytes of a text, or tokens of a list, that a request may have for each token of the model's context. A
/// usual text has about four bytes a token, so four times the context can be counted.
const SIZE_PER_TOKEN: usize = 16;
/// What a request may have whatever the context is.
const LEAST_SIZE: usize = 64 << 10;

/// The fields of `/tokenize`.
pub(in crate::http) const FIELDS: FieldTable = &[&[
    Field::json("model", model_schema, "The name of the model."),
    Field::text("prompt", "A text; excludes `messages`."),
    Field::json("messages", messages::schema, "A conversation; excludes `prompt`."),
    Field::flag("add_generation_prompt", "Whether the template begins the answer; default true."),
    Field::flag("add_special_tokens", "Whether the tokenizer frames a text; default true."),
    Field::flag("return_token_strs", "Whether the response has the tokens as texts."),
    Field::json("tools", tools::schema, "Functions that the model may call."),
    Field::json("chat_template_kwargs", tools::variables_schema, "Variables of the template."),
]];

/// The fields of `/detokenize`.
pub(in crate::http) const DETOKENIZE_FIELDS: FieldTable = &[&[
    Field::json("model", model_schema, "The name of the model."),
    Field::json("tokens", ids_schema, "Token ids.").required(),
]];

fn ids_schema() -> Value {
    json!({"type": "array", "items": token_schema()})
}

/// The response of `/tokenize`.
#[derive(Serialize, JsonSchema)]
pub struct TokenizedText {
    count: usize,
    /// The model's context in tokens.
    max_model_len: usize,
    tokens: Vec<TokenId>,
    /// The tokens as the vocabulary spells them; null unless requested.
    token_strs: Option<Vec<String>>,
}

/// The response of `/detokenize`.
#[derive(Serialize, JsonSchema)]
pub struct DetokenizedText {
    prompt: String,
}

/// `POST /tokenize`
pub async fn tokenize(
    State(state): State<Arc<AppState>>,
    JsonObject(body): JsonObject,
) -> Result<Json<TokenizedText>, ApiError> {
    let fields = Fields::of(&body, FIELDS)?;
    check_model(&state, &fields)?;
    let framed = fields.boolean("add_special_tokens")?;
    let generate = fields.boolean("add_generation_prompt")?;
    let spells = fields.boolean("return_token_strs")?.unwrap_or(false);
    let (tokens, _place) = match (fields.text("prompt")?, fields.get("messages")) {
        (Some(_), Some(_)) => return Err(fields.invalid("messages", "absent beside prompt")),
        (None, None) => {
            return Err(fields.missing("prompt", "a text; or messages must be given"));
        }
        (Some(_), None) if generate.is_some() => {
            return Err(fields.invalid("add_generation_prompt", "absent beside prompt"));
        }
        (Some(text), None) => {
            check_size(&state, "prompt", text.len(), "bytes")?;
            let place = state.tokenizing.wait(text.len()).await;
            let (text, size, framed) = (text.to_owned(), text.len(), framed.unwrap_or(true));
            let work = move |codec: &Codec| codec.encode_text(&text, framed);
            (encode(&state, size, work).await?, place)
        }
        (None, Some(_)) if framed == Some(true) => {
            let allowed = "false beside messages: the chat template writes the special tokens";
            return Err(fields.invalid("add_special_tokens", allowed));
        }
        (None, Some(_)) => {
            let (messages, options) = (messages::read(&fields)?, tools::read(&fields)?);
            let size = prompt::size(&messages, &options);
            check_size(&state, "messages", size, "bytes")?;
            let place = state.tokenizing.wait(size).await;
            let generate = generate.unwrap_or(true);
            (prompt::tokenize(&state, &messages, &options, generate).await?, place)
        }
    };
    let token_strs = if spells { Some(spelled(&state, tokens.clone()).await?) } else { None };
    Ok(Json(TokenizedText {
        count: tokens.len(),
        max_model_len: state.engine.info().context,
        tokens,
        token_strs,
    }))
}

/// The tokens as the vocabulary spells them.
async fn spelled(state: &AppState, ids: Vec<TokenId>) -> Result<Vec<String>, ApiError> {
    let size = ids.len();
    let spell = move |codec: &Codec| {
        Ok(ids.iter().map(|id| codec.token(*id).unwrap_or_default()).collect())
    };
    encode(state, size, spell).await
}

/// `POST /detokenize`
pub async fn detokenize(
    State(state): State<Arc<AppState>>,
    JsonObject(body): JsonObject,
) -> Result<Json<DetokenizedText>, ApiError> {
    let fields = Fields::of(&body, DETOKENIZE_FIELDS)?;
    check_model(&state, &fields)?;
    let list = fields.list("tokens")?.ok_or_else(|| fields.missing("tokens", "a list of ids"))?;
    check_size(&state, "tokens", list.len(), "ids")?;
    let _place = state.tokenizing.wait(list.len()).await;
    let ids = token_ids("tokens", list, state.engine.info().vocab)?;
    let prompt = encode(&state, ids.len(), move |codec| Ok(codec.decode_all(&ids))).await?;
    Ok(Json(DetokenizedText { prompt }))
}

/// Refuses a field that has much more than a usual prompt of the model can have.
fn check_size(state: &AppState, field: &str, size: usize, unit: &str) -> Result<(), ApiError> {
    let context = state.engine.info().context;
    let most = context.saturating_mul(SIZE_PER_TOKEN).max(LEAST_SIZE);
    if size <= most {
        return Ok(());
    }
    let message = format!("{field} has {size} {unit}: it may have {most}");
    Err(ApiError::field(field, message))
}

/// Checks the model's name, if one is given.
fn check_model(state: &AppState, fields: &Fields<'_>) -> Result<(), ApiError> {
    fields.text("model")?.map_or(Ok(()), |name| models::check(state, name))
}
