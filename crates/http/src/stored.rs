//! Recorded completions: list, read, change of metadata and erasure, and the items of a response's input. Only the key
//! that asked for a completion sees it.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value, json};

use hone_core::types::{
    ClientEndpoint, Interaction, InteractionId, Message, PromptSource, ResponseOptions, Role,
    Sample, SampleOrigin, now_ms,
};
use hone_store::{Op, StoreError};

use super::auth::Caller;
use super::body::{Call, Field, FieldTable, Fields, JsonObject, PathText, QueryObject, invalid};
use super::chat::answer::{MessageEnd, MessageItem, WholeMessage, recorded, recorded_form};
use super::chat::{ChatCompletion, Choice};
use super::error::{ApiError, JsonResult};
use super::feedback::posted::find_interaction;
use super::generate::prompt::tool_format;
use super::generate::{CompletionTokens, Usage, metadata, metadata_schema};
use super::responses::wire::{DeletedResponse, OutputItem, ResponseObject, ResponseOutput};
use super::state::AppState;

/// Completions that one request for a page reads at most, because filters may admit few.
const MAX_READ: usize = 2000;
const CHUNK: usize = 100;

pub const UPDATE_FIELDS: FieldTable =
    &[&[Field::json("metadata", metadata_schema, "The new metadata.").required()]];

type Completions = ListPage<StoredCompletion>;

pub async fn list(
    Call(state, caller): Call,
    QueryObject(query): QueryObject,
) -> JsonResult<Completions> {
    let query = CompletionQuery::read(query)?;
    // The last completions may still be queued for the ledger.
    state.store.flush().await?;
    let reader = state.clone();
    let page = state.read_ledger(move |_| page(&reader, &caller, &query)).await?;
    Ok(Json(page))
}

pub async fn retrieve(call: Call, PathText(id): PathText) -> JsonResult<StoredCompletion> {
    let interaction = find_chat(&call, &id).await?;
    // Further choices of the completion may still be queued for the ledger.
    call.0.store.flush().await?;
    read_stored(call.0, interaction).await
}

pub async fn messages(
    call: Call,
    PathText(id): PathText,
    QueryObject(query): QueryObject,
) -> JsonResult<ListPage<StoredMessage>> {
    let fields = Fields::of(&query, MESSAGES)?;
    let page = PageQuery::read(&fields)?;
    let interaction = find_chat(&call, &id).await?;
    let completion = interaction.completion_id();
    let all: Vec<_> = interaction
        .messages
        .into_iter()
        .enumerate()
        .map(|(place, message)| {
            let id = format!("{completion}-{place}");
            let message = Message { reasoning: None, ..message };
            (id.clone(), StoredMessage { id, message })
        })
        .collect();
    Ok(Json(ListPage::cut(all, &page, "a message of this completion")?))
}

pub async fn update(
    call: Call,
    PathText(id): PathText,
    JsonObject(body): JsonObject,
) -> JsonResult<StoredCompletion> {
    let fields = Fields::of(&body, UPDATE_FIELDS)?;
    if fields.get("metadata").is_none() {
        return Err(fields.missing("metadata", "an object of strings"));
    }
    let metadata = metadata(&fields)?;
    let interaction = find_chat(&call, &id).await?;
    call.0.store.commit_in_time(vec![Op::Metadata(interaction.id, metadata.clone())]).await?;
    read_stored(call.0, Interaction { metadata, ..interaction }).await
}

/// `DELETE /v1/chat/completions/{id}`; erases the completions of the other endpoints, too.
pub async fn delete(call: Call, PathText(id): PathText) -> JsonResult<DeletedCompletion> {
    erase(&call.0, &find(&call, "id", &id).await?).await.map(Json)
}

/// `DELETE /admin/completions/{id}`: as [`delete`], for a completion of any key.
pub async fn delete_any(
    State(state): State<Arc<AppState>>,
    PathText(id): PathText,
) -> JsonResult<DeletedCompletion> {
    erase(&state, &find_any(&state, "id", &id).await?).await.map(Json)
}

