//! OpenAI's Responses: `POST /v1/responses` and the endpoints of recorded responses.
//!
//! `read` validates the body (`fields` declares it; `input` and `text` read their parts), and
//! completes the conversation by earlier responses in the ledger. [`chat`](super::chat) samples the answer
//! like that of a chat completion. `output` makes its `items`, `wire` and `events` define the shapes, `ResponseRun`
//! reports the progress, `stored` has the endpoints of recorded responses.

pub(super) mod events;
pub(super) mod fields;
mod input;
mod items;
mod output;
pub(super) mod stored;
mod text;
pub(super) mod wire;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde_json::{Map, Value};

use hone_core::types::{
    ClientEndpoint, Interaction, InteractionId, Message, PolicyVersion, ResponseOptions, Role,
    now_ms,
};

use super::body::JsonObject;
use super::chat::conversation::begin;
use super::generate::with_version;
use crate::http::AppState;
use crate::http::auth::Caller;
use crate::http::body::{Fields, invalid};
use crate::http::chat::answer::{
    Answers, MessageEnd, MessageItem, MessagePart, MessageUpdate, WholeMessage,
};
use crate::http::chat::conversation::{AnswerRun, ConversationRequest, FieldNames};
use crate::http::chat::tools::{self, EFFORTS, ToolShape, refuse_others};
use crate::http::chat::wire::TokenLogprob;
use crate::http::chat::{metadata, params, refuse_contradictions, stop, to_u32};
use crate::http::error::ApiError;
use crate::http::generate::ChoiceUpdate;
use crate::http::generate::run::RequestRun;
use crate::http::generate::sse::{self, RunEvents};
use events::ResponseEvent;
use fields::{FIELDS, INCLUDABLE, LOGPROBS, REASONING, SUMMARIES};
use input::InputItem;
use items::item_of;
use output::ResponseOutput;
use stored::{RecordedResponse, find};
use text::TextFormat;
use wire::ResponseObject;

/// `POST /v1/responses`
pub(super) async fn create(
    State(state): State<Arc<AppState>>,
    Extension(caller): Extension<Caller>,
    JsonObject(body): JsonObject,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let vocab = state.engine.info().vocab;
    let request = read(&body, state.config.default_max_tokens, vocab)?;
    let stream = request.stream;
    let conversation = complete(&state, &caller, request).await?;
    let mut run = ResponseRun::new(begin(state, caller, conversation, arrived).await?);
    if stream {
        let (version, response) = respond(run).await?;
        return Ok(with_version(response, version));
    }
    run.run.read_whole();
    while let Some(events) = run.next().await {
        events?;
    }
    Ok(with_version(Json(run.ended()).into_response(), run.version))
}

// Streams a response as server-sent events: `response.created` and `response.in_progress`; for each item its
// beginning, its growth and its end; then `response.completed` or `response.incomplete`. A failure after
// the first byte ends the stream with `response.failed`.

struct ResponseStream {
    run: ResponseRun,
    /// The number of the next event.
    sequence: u64,
}

/// Starts the run before it responds, so that a refusal still has its status code, unless the run waits too
/// long. Returns the version, if the run has started.
async fn respond(mut run: ResponseRun) -> Result<(Option<PolicyVersion>, Response), ApiError> {
    let (version, keep_alive) = (run.run.start_in_time().await?, run.run.keep_alive());
    run.version = version;
    let events = ResponseStream { run, sequence: 0 };
    Ok((version, sse::respond(sse::events_of(events), keep_alive)))
}

impl RunEvents for ResponseStream {
    fn run(&mut self) -> &mut RequestRun {
        &mut self.run.run
    }

    fn first(&mut self) -> String {
        let response = self.run.begun();
        let created = ResponseEvent::response("response.created", response.clone());
        self.write(vec![created, ResponseEvent::response("response.in_progress", response)])
    }

