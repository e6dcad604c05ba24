//! Conversations.

use serde::{Deserialize, Deserializer, Serialize};

use super::tools::ToolCall;

/// The author of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions of the operator.
    System,
    /// OpenAI's newer name for `system`.
    Developer,
    /// The person who asks.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
}

impl Role {
    /// The name in chat templates.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::Developer => "developer",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// One message of a conversation. In JSON it has OpenAI's shape; fields without a value are absent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// The author.
    pub role: Role,
    /// The text; empty for an assistant's message that only calls tools, whose content may be null.
    #[serde(deserialize_with = "null_as_default")]
    pub content: String,
    /// The name of the participant, or of the function whose result this is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What the assistant thought before its text.
    #[serde(
        default,
        rename = "reasoning_content",
        alias = "reasoning",
        skip_serializing_if = "Option::is_none"
    )]
    pub reasoning: Option<String>,
    /// The assistant's calls, in their order.
    #[serde(default, deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// The call whose result this is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
}

impl Message {
    /// A message of text alone.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self {
            role,
            content: content.into(),
            name: None,
            reasoning: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
        }
    }
}

fn null_as_default<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: Default + Deserialize<'de>,
    D: Deserializer<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_message_of_text_has_two_fields() {
        let message = Message::new(Role::User, "Hi");
        let shown = serde_json::to_value(&message).unwrap();
        assert_eq!(shown, json!({"role": "user", "content": "Hi"}));
        let nulls = json!({"role": "user", "content": "Hi", "name": null, "tool_calls": null,
                           "tool_call_id": null, "reasoning_content": null});
        assert_eq!(serde_json::from_value::<Message>(nulls).unwrap(), message);
    }

    #[test]
    fn calls_have_openais_shape() {
        let call = json!({"id": "call_1", "type": "function",
                          "function": {"name": "add", "arguments": "{\"a\": 1}"}});
        let mut shown = json!({"role": "assistant", "content": null, "reasoning_content": "hm",
                               "tool_calls": [call]});
        let message: Message = serde_json::from_value(shown.clone()).unwrap();
        shown["content"] = json!("");
        assert_eq!(message.tool_calls[0].arguments, "{\"a\": 1}");
        assert_eq!(message.reasoning.as_deref(), Some("hm"));
        assert_eq!(serde_json::to_value(&message).unwrap(), shown);
    }

    #[test]
    fn arguments_may_be_an_object_as_in_transformers() {
        let call = json!({"function": {"name": "add", "arguments": {"b": 2, "a": [1]}}});
        let call: ToolCall = serde_json::from_value(call).unwrap();
        assert_eq!((call.id.as_str(), call.name.as_str()), ("", "add"));
        let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
        assert_eq!(arguments, json!({"b": 2, "a": [1]}));
    }
}
