//! The shapes of OpenAI's responses, of the items of their output and of the events of their streams, and how they are
//! made of the parts of a message.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};
use uuid::Uuid;

use hone_core::types::{
    ChatOptions, ClientEndpoint, GrammarSpec, Interaction, InteractionId, PolicyVersion, Tool,
    ToolCall, ToolChoice, UnixMillis,
};

use crate::chat::TokenLogprob;
use crate::chat::answer::{MessageEnd, MessageItem, MessagePart};
use crate::error::ApiError;
use crate::generate::Usage;

/// A response, whole or while it is sampled.
#[derive(Clone, Serialize, JsonSchema)]
pub struct ResponseObject {
    id: String,
    #[schemars(extend("const" = "response"))]
    object: &'static str,
    /// Seconds since 1970.
    created_at: u64,
    /// Seconds since 1970; null until the status is `completed`.
    completed_at: Option<u64>,
    status: ResponseStatus,
    error: Option<ResponseFailure>,
    incomplete_details: Option<IncompleteDetails>,
    background: bool,
    instructions: Option<String>,
    max_output_tokens: u32,
    metadata: BTreeMap<String, String>,
    model: String,
    output: Vec<OutputItem>,
    parallel_tool_calls: bool,
    previous_response_id: Option<String>,
    reasoning: ReasoningOptions,
    store: bool,
    /// `hone-vN`, where N is the policy version; null until it is known.
    system_fingerprint: Option<String>,
    temperature: f32,
    text: TextOptions,
    /// The choice of functions, as in the request.
    tool_choice: Value,
    tools: Vec<FunctionTool>,
    top_p: f32,
    #[schemars(extend("const" = "disabled"))]
    truncation: &'static str,
    /// Null until the response has ended.
    usage: Option<ResponseUsage>,
}

/// Progress of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum ResponseStatus {
    InProgress,
    Completed,
    /// The token limit ended it.
    Incomplete,
    /// The client disconnected.
    Cancelled,
    Failed,
}

/// Why a response failed.
#[derive(Clone, Serialize, JsonSchema)]
struct ResponseFailure {
    #[schemars(extend("enum" = ["invalid_prompt", "rate_limit_exceeded", "server_error"]))]
    code: &'static str,
    message: String,
}

/// Why a response is incomplete.
#[derive(Clone, Serialize, JsonSchema)]
struct IncompleteDetails {
    #[schemars(extend("const" = "max_output_tokens"))]
    reason: &'static str,
}

/// `reasoning` of the request.
#[derive(Clone, Serialize, JsonSchema)]
struct ReasoningOptions {
    effort: Option<String>,
    summary: Option<()>,
}

/// `text` of the request.
#[derive(Clone, Serialize, JsonSchema)]
struct TextOptions {
    format: Value,
}

/// A function of the request.
#[derive(Clone, Serialize, JsonSchema)]
struct FunctionTool {
    #[schemars(extend("const" = "function"))]
    r#type: &'static str,
    name: String,
    description: Option<String>,
    parameters: Option<Value>,
    strict: bool,
}

/// Token counts. Sampled stop tokens are included.
#[derive(Clone, Copy, Serialize, JsonSchema)]
pub struct ResponseUsage {
    input_tokens: usize,
    input_tokens_details: InputTokenCounts,
    output_tokens: usize,
    output_tokens_details: OutputTokenCounts,
    total_tokens: usize,
}

/// Parts of the input's tokens.
#[derive(Clone, Copy, Serialize, JsonSchema)]
struct InputTokenCounts {
    /// Those whose keys and values came from the engine's prefix cache; 0 for a recorded response.
    cached_tokens: usize,
    /// Always 0: entries of the engine's cache cost nothing.
    cache_write_tokens: usize,
}

/// Parts of the output's tokens.
#[derive(Clone, Copy, Serialize, JsonSchema)]
struct OutputTokenCounts {
    reasoning_tokens: usize,
}

