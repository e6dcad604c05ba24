//! The fields of a chat request: those of OpenAI and vLLM. A field that would change the response in a way
//! that is not supported is refused; every other field is refused as unknown, as in OpenAI's API, so that a
//! misspelled field is not silently ignored.

use serde_json::{Value, json};

use super::constraint;
use super::messages;
use super::tools::{self, EFFORTS};
use crate::http::body::{Field, FieldTable};

/// Largest `n`.
pub(in crate::http) const MAX_CHOICES: i64 = 8;
/// OpenAI's limits of `metadata`: number of pairs, characters of a key, characters of a value.
pub(super) const METADATA: (usize, usize, usize) = (16, 64, 512);
/// OpenAI's limit of stop strings.
pub(super) const MAX_STOP: usize = 4;
/// Characters of a stop string. It is recorded with the request and compared at each token.
const MAX_STOP_CHARS: usize = 256;
/// Entries of `logit_bias`, which is recorded with the request and with each choice.
pub(super) const MAX_BIASES: usize = 1024;
/// OpenAI's limit of `top_logprobs`.
pub(in crate::http) const MAX_TOP_LOGPROBS: i64 = 20;
/// Most stop tokens of a request.
pub(super) const MAX_STOP_TOKENS: usize = 64;
/// Largest number of tokens that a field may name.
pub(in crate::http) const MAX_TOKENS: i64 = u32::MAX as i64;

/// The fields of a chat request.
pub(in crate::http) const FIELDS: FieldTable =
    &[CONVERSATION, SAMPLING, CHOICES, CONSTRAINTS, OTHERS];

/// The conversation and what is added to it.
pub(in crate::http) const CONVERSATION: &[Field] = &[
    Field::json("messages", messages::schema, "The conversation.").required(),
    Field::json("tools", tools::schema, "Functions that the model may call."),
    Field::json("tool_choice", tools::choice_schema, "Whether the model must call a function."),
    Field::flag("parallel_tool_calls", "False returns only the first call; default true."),
    Field::json(
        "chat_template_kwargs",
        tools::variables_schema,
        "Variables of the chat template, as in vLLM.",
    ),
    Field::one_of("reasoning_effort", &EFFORTS, "A variable of the chat template."),
];

/// How texts are sampled, and what every request for texts has.
pub(in crate::http) const SAMPLING: &[Field] = &[
    Field::json("model", model_schema, "The name of the model.").required(),
    Field::number("temperature", 0.0, 2.0, "0 is greedy; default 1."),
    Field::number("top_p", 0.0, 1.0, "Mass of the tokens that are kept; default 1."),
    Field::number("min_p", 0.0, 1.0, "Least share of the greatest probability; default 0."),
    Field::integer("top_k", -1, MAX_TOKENS, "Tokens that are kept; 0 and -1 keep all."),
    Field::number("presence_penalty", -2.0, 2.0, "Default 0."),
    Field::number("frequency_penalty", -2.0, 2.0, "Default 0."),
    Field::json("repetition_penalty", penalty_schema, "As in vLLM; default 1."),
    Field::json("logit_bias", bias_schema, "Token id to a bias."),
    Field::json("seed", seed_schema, "Without one the server draws it."),
    Field::json("stop", stop_schema, "The text ends before these strings."),
    Field::json("stop_token_ids", stop_tokens_schema, "Tokens that end the text, as in vLLM."),
    Field::flag("include_stop_str_in_output", "Whether the text keeps its stop string."),
    Field::json("min_tokens", least_schema, "Tokens before a stop token can be sampled."),
    Field::flag("ignore_eos", "Whether the model's own stop tokens are never sampled."),
    Field::flag("stream", "Whether events are sent while the text is sampled."),
    Field::text("user", "The client's name of its end user."),
    Field::json("metadata", metadata_schema, "Selects the route and holds references of rewards."),
    Field::flag("store", "False keeps nothing of the request."),
    Field::ignored("service_tier"),
];

/// What requests for completions have, whose answers have choices.
pub(in crate::http) const CHOICES: &[Field] = &[
    Field::integer("max_tokens", 1, MAX_TOKENS, "Most tokens of a choice."),
    Field::integer("n", 1, MAX_CHOICES, "Number of choices; default 1."),
    Field::json("stream_options", stream_schema, "Only with `stream`."),
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
    // They control OpenAI's service, its billing and its caches, or features that a supported request
    // does not use.
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

/// The schema of a model's name. `default` is always one.
pub(in crate::http) fn model_schema() -> Value {
    json!({"anyOf": [{"const": "default"}, {"type": "string"}]})
}

/// The schema of a token id.
pub(in crate::http) fn token_schema() -> Value {
    json!({"type": "integer", "minimum": 0, "maximum": MAX_TOKENS})
}

/// The schema of `metadata`.
pub(in crate::http) fn metadata_schema() -> Value {
    let (pairs, key_chars, value_chars) = METADATA;
    json!({
        "type": "object",
        "maxProperties": pairs,
        "propertyNames": {"maxLength": key_chars},
        "additionalProperties": {"type": "string", "maxLength": value_chars},
    })
}

fn penalty_schema() -> Value {
    json!({"type": "number", "exclusiveMinimum": 0, "maximum": 100})
}

fn bias_schema() -> Value {
    json!({
        "type": "object",
        "maxProperties": MAX_BIASES,
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": ["number", "null"], "minimum": -100, "maximum": 100},
    })
}

/// The schema of `seed`.
pub(in crate::http) fn seed_schema() -> Value {
    json!({"type": "integer", "minimum": i64::MIN, "maximum": u64::MAX})
}

fn stop_schema() -> Value {
    let text = stop_text_schema();
    json!({"anyOf": [text, {"type": "array", "items": text, "maxItems": MAX_STOP}]})
}

/// The schema of one stop string.
pub(in crate::http) fn stop_text_schema() -> Value {
    json!({"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS})
}

/// What a list of up to `most` stop strings must be, for error messages.
pub(in crate::http) fn stop_form(most: usize) -> String {
    format!("a list of up to {most} strings of 1 to {MAX_STOP_CHARS} characters")
}

/// The stop strings in a list of up to `most`; `None` if it is no such list.
pub(in crate::http) fn stop_texts(list: &[Value], most: usize) -> Option<Vec<String>> {
    let is_valid = |text: &&str| (1..=MAX_STOP_CHARS).contains(&text.chars().count());
    let text = |value: &Value| value.as_str().filter(is_valid).map(str::to_owned);
    list.iter().map(text).collect::<Option<Vec<_>>>().filter(|texts| texts.len() <= most)
}

fn stop_tokens_schema() -> Value {
    json!({"type": "array", "items": token_schema(), "maxItems": MAX_STOP_TOKENS})
}

fn least_schema() -> Value {
    json!({"type": "integer", "minimum": 0, "maximum": MAX_TOKENS})
}

fn stream_schema() -> Value {
    json!({
        "type": "object",
        "properties": {"include_usage": {
            "type": ["boolean", "null"],
            "description": "Whether an event with the usage is sent at the end.",
        }},
    })
}
