//! What the parts of one response have in common.

use std::sync::Arc;

use hone_core::types::{Interaction, PolicyVersion};

use super::wire::{TextChoice, TextCompletion};
use crate::http::generate::types::Usage;

/// The prompts of a response.
pub(super) struct TextHead {
    prompts: Vec<Arc<Interaction>>,
    choices_per_prompt: usize,
    echo: bool,
    /// The id of the response, which is the first prompt's.
    id: String,
    created: u64,
    model: String,
}

impl TextHead {
    pub(super) fn new(prompts: Vec<Arc<Interaction>>, choices_per_prompt: u32, echo: bool) -> Self {
        let first = prompts.first();
        Self {
            choices_per_prompt: choices_per_prompt.max(1) as usize,
            echo,
            id: first.map(|prompt| prompt.completion_id()).unwrap_or_default(),
            created: first.map_or(0, |prompt| prompt.created / 1000),
            model: first.map(|prompt| prompt.model.clone()).unwrap_or_default(),
            prompts,
        }
    }

    /// Number of choices.
    pub(super) fn choices(&self) -> usize {
        self.prompts.len() * self.choices_per_prompt
    }

    fn prompt(&self, index: u32) -> Option<&Interaction> {
        self.prompts.get(index as usize / self.choices_per_prompt).map(Arc::as_ref)
    }

    /// The text of a choice's prompt, if the client wants it before the completion.
    pub(super) fn echoed(&self, index: u32) -> Option<&str> {
        let prompt = self.prompt(index).filter(|_| self.echo)?;
        prompt.messages.first().map(|message| message.content.as_str())
    }

    /// The id of a choice's prompt, if there are several.
    pub(super) fn own_id(&self, index: u32) -> Option<String> {
        let prompt = self.prompt(index).filter(|_| self.prompts.len() > 1)?;
        Some(prompt.completion_id())
    }

    pub(super) fn completion(
        &self,
        version: PolicyVersion,
        choices: Vec<TextChoice>,
        usage: Option<Option<Usage>>,
    ) -> TextCompletion<'_> {
        TextCompletion {
            id: &self.id,
            object: "text_completion",
            created: self.created,
            model: &self.model,
            system_fingerprint: version.fingerprint(),
            choices,
            usage,
        }
    }
}
