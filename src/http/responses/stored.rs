//! Recorded responses: read, erasure and the items of their input. Only the key that asked for a response
//! sees it.

use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use schemars::JsonSchema;
use serde::Serialize;

use hone_core::types::{
    ClientEndpoint, Interaction, Message, ResponseOptions, Role, Sample, SampleOrigin,
};

use super::items::OutputItem;
use super::output::ResponseOutput;
use super::wire::{DeletedResponse, ResponseObject};
use crate::http::AppState;
use crate::http::auth::Caller;
use crate::http::body::{Field, FieldTable, Fields, PathText, QueryObject};
use crate::http::chat::answer::{MessageEnd, MessageItem, WholeMessage, recorded, recorded_form};
use crate::http::chat::stored::query::{NEWEST_PAGE, PageQuery};
use crate::http::chat::stored::{self, ListPage};
use crate::http::error::ApiError;
use crate::http::generate::prompt::tool_format;
use crate::http::generate::{CompletionTokens, Usage};

/// The parameters of a read. Streams cannot be resumed.
pub(in crate::http) const RETRIEVE: FieldTable = &[
    INCLUDE,
    &[
        Field::ignored("include_obfuscation"),
        Field::only("stream", "\"false\""),
        Field::refused("starting_after"),
    ],
];
/// The parameters of a list of items.
pub(in crate::http) const ITEMS: FieldTable = &[NEWEST_PAGE, INCLUDE];
/// What a recorded response has beside its text is not recorded.
const INCLUDE: &[Field] = &[Field::ignored("include"), Field::ignored("include[]")];

/// A response in the ledger.
pub(super) struct RecordedResponse {
    pub(super) interaction: Interaction,
    pub(super) options: ResponseOptions,
    sample: Sample,
    /// The parts of the answer, at least one.
    pub(super) items: Vec<MessageItem>,
    reasoning_tokens: usize,
    end: MessageEnd,
}

/// An item of the input.
#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
pub(in crate::http) enum ListedItem {
    Input(InputMessage),
    Output(OutputItem),
}

/// What a client sent.
#[derive(Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(in crate::http) enum InputMessage {
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
pub(in crate::http) struct InputText {
    #[schemars(extend("const" = "input_text"))]
    r#type: &'static str,
    text: String,
}

/// `GET /v1/responses/{id}`
pub(in crate::http) async fn retrieve(
    State(state): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    PathText(id): PathText,
    QueryObject(query): QueryObject,
) -> Result<Json<ResponseObject>, ApiError> {
    Fields::of(&query, RETRIEVE)?;
    let found = find(&state, &caller, "id", &id).await?;
    let RecordedResponse { interaction, sample, items, reasoning_tokens, end, .. } = found;
    let usage = Usage {
        completion_tokens_details: Some(CompletionTokens { reasoning_tokens }),
        ..Usage::new(interaction.prompt_ids.len(), sample.ids.len())
    };
    let output = ResponseOutput::whole(interaction.id, items, end);
    let response = ResponseObject::new(&interaction, Some(sample.version));
    Ok(Json(response.ended(end, output, usage.into(), sample.created)))
}

/// `DELETE /v1/responses/{id}`
pub(in crate::http) async fn delete(
    State(state): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    PathText(id): PathText,
) -> Result<Json<DeletedResponse>, ApiError> {
    let RecordedResponse { interaction, .. } = find(&state, &caller, "id", &id).await?;
    stored::erase(&state, &interaction).await?;
    Ok(Json(DeletedResponse { id, object: "response", deleted: true }))
}

/// `GET /v1/responses/{id}/input_items`
pub(in crate::http) async fn input_items(
    State(state): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    PathText(id): PathText,
    QueryObject(query): QueryObject,
) -> Result<Json<ListPage<ListedItem>>, ApiError> {
    let fields = Fields::of(&query, ITEMS)?;
    let newest_first = fields.text("order")? != Some("asc");
    let page = PageQuery { newest_first, ..PageQuery::read(&fields)? };
    let RecordedResponse { interaction, options, .. } = find(&state, &caller, "id", &id).await?;
    let own = interaction.messages.into_iter().skip(usize::from(options.instructions));
    let mut all = Vec::new();
    for item in own.flat_map(items) {
        let index = all.len();
        // No item of an output has an id with this letter.
        all.push(listed(item, |prefix| format!("{prefix}_{}i{index:04x}", interaction.id)));
    }
    Ok(Json(ListPage::cut(all, &page, "an item of this response's input")?))
}

/// A response that this key asked for, by the id in the field `param`.
pub(super) async fn find(
    state: &AppState,
    caller: &Caller,
    param: &str,
    text: &str,
) -> Result<RecordedResponse, ApiError> {
    let unknown = || ApiError::no_such_completion(param, text);
    let interaction = stored::find(state, caller, param, text).await?;
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

/// What a message is in a list.
enum MessageContent {
    Client(Message),
    Assistant(MessageItem),
}

/// The items of a message.
fn items(message: Message) -> Vec<MessageContent> {
    if message.role != Role::Assistant {
        return vec![MessageContent::Client(message)];
    }
    let Message { reasoning, content, tool_calls, .. } = message;
    let reasoning = reasoning.map(MessageItem::Reasoning);
    let text = (!content.is_empty() || tool_calls.is_empty()).then_some(MessageItem::Text(content));
    let calls = tool_calls.into_iter().map(MessageItem::Call);
    reasoning.into_iter().chain(text).chain(calls).map(MessageContent::Assistant).collect()
}

/// An item with its id, which `id` makes of a prefix.
fn listed(content: MessageContent, id: impl Fn(&str) -> String) -> (String, ListedItem) {
    let status = "completed";
    let message = match content {
        MessageContent::Client(message) => message,
        MessageContent::Assistant(item) => {
            let item = OutputItem::whole(item, &id);
            return (item.id().to_owned(), ListedItem::Output(item));
        }
    };
    let (role, text) = (message.role.as_str(), message.content);
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
