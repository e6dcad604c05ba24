//! Reads a request for a response. Its fields are those of OpenAI, and vLLM's for sampling.

use serde_json::{Map, Value, json};

use hone_core::types::{ClientEndpoint, GrammarSpec, ResponseOptions};

use super::input::{self, InputItem};
use crate::body::{Field, FieldKind, FieldTable, Fields, closed, invalid, maybe_flag, or_null};
use crate::chat::constraint::{RequestedGrammar, named_schema, schema_members};
use crate::chat::request::refuse_contradictions;
use crate::chat::tools::{self, EFFORTS, SWITCHES, ToolShape};
use crate::error::ApiError;
use crate::generate::fields::{self, MAX_TOKENS, MAX_TOP_LOGPROBS, SAMPLING, metadata, to_u32};
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
/// The fields of `reasoning`.
const REASONING: [&str; 3] = ["effort", "generate_summary", "summary"];
/// The lengths of a summary of the reasoning.
const SUMMARIES: [&str; 3] = ["auto", "concise", "detailed"];

/// The values of `text.verbosity`, which has no effect.
const VERBOSITIES: [&str; 3] = ["low", "medium", "high"];

/// The fields of a request.
pub const FIELDS: FieldTable = &[CONVERSATION, SWITCHES, SAMPLING, OTHERS];

const CONVERSATION: &[Field] = &[
    Field::json("input", input::schema, "A text of the user, or a list of items.").required(),
    Field::text("instructions", "The system's message, before all others."),
    Field::text("previous_response_id", "The response that the input continues."),
    Field::json("tools", || ToolShape::Flat.tools_schema(), "Functions that the model may call."),
    Field::json(
        "tool_choice",
        || ToolShape::Flat.choice_schema(),
        "Whether the model must call a function.",
    ),
    Field::json("reasoning", reasoning_schema, "Its effort is a variable of the chat template."),
    Field::json("text", text_schema, "The format of the text."),
];

const OTHERS: &[Field] = &[
    Field::integer("max_output_tokens", 1, MAX_TOKENS, "Most tokens of the response."),
    Field::integer("top_logprobs", 0, MAX_TOP_LOGPROBS, "Alternatives for each token."),
    Field::json("include", include_schema, "What the response has beside its text."),
    Field::json("stream_options", stream_schema, "Only with `stream`."),
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

fn reasoning_schema() -> Value {
    let summary = or_null(json!({"enum": SUMMARIES}));
    let effort = or_null(json!({"enum": EFFORTS}));
    closed(0, &[("effort", effort), ("summary", summary.clone()), ("generate_summary", summary)])
}

fn include_schema() -> Value {
    json!({"type": "array", "items": {"enum": INCLUDABLE}})
}

fn stream_schema() -> Value {
    let mut flag = maybe_flag();
    flag["description"] = "Has no effect: events are not obfuscated.".into();
    closed(0, &[("include_obfuscation", flag)])
}

/// The JSON schema of `text`.
fn text_schema() -> Value {
    let plain = closed(1, &[("type", json!({"enum": ["text", "json_object"]}))]);
    let members =
        [&[("type", json!({"const": "json_schema"}))][..], &schema_members()[..]].concat();
    let format = json!({"anyOf": [plain, closed(3, &members), {"type": "null"}]});
    closed(0, &[("format", format), ("verbosity", or_null(json!({"enum": VERBOSITIES})))])
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
    let request = fields::read(&fields, metadata(&fields)?, max_tokens, vocab, names)?;
    check_stream_options(&fields, request.stream)?;
    let (grammar, schema_name) = text_format(&fields)?;
    let request = ClientRequest {
        endpoint: ClientEndpoint::Responses(ResponseOptions::default()),
        chat: tools::read_as(&fields, ToolShape::Flat, effort(&fields)?)?,
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
        input: input::read(&fields)?,
        schema_name,
    })
}

fn check_stream_options(fields: &Fields<'_>, stream: bool) -> Result<(), ApiError> {
    let Some(value) = fields.get("stream_options") else { return Ok(()) };
    if !stream {
        return Err(fields.invalid("stream_options", "absent unless stream is true"));
    }
    let options = Fields::known_at("stream_options", value, &["include_obfuscation"])?;
    options.boolean("include_obfuscation").map(|_| ())
}

/// `reasoning.effort`. The reasoning is returned as a whole, so that `summary` has no effect.
fn effort<'a>(fields: &Fields<'a>) -> Result<Option<&'a str>, ApiError> {
    let Some(value) = fields.get("reasoning") else { return Ok(None) };
    let reasoning = Fields::known_at("reasoning", value, &REASONING)?;
    for name in ["generate_summary", "summary"] {
        reasoning.one_of(name, &SUMMARIES)?;
    }
    reasoning.one_of("effort", &EFFORTS)
}

/// The number of alternatives per token; `None` if no log-probabilities are requested.
fn logprobs(fields: &Fields<'_>) -> Result<Option<u8>, ApiError> {
    let top = fields.whole("top_logprobs").unwrap_or(0);
    let mut wanted = top > 0;
    for (path, value) in fields.entries("include")?.into_iter().flatten() {
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
    let Some(value) = fields.get("text") else { return Ok((None, None)) };
    let text = Fields::known_at("text", value, &["format", "verbosity"])?;
    text.read("verbosity", "\"low\", \"medium\" or \"high\"", |value| {
        VERBOSITIES.contains(&value.as_str()?).then_some(())
    })?;
    let Some(value) = text.get("format") else { return Ok((None, None)) };
    let format = Fields::at("text.format", value)?;
    match format.required("type", TYPES)? {
        "text" => {
            format.refuse_others(&["type"])?;
            Ok((None, None))
        }
        "json_object" => {
            format.refuse_others(&["type"])?;
            let field = "text.format".to_owned();
            Ok((Some(RequestedGrammar { spec: GrammarSpec::JsonObject, field }), None))
        }
        "json_schema" => {
            format.refuse_others(&["type", "name", "description", "schema", "strict"])?;
            let (name, grammar) = named_schema(&format)?;
            Ok((Some(grammar), Some(name.to_owned())))
        }
        _ => Err(format.invalid("type", TYPES)),
    }
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