impl From<Usage> for ResponseUsage {
    fn from(usage: Usage) -> Self {
        let details = usage.completion_tokens_details;
        Self {
            input_tokens: usage.prompt_tokens,
            input_tokens_details: InputTokenCounts {
                cached_tokens: usage.cached_tokens(),
                cache_write_tokens: 0,
            },
            output_tokens: usage.completion_tokens,
            output_tokens_details: OutputTokenCounts {
                reasoning_tokens: details.map_or(0, |details| details.reasoning_tokens),
            },
            total_tokens: usage.total_tokens,
        }
    }
}

impl ResponseObject {
    /// The response to a request, before its output.
    pub fn new(interaction: &Interaction, version: Option<PolicyVersion>) -> Self {
        let Interaction { endpoint, chat, params, grammar, .. } = interaction;
        let options = match endpoint {
            ClientEndpoint::Responses(options) => Some(options),
            _ => None,
        };
        let has_instructions = options.is_some_and(|options| options.instructions);
        let first = interaction.messages.first().filter(|_| has_instructions);
        let previous = options.and_then(|options| options.previous);
        let effort = chat.template_variables.get("reasoning_effort").and_then(Value::as_str);
        // The grammar of a forced call is not a format of the text.
        let grammar = grammar.as_ref().filter(|_| !chat.forces_call());
        let schema_name = options.and_then(|options| options.schema_name.as_deref());
        let tool = |Tool { name, description, parameters, strict }| FunctionTool {
            r#type: "function",
            name,
            description,
            parameters,
            strict,
        };
        Self {
            id: interaction.id.response_id(),
            object: "response",
            created_at: interaction.created / 1000,
            completed_at: None,
            status: ResponseStatus::InProgress,
            error: None,
            incomplete_details: None,
            background: false,
            instructions: first.map(|message| message.content.clone()),
            max_output_tokens: params.max_tokens,
            metadata: interaction.metadata.clone(),
            model: interaction.model.clone(),
            output: Vec::new(),
            parallel_tool_calls: chat.parallel_tool_calls,
            previous_response_id: previous.map(|id| id.response_id()),
            reasoning: ReasoningOptions { effort: effort.map(str::to_owned), summary: None },
            store: !interaction.id.is_unstored(),
            system_fingerprint: version.map(PolicyVersion::fingerprint),
            temperature: params.temperature,
            text: TextOptions { format: format(grammar, schema_name) },
            tool_choice: tool_choice(chat),
            tools: chat.tools.iter().cloned().map(tool).collect(),
            top_p: params.top_p,
            truncation: "disabled",
            usage: None,
        }
    }

    /// The response that ended at a time.
    pub fn ended(
        self,
        end: MessageEnd,
        output: Vec<OutputItem>,
        usage: ResponseUsage,
        at: UnixMillis,
    ) -> Self {
        let status = match end {
            MessageEnd::Stop | MessageEnd::Calls => ResponseStatus::Completed,
            MessageEnd::Length => ResponseStatus::Incomplete,
            MessageEnd::Cancelled => ResponseStatus::Cancelled,
        };
        let is_incomplete = status == ResponseStatus::Incomplete;
        Self {
            completed_at: (status == ResponseStatus::Completed).then_some(at / 1000),
            status,
            incomplete_details: is_incomplete
                .then_some(IncompleteDetails { reason: "max_output_tokens" }),
            output,
            usage: Some(usage),
            ..self
        }
    }

    /// The response that an error ended.
    pub fn failed(self, error: &ApiError, output: Vec<OutputItem>) -> Self {
        let code = match error.status() {
            429 => "rate_limit_exceeded",
            400..=499 => "invalid_prompt",
            _ => "server_error",
        };
        let failure = ResponseFailure { code, message: error.message.clone() };
        Self { status: ResponseStatus::Failed, error: Some(failure), output, ..self }
    }

