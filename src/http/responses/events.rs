//! The events of a stream.

use schemars::JsonSchema;
use serde::Serialize;

use super::items::{ContentPart, OutputItem};
use super::wire::ResponseObject;
use crate::http::chat::wire::TokenLogprob;

/// One event. It has the fields of its type.
#[derive(Default, Serialize, JsonSchema)]
pub(in crate::http) struct ResponseEvent {
    pub(super) r#type: &'static str,
    /// The event's number in its stream, from 0.
    pub(super) sequence_number: u64,
    /// The response so far.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) response: Option<ResponseObject>,
    /// The item's place in the output.
    #[serde(skip_serializing_if = "Option::is_none")]
    output_index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    item: Option<OutputItem>,
    #[serde(skip_serializing_if = "Option::is_none")]
    item_id: Option<String>,
    /// The part's place in the item.
    #[serde(skip_serializing_if = "Option::is_none")]
    content_index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    part: Option<ContentPart>,
    /// More of a text or of a call's arguments.
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<String>,
    /// A whole text.
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    /// The whole arguments of a call.
    #[serde(skip_serializing_if = "Option::is_none")]
    arguments: Option<String>,
    /// Of the tokens of `delta` or `text`; empty unless requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Vec<TokenLogprob>>,
}

/// Where a change is.
#[derive(Clone)]
pub(super) struct EventPlace {
    output_index: usize,
    item_id: String,
}

impl EventPlace {
    /// The place of an item of the output.
    pub(super) fn of(item: &OutputItem, output_index: usize) -> Self {
        Self { output_index, item_id: item.id().to_owned() }
    }
}

impl ResponseEvent {
    /// The state of the response.
    pub(super) fn response(r#type: &'static str, response: ResponseObject) -> Self {
        Self { r#type, response: Some(response), ..Self::default() }
    }

    /// An item that begins or has ended.
    pub(super) fn item(r#type: &'static str, output_index: usize, item: OutputItem) -> Self {
        let output_index = Some(output_index);
        Self { r#type, output_index, item: Some(item), ..Self::default() }
    }

    /// A part of an item that begins or has ended.
    pub(super) fn part(r#type: &'static str, place: &EventPlace, part: ContentPart) -> Self {
        Self { part: Some(part), ..Self::of_content(r#type, place) }
    }

    /// More text of a part.
    pub(super) fn text_delta(
        place: &EventPlace,
        text: String,
        logprobs: Vec<TokenLogprob>,
    ) -> Self {
        Self {
            delta: Some(text),
            logprobs: Some(logprobs),
            ..Self::of_content("response.output_text.delta", place)
        }
    }

    /// More of the reasoning.
    pub(super) fn reasoning_delta(place: &EventPlace, text: String) -> Self {
        Self { delta: Some(text), ..Self::of_content("response.reasoning_text.delta", place) }
    }

    /// More of a call's arguments.
    pub(super) fn arguments_delta(place: &EventPlace, json: String) -> Self {
        let r#type = "response.function_call_arguments.delta";
        Self { delta: Some(json), ..Self::of_item(r#type, place) }
    }

    /// The whole arguments of a call.
    pub(super) fn arguments_done(place: &EventPlace, arguments: String) -> Self {
        let r#type = "response.function_call_arguments.done";
        Self { arguments: Some(arguments), ..Self::of_item(r#type, place) }
    }

    /// The whole text of a part.
    pub(super) fn text_done(place: &EventPlace, part: &ContentPart) -> Self {
        match part.clone() {
            ContentPart::ReasoningText { text } => {
                Self { text: Some(text), ..Self::of_content("response.reasoning_text.done", place) }
            }
            ContentPart::OutputText { text, logprobs, .. } => Self {
                text: Some(text),
                logprobs: Some(logprobs),
                ..Self::of_content("response.output_text.done", place)
            },
        }
    }

    fn of_item(r#type: &'static str, place: &EventPlace) -> Self {
        let EventPlace { output_index, item_id } = place.clone();
        let (output_index, item_id) = (Some(output_index), Some(item_id));
        Self { r#type, output_index, item_id, ..Self::default() }
    }

    /// Every item with content has one part.
    fn of_content(r#type: &'static str, place: &EventPlace) -> Self {
        Self { content_index: Some(0), ..Self::of_item(r#type, place) }
    }
}
