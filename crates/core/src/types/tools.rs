//! Functions that a model may call, and its calls.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A call of a function by the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(from = "OpenAiCall", into = "OpenAiCall")]
pub struct ToolCall {
    /// Identifies the call within its conversation.
    pub id: String,
    /// The function.
    pub name: String,
    /// The arguments as the model wrote them: normally a JSON object, but nothing guarantees it.
    pub arguments: String,
}

/// [`ToolCall`] in OpenAI's JSON.
#[derive(Clone, Serialize, Deserialize, JsonSchema)]
struct OpenAiCall {
    #[serde(default)]
    id: String,
    #[serde(default = "function_type")]
    r#type: String,
    function: CalledFunction,
}

#[derive(Clone, Serialize, Deserialize, JsonSchema)]
struct CalledFunction {
    name: String,
    /// A text, or an object as in datasets for transformers.
    #[schemars(with = "String")]
    arguments: Value,
}

fn function_type() -> String {
    "function".to_owned()
}

impl From<OpenAiCall> for ToolCall {
    fn from(call: OpenAiCall) -> Self {
        let arguments = match call.function.arguments {
            Value::String(text) => text,
            other => other.to_string(),
        };
        Self { id: call.id, name: call.function.name, arguments }
    }
}

impl From<ToolCall> for OpenAiCall {
    fn from(call: ToolCall) -> Self {
        let function = CalledFunction { name: call.name, arguments: Value::String(call.arguments) };
        Self { id: call.id, r#type: function_type(), function }
    }
}

/// A function that the model may call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tool {
    /// The name that calls have, unique within a request.
    pub name: String,
    /// What it does and when to call it.
    pub description: Option<String>,
    /// JSON schema of its arguments, with the client's order of keys; `None` without arguments.
    pub parameters: Option<Value>,
    /// Whether arguments must satisfy the schema.
    pub strict: bool,
}

/// Whether the model may or must call functions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolChoice {
    /// It must not.
    None,
    /// It decides.
    #[default]
    Auto,
    /// It must call at least one.
    Required,
    /// It must call this one.
    Function(String),
}

/// What a request adds to its messages: functions, and variables of the chat template.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChatOptions {
    /// The functions that the model may call.
    pub tools: Vec<Tool>,
    /// Whether it may or must call them.
    pub tool_choice: ToolChoice,
    /// Whether one answer may have several calls.
    pub parallel_tool_calls: bool,
    /// Variables of the chat template, such as `enable_thinking`, with the client's values.
    pub template_variables: Map<String, Value>,
}

impl Default for ChatOptions {
    fn default() -> Self {
        Self {
            tools: Vec::new(),
            tool_choice: ToolChoice::Auto,
            parallel_tool_calls: true,
            template_variables: Map::new(),
        }
    }
}

impl ChatOptions {
    /// Whether a request without these options has the same prompt and the same answer.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// The functions that the model sees and may call: no function if the choice forbids it.
    pub fn callable(&self) -> &[Tool] {
        if self.tool_choice == ToolChoice::None { &[] } else { &self.tools }
    }

    /// Whether the model must call a function.
    pub fn forces_call(&self) -> bool {
        matches!(self.tool_choice, ToolChoice::Required | ToolChoice::Function(_))
    }

    /// Whether a grammar constrains the calls of an answer: it must have one, or arguments must satisfy a
    /// schema.
    pub fn constrains_calls(&self) -> bool {
        self.forces_call() || self.callable().iter().any(|tool| tool.strict)
    }
}
