//! Reads a request for a response. Its fields are those of OpenAI, and vLLM's for sampling.

use serde_json::{Map, Value, json};

use hone_core::types::{ClientEndpoint, GrammarSpec, Message, ResponseOptions, Role, ToolCall};

use crate::body::{
    Field, FieldKind, FieldTable, Fields, invalid, list_of, object_schema, open, text_schema,
};
use crate::chat::answer::MessageItem;
use crate::chat::constraint::{NAMED_SCHEMA, RequestedGrammar, named_schema};
use crate::chat::request::{
    self as chat, EFFORTS, SWITCHES, ToolShape, joined_text, read_role, refuse_contradictions,
};
use crate::error::ApiError;
use crate::generate::{self, MAX_TOKENS, MAX_TOP_LOGPROBS, SAMPLING, metadata, to_u32};
use crate::generate::{ClientRequest, FieldNames};

/// What `include` may contain. Only the last one has an effect: the others belong to tools, or are always there.
const INCLUDABLE: [&str; 8] = [
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    LOGPROBS,
];
/// The value of `include` that adds log-probabilities.
const LOGPROBS: &str = "message.output_text.logprobs";

pub const FIELDS: FieldTable = &[CONVERSATION, SWITCHES, SAMPLING, OTHERS];

const CONVERSATION: &[Field] = &[
    Field::json("input", input_schema, "A text of the user, or a list of items.").required(),
    Field::text("instructions", "The system's message, before all others."),
    Field::text("previous_response_id", "The response that the input continues."),
    Field::json("tools", || ToolShape::Flat.tools_schema(), "Functions that the model may call."),
    Field::json(
        "tool_choice",
        || ToolShape::Flat.choice_schema(),
        "Whether the model must call a function.",
    ),
    Field::object("reasoning", REASONING, "Its effort is a variable of the chat template."),
    Field::object("text", TEXT, "The format of the text."),
];

const OTHERS: &[Field] = &[
    Field::integer("max_output_tokens", 1, MAX_TOKENS, "Most tokens of the response."),
    Field::integer("top_logprobs", 0, MAX_TOP_LOGPROBS, "Alternatives for each token."),
    Field::json("include", include_schema, "What the response has beside its text."),
    Field::object("stream_options", STREAM_OPTIONS, "Only with `stream`."),
    // They control OpenAI's service, its billing and its caches.
    Field::ignored("prompt_cache_key"),
    Field::ignored("prompt_cache_options"),
    Field::ignored("prompt_cache_retention"),
    Field::ignored("safety_identifier"),
    Field::only("background", "false"),
    Field::only("truncation", "\"disabled\""),
    Field::refused("access_programs"),
    Field::refused("background_options"),
    Field::refused("context_management"),
    Field::refused("conversation"),
    Field::refused("image"),
    Field::refused("max_tool_calls"),
    Field::refused("moderation"),
    Field::refused("prompt"),
];

/// The lengths of a summary of the reasoning, which has no effect because the reasoning is returned as a whole.
const SUMMARIES: [&str; 3] = ["auto", "concise", "detailed"];
const REASONING: FieldTable = &[&[
    Field::one_of("effort", &EFFORTS, ""),
    Field::one_of("summary", &SUMMARIES, "Has no effect."),
    Field::one_of("generate_summary", &SUMMARIES, "Has no effect."),
]];
const VERBOSITIES: [&str; 3] = ["low", "medium", "high"];
const TEXT: FieldTable = &[&[
    Field::json("format", format_schema, ""),
    Field::json("verbosity", || json!({"enum": VERBOSITIES}), "Has no effect."),
]];
const STREAM_OPTIONS: FieldTable =
    &[&[Field::flag("include_obfuscation", "Has no effect: events are not obfuscated.")]];
/// The fields of a format that is not a JSON schema, and of one that is.
const PLAIN_FORMAT: FieldTable =
    &[&[Field::one_of("type", &["text", "json_object"], "").required()]];
const SCHEMA_FORMAT: FieldTable =
    &[&[Field::one_of("type", &["json_schema"], "").required()], NAMED_SCHEMA];

fn format_schema() -> Value {
    json!({"anyOf": [object_schema(PLAIN_FORMAT), object_schema(SCHEMA_FORMAT)]})
}

fn include_schema() -> Value {
    json!({"type": "array", "items": {"enum": INCLUDABLE}})
}

/// A valid request, whose conversation lacks the messages that may be in the ledger.
pub struct ResponseRequest {
    /// The request without its messages.
    pub request: ClientRequest,
    pub instructions: Option<String>,
    /// The id of the response that the input continues.
    pub previous: Option<String>,
    pub input: Vec<InputItem>,
    /// The client's name of the JSON schema of the text.
    pub schema_name: Option<String>,
}

