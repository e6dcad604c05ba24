//! The shapes of stored completions.

use std::collections::BTreeMap;

use serde::Serialize;

use hone_core::types::{Interaction, Sample, SampleOrigin};

use crate::http::chat::wire::{AssistantMessage, ChatCompletion, Choice};
use crate::http::generate::types::Usage;

/// A recorded completion: its response, and what the request asked for.
#[derive(Serialize)]
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
    /// The completion of a prompt with its samples. Those that no client received are left out.
    pub(super) fn new(interaction: Interaction, mut samples: Vec<Sample>) -> Self {
        samples.retain(|sample| sample.origin == SampleOrigin::Served);
        samples.sort_by_key(|sample| sample.choice);
        let tokens = samples.iter().map(|sample| sample.ids.len()).sum();
        let version = samples.first().map(|sample| sample.version).unwrap_or_default();
        let choices = samples.into_iter().map(|sample| Choice {
            index: sample.choice,
            message: AssistantMessage { role: "assistant", content: sample.text, refusal: None },
            logprobs: None,
            finish_reason: sample.finish.as_str(),
            token_ids: None,
        });
        let Interaction { params, metadata, .. } = interaction;
        Self {
            completion: ChatCompletion {
                id: interaction.id.completion_id(),
                object: "chat.completion",
                created: interaction.created / 1000,
                model: interaction.model,
                system_fingerprint: version.fingerprint(),
                choices: choices.collect(),
                usage: Usage::new(interaction.prompt_ids.len(), tokens),
                prompt_token_ids: None,
            },
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
#[derive(Serialize)]
pub struct StoredMessage {
    /// The completion's id, `-` and the message's place.
    pub(super) id: String,
    pub(super) role: &'static str,
    pub(super) content: String,
}

/// A part of a list, in OpenAI's shape.
#[derive(Serialize)]
pub struct ListPage<T> {
    object: &'static str,
    data: Vec<T>,
    first_id: Option<String>,
    /// The value of `after` for the next page.
    last_id: Option<String>,
    has_more: bool,
}

impl<T> ListPage<T> {
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
#[derive(Serialize)]
pub struct DeletedCompletion {
    pub(super) object: &'static str,
    pub(super) id: String,
    pub(super) deleted: bool,
}