    fn of(&mut self, updates: Vec<ChoiceUpdate>) -> Result<String, ApiError> {
        let events = self.run.update(updates)?;
        Ok(self.write(events))
    }

    fn failed(&mut self, error: &ApiError) -> String {
        let response = self.run.failed(error);
        self.end(response)
    }

    fn last(&mut self) -> String {
        let response = self.run.ended();
        self.end(response)
    }
}

impl ResponseStream {
    fn end(&mut self, response: ResponseObject) -> String {
        self.write(vec![ResponseEvent::response(response.last_event(), response)])
    }

    fn write(&mut self, events: Vec<ResponseEvent>) -> String {
        let mut text = String::new();
        for mut event in events {
            event.sequence_number = self.sequence;
            self.sequence += 1;
            text.push_str(&sse::named_event(event.r#type, &event));
        }
        text
    }
}

// A response while it is sampled.

/// A running response.
struct ResponseRun {
    run: RequestRun,
    interaction: Arc<Interaction>,
    answers: Answers,
    output: ResponseOutput,
    /// The version that samples it, when that is known.
    version: Option<PolicyVersion>,
    end: MessageEnd,
}

impl ResponseRun {
    fn new(begun: AnswerRun) -> Self {
        let AnswerRun { run, interaction, answers } = begun;
        let output = ResponseOutput::new(interaction.id);
        Self { run, interaction, answers, output, version: None, end: MessageEnd::Cancelled }
    }

    /// The events of the next progress, perhaps none; `None` when the response has ended.
    async fn next(&mut self) -> Option<Result<Vec<ResponseEvent>, ApiError>> {
        let update = self.run.next().await?;
        Some(update.and_then(|update| self.update(vec![update])))
    }

    /// The events of updates, perhaps none.
    fn update(&mut self, updates: Vec<ChoiceUpdate>) -> Result<Vec<ResponseEvent>, ApiError> {
        self.version = updates.last().map(|update| update.version).or(self.version);
        let updates = self.answers.update(updates)?;
        Ok(updates.into_iter().flat_map(|update| self.add(update)).collect())
    }

    fn add(&mut self, update: MessageUpdate) -> Vec<ResponseEvent> {
        let MessageUpdate { parts, tokens, end, .. } = update;
        let codec = self.run.state.engine.codec();
        let mut logprobs: Vec<TokenLogprob> =
            tokens.iter().map(|token| TokenLogprob::new(codec, token)).collect();
        let mut events = Vec::new();
        for part in parts {
            let is_text = matches!(part, MessagePart::Text(_));
            let own = if is_text { std::mem::take(&mut logprobs) } else { Vec::new() };
            events.extend(self.output.add(part, own));
        }
        // Tokens of a stop string, which is no text.
        if !logprobs.is_empty() && self.output.is_in_text() {
            events.extend(self.output.add(MessagePart::Text(String::new()), logprobs));
        }
        if let Some(end) = end {
            self.end = end;
            events.extend(self.output.finish(end));
        }
        events
    }

    /// The response before its output.
    fn begun(&self) -> ResponseObject {
        ResponseObject::new(&self.interaction, self.version)
    }

    /// The response after its end.
    fn ended(&self) -> ResponseObject {
        let usage = self.answers.usage(self.run.usage()).into();
        self.begun().ended(self.end, self.output.items().to_vec(), usage, now_ms())
    }

    /// The response after an error.
    fn failed(&mut self, error: &ApiError) -> ResponseObject {
        let mut output = Vec::new();
        if !self.output.items().is_empty() {
            self.output.finish(MessageEnd::Cancelled);
            output.extend_from_slice(self.output.items());
        }
        self.begun().failed(error, output)
    }
}

// Completes the conversation of a request by what the ledger has: the response that it continues, and the
// items that its input refers to.

/// The conversation of a request: instructions, the messages and the answer of the response that it
/// continues, and the input. The instructions of that response are left out, as in OpenAI's API.
///
/// # Errors
/// 400 for a response that cannot be continued, 404 for an unknown item.
async fn complete(
    state: &AppState,
    caller: &Caller,
    request: ResponseRequest,
) -> Result<ConversationRequest, ApiError> {
    let ResponseRequest { conversation, instructions, previous, input, schema_name, .. } = request;
    let mut turns = Turns::default();
    let has_instructions = instructions.is_some();
    if let Some(text) = instructions {
        turns.add(Message::new(Role::System, text));
    }
    let previous = match previous {
        Some(id) => Some(continued(state, caller, &id, &mut turns).await?),
        None => None,
    };
    let mut found = BTreeMap::new();
    for item in input {
        match item {
            InputItem::Message(message) => turns.add(message),
            InputItem::Assistant(item) => turns.add_item(item),
            InputItem::Reference { path, id } => {
                turns.add_item(referred(state, caller, &path, &id, &mut found).await?);
            }
        }
    }
    let options = ResponseOptions { instructions: has_instructions, previous, schema_name };
    Ok(ConversationRequest {
        messages: turns.finish(),
        endpoint: ClientEndpoint::Responses(options),
        ..conversation
    })
}

/// Adds the messages and the answer of a response.
async fn continued(
    state: &AppState,
    caller: &Caller,
    text: &str,
    turns: &mut Turns,
) -> Result<InteractionId, ApiError> {
    if InteractionId::from_completion_id(text).is_some_and(InteractionId::is_unstored) {
        return Err(ApiError::no_previous_response(format!(
            "previous_response_id is {text:?}: nothing of this response was kept (\"store\" is false \
             for its request, its route or its key), so send its items in input"
        )));
    }
    let previous = find(state, caller, "previous_response_id", text).await;
    let previous = previous.map_err(|error| match error.status() {
        404 => ApiError::no_previous_response(error.message().to_owned()),
        _ => error,
    })?;
    let RecordedResponse { interaction, options, items, .. } = previous;
    let instructions = usize::from(options.instructions);
    for message in interaction.messages.into_iter().skip(instructions) {
        turns.add(message);
    }
    turns.add(assistant(items));
    Ok(interaction.id)
}

/// The message of an answer.
fn assistant(items: Vec<MessageItem>) -> Message {
    let (reasoning, content, tool_calls) = WholeMessage::split(items);
    Message {
        reasoning: Some(reasoning).filter(|text| !text.is_empty()),
        tool_calls,
        ..Message::new(Role::Assistant, content)
    }
}

/// The item with an id. `found` has the items of the responses that were read.
async fn referred(
    state: &AppState,
    caller: &Caller,
    path: &str,
    id: &str,
    found: &mut BTreeMap<InteractionId, Vec<MessageItem>>,
) -> Result<MessageItem, ApiError> {
    let unknown = || ApiError::no_such_item(path, id);
    let (response, index) = item_of(id).ok_or_else(unknown)?;
    if response.is_unstored() {
        return Err(ApiError::unstored_completion(path, id));
    }
    let items = match found.entry(response) {
        Entry::Occupied(entry) => entry.into_mut(),
        Entry::Vacant(entry) => {
            let recorded = find(state, caller, path, &response.response_id()).await;
            let recorded = recorded.map_err(|error| match error.status() {
                404 => unknown(),
                _ => error,
            })?;
            entry.insert(recorded.items)
        }
    };
    items.get(index).cloned().ok_or_else(unknown)
}

/// Makes messages of items. Reasoning, text and calls of the assistant are parts of one message, until the
/// client's next one.
#[derive(Default)]
struct Turns {
    messages: Vec<Message>,
    /// The assistant's message that the next item may belong to.
    open: Option<Message>,
}

impl Turns {
    fn add(&mut self, message: Message) {
        self.messages.extend(self.open.take());
        self.messages.push(message);
    }

    fn add_item(&mut self, item: MessageItem) {
        if self.open.as_ref().is_some_and(|open| begins_message(open, &item)) {
            self.messages.extend(self.open.take());
        }
        let open = self.open.get_or_insert_with(|| Message::new(Role::Assistant, ""));
        match item {
            MessageItem::Reasoning(text) if text.is_empty() => {}
            MessageItem::Reasoning(text) => {
                open.reasoning.get_or_insert_default().push_str(&text);
            }
            MessageItem::Text(text) => open.content.push_str(&text),
            MessageItem::Call(call) => open.tool_calls.push(call),
        }
    }

    fn finish(mut self) -> Vec<Message> {
        self.messages.extend(self.open.take());
        self.messages
    }
}

/// Whether an item begins another message: one message has its reasoning first, and a second text only
/// after calls.
fn begins_message(open: &Message, item: &MessageItem) -> bool {
    match item {
        MessageItem::Reasoning(_) => !open.content.is_empty() || !open.tool_calls.is_empty(),
        MessageItem::Text(_) => !open.content.is_empty() && open.tool_calls.is_empty(),
        MessageItem::Call(_) => false,
    }
}

// Validates a request for a response. `fields` declares the fields; `input` and `text` read their parts.

/// A valid request, whose conversation lacks the messages that may be in the ledger.
struct ResponseRequest {
    /// The request without its messages.
    conversation: ConversationRequest,
    instructions: Option<String>,
    /// The id of the response that the input continues.
    previous: Option<String>,
    input: Vec<InputItem>,
    /// The client's name of the JSON schema of the text.
    schema_name: Option<String>,
    stream: bool,
}

/// Validates a body. `vocab` bounds the token ids.
fn read(
    body: &Map<String, Value>,
    default_max_tokens: u32,
    vocab: usize,
) -> Result<ResponseRequest, ApiError> {
    let fields = Fields::of(body, FIELDS)?;
    let model = fields.text("model")?.ok_or_else(|| fields.missing("model", "a model's name"))?;
    let stream = fields.boolean("stream")?.unwrap_or(false);
    check_stream_options(&fields, stream)?;
    let TextFormat { grammar, schema_name } = text::read(&fields)?;
    let max_tokens = to_u32(fields.whole("max_output_tokens")).unwrap_or(default_max_tokens);
    let params = params(&fields, max_tokens, vocab)?;
    let chat = tools::read_as(&fields, ToolShape::Flat, effort(&fields)?)?;
    refuse_contradictions(&fields, grammar.as_ref(), &chat, &params)?;
    let conversation = ConversationRequest {
        model: model.to_owned(),
        endpoint: ClientEndpoint::Responses(ResponseOptions::default()),
        messages: Vec::new(),
        chat,
        params,
        stop: stop(&fields)?,
        grammar,
        choices: 1,
        logprobs: logprobs(&fields)?,
        token_ids: false,
        metadata: metadata(&fields)?,
        user: fields.text("user")?.map(str::to_owned),
        store: fields.boolean("store")?,
        fields: FieldNames {
            max_tokens: "max_output_tokens",
            messages: "input",
            parameters: "parameters",
        },
    };
    let instructions = fields.text("instructions")?.filter(|text| !text.is_empty());
    Ok(ResponseRequest {
        conversation,
        instructions: instructions.map(str::to_owned),
        previous: fields.text("previous_response_id")?.map(str::to_owned),
        input: input::read(&fields)?,
        schema_name,
        stream,
    })
}

fn check_stream_options(fields: &Fields<'_>, stream: bool) -> Result<(), ApiError> {
    let Some(value) = fields.get("stream_options") else { return Ok(()) };
    if !stream {
        return Err(fields.invalid("stream_options", "absent unless stream is true"));
    }
    let options = Fields::at("stream_options", value)?;
    refuse_others(&options, &["include_obfuscation"])?;
    options.boolean("include_obfuscation").map(|_| ())
}

/// `reasoning.effort`. The reasoning is returned as a whole, so that `summary` has no effect.
fn effort<'a>(fields: &Fields<'a>) -> Result<Option<&'a str>, ApiError> {
    let Some(value) = fields.get("reasoning") else { return Ok(None) };
    let reasoning = Fields::at("reasoning", value)?;
    refuse_others(&reasoning, &REASONING)?;
    for name in ["generate_summary", "summary"] {
        one_of(&reasoning, name, &SUMMARIES)?;
    }
    one_of(&reasoning, "effort", &EFFORTS)
}

