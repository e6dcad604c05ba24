//! Reads a chat request. Its fields are those of OpenAI and vLLM. A field that would change the response in a way
//! that is not supported is refused; every other field is refused as unknown, as in OpenAI's API, so that a
//! misspelled field is not silently ignored.

use serde_json::{Map, Value, json};

use hone_core::types::{Message, Role, ToolCall};

use super::constraint;
use super::tools::{self, EFFORTS, SWITCHES, ToolShape};
use crate::body::{Field, FieldTable, Fields, list_of, maybe_text, open, or_null, text_schema};
use crate::error::ApiError;
use crate::generate::fields::{
    self, CHOICES, MAX_TOKENS, MAX_TOP_LOGPROBS, SAMPLING, include_usage, metadata, to_u32,
};
use crate::generate::{ClientRequest, FieldNames};

/// The fields of a chat request.
pub const FIELDS: FieldTable = &[CONVERSATION, SWITCHES, SAMPLING, CHOICES, CONSTRAINTS, OTHERS];

/// The conversation and what is added to it.
pub const CONVERSATION: &[Field] = &[
    Field::json("messages", messages_schema, "The conversation.").required(),
    Field::json("tools", tools::schema, "Functions that the model may call."),
    Field::json(
        "tool_choice",
        || ToolShape::Nested.choice_schema(),
        "Whether the model must call a function.",
    ),
    Field::one_of("reasoning_effort", &EFFORTS, "A variable of the chat template."),
];

/// What the text must follow.
const CONSTRAINTS: &[Field] = &[
    Field::json("response_format", constraint::format_schema, "A grammar of the text."),
    Field::json("guided_json", constraint::json_schema, "A JSON schema of the text, as in vLLM."),
    Field::text("guided_regex", "A regular expression of the text, as in vLLM."),
    Field::json("guided_choice", constraint::choice_schema, "The possible texts, as in vLLM."),
    Field::text("guided_grammar", "A grammar in llguidance's variant of Lark."),
    Field::json("structured_outputs", constraint::outputs_schema, "vLLM's newer form."),
];

const OTHERS: &[Field] = &[
    Field::integer("max_completion_tokens", 1, MAX_TOKENS, "The newer name of `max_tokens`."),
    Field::flag("logprobs", "Whether the response has log-probabilities."),
    Field::integer("top_logprobs", 0, MAX_TOP_LOGPROBS, "Alternatives; only with `logprobs`."),
    Field::flag("return_token_ids", "Whether the response has token ids, as in vLLM."),
    // They control OpenAI's service, billing and caches, or features that a supported request does not use.
    Field::ignored("prediction"),
    Field::ignored("prompt_cache_key"),
    Field::ignored("prompt_cache_options"),
    Field::ignored("prompt_cache_retention"),
    Field::ignored("safety_identifier"),
    Field::ignored("verbosity"),
    Field::only("best_of", "1"),
    Field::only("length_penalty", "1"),
    Field::only("modalities", "[\"text\"]"),
    Field::only("skip_special_tokens", "true"),
    Field::only("spaces_between_special_tokens", "true"),
    Field::refused("allowed_token_ids"),
    Field::refused("audio"),
    Field::refused("bad_words"),
    Field::refused("early_stopping"),
    Field::refused("function_call"),
    Field::refused("functions"),
    Field::refused("guided_decoding_backend"),
    Field::refused("guided_whitespace_pattern"),
    Field::refused("logits_processors"),
    Field::refused("moderation"),
    Field::refused("prompt_logprobs"),
    Field::refused("return_tokens_as_token_ids"),
    Field::refused("truncate_prompt_tokens"),
    Field::refused("use_beam_search"),
    Field::refused("vllm_xargs"),
    Field::refused("web_search_options"),
];

