//! Recorded responses: read, erasure and the items of their input. Only the key that asked for a response
//! sees it.

use axum::Json;
use schemars::JsonSchema;
use serde::Serialize;

use hone_core::types::{
    ClientEndpoint, Interaction, Message, ResponseOptions, Role, Sample, SampleOrigin,
};

use super::output::ResponseOutput;
use super::wire::{DeletedResponse, OutputItem, ResponseObject};
use crate::body::{Field, FieldTable, Fields, PathText, QueryObject};
use crate::chat::answer::{MessageEnd, MessageItem, WholeMessage, recorded, recorded_form};
use crate::chat::stored::{self, ListPage, NEWEST_PAGE, PageQuery};
use crate::error::{ApiError, JsonResult};
use crate::generate::prompt::tool_format;
use crate::generate::{CompletionTokens, Usage};
use crate::state::Call;

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

pub async fn retrieve(
    call: Call,
    PathText(id): PathText,
    QueryObject(query): QueryObject,
) -> JsonResult<ResponseObject> {
    Fields::of(&query, RETRIEVE)?;
    let found = find(&call, "id", &id).await?;
    let RecordedResponse { interaction, sample, items, reasoning_tokens, end, .. } = found;
    let usage = Usage {
        completion_tokens_details: Some(CompletionTokens { reasoning_tokens }),
        ..Usage::new(interaction.prompt_ids.len(), sample.ids.len())
    };
    let output = ResponseOutput::whole(interaction.id, items, end);
    let response = ResponseObject::new(&interaction, Some(sample.version));
    Ok(Json(response.ended(end, output, usage.into(), sample.created)))
}

pub async fn delete(call: Call, PathText(id): PathText) -> JsonResult<DeletedResponse> {
    let RecordedResponse { interaction, .. } = find(&call, "id", &id).await?;
    stored::erase(&call.0, &interaction).await?;
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
    let RecordedResponse { interaction, options, .. } = find(&call, "id", &id).await?;
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
pub async fn find(call: &Call, param: &str, text: &str) -> Result<RecordedResponse, ApiError> {
    let (state, unknown) = (&call.0, || ApiError::no_such_completion(param, text));
    let interaction = stored::find(call, param, text).await?;
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