fn one_of<'a>(
    fields: &Fields<'a>,
    name: &str,
    texts: &[&str],
) -> Result<Option<&'a str>, ApiError> {
    let quoted: Vec<_> = texts.iter().map(|text| format!("{text:?}")).collect();
    let allowed = format!("one of {}", quoted.join(", "));
    fields.read(name, allowed, |value| value.as_str().filter(|text| texts.contains(text)))
}

/// The number of alternatives per token; `None` if no log-probabilities are requested.
fn logprobs(fields: &Fields<'_>) -> Result<Option<u8>, ApiError> {
    let top = fields.whole("top_logprobs").unwrap_or(0);
    let mut wanted = top > 0;
    for (index, value) in fields.list("include")?.into_iter().flatten().enumerate() {
        let known = value.as_str().filter(|text| INCLUDABLE.contains(text));
        let Some(known) = known else {
            let path = format!("include[{index}]");
            let quoted: Vec<_> = INCLUDABLE.iter().map(|text| format!("{text:?}")).collect();
            let allowed = format!("one of {}", quoted.join(", "));
            return Err(invalid(&path, value, allowed));
        };
        wanted |= known == LOGPROBS;
    }
    Ok(wanted.then(|| u8::try_from(top).unwrap_or(u8::MAX)))
}

