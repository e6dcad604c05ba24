//! The API of a request.

use serde::{Deserialize, Serialize};

use super::ids::InteractionId;

/// The API of a request, with what the record of its prompt has for that API alone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClientEndpoint {
    /// OpenAI's chat or text completions. Also that of a dataset's row.
    #[default]
    Completions,
    /// OpenAI's Responses.
    Responses(ResponseOptions),
    /// Anthropic's messages.
    Messages,
}

impl ClientEndpoint {
    /// Whether the API is that of completions.
    pub fn is_completions(&self) -> bool {
        *self == Self::Completions
    }
}

/// What a request for a response has beside its conversation and the sampling parameters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResponseOptions {
    /// Whether the first message has the request's `instructions`, which do not apply to the response that
    /// continues this one.
    pub instructions: bool,
    /// The response that this one continues.
    pub previous: Option<InteractionId>,
    /// The client's name of the JSON schema that the text follows.
    pub schema_name: Option<String>,
}