/// Validates a body. `vocab` bounds the token ids.
pub fn from_wire(
    body: &Map<String, Value>,
    default_max_tokens: u32,
    vocab: usize,
) -> Result<ResponseRequest, ApiError> {
    let fields = Fields::of(body, FIELDS)?;
    let max_tokens = to_u32(fields.whole("max_output_tokens")).unwrap_or(default_max_tokens);
    let names =
        FieldNames { max_tokens: "max_output_tokens", prompt: "input", parameters: "parameters" };
    let request = generate::read(&fields, metadata(&fields)?, max_tokens, vocab, names)?;
    if !request.stream && fields.get("stream_options").is_some() {
        return Err(fields.invalid("stream_options", "absent unless stream is true"));
    }
    let (grammar, schema_name) = text_format(&fields)?;
    let effort = fields.inner("reasoning").and_then(|reasoning| reasoning.get("effort"));
    let request = ClientRequest {
        endpoint: ClientEndpoint::Responses(ResponseOptions::default()),
        chat: chat::read_options_as(&fields, ToolShape::Flat, effort.and_then(Value::as_str))?,
        grammar,
        logprobs: logprobs(&fields)?,
        ..request
    };
    refuse_contradictions(&fields, &request)?;
    let instructions = fields.text("instructions")?.filter(|text| !text.is_empty());
    Ok(ResponseRequest {
        request,
        instructions: instructions.map(str::to_owned),
        previous: fields.owned("previous_response_id")?,
        input: input(&fields)?,
        schema_name,
    })
}

/// The number of alternatives per token; `None` if no log-probabilities are requested.
fn logprobs(fields: &Fields<'_>) -> Result<Option<u8>, ApiError> {
    let top = fields.whole("top_logprobs").unwrap_or(0);
    let mut wanted = top > 0;
    for (path, value) in fields.entries("include")? {
        if let Some(allowed) = FieldKind::OneOf(&INCLUDABLE).problem(value) {
            return Err(invalid(&path, value, allowed));
        }
        wanted |= value == LOGPROBS;
    }
    Ok(wanted.then(|| u8::try_from(top).unwrap_or(u8::MAX)))
}

/// Reads `text`: what constrains the text, and the name of its JSON schema.
fn text_format(
    fields: &Fields<'_>,
) -> Result<(Option<RequestedGrammar>, Option<String>), ApiError> {
    const TYPES: &str = "\"text\", \"json_object\" or \"json_schema\"";
    let Some(text) = fields.inner("text") else { return Ok((None, None)) };
    text.read("verbosity", "\"low\", \"medium\" or \"high\"", |value| {
        VERBOSITIES.contains(&value.as_str()?).then_some(())
    })?;
    let Some(value) = text.get("format") else { return Ok((None, None)) };
    let format = Fields::at("text.format", value)?;
    match format.required("type", TYPES)? {
        "text" => {
            format.check(PLAIN_FORMAT)?;
            Ok((None, None))
        }
        "json_object" => {
            format.check(PLAIN_FORMAT)?;
            let field = "text.format".to_owned();
            Ok((Some(RequestedGrammar { spec: GrammarSpec::JsonObject, field }), None))
        }
        "json_schema" => {
            format.check(SCHEMA_FORMAT)?;
            let (name, grammar) = named_schema(&format)?;
            Ok((Some(grammar), Some(name.to_owned())))
        }
        _ => Err(format.invalid("type", TYPES)),
    }
}

// The items of the input. Fields of theirs that change nothing, such as `status`, are ignored, because clients send
// back items as they received them.

#[derive(Debug, PartialEq)]
pub enum InputItem {
    /// A message of the client, or the result of a call.
    Message(Message),
    /// A part of the assistant's turn.
    Assistant(MessageItem),
    /// An item of an earlier response.
    Reference {
        /// The path of the field with the id.
        path: String,
        id: String,
    },
}

/// Reads `input`, which has at least one item.
fn input(fields: &Fields<'_>) -> Result<Vec<InputItem>, ApiError> {
    const ALLOWED: &str = "a text or a list of at least one item";
    match fields.get("input") {
        None => Err(fields.missing("input", ALLOWED)),
        Some(Value::String(text)) => Ok(vec![InputItem::Message(Message::new(Role::User, text))]),
        Some(Value::Array(list)) if !list.is_empty() => {
            let items = fields.entries("input")?;
            items.map(|(path, value)| item(&path, value)).collect()
        }
        Some(_) => Err(fields.invalid("input", ALLOWED)),
    }
}

