//! Recorded chat completions: list, read, change of metadata and erasure. Only the key that asked for a
//! completion sees it.

pub(in crate::http) mod query;

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use hone_core::types::{
    Interaction, InteractionId, PromptSource, Sample, SampleOrigin, ToolCall, now_ms,
};
use hone_engine::{Codec, ToolFormat};
use hone_store::{Op, StoreError};

use self::query::{CompletionQuery, MESSAGES};
use super::fields::metadata_schema;
use super::metadata;
use crate::http::AppState;
use crate::http::auth::Caller;
use crate::http::body::{Field, FieldTable, Fields, JsonObject, PathText, QueryObject, invalid};
use crate::http::chat::answer::{recorded, recorded_form};
use crate::http::chat::wire::{ChatCompletion, Choice};
use crate::http::error::ApiError;
use crate::http::feedback::recording::find_interaction;
use crate::http::generate::Usage;
use crate::http::generate::prompt::tool_format;
use query::PageQuery;

/// Completions that one request for a page reads at most, because filters may admit few.
const MAX_READ: usize = 2000;
/// Completions that are read at once.
const CHUNK: usize = 100;

/// The fields of a change.
pub(in crate::http) const UPDATE_FIELDS: FieldTable =
    &[&[Field::json("metadata", metadata_schema, "The new metadata.").required()]];

type Completions = ListPage<StoredCompletion>;

/// `GET /v1/chat/completions`
pub async fn list(
    State(state): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    QueryObject(query): QueryObject,
) -> Result<Json<Completions>, ApiError> {
    let query = CompletionQuery::read(query)?;
    // The last completions may still be queued for the ledger.
    state.store.flush().await?;
    let reader = state.clone();
    let page = state.read_ledger(move |_| page(&reader, &caller, &query)).await?;
    Ok(Json(page))
}

/// `GET /v1/chat/completions/{id}`
pub async fn retrieve(
    State(state): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    PathText(id): PathText,
) -> Result<Json<StoredCompletion>, ApiError> {
    let interaction = find_chat(&state, &caller, &id).await?;
    // Further choices of the completion may still be queued for the ledger.
    state.store.flush().await?;
    read_stored(state, interaction).await
}

/// `GET /v1/chat/completions/{id}/messages`
pub async fn messages(
    State(state): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    PathText(id): PathText,
    QueryObject(query): QueryObject,
) -> Result<Json<ListPage<StoredMessage>>, ApiError> {
    let fields = Fields::of(&query, MESSAGES)?;
    let page = PageQuery::read(&fields)?;
    let interaction = find_chat(&state, &caller, &id).await?;
    let completion = interaction.completion_id();
    let all: Vec<_> = interaction
        .messages
        .into_iter()
        .enumerate()
        .map(|(place, message)| {
            let id = format!("{completion}-{place}");
            let message = StoredMessage {
                id: id.clone(),
                role: message.role.as_str(),
                content: message.content,
                name: message.name,
                tool_calls: message.tool_calls,
                tool_call_id: message.tool_call_id,
            };
            (id, message)
        })
        .collect();
    Ok(Json(ListPage::cut(all, &page, "a message of this completion")?))
}

/// `POST /v1/chat/completions/{id}`
pub async fn update(
    State(state): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    PathText(id): PathText,
    JsonObject(body): JsonObject,
) -> Result<Json<StoredCompletion>, ApiError> {
    let fields = Fields::of(&body, UPDATE_FIELDS)?;
    if fields.get("metadata").is_none() {
        return Err(fields.missing("metadata", "an object of strings"));
    }
    let metadata = metadata(&fields)?;
    let interaction = find_chat(&state, &caller, &id).await?;
    state.store.commit(vec![Op::Metadata(interaction.id, metadata.clone())]).await?;
    read_stored(state, Interaction { metadata, ..interaction }).await
}

/// `DELETE /v1/chat/completions/{id}`; erases the completions of the other endpoints, too.
pub async fn delete(
    State(state): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    PathText(id): PathText,
) -> Result<Json<DeletedCompletion>, ApiError> {
    erase(&state, &find(&state, &caller, "id", &id).await?).await.map(Json)
}

/// `DELETE /admin/completions/{id}`: as [`delete`], for a completion of any key.
pub async fn delete_any(
    State(state): State<Arc<AppState>>,
    PathText(id): PathText,
) -> Result<Json<DeletedCompletion>, ApiError> {
    erase(&state, &find_any(&state, "id", &id).await?).await.map(Json)
}

/// Erases a completion with everything that was recorded for it.
pub(in crate::http) async fn erase(
    state: &AppState,
    interaction: &Interaction,
) -> Result<DeletedCompletion, ApiError> {
    state.store.commit(vec![Op::Erase(interaction.id, now_ms())]).await?;
    let id = interaction.completion_id();
    tracing::info!(id, "a completion was erased");
    Ok(DeletedCompletion { object: "chat.completion.deleted", id, deleted: true })
}

/// A completion that this key asked for, by the id in the field `param`.
pub(in crate::http) async fn find(
    state: &AppState,
    caller: &Caller,
    param: &str,
    text: &str,
) -> Result<Interaction, ApiError> {
    let found = find_any(state, param, text).await?;
    let is_own = found.api_key() == caller.key_id.as_deref();
    if is_own { Ok(found) } else { Err(ApiError::no_such_completion(param, text)) }
}

/// A completion that any key asked for, by the id in the field `param`.
async fn find_any(state: &AppState, param: &str, text: &str) -> Result<Interaction, ApiError> {
    let unknown = || ApiError::no_such_completion(param, text);
    let id = InteractionId::from_completion_id(text).ok_or_else(unknown)?;
    if id.is_unstored() {
        return Err(ApiError::unstored_completion(param, text));
    }
    let found = find_interaction(state, id).await?;
    found.filter(|row| row.source == PromptSource::Live).ok_or_else(unknown)
}

