//! Validates a request for text completions, field by field.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use hone_core::types::{SamplingParams, TokenId};

use crate::http::body::{Field, FieldTable, Fields, invalid};
use crate::http::chat::fields::{CHOICES, MAX_CHOICES, MAX_TOP_LOGPROBS, SAMPLING, token_schema};
use crate::http::chat::{include_usage, metadata, params, stop, to_u32};
use crate::http::error::ApiError;
use crate::http::generate::admit::BYTES_PER_TOKEN;
use crate::http::generate::prompt::token_ids;

/// OpenAI's `max_tokens` of requests that contain none.
const DEFAULT_MAX_TOKENS: u32 = 16;
/// Largest number of choices of all prompts together.
const MAX_ALL_CHOICES: usize = 128;

/// The fields.
pub(in crate::http) const FIELDS: FieldTable = &[
    &[
        Field::json("prompt", prompt_schema, "What is continued.").required(),
        Field::flag("add_special_tokens", "Whether the tokenizer frames a text; default true."),
        Field::integer("best_of", 1, MAX_CHOICES, "Only the value of `n`."),
        Field::flag("echo", "Whether each text, with its `logprobs`, begins with its prompt."),
        Field::integer("logprobs", 0, MAX_TOP_LOGPROBS, "Number of alternatives for each token."),
        Field::integer("prompt_logprobs", 0, MAX_TOP_LOGPROBS, "As `logprobs`, for the prompt."),
        Field::refused("suffix"),
    ],
    SAMPLING,
    CHOICES,
];

fn prompt_schema() -> Value {
    let ids = json!({"type": "array", "items": token_schema(), "minItems": 1});
    json!({"anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_ALL_CHOICES},
        ids,
        {"type": "array", "items": ids, "minItems": 1, "maxItems": MAX_ALL_CHOICES},
    ]})
}

/// A prompt of a [`TextRequest`].
#[derive(Debug, PartialEq)]
pub(super) enum TextPrompt {
    /// A text, whose special tokens are recognized.
    Text(String),
    /// Token ids, to which nothing is added.
    Tokens(Vec<TokenId>),
}

impl TextPrompt {
    /// The number of its tokens, before it is tokenized.
    pub(super) fn estimated_tokens(&self) -> usize {
        match self {
            Self::Text(text) => text.len() / BYTES_PER_TOKEN,
            Self::Tokens(ids) => ids.len(),
        }
    }
}

/// A valid request.
#[derive(Debug, PartialEq)]
pub(super) struct TextRequest {
    pub(super) model: String,
    pub(super) prompts: Vec<TextPrompt>,
    /// Whether the tokenizer puts its special tokens around a text.
    pub(super) add_special_tokens: bool,
    pub(super) params: SamplingParams,
    pub(super) stop: Vec<String>,
    /// Number of choices for each prompt.
    pub(super) choices: u32,
    /// Number of alternatives per token; `None` if no log-probabilities are requested.
    pub(super) logprobs: Option<u8>,
    /// Whether each text begins with its prompt.
    pub(super) echo: bool,
    /// Number of alternatives per token of the prompt; `None` if its log-probabilities are not requested.
    pub(super) prompt_logprobs: Option<u8>,
    /// Whether nothing is sampled (`max_tokens: 0`), because the prompt's log-probabilities are all that is wanted.
    pub(super) scores_only: bool,
    pub(super) metadata: BTreeMap<String, String>,
    pub(super) user: Option<String>,
    pub(super) store: Option<bool>,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
}

/// Validates a body. `vocab` bounds the token ids.
pub(super) fn read(body: &Map<String, Value>, vocab: usize) -> Result<TextRequest, ApiError> {
    // Without a token only a prompt's log-probabilities can be wanted, of a whole response.
    let is_set =
        |name| body.get(name).is_some_and(|value| *value != Value::Null && *value != false);
    let scores_only = body.get("max_tokens") == Some(&json!(0))
        && (is_set("echo") || is_set("prompt_logprobs"))
        && !is_set("stream");
    let mut body = Cow::Borrowed(body);
    if scores_only {
        body.to_mut().insert("max_tokens".to_owned(), json!(1));
    }
    let fields = Fields::of(&body, FIELDS)?;
    let model = fields.text("model")?.ok_or_else(|| fields.missing("model", "a model's name"))?;
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let n = fields.whole("n").unwrap_or(1);
    if let Some(best_of) = fields.whole("best_of")
        && best_of != n
    {
        let message =
            format!("best_of is {best_of}: only n choices are sampled, so it must be {n}");
        return Err(ApiError::unsupported("best_of", message));
    }
    let top = |name| fields.whole(name).map(|top| u8::try_from(top).unwrap_or(u8::MAX));
    let prompts = prompts(&fields, vocab)?;
    let choices = to_u32(Some(n)).unwrap_or(1);
    let most = MAX_ALL_CHOICES / choices as usize;
    if prompts.len() > most {
        let message = format!(
            "prompt has {} prompts: it may have {most} if n is {n}, for {MAX_ALL_CHOICES} choices",
            prompts.len()
        );
        return Err(ApiError::field("prompt", message));
    }
    Ok(TextRequest {
        model: model.to_owned(),
        prompts,
        add_special_tokens: fields.boolean("add_special_tokens")?.unwrap_or(true),
        params: params(&fields, DEFAULT_MAX_TOKENS, vocab)?,
        stop: stop(&fields)?,
        choices,
        logprobs: top("logprobs"),
        echo: fields.boolean("echo")?.unwrap_or(false),
        prompt_logprobs: top("prompt_logprobs"),
        scores_only,
        metadata: metadata(&fields)?,
        user: fields.text("user")?.map(str::to_owned),
        store: fields.boolean("store")?,
        stream,
        include_usage: include_usage(&fields, stream)?,
    })
}

/// A text, several texts, a list of token ids, or several such lists.
fn prompts(fields: &Fields<'_>, vocab: usize) -> Result<Vec<TextPrompt>, ApiError> {
    const ALLOWED: &str = "a text, a list of texts, a list of token ids or a list of such lists";
    let list = match fields.get("prompt") {
        None => return Err(fields.missing("prompt", ALLOWED)),
        Some(Value::String(text)) => return Ok(vec![TextPrompt::Text(text.clone())]),
        Some(Value::Array(list)) if !list.is_empty() => list,
        Some(_) => return Err(fields.invalid("prompt", ALLOWED)),
    };
    let at = |i: usize| format!("prompt[{i}]");
    match list.first() {
        Some(Value::Number(_)) => Ok(vec![TextPrompt::Tokens(token_ids("prompt", list, vocab)?)]),
        Some(Value::Array(_)) => {
            let ids = |(i, value): (usize, &Value)| match value.as_array() {
                Some(ids) => Ok(TextPrompt::Tokens(token_ids(&at(i), ids, vocab)?)),
                None => Err(invalid(&at(i), value, "a list of token ids, as the first one")),
            };
            list.iter().enumerate().map(ids).collect()
        }
        _ => {
            let text = |(i, value): (usize, &Value)| match value.as_str() {
                Some(text) => Ok(TextPrompt::Text(text.to_owned())),
                None => Err(invalid(&at(i), value, "a text")),
            };
            list.iter().enumerate().map(text).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::body::testing::assert_agreement;

    #[test]
    fn the_reader_accepts_what_the_schema_does() {
        let base = json!({"model": "default", "prompt": "a", "stream": true, "max_tokens": 256});
        // It must be equal to `n`.
        let except = ["best_of"];
        assert_agreement(FIELDS, &base, &except, |body| read(body, 1000).map(drop));
    }
}
