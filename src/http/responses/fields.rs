//! The fields of a request for a response: those of OpenAI, and vLLM's for sampling.

use serde_json::{Value, json};

use super::input;
use super::text;
use crate::http::body::{Field, FieldTable, or_null};
use crate::http::chat::fields::{MAX_TOKENS, MAX_TOP_LOGPROBS, SAMPLING};
use crate::http::chat::tools::{self, EFFORTS};

/// What `include` may contain. Only the last one changes the response: the others belong to tools that are
/// not supported, or to content that it has in any case.
pub(super) const INCLUDABLE: [&str; 8] = [
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
pub(super) const LOGPROBS: &str = "message.output_text.logprobs";
/// The fields of `reasoning`.
pub(super) const REASONING: [&str; 3] = ["effort", "generate_summary", "summary"];
/// The lengths of a summary of the reasoning.
pub(super) const SUMMARIES: [&str; 3] = ["auto", "concise", "detailed"];

/// The fields of a request.
pub(in crate::http) const FIELDS: FieldTable = &[CONVERSATION, SAMPLING, OTHERS];

const CONVERSATION: &[Field] = &[
    Field::json("input", input::schema, "A text of the user, or a list of items.").required(),
    Field::text("instructions", "The system's message, before all others."),
    Field::text("previous_response_id", "The response that the input continues."),
    Field::json("tools", tools::flat_schema, "Functions that the model may call."),
    Field::json(
        "tool_choice",
        tools::flat_choice_schema,
        "Whether the model must call a function.",
    ),
    Field::flag("parallel_tool_calls", "False returns only the first call; default true."),
    Field::json("reasoning", reasoning_schema, "Its effort is a variable of the chat template."),
    Field::json(
        "chat_template_kwargs",
        tools::variables_schema,
        "Variables of the chat template, as in vLLM.",
    ),
    Field::json("text", text::schema, "The format of the text."),
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
    json!({
        "type": "object",
        "properties": {
            "effort": or_null(json!({"enum": EFFORTS})),
            "summary": summary,
            "generate_summary": summary,
        },
        "additionalProperties": false,
    })
}

fn include_schema() -> Value {
    json!({"type": "array", "items": {"enum": INCLUDABLE}})
}

fn stream_schema() -> Value {
    json!({
        "type": "object",
        "properties": {"include_obfuscation": {
            "type": ["boolean", "null"],
            "description": "Has no effect: events are not obfuscated.",
        }},
        "additionalProperties": false,
    })
}