#[cfg(test)]
mod tests {
    use hone_core::types::ToolCall;

    use super::*;

    fn call(id: &str) -> ToolCall {
        ToolCall { id: id.to_owned(), name: "add".to_owned(), arguments: "{}".to_owned() }
    }

    fn text(text: &str) -> MessageItem {
        MessageItem::Text(text.to_owned())
    }

    fn thought(text: &str) -> MessageItem {
        MessageItem::Reasoning(text.to_owned())
    }

    #[test]
    fn the_items_of_a_turn_are_one_message() {
        let mut turns = Turns::default();
        turns.add(Message::new(Role::User, "2 + 3"));
        for item in [thought("Hm."), text("I add."), MessageItem::Call(call("a")), text("Done.")] {
            turns.add_item(item);
        }
        turns.add(Message::new(Role::Tool, "5"));
        for item in [text("5"), text("Really."), thought("Why?"), MessageItem::Call(call("b"))] {
            turns.add_item(item);
        }
        let message = |reasoning: &str, content: &str, calls: &[&str]| Message {
            reasoning: Some(reasoning.to_owned()).filter(|text| !text.is_empty()),
            tool_calls: calls.iter().map(|id| call(id)).collect(),
            ..Message::new(Role::Assistant, content)
        };
        let expected = [
            Message::new(Role::User, "2 + 3"),
            message("Hm.", "I add.Done.", &["a"]),
            Message::new(Role::Tool, "5"),
            message("", "5", &[]),
            message("", "Really.", &[]),
            message("Why?", "", &["b"]),
        ];
        assert_eq!(turns.finish(), expected);
    }

    mod request {
        use serde_json::json;

        use super::super::*;
        use crate::http::body::testing::assert_agreement;

        #[test]
        fn the_reader_accepts_what_the_schema_does() {
            let base = json!({
                "model": "default",
                "input": "a",
                "tools": [{"type": "function", "name": "f"}],
                "stream": true,
            });
            assert_agreement(FIELDS, &base, &[], |body| read(body, 256, 1000).map(drop));
        }
    }
}
