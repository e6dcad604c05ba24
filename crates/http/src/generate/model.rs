//! The names and the tokenizer of the served model: `/v1/models`, and `/tokenize` and `/detokenize` as in vLLM.
//! Nothing is sampled or recorded.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use hone_core::types::TokenId;
use hone_engine::Codec;

use super::prompt::{self, encode, encode_apart, token_ids};
use super::run::{check_model, model_names};
use super::{model_schema, token_schema};
use crate::body::{Field, FieldTable, Fields, JsonObject, List, PathText, list_of};
use crate::chat::request::{
    messages_schema, read_messages, read_options, tools_schema, variables_schema,
};
use crate::error::{ApiError, JsonResult};
use crate::state::AppState;

/// OpenAI's `model` object, with the active policy version.
#[derive(Serialize, JsonSchema)]
pub struct ModelObject {
    id: String,
    #[schemars(extend("const" = "model"))]
    object: &'static str,
    /// Seconds since 1970.
    created: u64,
    #[schemars(extend("const" = "hone"))]
    owned_by: &'static str,
    /// The active version.
    policy_version: u64,
}

fn model(state: &AppState, name: &str) -> ModelObject {
    ModelObject {
        id: name.to_owned(),
        object: "model",
        created: state.started / 1000,
        owned_by: "hone",
        policy_version: state.engine.active_version().0,
    }
}

/// `GET /v1/models`: the served model as `default`, under its own name and under its aliases.
pub async fn list(State(state): State<Arc<AppState>>) -> Json<List<ModelObject>> {
    Json(List::new(model_names(&state).into_iter().map(|name| model(&state, name))))
}

/// `GET /v1/models/{model}`; the name may contain slashes.
pub async fn retrieve(
    State(state): State<Arc<AppState>>,
    PathText(name): PathText,
) -> JsonResult<ModelObject> {
    check_model(&state, &name)?;
    Ok(Json(model(&state, &name)))
}

pub const FIELDS: FieldTable = &[&[
    Field::json("model", model_schema, "The name of the model."),
    Field::text("prompt", "A text; excludes `messages`."),
    Field::json("messages", messages_schema, "A conversation; excludes `prompt`."),
    Field::flag("add_generation_prompt", "Whether the template begins the answer; default true."),
    Field::flag("add_special_tokens", "Whether the tokenizer frames a text; default true."),
    Field::flag("return_token_strs", "Whether the response has the tokens as texts."),
    Field::json("tools", tools_schema, "Functions that the model may call."),
    Field::json("chat_template_kwargs", variables_schema, "Variables of the template."),
]];

pub const DETOKENIZE_FIELDS: FieldTable = &[&[
    Field::json("model", model_schema, "The name of the model."),
    Field::json("tokens", ids_schema, "Token ids.").required(),
]];

fn ids_schema() -> Value {
    list_of(0, token_schema())
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

pub async fn tokenize(
    State(state): State<Arc<AppState>>,
    JsonObject(body): JsonObject,
) -> JsonResult<TokenizedText> {
    let fields = Fields::of(&body, FIELDS)?;
    check_named(&state, &fields)?;
    let framed = fields.boolean("add_special_tokens")?;
    let generate = fields.boolean("add_generation_prompt")?;
    let spells = fields.is_set("return_token_strs")?;
    let tokens = match (fields.text("prompt")?, fields.get("messages")) {
        (Some(_), Some(_)) => return Err(fields.invalid("messages", "absent beside prompt")),
        (None, None) => {
            return Err(fields.missing("prompt", "a text; or messages must be given"));
        }
        (Some(_), None) if generate.is_some() => {
            return Err(fields.invalid("add_generation_prompt", "absent beside prompt"));
        }
        (Some(text), None) => {
            let (text, framed) = (text.to_owned(), framed.unwrap_or(true));
            let size = (text.len(), "bytes");
            let work = move |codec: &Codec| codec.encode_text(&text, framed);
            encode(&state, "prompt", size, work).await?
        }
        (None, Some(_)) if framed == Some(true) => {
            let allowed = "false beside messages: the chat template writes the special tokens";
            return Err(fields.invalid("add_special_tokens", allowed));
        }
        (None, Some(_)) => {
            let (messages, options) = (read_messages(&fields)?, read_options(&fields)?);
            let generate = generate.unwrap_or(true);
            prompt::tokenize(&state, "messages", &messages, &options, generate).await?
        }
    };
    let mut token_strs = None;
    if spells {
        let ids = tokens.clone();
        let spell = move |codec: &Codec| {
            Ok(ids.iter().map(|id| codec.token(*id).unwrap_or_default()).collect())
        };
        token_strs = Some(encode_apart(&state, spell).await?);
    }
    Ok(Json(TokenizedText {
        count: tokens.len(),
        max_model_len: state.engine.info().context,
        tokens,
        token_strs,
    }))
}

pub async fn detokenize(
    State(state): State<Arc<AppState>>,
    JsonObject(body): JsonObject,
) -> JsonResult<DetokenizedText> {
    let fields = Fields::of(&body, DETOKENIZE_FIELDS)?;
    check_named(&state, &fields)?;
    let list = fields.list("tokens")?.ok_or_else(|| fields.missing("tokens", "a list of ids"))?;
    let ids = token_ids("tokens", list, state.engine.info().vocab)?;
    let size = (ids.len(), "ids");
    let prompt = encode(&state, "tokens", size, move |codec| Ok(codec.decode_all(&ids))).await?;
    Ok(Json(DetokenizedText { prompt }))
}

/// Checks the model's name, if one is given.
fn check_named(state: &AppState, fields: &Fields<'_>) -> Result<(), ApiError> {
    fields.text("model")?.map_or(Ok(()), |name| check_model(state, name))
}
