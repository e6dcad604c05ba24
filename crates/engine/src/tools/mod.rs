//! The formats in which models write calls of functions.
//!
//! A format is a property of the model, whose chat template shows it. [`ToolFormat::of_template`]
//! recognizes it. [`ToolFormat::syntax`] describes it for the parser of answers, and
//! [`ToolFormat::framing`] for text that Hone writes itself: earlier calls in prompts of templates
//! without tools, and grammars of calls.

mod framing;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use hone_core::types::Tool;

pub use framing::{CallFraming, CallSyntax};

/// How a model writes calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`: Hermes, Qwen.
    Hermes,
    /// `{"name": …, "parameters": …}` as the whole answer, perhaps after `<|python_tag|>`: Llama 3.
    Llama3,
    /// `[TOOL_CALLS][{"name": …, "arguments": …}]`, or since 2025 `[TOOL_CALLS]name[ARGS]{…}`: Mistral.
    Mistral,
    /// `<|tool_call|>[{"name": …, "arguments": …}]<|/tool_call|>`, or `functools[…]`: Phi 4.
    Phi,
    /// Hermes' format, with a template that shows functions but no calls: SmolLM3.
    SmolLm3,
    /// Hermes' format, which a system message of Hone describes: every other model.
    Prompt,
}

/// `server.tool_format`: a format, or the one that the chat template shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ToolFormatSetting {
    /// The template's.
    #[default]
    Auto,
    /// [`ToolFormat::Hermes`].
    Hermes,
    /// [`ToolFormat::Llama3`].
    Llama3,
    /// [`ToolFormat::Mistral`].
    Mistral,
    /// [`ToolFormat::Phi`].
    Phi,
    /// [`ToolFormat::SmolLm3`].
    SmolLm3,
    /// [`ToolFormat::Prompt`].
    Prompt,
}

impl ToolFormatSetting {
    /// The format in use for a model whose template shows `shown`.
    pub fn or(self, shown: ToolFormat) -> ToolFormat {
        match self {
            Self::Auto => shown,
            Self::Hermes => ToolFormat::Hermes,
            Self::Llama3 => ToolFormat::Llama3,
            Self::Mistral => ToolFormat::Mistral,
            Self::Phi => ToolFormat::Phi,
            Self::SmolLm3 => ToolFormat::SmolLm3,
            Self::Prompt => ToolFormat::Prompt,
        }
    }
}

impl ToolFormat {
    /// The format that the text of a chat template shows.
    pub fn of_template(text: &str) -> Self {
        let has = |part: &str| text.contains(part);
        if has("<tool_call>") {
            // Qwen3-Coder and GLM write XML within the same tags, which Hone does not read.
            match (has("<function=") || has("<arg_key>"), has("xml_tools")) {
                (true, _) => Self::Prompt,
                (false, true) => Self::SmolLm3,
                (false, false) => Self::Hermes,
            }
        } else if has("[TOOL_CALLS]") {
            Self::Mistral
        } else if has("<|tool_call|>") || has("<|tool|>") || has("functools") {
            Self::Phi
        } else if has("<|python_tag|>") || has("{\"name\": function name, \"parameters\":") {
            Self::Llama3
        } else {
            Self::Prompt
        }
    }
}

/// A function as OpenAI's JSON, which templates print. Without `strict`, which is not for the model.
pub fn tool_json(tool: &Tool) -> Value {
    json!({"type": "function", "function": function_json(tool)})
}

/// The inner object of [`tool_json`].
pub fn function_json(tool: &Tool) -> Value {
    let mut function = Map::new();
    function.insert("name".to_owned(), Value::from(tool.name.as_str()));
    if let Some(description) = &tool.description {
        function.insert("description".to_owned(), Value::from(description.as_str()));
    }
    if let Some(parameters) = &tool.parameters {
        function.insert("parameters".to_owned(), parameters.clone());
    }
    Value::Object(function)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_show_their_format() {
        let cases = [
            ("{{ '<tool_call>' }}", ToolFormat::Hermes),
            ("{{ '<tool_call><function=' }}", ToolFormat::Prompt),
            ("{% if xml_tools %}{{ '<tool_call>' }}", ToolFormat::SmolLm3),
            ("{{ '[TOOL_CALLS]' }}", ToolFormat::Mistral),
            ("{{ '<|tool|>' + message['tools'] }}", ToolFormat::Phi),
            ("{{ '<|python_tag|>' }}", ToolFormat::Llama3),
            ("{{ messages[0].content }}", ToolFormat::Prompt),
        ];
        for (text, format) in cases {
            assert_eq!(ToolFormat::of_template(text), format, "{text}");
            assert_eq!(ToolFormatSetting::Auto.or(format), format);
            assert_eq!(ToolFormatSetting::Phi.or(format), ToolFormat::Phi);
        }
        let name = |setting| serde_json::to_value::<ToolFormatSetting>(setting).unwrap();
        assert_eq!(name(ToolFormatSetting::SmolLm3), "smollm3");
        assert_eq!(name(ToolFormatSetting::Llama3), "llama3");
    }
}