/// [`find`] for chat completions only.
async fn find_chat(state: &AppState, caller: &Caller, text: &str) -> Result<Interaction, ApiError> {
    let interaction = find(state, caller, "id", text).await?;
    if interaction.is_text() || !interaction.endpoint.is_completions() {
        return Err(ApiError::no_such_completion("id", text));
    }
    Ok(interaction)
}

/// The response with a completion.
async fn read_stored(
    state: Arc<AppState>,
    interaction: Interaction,
) -> Result<Json<StoredCompletion>, ApiError> {
    let reader = state.clone();
    state.read_ledger(move |_| stored(&reader, interaction)).await.map(Json)
}

fn stored(state: &AppState, interaction: Interaction) -> Result<StoredCompletion, StoreError> {
    let samples = state.store.samples_of(interaction.id)?;
    let format = tool_format(state);
    Ok(StoredCompletion::new(interaction, samples, state.engine.codec(), format))
}

/// A page of the caller's completions.
fn page(
    state: &AppState,
    caller: &Caller,
    query: &CompletionQuery,
) -> Result<Completions, StoreError> {
    let mut found = Vec::new();
    let mut last = query.after;
    let mut left = MAX_READ;
    loop {
        let key_id = caller.key_id.as_deref();
        let ids = state.store.completions_of(key_id, last, query.newest_first, CHUNK)?;
        if ids.is_empty() {
            return Ok(ListPage::new(found, None, false));
        }
        for id in ids {
            let cursor = || last.map(InteractionId::completion_id);
            if left == 0 {
                return Ok(ListPage::new(found, cursor(), true));
            }
            left -= 1;
            let interaction = state.store.interaction(id)?.filter(|row| query.admits(row));
            if let Some(interaction) = interaction {
                if found.len() == query.limit {
                    return Ok(ListPage::new(found, None, true));
                }
                found.push((id.completion_id(), stored(state, interaction)?));
            }
            last = Some(id);
        }
    }
}

// The shapes of stored completions.

/// A recorded completion: its response, and what the request asked for.
#[derive(Serialize, JsonSchema)]
pub struct StoredCompletion {
    #[serde(flatten)]
    completion: ChatCompletion,
    metadata: BTreeMap<String, String>,
    temperature: f32,
    top_p: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    seed: u64,
    max_completion_tokens: u32,
}

impl StoredCompletion {
    /// The completion of a prompt with its samples. Those that no client received are left out. The message
    /// is divided as for its client, unless another model with another template sampled it.
    fn new(
        interaction: Interaction,
        mut samples: Vec<Sample>,
        codec: &Arc<Codec>,
        format: ToolFormat,
    ) -> Self {
        samples.retain(|sample| sample.origin == SampleOrigin::Served);
        samples.sort_by_key(|sample| sample.choice);
        let tokens = samples.iter().map(|sample| sample.ids.len()).sum();
        let version = samples.first().map(|sample| sample.version).unwrap_or_default();
        let form = recorded_form(codec, &interaction, format);
        let choices = samples.into_iter().map(|sample| {
            let message = recorded(codec, form.as_ref(), &sample, &interaction.stop);
            Choice::new(sample.choice, message, None, false)
        });
        let usage = Usage::new(interaction.prompt_ids.len(), tokens);
        let completion = ChatCompletion::new(&interaction, version, choices.collect(), usage);
        let Interaction { params, metadata, .. } = interaction;
        Self {
            completion,
            metadata,
            temperature: params.temperature,
            top_p: params.top_p,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            seed: params.seed,
            max_completion_tokens: params.max_tokens,
        }
    }
}

/// A message of a recorded request.
#[derive(Serialize, JsonSchema)]
pub struct StoredMessage {
    /// The completion's id, `-` and the message's place.
    id: String,
    role: &'static str,
    content: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_call_id: Option<String>,
}

/// A part of a list, in OpenAI's shape.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "PageOf{T}")]
pub struct ListPage<T> {
    #[schemars(extend("const" = "list"))]
    object: &'static str,
    data: Vec<T>,
    first_id: Option<String>,
    /// The value of `after` for the next page.
    last_id: Option<String>,
    has_more: bool,
}

impl<T> ListPage<T> {
    /// The page that a query wants of `all` entries, each with its id, oldest first. `entry` describes one.
    pub(in crate::http) fn cut(
        mut all: Vec<(String, T)>,
        query: &PageQuery<'_>,
        entry: &str,
    ) -> Result<Self, ApiError> {
        if query.newest_first {
            all.reverse();
        }
        if let Some(after) = query.after {
            let Some(place) = all.iter().position(|(id, _)| id == after) else {
                return Err(invalid(
                    "after",
                    &Value::from(after),
                    format_args!("the id of {entry}"),
                ));
            };
            all.drain(..=place);
        }
        let has_more = all.len() > query.limit;
        all.truncate(query.limit);
        Ok(Self::new(all, None, has_more))
    }

    /// `data` has each entry with its id. The next page begins after `last`, or else after the last entry.
    fn new(data: Vec<(String, T)>, last: Option<String>, has_more: bool) -> Self {
        Self {
            object: "list",
            first_id: data.first().map(|(id, _)| id.clone()),
            last_id: last.or_else(|| data.last().map(|(id, _)| id.clone())),
            data: data.into_iter().map(|(_, entry)| entry).collect(),
            has_more,
        }
    }
}

/// The response to an erasure.
#[derive(Serialize, JsonSchema)]
pub struct DeletedCompletion {
    #[schemars(extend("const" = "chat.completion.deleted"))]
    object: &'static str,
    id: String,
    deleted: bool,
}