/// Erases a completion with everything that was recorded for it.
pub async fn erase(
    state: &AppState,
    interaction: &Interaction,
) -> Result<DeletedCompletion, ApiError> {
    state.store.commit_in_time(vec![Op::Erase(interaction.id, now_ms())]).await?;
    let id = interaction.completion_id();
    tracing::info!(id, "a completion was erased");
    Ok(DeletedCompletion { object: "chat.completion.deleted", id, deleted: true })
}

/// A completion that this key asked for, by the id in the field `param`.
pub async fn find(
    Call(state, caller): &Call,
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
async fn find_chat(call: &Call, text: &str) -> Result<Interaction, ApiError> {
    let interaction = find(call, "id", text).await?;
    if interaction.is_text() || !interaction.endpoint.is_completions() {
        return Err(ApiError::no_such_completion("id", text));
    }
    Ok(interaction)
}

async fn read_stored(
    state: Arc<AppState>,
    interaction: Interaction,
) -> JsonResult<StoredCompletion> {
    let reader = state.clone();
    state.read_ledger(move |_| stored(&reader, interaction)).await.map(Json)
}

/// A completion with its samples, without those that no client received.
fn stored(state: &AppState, interaction: Interaction) -> Result<StoredCompletion, StoreError> {
    let codec = state.engine.codec();
    let mut samples = state.store.samples_of(interaction.id)?;
    samples.retain(|sample| sample.origin == SampleOrigin::Served);
    samples.sort_by_key(|sample| sample.choice);
    let tokens = samples.iter().map(|sample| sample.ids.len()).sum();
    let version = samples.first().map(|sample| sample.version).unwrap_or_default();
    let form = recorded_form(codec, &interaction, tool_format(state));
    let choices = samples.into_iter().map(|sample| {
        let message = recorded(codec, form.as_ref(), &sample, &interaction.stop);
        Choice::new(sample.choice, message, None, false)
    });
    let usage = Usage::new(interaction.prompt_ids.len(), tokens);
    let completion = ChatCompletion::new(&interaction, version, choices.collect(), usage);
    let Interaction { params, metadata, .. } = interaction;
    Ok(StoredCompletion {
        completion,
        metadata,
        temperature: params.temperature,
        top_p: params.top_p,
        presence_penalty: params.presence_penalty,
        frequency_penalty: params.frequency_penalty,
        seed: params.seed,
        max_completion_tokens: params.max_tokens,
    })
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

/// A message of a recorded request.
#[derive(Serialize, JsonSchema)]
pub struct StoredMessage {
    /// The completion's id, `-` and the message's place.
    id: String,
    #[serde(flatten)]
    message: Message,
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
    pub fn cut(
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
    pub fn new(data: Vec<(String, T)>, last: Option<String>, has_more: bool) -> Self {
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

// The parameters of lists.

/// Entries of a page unless the client wants another number.
const DEFAULT_LIMIT: usize = 20;
const MAX_LIMIT: usize = 100;

/// The parameters of a page.
const PAGE: &[Field] = &page_fields("By time; default `asc`.");
/// The parameters of a page that begins with the newest entry by default.
pub const NEWEST_PAGE: &[Field] = &page_fields("By time; default `desc`.");

const fn page_fields(order: &'static str) -> [Field; 3] {
    [
        Field::text("after", "The page begins after the entry with this id."),
        Field::json("limit", limit_schema, "Most entries of the page; default 20."),
        Field::one_of("order", &["asc", "desc"], order),
    ]
}

pub const COMPLETIONS: FieldTable = &[
    PAGE,
    &[
        Field::text("model", "Only completions with this model name."),
        Field::json("metadata[KEY]", || json!({"type": "object"}), "Only those with this entry."),
    ],
];

pub const MESSAGES: FieldTable = &[PAGE];

fn limit_schema() -> Value {
    json!({"type": "integer", "minimum": 1, "maximum": MAX_LIMIT})
}

/// Which page of a list, and in which order.
pub struct PageQuery<'a> {
    /// The id of the entry before the page.
    pub after: Option<&'a str>,
    pub limit: usize,
    pub newest_first: bool,
}

impl<'a> PageQuery<'a> {
    pub fn read(fields: &Fields<'a>) -> Result<Self, ApiError> {
        let limit = fields.read("limit", format_args!("from 1 to {MAX_LIMIT}"), |value| {
            let limit: usize = value.as_str()?.parse().ok()?;
            (1..=MAX_LIMIT).contains(&limit).then_some(limit)
        })?;
        Ok(Self {
            after: fields.text("after")?,
            limit: limit.unwrap_or(DEFAULT_LIMIT),
            newest_first: fields.text("order")? == Some("desc"),
        })
    }
}

struct CompletionQuery {
    after: Option<InteractionId>,
    limit: usize,
    newest_first: bool,
    model: Option<String>,
    metadata: BTreeMap<String, String>,
}

impl CompletionQuery {
    /// Reads a query. An entry of `metadata` is the parameter `metadata[KEY]`.
    fn read(mut query: Map<String, Value>) -> Result<Self, ApiError> {
        let mut metadata = BTreeMap::new();
        query.retain(|name, value| {
            let key = name.strip_prefix("metadata[").and_then(|rest| rest.strip_suffix(']'));
            let entry = key.and_then(|key| Some((key.to_owned(), value.as_str()?.to_owned())));
            let is_entry = entry.is_some();
            metadata.extend(entry);
            !is_entry
        });
        let fields = Fields::of(&query, COMPLETIONS)?;
        let PageQuery { after, limit, newest_first } = PageQuery::read(&fields)?;
        let id = |text: &str| {
            let id = InteractionId::from_completion_id(text);
            id.ok_or_else(|| invalid("after", &Value::from(text), "a completion's id"))
        };
        let model = fields.owned("model")?;
        Ok(Self { after: after.map(id).transpose()?, limit, newest_first, model, metadata })
    }

    /// Whether a completion belongs into the list.
    fn admits(&self, interaction: &Interaction) -> bool {
        let has = |(key, value): (&String, &String)| interaction.metadata.get(key) == Some(value);
        self.model.as_ref().is_none_or(|model| *model == interaction.model)
            && self.metadata.iter().all(has)
    }
}

// Recorded responses.

/// The parameters of a read. Streams cannot be resumed.
pub const RETRIEVE: FieldTable = &[
    INCLUDE,
    &[
        Field::ignored("include_obfuscation"),
        Field::only("stream", "\"false\""),
        Field::refused("starting_after"),
    ],
];
pub const ITEMS: FieldTable = &[NEWEST_PAGE, INCLUDE];
/// What a recorded response has beside its text is not recorded.
const INCLUDE: &[Field] = &[Field::ignored("include"), Field::ignored("include[]")];

pub struct RecordedResponse {
    pub interaction: Interaction,
    pub options: ResponseOptions,
    sample: Sample,
    /// The parts of the answer, at least one.
    pub items: Vec<MessageItem>,
    reasoning_tokens: usize,
    end: MessageEnd,
}

/// An item of the input.
#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
pub enum ListedItem {
    Input(InputMessage),
    Output(OutputItem),
}

/// What a client sent.
#[derive(Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum InputMessage {
    Message {
        id: String,
        #[schemars(extend("enum" = ["user", "system", "developer"]))]
        role: &'static str,
        #[schemars(extend("const" = "completed"))]
        status: &'static str,
        content: [InputText; 1],
    },
    FunctionCallOutput {
        id: String,
        call_id: String,
        output: String,
        #[schemars(extend("const" = "completed"))]
        status: &'static str,
    },
}

/// The text of a message.
#[derive(Serialize, JsonSchema)]
pub struct InputText {
    #[schemars(extend("const" = "input_text"))]
    r#type: &'static str,
    text: String,
}

pub async fn retrieve_response(
    call: Call,
    PathText(id): PathText,
    QueryObject(query): QueryObject,
) -> JsonResult<ResponseObject> {
    Fields::of(&query, RETRIEVE)?;
    let found = find_response(&call, "id", &id).await?;
    let RecordedResponse { interaction, sample, items, reasoning_tokens, end, .. } = found;
    let usage = Usage {
        completion_tokens_details: Some(CompletionTokens { reasoning_tokens }),
        ..Usage::new(interaction.prompt_ids.len(), sample.ids.len())
    };
    let output = ResponseOutput::whole(interaction.id, items, end);
    let response = ResponseObject::new(&interaction, Some(sample.version));
    Ok(Json(response.ended(end, output, usage.into(), sample.created)))
}

pub async fn delete_response(call: Call, PathText(id): PathText) -> JsonResult<DeletedResponse> {
    let RecordedResponse { interaction, .. } = find_response(&call, "id", &id).await?;
    erase(&call.0, &interaction).await?;
    Ok(Json(DeletedResponse { id, object: "response", deleted: true }))
}

pub async fn input_items(
    call: Call,
    PathText(id): PathText,
    QueryObject(query): QueryObject,
) -> JsonResult<ListPage<ListedItem>> {
    let fields = Fields::of(&query, ITEMS)?;
    let newest_first = fields.text("order")? != Some("asc");
    let page = PageQuery { newest_first, ..PageQuery::read(&fields)? };
    let RecordedResponse { interaction, options, .. } = find_response(&call, "id", &id).await?;
    let own = interaction.messages.into_iter().skip(usize::from(options.instructions));
    let mut all = Vec::new();
    for message in own {
        // No item of an output has an id with this letter.
        let id = |prefix: &str, at: usize| format!("{prefix}_{}i{at:04x}", interaction.id);
        if message.role != Role::Assistant {
            let at = all.len();
            all.push(sent(message, |prefix| id(prefix, at)));
            continue;
        }
        for item in answered(message) {
            let at = all.len();
            let item = OutputItem::whole(item, |prefix| id(prefix, at));
            all.push((item.id().to_owned(), ListedItem::Output(item)));
        }
    }
    Ok(Json(ListPage::cut(all, &page, "an item of this response's input")?))
}

/// A response that this key asked for, by the id in the field `param`.
pub async fn find_response(
    call: &Call,
    param: &str,
    text: &str,
) -> Result<RecordedResponse, ApiError> {
    let (state, unknown) = (&call.0, || ApiError::no_such_completion(param, text));
    let interaction = find(call, param, text).await?;
    let options = match &interaction.endpoint {
        ClientEndpoint::Responses(options) if interaction.completion_id() == text => {
            options.clone()
        }
        _ => return Err(unknown()),
    };
    let samples = state.store.samples_of(interaction.id)?;
    let sample = samples.into_iter().find(|sample| sample.origin == SampleOrigin::Served);
    let sample = sample.ok_or_else(unknown)?;
    let codec = state.engine.codec();
    let form = recorded_form(codec, &interaction, tool_format(state));
    let message = recorded(codec, form.as_ref(), &sample, &interaction.stop);
    let WholeMessage { mut items, reasoning_tokens, end, .. } = message;
    if items.is_empty() {
        items.push(MessageItem::Text(String::new()));
    }
    Ok(RecordedResponse { interaction, options, sample, items, reasoning_tokens, end })
}

/// The items of a message of the assistant.
fn answered(message: Message) -> impl Iterator<Item = MessageItem> {
    let Message { reasoning, content, tool_calls, .. } = message;
    let reasoning = reasoning.map(MessageItem::Reasoning);
    let text = (!content.is_empty() || tool_calls.is_empty()).then_some(MessageItem::Text(content));
    reasoning.into_iter().chain(text).chain(tool_calls.into_iter().map(MessageItem::Call))
}

/// A message of the client with its id, which `id` makes of a prefix.
fn sent(message: Message, id: impl Fn(&str) -> String) -> (String, ListedItem) {
    let (role, text, status) = (message.role.as_str(), message.content, "completed");
    let (id, item) = match message.tool_call_id {
        Some(call_id) => {
            let id = id("fco");
            (id.clone(), InputMessage::FunctionCallOutput { id, call_id, output: text, status })
        }
        None => {
            let (id, content) = (id("msg"), [InputText { r#type: "input_text", text }]);
            (id.clone(), InputMessage::Message { id, role, status, content })
        }
    };
    (id, ListedItem::Input(item))
}