    /// The type of the event that ends a stream with this response.
    pub fn last_event(&self) -> &'static str {
        match self.status {
            ResponseStatus::Failed => "response.failed",
            ResponseStatus::Incomplete => "response.incomplete",
            _ => "response.completed",
        }
    }
}

fn format(grammar: Option<&GrammarSpec>, schema_name: Option<&str>) -> Value {
    match grammar {
        Some(GrammarSpec::JsonObject) => json!({"type": "json_object"}),
        Some(GrammarSpec::JsonSchema(schema)) => {
            let schema: Value = serde_json::from_str(schema).unwrap_or_default();
            json!({"type": "json_schema", "name": schema_name, "schema": schema, "strict": true})
        }
        _ => json!({"type": "text"}),
    }
}

fn tool_choice(chat: &ChatOptions) -> Value {
    match &chat.tool_choice {
        ToolChoice::None => json!("none"),
        ToolChoice::Auto => json!("auto"),
        ToolChoice::Required => json!("required"),
        ToolChoice::Function(name) => json!({"type": "function", "name": name}),
    }
}

/// The response to an erasure.
#[derive(Serialize, JsonSchema)]
pub struct DeletedResponse {
    pub id: String,
    #[schemars(extend("const" = "response"))]
    pub object: &'static str,
    pub deleted: bool,
}

// Ids of items follow from the response's id and the item's place, so that recorded responses have the same.

/// Hexadecimal digits of the response's id in the id of an item. Those of the item's place follow.
const ID_DIGITS: usize = 32;

/// An item of the output.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum OutputItem {
    /// Reasoning before the text. It has no summary.
    Reasoning {
        id: String,
        summary: Vec<()>,
        content: Vec<ContentPart>,
        encrypted_content: Option<()>,
        status: ItemStatus,
    },
    /// Text.
    Message {
        id: String,
        #[schemars(extend("const" = "assistant"))]
        role: &'static str,
        status: ItemStatus,
        content: Vec<ContentPart>,
    },
    /// A call of a function.
    FunctionCall {
        id: String,
        call_id: String,
        name: String,
        arguments: String,
        status: ItemStatus,
    },
}

/// The text of an item.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ContentPart {
    ReasoningText {
        text: String,
    },
    OutputText {
        text: String,
        annotations: Vec<()>,
        /// Empty unless requested.
        logprobs: Vec<TokenLogprob>,
    },
}

/// Progress of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ItemStatus {
    InProgress,
    Completed,
    /// It was cut off.
    Incomplete,
}

/// The response and the place in its output of the item with an id; `None` for any other text.
pub fn item_of(id: &str) -> Option<(InteractionId, usize)> {
    let (prefix, digits) = id.split_once('_')?;
    let (response, place) = digits.split_at_checked(ID_DIGITS)?;
    let is_item = ["rs", "msg", "fc"].contains(&prefix) && place.len() == 4;
    let response = Uuid::try_parse(response).ok().filter(|_| is_item)?;
    Some((InteractionId(response), usize::from_str_radix(place, 16).ok()?))
}

/// The id of the item at a place of the output.
pub fn item_id(prefix: &str, response: InteractionId, index: usize) -> String {
    format!("{prefix}_{response}{index:04x}")
}

impl OutputItem {
    /// A whole item. `id` makes its id of a prefix.
    pub fn whole(item: MessageItem, id: impl Fn(&str) -> String) -> Self {
        let status = ItemStatus::Completed;
        match item {
            MessageItem::Reasoning(text) => Self::Reasoning {
                id: id("rs"),
                summary: Vec::new(),
                content: vec![ContentPart::ReasoningText { text }],
                encrypted_content: None,
                status,
            },
            MessageItem::Text(text) => {
                let (annotations, logprobs) = (Vec::new(), Vec::new());
                let content = vec![ContentPart::OutputText { text, annotations, logprobs }];
                Self::Message { id: id("msg"), role: "assistant", status, content }
            }
            MessageItem::Call(ToolCall { id: call_id, name, arguments }) => {
                Self::FunctionCall { id: id("fc"), call_id, name, arguments, status }
            }
        }
    }

