//! Makes the items of a response's output of the parts of its message, with the events of a stream.
//!
//! Invariant: an item is open until the next one begins.

use hone_core::types::{InteractionId, ToolCall};

use super::wire::{ContentPart, ItemStatus, OutputItem, ResponseEvent, item_id};
use crate::chat::TokenLogprob;
use crate::chat::answer::{MessageEnd, MessageItem, MessagePart};

/// The output while it grows.
pub struct ResponseOutput {
    response: InteractionId,
    items: Vec<OutputItem>,
    /// Whether the last item may grow.
    is_open: bool,
}

/// The status of the last item of an answer.
fn last_status(end: MessageEnd) -> ItemStatus {
    match end {
        MessageEnd::Stop | MessageEnd::Calls => ItemStatus::Completed,
        MessageEnd::Length | MessageEnd::Cancelled => ItemStatus::Incomplete,
    }
}

impl ResponseOutput {
    pub fn new(response: InteractionId) -> Self {
        Self { response, items: Vec::new(), is_open: false }
    }

    /// The items of a whole message, which is not empty.
    pub fn whole(
        response: InteractionId,
        message: Vec<MessageItem>,
        end: MessageEnd,
    ) -> Vec<OutputItem> {
        let items = message.into_iter().enumerate();
        let mut items: Vec<OutputItem> = items
            .map(|(index, item)| OutputItem::whole(item, |prefix| item_id(prefix, response, index)))
            .collect();
        if let Some(last) = items.last_mut() {
            last.set_status(last_status(end));
        }
        items
    }

    pub fn items(&self) -> &[OutputItem] {
        &self.items
    }

    /// Whether the last item is text that may grow.
    pub fn is_in_text(&self) -> bool {
        self.is_open && matches!(self.items.last(), Some(OutputItem::Message { .. }))
    }

    /// Adds a part, with the log-probabilities of its tokens if it is text.
    pub fn add(&mut self, part: MessagePart, logprobs: Vec<TokenLogprob>) -> Vec<ResponseEvent> {
        let mut events = Vec::new();
        if !self.continues(&part) {
            self.close(ItemStatus::Completed, &mut events);
            self.open(&part, &mut events);
        }
        events.extend(self.grow(part, logprobs));
        events
    }

    /// Ends the output. It has at least one item then.
    pub fn finish(&mut self, end: MessageEnd) -> Vec<ResponseEvent> {
        let mut events = Vec::new();
        if self.items.is_empty() {
            self.open(&MessagePart::Text(String::new()), &mut events);
        }
        self.close(last_status(end), &mut events);
        events
    }

    fn continues(&self, part: &MessagePart) -> bool {
        let last = self.items.last().filter(|_| self.is_open);
        matches!(
            (last, part),
            (Some(OutputItem::Reasoning { .. }), MessagePart::Reasoning(_))
                | (Some(OutputItem::Message { .. }), MessagePart::Text(_))
                | (Some(OutputItem::FunctionCall { .. }), MessagePart::Arguments { .. })
        )
    }

    /// Begins the item that a part belongs to.
    fn open(&mut self, part: &MessagePart, events: &mut Vec<ResponseEvent>) {
        let item = match part {
            MessagePart::Reasoning(_) => MessageItem::Reasoning(String::new()),
            MessagePart::Text(_) => MessageItem::Text(String::new()),
            MessagePart::Call { id, name, .. } => MessageItem::Call(ToolCall {
                id: id.clone(),
                name: name.clone(),
                arguments: String::new(),
            }),
            // A call begins before its arguments.
            MessagePart::Arguments { .. } => return,
        };
        let index = self.items.len();
        let mut item = OutputItem::whole(item, |prefix| item_id(prefix, self.response, index));
        item.set_status(ItemStatus::InProgress);
        // An item begins without its part.
        let mut begun = item.clone();
        let parts = begun.content_mut().map(std::mem::take).unwrap_or_default();
        events.push(ResponseEvent::item("response.output_item.added", index, begun));
        events.extend(parts.into_iter().map(|part| ResponseEvent {
            part: Some(part),
            ..ResponseEvent::within("response.content_part.added", index, &item)
        }));
        self.items.push(item);
        self.is_open = true;
    }

