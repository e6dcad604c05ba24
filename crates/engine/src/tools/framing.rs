//! The texts of each format.

use super::ToolFormat;

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
