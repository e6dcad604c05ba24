//! The shapes of OpenAI's responses.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};

use hone_core::types::{
    ChatOptions, ClientEndpoint, GrammarSpec, Interaction, PolicyVersion, Tool, ToolChoice,
    UnixMillis,
};

use super::items::OutputItem;
use crate::http::chat::answer::MessageEnd;
use crate::http::error::ApiError;
use crate::http::generate::Usage;

/// A response, whole or while it is sampled.
#[derive(Clone, Serialize, JsonSchema)]
pub(in crate::http) struct ResponseObject {
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
pub(super) struct ResponseUsage {
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
    pub(super) fn new(interaction: &Interaction, version: Option<PolicyVersion>) -> Self {
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
            tools: chat.tools.iter().map(FunctionTool::new).collect(),
            top_p: params.top_p,
            truncation: "disabled",
            usage: None,
        }
    }

    /// The response that ended at a time.
    pub(super) fn ended(
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
    pub(super) fn failed(self, error: &ApiError, output: Vec<OutputItem>) -> Self {
        let code = match error.status() {
            429 => "rate_limit_exceeded",
            400..=499 => "invalid_prompt",
            _ => "server_error",
        };
        let failure = ResponseFailure { code, message: error.message().to_owned() };
        Self { status: ResponseStatus::Failed, error: Some(failure), output, ..self }
    }

    /// The type of the event that ends a stream with this response.
    pub(super) fn last_event(&self) -> &'static str {
        match self.status {
            ResponseStatus::Failed => "response.failed",
            ResponseStatus::Incomplete => "response.incomplete",
            _ => "response.completed",
        }
    }
}

impl FunctionTool {
    fn new(tool: &Tool) -> Self {
        let Tool { name, description, parameters, strict } = tool.clone();
        Self { r#type: "function", name, description, parameters, strict }
    }
}

/// `text.format` of a request.
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
pub(in crate::http) struct DeletedResponse {
    pub(super) id: String,
    #[schemars(extend("const" = "response"))]
    pub(super) object: &'static str,
    pub(super) deleted: bool,
}