/// Validates a body. `vocab` bounds token ids. Returns whether a stream reports its usage, too.
pub fn from_wire(
    body: &Map<String, Value>,
    default_max_tokens: u32,
    vocab: usize,
) -> Result<(ClientRequest, bool), ApiError> {
    let fields = Fields::of(body, FIELDS)?;
    let newer = fields.get("max_completion_tokens").is_some();
    let names = FieldNames {
        max_tokens: if newer { "max_completion_tokens" } else { "max_tokens" },
        prompt: "messages",
        parameters: "function.parameters",
    };
    let request = fields::read(&fields, metadata(&fields)?, default_max_tokens, vocab, names)?;
    let request = ClientRequest {
        messages: read_messages(&fields)?,
        chat: tools::read(&fields)?,
        grammar: constraint::read(&fields)?,
        choices: to_u32(fields.whole("n")).unwrap_or(1),
        logprobs: logprobs(&fields)?,
        token_ids: fields.is_set("return_token_ids")?,
        ..request
    };
    refuse_contradictions(&fields, &request)?;
    let include_usage = include_usage(&fields, request.stream)?;
    Ok((request, include_usage))
}

/// Refuses what contradicts a grammar or a forced call.
pub fn refuse_contradictions(
    fields: &Fields<'_>,
    ClientRequest { grammar, chat, params, .. }: &ClientRequest,
) -> Result<(), ApiError> {
    if let Some(grammar) = grammar.as_ref().filter(|_| chat.forces_call()) {
        let allowed = format_args!("\"none\" or \"auto\" beside {}", grammar.field);
        return Err(fields.invalid("tool_choice", allowed));
    }
    let is_constrained = grammar.is_some() || chat.constrains_calls();
    if is_constrained && (params.min_tokens > 0 || params.ignore_eos) {
        let name = if params.ignore_eos { "ignore_eos" } else { "min_tokens" };
        return Err(fields.invalid(name, "absent if the text is constrained"));
    }
    Ok(())
}

fn logprobs(fields: &Fields<'_>) -> Result<Option<u8>, ApiError> {
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.whole("top_logprobs");
    match (wanted, top) {
        (true, top) => Ok(Some(u8::try_from(top.unwrap_or(0)).unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(fields.invalid("top_logprobs", "absent unless logprobs is true")),
    }
}

// The messages. Other fields of theirs are ignored, because clients send back messages as they received them.

/// The values of `role`.
const ROLES: &str = "\"system\", \"developer\", \"user\", \"assistant\" or \"tool\"";
/// The fields of OpenAI's messages that are not supported.
const UNSUPPORTED: [&str; 2] = ["function_call", "audio"];

/// Reads `messages`.
pub fn read_messages(fields: &Fields<'_>) -> Result<Vec<Message>, ApiError> {
    at_least_one(fields)?.map(|(path, value)| message(&path, value)).collect()
}

/// The entries of `messages`, each with its path.
pub fn at_least_one<'a>(
    fields: &Fields<'a>,
) -> Result<impl Iterator<Item = (String, &'a Value)> + use<'a>, ApiError> {
    let allowed = "a list of at least one message";
    let mut list = fields.entries("messages")?.into_iter().flatten().peekable();
    if list.peek().is_some() {
        return Ok(list);
    }
    Err(match fields.get("messages") {
        Some(_) => fields.invalid("messages", allowed),
        None => fields.missing("messages", allowed),
    })
}

fn message(path: &str, value: &Value) -> Result<Message, ApiError> {
    let fields = Fields::at(path, value)?;
    let role = match fields.required("role", ROLES)? {
        "system" => Role::System,
        "developer" => Role::Developer,
        "user" => Role::User,
        "assistant" => Role::Assistant,
        "tool" => Role::Tool,
        _ => return Err(fields.invalid("role", ROLES)),
    };
    if let Some(name) = UNSUPPORTED.iter().find(|name| !is_absent(&fields, name)) {
        return Err(fields.unsupported(name, "is not supported"));
    }
    let mut message = Message::new(role, "");
    message.name = fields.owned("name")?;
    if role == Role::Assistant {
        let calls = fields.entries("tool_calls")?.into_iter().flatten();
        let calls = calls.map(|(path, call)| tool_call(&path, call));
        message.tool_calls = calls.collect::<Result<_, _>>()?;
        let reasoning = fields.text("reasoning_content")?.or(fields.text("reasoning")?);
        message.reasoning = reasoning.map(str::to_owned);
    } else if !is_absent(&fields, "tool_calls") {
        return Err(fields.invalid("tool_calls", "absent unless role is \"assistant\""));
    }
    if role == Role::Tool {
        let id = fields.required("tool_call_id", "the id of the call that was answered")?;
        message.tool_call_id = Some(id.to_owned());
    }
    if message.tool_calls.is_empty() || fields.get("content").is_some() {
        message.content = content(&fields)?;
    }
    Ok(message)
}

/// Whether a field is absent or an empty list.
fn is_absent(fields: &Fields<'_>, name: &str) -> bool {
    fields.get(name).is_none_or(|value| value.as_array().is_some_and(Vec::is_empty))
}

/// A string, or text parts, which are concatenated.
fn content(fields: &Fields<'_>) -> Result<String, ApiError> {
    const ALLOWED: &str = "a string or a list of text parts";
    match fields.get("content") {
        None => Err(fields.missing("content", ALLOWED)),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) if !parts.is_empty() => {
            let parts = fields.entries("content")?.into_iter().flatten();
            parts.map(|(path, part)| text_part(&path, part)).collect()
        }
        Some(_) => Err(fields.invalid("content", ALLOWED)),
    }
}

fn text_part<'a>(path: &str, value: &'a Value) -> Result<&'a str, ApiError> {
    let part = Fields::at(path, value)?;
    if part.required("type", "\"text\"")? != "text" {
        return Err(part.invalid("type", "\"text\": nothing else is supported"));
    }
    part.required("text", "a string")
}

