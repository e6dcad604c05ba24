//! The formats in which models write calls of functions.
//!
//! A format is a property of the model, whose chat template shows it. [`ToolFormat::of_template`]
//! recognizes it. [`ToolFormat::calls`] describes it for the parser of answers, and for text that Hone
//! writes itself: earlier calls in prompts of templates without tools, and grammars of calls.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use hone_core::types::Tool;

/// How a model writes calls. As `server.tool_format`, in lower case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ToolFormat {
    /// In a setting, the format that the chat template shows.
    #[default]
    Auto,
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

impl ToolFormat {
    /// The format in use for a model whose template shows `shown`.
    #[must_use]
    pub fn or(self, shown: Self) -> Self {
        if self == Self::Auto { shown } else { self }
    }

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

    /// The texts of the format.
    pub fn calls(self) -> &'static CallFormat {
        match self {
            Self::Auto | Self::Hermes | Self::SmolLm3 | Self::Prompt => &HERMES,
            Self::Llama3 => &LLAMA3,
            Self::Mistral => &MISTRAL,
            Self::Phi => &PHI,
        }
    }
}

/// The texts of a format. Answers may have white space between all parts of a call.
///
/// Hone itself writes `open`, the calls with `separator` between them, and `close`: each call is a JSON object of a
/// name and arguments. A grammar that forces calls consists of the same parts. Texts of `begin` and `end` are single
/// special tokens in some vocabularies ([`Codec::special_id`](crate::Codec::special_id)), and then a grammar needs the
/// token instead of the text.
#[derive(Debug)]
pub struct CallFormat {
    /// Texts that begin a call, or a list of calls in brackets.
    pub begin: &'static [&'static str],
    /// Texts that may end what a text of `begin` began.
    pub end: &'static [&'static str],
    /// Whether an answer may consist of calls without any text of `begin`, separated by `;`.
    pub bare: bool,
    /// The texts before the id and before the arguments of `name[CALL_ID]id[ARGS]{…}`, which follows a
    /// text of `begin` in place of an object.
    pub named: Option<(&'static str, &'static str)>,
    /// What Hone writes before the first call.
    pub open: &'static str,
    /// What Hone writes between two calls.
    pub separator: &'static str,
    /// What Hone writes after the last call.
    pub close: &'static str,
    /// The key of the arguments that Hone writes.
    pub arguments: &'static str,
}

const HERMES: CallFormat = CallFormat {
    begin: &["<tool_call>"],
    end: &["</tool_call>"],
    bare: false,
    named: None,
    open: "<tool_call>\n",
    separator: "\n</tool_call>\n<tool_call>\n",
    close: "\n</tool_call>",
    arguments: "arguments",
};

const LLAMA3: CallFormat = CallFormat {
    begin: &["<|python_tag|>"],
    end: &[],
    bare: true,
    open: "",
    separator: "; ",
    close: "",
    arguments: "parameters",
    ..HERMES
};

const MISTRAL: CallFormat = CallFormat {
    begin: &["[TOOL_CALLS]"],
    end: &[],
    named: Some(("[CALL_ID]", "[ARGS]")),
    open: "[TOOL_CALLS][",
    separator: ", ",
    close: "]",
    ..HERMES
};

const PHI: CallFormat = CallFormat {
    begin: &["<|tool_call|>", "functools"],
    end: &["<|/tool_call|>"],
    open: "<|tool_call|>[",
    separator: ", ",
    close: "]<|/tool_call|>",
    ..HERMES
};

/// A function as OpenAI's JSON, which templates print. Without `strict`, which is not for the model.
pub fn tool_json(tool: &Tool) -> Value {
    json!({"type": "function", "function": function_json(tool)})
}

/// The inner object of [`tool_json`].
pub fn function_json(tool: &Tool) -> Value {
    let fields = [
        ("name", Some(Value::from(tool.name.as_str()))),
        ("description", tool.description.as_deref().map(Value::from)),
        ("parameters", tool.parameters.clone()),
    ];
    fields.into_iter().filter_map(|(key, value)| Some((key, value?))).collect()
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
            assert_eq!(ToolFormat::Auto.or(format), format);
            assert_eq!(ToolFormat::Phi.or(format), ToolFormat::Phi);
        }
    }
}