    pub fn id(&self) -> &str {
        match self {
            Self::Reasoning { id, .. }
            | Self::Message { id, .. }
            | Self::FunctionCall { id, .. } => id,
        }
    }

    pub fn set_status(&mut self, new: ItemStatus) {
        match self {
            Self::Reasoning { status, .. }
            | Self::Message { status, .. }
            | Self::FunctionCall { status, .. } => *status = new,
        }
    }

    /// The parts of text; `None` for a call.
    pub fn content_mut(&mut self) -> Option<&mut Vec<ContentPart>> {
        match self {
            Self::Reasoning { content, .. } | Self::Message { content, .. } => Some(content),
            Self::FunctionCall { .. } => None,
        }
    }
}

/// One event. It has the fields of its type.
#[derive(Default, Serialize, JsonSchema)]
pub struct ResponseEvent {
    pub r#type: &'static str,
    /// The event's number in its stream, from 0.
    pub sequence_number: u64,
    /// The response so far.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response: Option<ResponseObject>,
    /// The item's place in the output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub item: Option<OutputItem>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub item_id: Option<String>,
    /// The part's place in the item.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content_index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<ContentPart>,
    /// More of a text or of a call's arguments.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delta: Option<String>,
    /// A whole text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// The whole arguments of a call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arguments: Option<String>,
    /// Of the tokens of `delta` or `text`; empty unless requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<Vec<TokenLogprob>>,
}

