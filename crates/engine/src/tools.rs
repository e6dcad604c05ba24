//! The formats in which models write calls of functions.
//!
//! A format is a property of the model, whose chat template shows it. [`ToolFormat::of_template`]
//! recognizes it. [`ToolFormat::syntax`] describes it for the parser of answers, and
//! [`ToolFormat::framing`] for text that Hone writes itself: earlier calls in prompts of templates
//! without tools, and grammars of calls.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use hone_core::types::Tool;

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

// The texts of each format.

/// What the parser of answers has to know about a format. White space is allowed between all parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallSyntax {
    /// Texts that begin a call, or a list of calls in brackets.
    pub begin: &'static [&'static str],
    /// Texts that may end what a text of `begin` began.
    pub end: &'static [&'static str],
    /// Whether an answer may consist of calls without any text of `begin`, separated by `;`.
    pub bare: bool,
    /// The texts before the id and before the arguments of `name[CALL_ID]id[ARGS]{…}`, which follows a
    /// text of `begin` in place of an object.
    pub named: Option<(&'static str, &'static str)>,
}

/// How Hone writes calls itself: `open`, the calls with `separator` between them, `close`.
///
/// Each call is a JSON object of a name and arguments. A grammar that forces calls consists of the same
/// parts. Texts in `markers` are single special tokens in some
/// vocabularies ([`Codec::special_id`](crate::Codec::special_id)), and then a grammar needs the token
/// instead of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallFraming {
    /// The text before the first call.
    pub open: &'static str,
    /// The text between two calls.
    pub separator: &'static str,
    /// The text after the last call.
    pub close: &'static str,
    /// The key of the arguments.
    pub arguments: &'static str,
    /// The parts of these texts that may be special tokens.
    pub markers: &'static [&'static str],
}

const HERMES: CallFraming = CallFraming {
    open: "<tool_call>\n",
    separator: "\n</tool_call>\n<tool_call>\n",
    close: "\n</tool_call>",
    arguments: "arguments",
    markers: &["<tool_call>", "</tool_call>"],
};

impl ToolFormat {
    /// What answers in this format look like.
    pub fn syntax(self) -> CallSyntax {
        let none = CallSyntax { begin: &[], end: &[], bare: false, named: None };
        match self {
            Self::Hermes | Self::SmolLm3 | Self::Prompt => {
                CallSyntax { begin: &["<tool_call>"], end: &["</tool_call>"], ..none }
            }
            Self::Llama3 => CallSyntax { begin: &["<|python_tag|>"], bare: true, ..none },
            Self::Mistral => CallSyntax {
                begin: &["[TOOL_CALLS]"],
                named: Some(("[CALL_ID]", "[ARGS]")),
                ..none
            },
            Self::Phi => CallSyntax {
                begin: &["<|tool_call|>", "functools"],
                end: &["<|/tool_call|>"],
                ..none
            },
        }
    }

    /// The texts with which Hone writes calls in this format.
    pub fn framing(self) -> CallFraming {
        match self {
            Self::Hermes | Self::SmolLm3 | Self::Prompt => HERMES,
            Self::Llama3 => CallFraming {
                open: "",
                separator: "; ",
                close: "",
                arguments: "parameters",
                markers: &[],
            },
            Self::Mistral => CallFraming {
                open: "[TOOL_CALLS][",
                separator: ", ",
                close: "]",
                arguments: "arguments",
                markers: &["[TOOL_CALLS]"],
            },
            Self::Phi => CallFraming {
                open: "<|tool_call|>[",
                separator: ", ",
                close: "]<|/tool_call|>",
                arguments: "arguments",
                markers: &["<|tool_call|>", "<|/tool_call|>"],
            },
        }
    }
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

    mod framing {
        use super::super::*;

        #[test]
        fn every_marker_is_part_of_the_texts() {
            let formats = [
                ToolFormat::Hermes,
                ToolFormat::Llama3,
                ToolFormat::Mistral,
                ToolFormat::Phi,
                ToolFormat::SmolLm3,
                ToolFormat::Prompt,
            ];
            for format in formats {
                let (framing, syntax) = (format.framing(), format.syntax());
                for marker in framing.markers {
                    assert!([framing.open, framing.close].iter().any(|text| text.contains(marker)));
                    assert!(syntax.begin.iter().chain(syntax.end).any(|text| text == marker));
                }
            }
        }
    }
}
