//! Validates a request for a response. `fields` declares the fields; `input` and `text` read their parts.

use serde_json::{Map, Value};

use hone_core::types::{ClientEndpoint, ResponseOptions};

use super::fields::{FIELDS, INCLUDABLE, LOGPROBS, REASONING, SUMMARIES};
use super::input::{self, InputItem};
use super::text::{self, TextFormat};
use crate::http::body::{Fields, invalid};
use crate::http::chat::conversation::{ConversationRequest, FieldNames};
use crate::http::chat::request::{metadata, params, refuse_contradictions, stop, to_u32};
use crate::http::chat::tools::{self, EFFORTS, ToolShape, refuse_others};
use crate::http::error::ApiError;

/// A valid request, whose conversation lacks the messages that may be in the ledger.
pub(super) struct ResponseRequest {
    /// The request without its messages.
    pub(super) conversation: ConversationRequest,
    pub(super) instructions: Option<String>,
    /// The id of the response that the input continues.
    pub(super) previous: Option<String>,
    pub(super) input: Vec<InputItem>,
    /// The client's name of the JSON schema of the text.
    pub(super) schema_name: Option<String>,
    pub(super) stream: bool,
}

/// Validates a body. `vocab` bounds the token ids.
pub(super) fn read(
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
    use serde_json::json;

    use super::*;
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