fn item(path: &str, value: &Value) -> Result<InputItem, ApiError> {
    let fields = Fields::at(path, value)?;
    match fields.text("type")? {
        // The type of a reference and of a message may be absent.
        None if fields.get("role").is_none() && fields.get("id").is_some() => reference(&fields),
        None | Some("message") => message(&fields),
        Some("item_reference") => reference(&fields),
        Some("function_call") => Ok(InputItem::Assistant(MessageItem::Call(ToolCall {
            id: fields.string("call_id")?,
            name: fields.string("name")?,
            arguments: fields.string("arguments")?,
        }))),
        Some("function_call_output") => {
            let mut result = Message::new(Role::Tool, text(&fields, "output")?);
            result.tool_call_id = Some(fields.string("call_id")?);
            Ok(InputItem::Message(result))
        }
        Some("reasoning") => reasoning(&fields),
        Some(kind) => {
            let reason = format_args!(
                "is {kind:?}: only \"message\", \"function_call\", \"function_call_output\", \
                 \"reasoning\" and \"item_reference\" are supported"
            );
            Err(fields.unsupported("type", reason))
        }
    }
}

fn reference(fields: &Fields<'_>) -> Result<InputItem, ApiError> {
    Ok(InputItem::Reference { path: fields.path("id"), id: fields.string("id")? })
}

fn message(fields: &Fields<'_>) -> Result<InputItem, ApiError> {
    let roles = [Role::User, Role::Assistant, Role::System, Role::Developer];
    let role = read_role(fields, &roles)?;
    let text = text(fields, "content")?;
    Ok(match role {
        Role::Assistant => InputItem::Assistant(MessageItem::Text(text)),
        role => InputItem::Message(Message::new(role, text)),
    })
}

/// A text or parts of text, whose types have the field of the text.
fn text(fields: &Fields<'_>, name: &str) -> Result<String, ApiError> {
    let known = [("input_text", "text"), ("output_text", "text"), ("refusal", "refusal")];
    joined_text(fields, name, |part| text_part(part, &known))
}

/// The text of a part. `known` has the types, each with the field of the text.
fn text_part(part: &Fields<'_>, known: &[(&str, &str)]) -> Result<String, ApiError> {
    let quoted: Vec<_> = known.iter().map(|(kind, _)| format!("{kind:?}")).collect();
    let allowed = format!("one of {}", quoted.join(", "));
    let kind = part.required("type", &allowed)?;
    match known.iter().find(|(name, _)| *name == kind) {
        Some((_, field)) => part.string(field),
        None => {
            let reason = format_args!("is {kind:?}, which is not supported: it must be {allowed}");
            Err(part.unsupported("type", reason))
        }
    }
}

/// The text of a reasoning item. Its summary is no text of the model.
fn reasoning(fields: &Fields<'_>) -> Result<InputItem, ApiError> {
    if fields.get("encrypted_content").is_some() {
        let reason = "is not supported: send the content, or leave the item out";
        return Err(fields.unsupported("encrypted_content", reason));
    }
    fields.list("summary")?;
    let parts = fields.entries("content")?;
    let text = |(path, part): (String, &Value)| {
        text_part(&Fields::at(&path, part)?, &[("reasoning_text", "text")])
    };
    Ok(InputItem::Assistant(MessageItem::Reasoning(parts.map(text).collect::<Result<_, _>>()?)))
}

fn input_schema() -> Value {
    let typed = |kind: Value, required: usize, members: &[(&'static str, Value)]| {
        open(required, &[&[("type", kind)][..], members].concat())
    };
    let is = |kind: &str| json!({"const": kind});
    let part = json!({"anyOf": [
        typed(json!({"enum": ["input_text", "output_text"]}), 2, &[("text", text_schema())]),
        typed(is("refusal"), 2, &[("refusal", text_schema())]),
    ]});
    let text = json!({"anyOf": [text_schema(), list_of(1, part)]});
    let message = [
        ("role", json!({"enum": ["user", "assistant", "system", "developer"]})),
        ("content", text.clone()),
        ("type", json!({"enum": ["message", null]})),
    ];
    let call_id = ("call_id", text_schema());
    let call = [call_id.clone(), ("name", text_schema()), ("arguments", text_schema())];
    let thought = typed(is("reasoning_text"), 2, &[("text", text_schema())]);
    let reasoning = [
        ("content", json!({"type": ["array", "null"], "items": thought})),
        ("summary", json!({"type": ["array", "null"]})),
        ("encrypted_content", json!({"type": "null"})),
    ];
    let reference = [
        ("id", text_schema()),
        ("type", json!({"enum": ["item_reference", null]})),
        ("role", json!({"type": "null"})),
    ];
    let items = json!({"anyOf": [
        open(2, &message),
        typed(is("function_call"), 4, &call),
        typed(is("function_call_output"), 3, &[call_id, ("output", text)]),
        typed(is("reasoning"), 1, &reasoning),
        open(1, &reference),
    ]});
    json!({"anyOf": [text_schema(), list_of(1, items)]})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::testing::assert_agreement;

    #[test]
    fn the_reader_accepts_what_the_schema_does() {
        let base = json!({
            "model": "default",
            "input": "a",
            "tools": [{"type": "function", "name": "f"}],
            "stream": true,
        });
        assert_agreement(FIELDS, &base, &[], |body| from_wire(body, 256, 1000).map(drop));
    }
}
