//! The shapes of stored completions.

use std::collections::BTreeMap;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use hone_core::types::{Interaction, Sample, SampleOrigin, ToolCall};
use hone_engine::{Codec, ToolFormat};

use super::query::PageQuery;
use crate::http::body::invalid;
use crate::http::chat::answer::{recorded, recorded_form};
use crate::http::chat::wire::{ChatCompletion, Choice};
use crate::http::error::ApiError;
use crate::http::generate::types::Usage;

/// A recorded completion: its response, and what the request asked for.
#[derive(Serialize, JsonSchema)]
pub struct StoredCompletion {
    #[serde(flatten)]
    completion: ChatCompletion,
    metadata: BTreeMap<String, String>,
    temperature: f32,
    top_p: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    seed: u64,
    max_completion_tokens: u32,
}

impl StoredCompletion {
    /// The completion of a prompt with its samples. Those that no client received are left out. The message
    /// is divided as for its client, unless another model with another template sampled it.
    pub(super) fn new(
        interaction: Interaction,
        mut samples: Vec<Sample>,
        codec: &Arc<Codec>,
        format: ToolFormat,
    ) -> Self {
        samples.retain(|sample| sample.origin == SampleOrigin::Served);
        samples.sort_by_key(|sample| sample.choice);
        let tokens = samples.iter().map(|sample| sample.ids.len()).sum();
        let version = samples.first().map(|sample| sample.version).unwrap_or_default();
        let form = recorded_form(codec, &interaction, format);
        let choices = samples.into_iter().map(|sample| {
            let message = recorded(codec, form.as_ref(), &sample, &interaction.stop);
            Choice::new(sample.choice, message, None, false)
        });
        let usage = Usage::new(interaction.prompt_ids.len(), tokens);
        let completion = ChatCompletion::new(&interaction, version, choices.collect(), usage);
        let Interaction { params, metadata, .. } = interaction;
        Self {
            completion,
            metadata,
            temperature: params.temperature,
            top_p: params.top_p,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            seed: params.seed,
            max_completion_tokens: params.max_tokens,
        }
    }
}

/// A message of a recorded request.
#[derive(Serialize, JsonSchema)]
pub struct StoredMessage {
    /// The completion's id, `-` and the message's place.
    pub(super) id: String,
    pub(super) role: &'static str,
    pub(super) content: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) name: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) tool_calls: Vec<ToolCall>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tool_call_id: Option<String>,
}

/// A part of a list, in OpenAI's shape.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "PageOf{T}")]
pub struct ListPage<T> {
    #[schemars(extend("const" = "list"))]
    object: &'static str,
    data: Vec<T>,
    first_id: Option<String>,
    /// The value of `after` for the next page.
    last_id: Option<String>,
    has_more: bool,
}

impl<T> ListPage<T> {
    /// The page that a query wants of `all` entries, each with its id, oldest first. `entry` describes one.
    pub(in crate::http) fn cut(
        mut all: Vec<(String, T)>,
        query: &PageQuery<'_>,
        entry: &str,
    ) -> Result<Self, ApiError> {
        if query.newest_first {
            all.reverse();
        }
        if let Some(after) = query.after {
            let Some(place) = all.iter().position(|(id, _)| id == after) else {
                return Err(invalid(
                    "after",
                    &Value::from(after),
                    format_args!("the id of {entry}"),
                ));
            };
            all.drain(..=place);
        }
        let has_more = all.len() > query.limit;
        all.truncate(query.limit);
        Ok(Self::new(all, None, has_more))
    }

    /// `data` has each entry with its id. The next page begins after `last`, or else after the last entry.
    pub(super) fn new(data: Vec<(String, T)>, last: Option<String>, has_more: bool) -> Self {
        Self {
            object: "list",
            first_id: data.first().map(|(id, _)| id.clone()),
            last_id: last.or_else(|| data.last().map(|(id, _)| id.clone())),
            data: data.into_iter().map(|(_, entry)| entry).collect(),
            has_more,
        }
    }
}

/// The response to an erasure.
#[derive(Serialize, JsonSchema)]
pub struct DeletedCompletion {
    #[schemars(extend("const" = "chat.completion.deleted"))]
    pub(super) object: &'static str,
    pub(super) id: String,
    pub(super) deleted: bool,
}