    fn grow(&mut self, part: MessagePart, logprobs: Vec<TokenLogprob>) -> Option<ResponseEvent> {
        let index = self.items.len().checked_sub(1)?;
        let item = self.items.last_mut()?;
        let mut event = ResponseEvent::within("", index, item);
        let (name, delta) = match (item, part) {
            (OutputItem::Reasoning { content, .. }, MessagePart::Reasoning(more)) => {
                if let Some(ContentPart::ReasoningText { text }) = content.last_mut() {
                    text.push_str(&more);
                }
                ("response.reasoning_text.delta", more)
            }
            (OutputItem::Message { content, .. }, MessagePart::Text(more)) => {
                if let Some(ContentPart::OutputText { text, logprobs: all, .. }) =
                    content.last_mut()
                {
                    text.push_str(&more);
                    all.extend(logprobs.iter().cloned());
                }
                event.logprobs = Some(logprobs);
                ("response.output_text.delta", more)
            }
            (OutputItem::FunctionCall { arguments, .. }, MessagePart::Arguments { json, .. }) => {
                arguments.push_str(&json);
                ("response.function_call_arguments.delta", json)
            }
            _ => return None,
        };
        Some(ResponseEvent { r#type: name, delta: Some(delta), ..event })
    }

    /// Ends the last item, if it is open.
    fn close(&mut self, status: ItemStatus, events: &mut Vec<ResponseEvent>) {
        let Some(index) = self.items.len().checked_sub(1).filter(|_| self.is_open) else { return };
        self.is_open = false;
        let Some(item) = self.items.last_mut() else { return };
        item.set_status(status);
        let within = |r#type| ResponseEvent::within(r#type, index, item);
        match &*item {
            OutputItem::Reasoning { content, .. } | OutputItem::Message { content, .. } => {
                for part in content {
                    let (name, text, logprobs) = match part.clone() {
                        ContentPart::ReasoningText { text } => {
                            ("response.reasoning_text.done", text, None)
                        }
                        ContentPart::OutputText { text, logprobs, .. } => {
                            ("response.output_text.done", text, Some(logprobs))
                        }
                    };
                    events.push(ResponseEvent { text: Some(text), logprobs, ..within(name) });
                    let part = Some(part.clone());
                    events.push(ResponseEvent { part, ..within("response.content_part.done") });
                }
            }
            OutputItem::FunctionCall { arguments, .. } => {
                let arguments = Some(arguments.clone());
                let done = within("response.function_call_arguments.done");
                events.push(ResponseEvent { arguments, ..done });
            }
        }
        events.push(ResponseEvent::item("response.output_item.done", index, item.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts() -> Vec<MessagePart> {
        let text = |text: &str| MessagePart::Text(text.to_owned());
        let call = |index: usize, id: &str| MessagePart::Call {
            index,
            id: id.to_owned(),
            name: "add".to_owned(),
        };
        let json =
            |index: usize, json: &str| MessagePart::Arguments { index, json: json.to_owned() };
        vec![
            MessagePart::Reasoning("Hm".to_owned()),
            MessagePart::Reasoning(".".to_owned()),
            text("I "),
            text("add."),
            call(0, "a"),
            json(0, "{\"a\":"),
            json(0, "1}"),
            call(1, "b"),
            text("Done."),
        ]
    }

    #[test]
    fn items_begin_grow_and_end_in_their_order() {
        let id = InteractionId::new();
        let mut output = ResponseOutput::new(id);
        let mut events: Vec<ResponseEvent> =
            parts().into_iter().flat_map(|part| output.add(part, Vec::new())).collect();
        events.extend(output.finish(MessageEnd::Length));
        let types: Vec<&str> = events
            .iter()
            .map(|event| event.r#type.strip_prefix("response.").unwrap_or_default())
            .collect();
        let text = |name: &'static str, deltas: usize| {
            let mut all = vec!["output_item.added", "content_part.added"];
            all.extend(std::iter::repeat_n(name, deltas));
            all
        };
        let ends = ["content_part.done", "output_item.done"];
        let call = ["output_item.added"];
        let call_ends = ["function_call_arguments.done", "output_item.done"];
        let expected = [
            &text("reasoning_text.delta", 2)[..],
            &["reasoning_text.done"],
            &ends,
            &text("output_text.delta", 2),
            &["output_text.done"],
            &ends,
            &call,
            &["function_call_arguments.delta"; 2],
            &call_ends,
            &call,
            &call_ends,
            &text("output_text.delta", 1),
            &["output_text.done"],
            &ends,
        ];
        assert_eq!(types, expected.concat());
        let call = |id: &str, arguments: &str| {
            MessageItem::Call(ToolCall {
                id: id.to_owned(),
                name: "add".to_owned(),
                arguments: arguments.to_owned(),
            })
        };
        let whole = vec![
            MessageItem::Reasoning("Hm.".to_owned()),
            MessageItem::Text("I add.".to_owned()),
            call("a", "{\"a\":1}"),
            call("b", ""),
            MessageItem::Text("Done.".to_owned()),
        ];
        assert_eq!(ResponseOutput::whole(id, whole, MessageEnd::Length), output.items());
    }
}