fn tool_call(path: &str, value: &Value) -> Result<ToolCall, ApiError> {
    let call = Fields::at(path, value)?;
    if call.text("type")?.is_some_and(|kind| kind != "function") {
        return Err(call.invalid("type", "\"function\": nothing else is supported"));
    }
    let required = |fields: &Fields<'_>, name: &str| -> Result<String, ApiError> {
        Ok(fields.required(name, "a string")?.to_owned())
    };
    let id = required(&call, "id")?;
    let function = call.member("function")?;
    let (name, arguments) = (required(&function, "name")?, required(&function, "arguments")?);
    Ok(ToolCall { id, name, arguments })
}

/// The JSON schema of `messages`.
pub fn messages_schema() -> Value {
    // Null or an empty list.
    let absent = json!({"enum": [null, []]});
    let message = |required: usize, role: Value, own: Vec<(&'static str, Value)>| {
        let mut members = vec![("role", role)];
        members.extend(own);
        members.push(("name", maybe_text()));
        members.extend(UNSUPPORTED.map(|name| (name, absent.clone())));
        open(required, &members)
    };
    let plain = vec![("content", content_schema()), ("tool_calls", absent.clone())];
    let mut result = vec![("content", content_schema()), ("tool_call_id", text_schema())];
    result.push(("tool_calls", absent.clone()));
    let function = open(2, &[("name", text_schema()), ("arguments", text_schema())]);
    let kind = json!({"enum": ["function", null]});
    let call = open(2, &[("id", text_schema()), ("function", function), ("type", kind)]);
    let own = vec![
        ("content", or_null(content_schema())),
        ("reasoning_content", maybe_text()),
        ("reasoning", maybe_text()),
        ("tool_calls", json!({"type": ["array", "null"], "items": call})),
    ];
    let mut assistant = message(1, json!({"const": "assistant"}), own);
    // With a text, with calls or with both.
    let has = |name: &str, schema: Value| json!({"properties": {name: schema}, "required": [name]});
    assistant["anyOf"] = json!([
        has("content", content_schema()),
        has("tool_calls", json!({"type": "array", "minItems": 1})),
    ]);
    list_of(
        1,
        json!({"oneOf": [
            message(2, json!({"enum": ["system", "developer", "user"]}), plain),
            assistant,
            message(3, json!({"const": "tool"}), result),
        ]}),
    )
}

/// A string or text parts.
fn content_schema() -> Value {
    let part = open(2, &[("type", json!({"const": "text"})), ("text", text_schema())]);
    json!({"anyOf": [text_schema(), list_of(1, part)]})
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::body::testing::assert_agreement;

    #[test]
    fn the_reader_accepts_what_the_schema_does() {
        let base = json!({
            "model": "default",
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "logprobs": true,
            "stream": true,
        });
        // The compiler of grammars refuses an empty list.
        let except = ["guided_choice"];
        assert_agreement(FIELDS, &base, &except, |body| from_wire(body, 256, 1000).map(drop));
    }
}