impl ResponseEvent {
    pub fn response(r#type: &'static str, response: ResponseObject) -> Self {
        Self { r#type, response: Some(response), ..Self::default() }
    }

    /// A change within an item at a place of the output. Every item with content has one part.
    pub fn within(r#type: &'static str, output_index: usize, item: &OutputItem) -> Self {
        let content_index = (!matches!(item, OutputItem::FunctionCall { .. })).then_some(0);
        let (output_index, item_id) = (Some(output_index), Some(item.id().to_owned()));
        Self { r#type, output_index, item_id, content_index, ..Self::default() }
    }

    /// An item that begins or has ended.
    pub fn item(r#type: &'static str, output_index: usize, item: OutputItem) -> Self {
        let output_index = Some(output_index);
        Self { r#type, output_index, item: Some(item), ..Self::default() }
    }
}

// The items are made of the parts of a message, with the events of a stream. An item is open until the next one begins.

/// The output while it grows.
pub struct ResponseOutput {
    response: InteractionId,
    items: Vec<OutputItem>,
    /// Whether the last item may grow.
    is_open: bool,
}

/// The status of the last item of an answer.
fn last_status(end: MessageEnd) -> ItemStatus {
    match end {
        MessageEnd::Stop | MessageEnd::Calls => ItemStatus::Completed,
        MessageEnd::Length | MessageEnd::Cancelled => ItemStatus::Incomplete,
    }
}

impl ResponseOutput {
    pub fn new(response: InteractionId) -> Self {
        Self { response, items: Vec::new(), is_open: false }
    }

    /// The items of a whole message, which is not empty.
    pub fn whole(
        response: InteractionId,
        message: Vec<MessageItem>,
        end: MessageEnd,
    ) -> Vec<OutputItem> {
        let items = message.into_iter().enumerate();
        let mut items: Vec<OutputItem> = items
            .map(|(index, item)| OutputItem::whole(item, |prefix| item_id(prefix, response, index)))
            .collect();
        if let Some(last) = items.last_mut() {
            last.set_status(last_status(end));
        }
        items
    }

    pub fn items(&self) -> &[OutputItem] {
        &self.items
    }

    /// Whether the last item is text that may grow.
    pub fn is_in_text(&self) -> bool {
        self.is_open && matches!(self.items.last(), Some(OutputItem::Message { .. }))
    }

    /// Adds a part, with the log-probabilities of its tokens if it is text.
    pub fn add(&mut self, part: MessagePart, logprobs: Vec<TokenLogprob>) -> Vec<ResponseEvent> {
        let mut events = Vec::new();
        if !self.continues(&part) {
            self.close(ItemStatus::Completed, &mut events);
            self.open(&part, &mut events);
        }
        events.extend(self.grow(part, logprobs));
        events
    }

    /// Ends the output. It has at least one item then.
    pub fn finish(&mut self, end: MessageEnd) -> Vec<ResponseEvent> {
        let mut events = Vec::new();
        if self.items.is_empty() {
            self.open(&MessagePart::Text(String::new()), &mut events);
        }
        self.close(last_status(end), &mut events);
        events
    }

    fn continues(&self, part: &MessagePart) -> bool {
        let last = self.items.last().filter(|_| self.is_open);
        matches!(
            (last, part),
            (Some(OutputItem::Reasoning { .. }), MessagePart::Reasoning(_))
                | (Some(OutputItem::Message { .. }), MessagePart::Text(_))
                | (Some(OutputItem::FunctionCall { .. }), MessagePart::Arguments { .. })
        )
    }

    /// Begins the item that a part belongs to.
    fn open(&mut self, part: &MessagePart, events: &mut Vec<ResponseEvent>) {
        let item = match part {
            MessagePart::Reasoning(_) => MessageItem::Reasoning(String::new()),
            MessagePart::Text(_) => MessageItem::Text(String::new()),
            MessagePart::Call { id, name, .. } => MessageItem::Call(ToolCall {
                id: id.clone(),
                name: name.clone(),
                arguments: String::new(),
            }),
            // A call begins before its arguments.
            MessagePart::Arguments { .. } => return,
        };
        let index = self.items.len();
        let mut item = OutputItem::whole(item, |prefix| item_id(prefix, self.response, index));
        item.set_status(ItemStatus::InProgress);
        // An item begins without its part.
        let mut begun = item.clone();
        let parts = begun.content_mut().map(std::mem::take).unwrap_or_default();
        events.push(ResponseEvent::item("response.output_item.added", index, begun));
        events.extend(parts.into_iter().map(|part| ResponseEvent {
            part: Some(part),
            ..ResponseEvent::within("response.content_part.added", index, &item)
        }));
        self.items.push(item);
        self.is_open = true;
    }

    fn grow(&mut self, part: MessagePart, logprobs: Vec<TokenLogprob>) -> Option<ResponseEvent> {
        let index = self.items.len().checked_sub(1)?;
        let item = self.items.last_mut()?;
        let mut event = ResponseEvent::within("", index, item);
        let (name, delta) = match (item, part) {
            (OutputItem::Reasoning { content, .. }, MessagePart::Reasoning(more)) => {
                if let Some(ContentPart::ReasoningText { text }) = content.last_mut() {
                    text.push_str(&more);
                }
                ("response.reasoning_text.delta", more)
            }
            (OutputItem::Message { content, .. }, MessagePart::Text(more)) => {
                if let Some(ContentPart::OutputText { text, logprobs: all, .. }) =
                    content.last_mut()
                {
                    text.push_str(&more);
                    all.extend(logprobs.iter().cloned());
                }
                event.logprobs = Some(logprobs);
                ("response.output_text.delta", more)
            }
            (OutputItem::FunctionCall { arguments, .. }, MessagePart::Arguments { json, .. }) => {
                arguments.push_str(&json);
                ("response.function_call_arguments.delta", json)
            }
            _ => return None,
        };
        Some(ResponseEvent { r#type: name, delta: Some(delta), ..event })
    }

    /// Ends the last item, if it is open.
    fn close(&mut self, status: ItemStatus, events: &mut Vec<ResponseEvent>) {
        let Some(index) = self.items.len().checked_sub(1).filter(|_| self.is_open) else { return };
        self.is_open = false;
        let Some(item) = self.items.last_mut() else { return };
        item.set_status(status);
        let within = |r#type| ResponseEvent::within(r#type, index, item);
        match &*item {
            OutputItem::Reasoning { content, .. } | OutputItem::Message { content, .. } => {
                for part in content {
                    let (name, text, logprobs) = match part.clone() {
                        ContentPart::ReasoningText { text } => {
                            ("response.reasoning_text.done", text, None)
                        }
                        ContentPart::OutputText { text, logprobs, .. } => {
                            ("response.output_text.done", text, Some(logprobs))
                        }
                    };
                    events.push(ResponseEvent { text: Some(text), logprobs, ..within(name) });
                    let part = Some(part.clone());
                    events.push(ResponseEvent { part, ..within("response.content_part.done") });
                }
            }
            OutputItem::FunctionCall { arguments, .. } => {
                let arguments = Some(arguments.clone());
                let done = within("response.function_call_arguments.done");
                events.push(ResponseEvent { arguments, ..done });
            }
        }
        events.push(ResponseEvent::item("response.output_item.done", index, item.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_item_is_found_by_its_id() {
        let id = InteractionId::new();
        for (prefix, place) in [("msg", 0), ("rs", 1), ("fc", 0xffff)] {
            assert_eq!(item_of(&item_id(prefix, id, place)), Some((id, place)));
        }
        for text in ["", "msg_", "msg_0", &id.message_id(), &format!("{}0000", id.response_id())] {
            assert_eq!(item_of(text), None, "{text}");
        }
    }

    fn parts() -> Vec<MessagePart> {
        let text = |text: &str| MessagePart::Text(text.to_owned());
        let call = |index: usize, id: &str| MessagePart::Call {
            index,
            id: id.to_owned(),
            name: "add".to_owned(),
        };
        let json =
            |index: usize, json: &str| MessagePart::Arguments { index, json: json.to_owned() };
        vec![
            MessagePart::Reasoning("Hm".to_owned()),
            MessagePart::Reasoning(".".to_owned()),
            text("I "),
            text("add."),
            call(0, "a"),
            json(0, "{\"a\":"),
            json(0, "1}"),
            call(1, "b"),
            text("Done."),
        ]
    }

    #[test]
    fn items_begin_grow_and_end_in_their_order() {
        let id = InteractionId::new();
        let mut output = ResponseOutput::new(id);
        let mut events: Vec<ResponseEvent> =
            parts().into_iter().flat_map(|part| output.add(part, Vec::new())).collect();
        events.extend(output.finish(MessageEnd::Length));
        let types: Vec<&str> = events
            .iter()
            .map(|event| event.r#type.strip_prefix("response.").unwrap_or_default())
            .collect();
        let text = |name: &'static str, deltas: usize| {
            let mut all = vec!["output_item.added", "content_part.added"];
            all.extend(std::iter::repeat_n(name, deltas));
            all
        };
        let ends = ["content_part.done", "output_item.done"];
        let call = ["output_item.added"];
        let call_ends = ["function_call_arguments.done", "output_item.done"];
        let expected = [
            &text("reasoning_text.delta", 2)[..],
            &["reasoning_text.done"],
            &ends,
            &text("output_text.delta", 2),
            &["output_text.done"],
            &ends,
            &call,
            &["function_call_arguments.delta"; 2],
            &call_ends,
            &call,
            &call_ends,
            &text("output_text.delta", 1),
            &["output_text.done"],
            &ends,
        ];
        assert_eq!(types, expected.concat());
        let call = |id: &str, arguments: &str| {
            MessageItem::Call(ToolCall {
                id: id.to_owned(),
                name: "add".to_owned(),
                arguments: arguments.to_owned(),
            })
        };
        let whole = vec![
            MessageItem::Reasoning("Hm.".to_owned()),
            MessageItem::Text("I add.".to_owned()),
            call("a", "{\"a\":1}"),
            call("b", ""),
            MessageItem::Text("Done.".to_owned()),
        ];
        assert_eq!(ResponseOutput::whole(id, whole, MessageEnd::Length), output.items());
    }
}
