//! The items of a response's output, and their ids. Ids follow from the response's id and the item's place, so
//! that the items of a recorded response have the ids that its client got.

use schemars::JsonSchema;
use serde::Serialize;
use uuid::Uuid;

use hone_core::types::{InteractionId, ToolCall};

use crate::http::chat::answer::MessageItem;
use crate::http::chat::wire::TokenLogprob;

/// Hexadecimal digits of the response's id in the id of an item. Those of the item's place follow.
const ID_DIGITS: usize = 32;

/// An item of the output.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(in crate::http) enum OutputItem {
    /// Reasoning before the text. It has no summary.
    Reasoning {
        id: String,
        summary: Vec<()>,
        content: Vec<ContentPart>,
        encrypted_content: Option<()>,
        status: ItemStatus,
    },
    /// Text.
    Message {
        id: String,
        #[schemars(extend("const" = "assistant"))]
        role: &'static str,
        status: ItemStatus,
        content: Vec<ContentPart>,
    },
    /// A call of a function.
    FunctionCall {
        id: String,
        call_id: String,
        name: String,
        arguments: String,
        status: ItemStatus,
    },
}

/// The text of an item.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(in crate::http) enum ContentPart {
    ReasoningText {
        text: String,
    },
    OutputText {
        text: String,
        annotations: Vec<()>,
        /// Empty unless requested.
        logprobs: Vec<TokenLogprob>,
    },
}

/// Progress of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(in crate::http) enum ItemStatus {
    InProgress,
    Completed,
    /// It was cut off.
    Incomplete,
}

/// The response and the place in its output of the item with an id; `None` for any other text.
pub(super) fn item_of(id: &str) -> Option<(InteractionId, usize)> {
    let (prefix, digits) = id.split_once('_')?;
    let (response, place) = digits.split_at_checked(ID_DIGITS)?;
    let is_item = ["rs", "msg", "fc"].contains(&prefix) && place.len() == 4;
    let response = Uuid::try_parse(response).ok().filter(|_| is_item)?;
    Some((InteractionId(response), usize::from_str_radix(place, 16).ok()?))
}

/// The id of the item at a place of the output.
pub(super) fn item_id(prefix: &str, response: InteractionId, index: usize) -> String {
    format!("{prefix}_{response}{index:04x}")
}

impl OutputItem {
    /// A whole item. `id` makes its id of a prefix.
    pub(super) fn whole(item: MessageItem, id: impl Fn(&str) -> String) -> Self {
        let status = ItemStatus::Completed;
        match item {
            MessageItem::Reasoning(text) => Self::Reasoning {
                id: id("rs"),
                summary: Vec::new(),
                content: vec![ContentPart::ReasoningText { text }],
                encrypted_content: None,
                status,
            },
            MessageItem::Text(text) => {
                let (annotations, logprobs) = (Vec::new(), Vec::new());
                let content = vec![ContentPart::OutputText { text, annotations, logprobs }];
                Self::Message { id: id("msg"), role: "assistant", status, content }
            }
            MessageItem::Call(ToolCall { id: call_id, name, arguments }) => {
                Self::FunctionCall { id: id("fc"), call_id, name, arguments, status }
            }
        }
    }

    pub(super) fn id(&self) -> &str {
        match self {
            Self::Reasoning { id, .. }
            | Self::Message { id, .. }
            | Self::FunctionCall { id, .. } => id,
        }
    }

    pub(super) fn set_status(&mut self, new: ItemStatus) {
        match self {
            Self::Reasoning { status, .. }
            | Self::Message { status, .. }
            | Self::FunctionCall { status, .. } => *status = new,
        }
    }

    /// The parts of text; `None` for a call.
    pub(super) fn content_mut(&mut self) -> Option<&mut Vec<ContentPart>> {
        match self {
            Self::Reasoning { content, .. } | Self::Message { content, .. } => Some(content),
            Self::FunctionCall { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_item_is_found_by_its_id() {
        let id = InteractionId::new();
        for (prefix, place) in [("msg", 0), ("rs", 1), ("fc", 0xffff)] {
            assert_eq!(item_of(&item_id(prefix, id, place)), Some((id, place)));
        }
        for text in ["", "msg_", "msg_0", &id.message_id(), &format!("{}0000", id.response_id())] {
            assert_eq!(item_of(text), None, "{text}");
        }
    }
}
