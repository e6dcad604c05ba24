//! What the parts of one response have in common.

use std::collections::BTreeMap;
use std::sync::Arc;

use hone_core::types::{Interaction, PolicyVersion, TokenId};
use hone_engine::{Codec, Token};

use super::request::TextRequest;
use super::wire::{PromptLogprob, TextChoice, TextCompletion, TextLogprobs, prompt_logprobs};
use crate::http::generate::types::Usage;

/// The prompts of a response.
pub(super) struct TextHead {
    prompts: Vec<Arc<Interaction>>,
    choices_per_prompt: usize,
    echo: bool,
    /// Alternatives of each token in `logprobs`, if the client wants them.
    logprobs: Option<usize>,
    /// Alternatives of each token in `prompt_logprobs`, if the client wants them.
    prompt_logprobs: Option<usize>,
    /// The tokens of each prompt after the first with their log-probabilities; empty if nothing needs them.
    scored: Vec<Vec<Token>>,
    /// The id of the response, which is the first prompt's.
    id: String,
    created: u64,
    model: String,
}

impl TextHead {
    pub(super) fn new(
        prompts: Vec<Arc<Interaction>>,
        request: &TextRequest,
        scored: Vec<Vec<Token>>,
    ) -> Self {
        let first = prompts.first();
        Self {
            choices_per_prompt: request.choices.max(1) as usize,
            echo: request.echo,
            logprobs: request.logprobs.map(usize::from),
            prompt_logprobs: request.prompt_logprobs.map(usize::from),
            scored,
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

    /// The log-probabilities of sampled tokens, after those of the prompt if `echoed`. `offset` is as in
    /// [`TextLogprobs::first`].
    pub(super) fn logprobs(
        &self,
        codec: &Codec,
        index: u32,
        (echoed, sampled): (bool, &[Token]),
        offset: &mut usize,
    ) -> Option<TextLogprobs> {
        let most = self.logprobs?;
        let mut all = TextLogprobs::default();
        if echoed
            && self.echo
            && let Some(first) = self.prompt(index)?.prompt_ids.first()
        {
            all = TextLogprobs::first(codec, *first, offset);
            all = all.with(codec, self.scored_of(index), most, offset);
        }
        Some(all.with(codec, sampled, most, offset))
    }

    pub(super) fn prompt_logprobs(
        &self,
        codec: &Codec,
        index: u32,
    ) -> Option<Vec<Option<BTreeMap<TokenId, PromptLogprob>>>> {
        Some(prompt_logprobs(codec, self.scored_of(index), self.prompt_logprobs?))
    }

    fn scored_of(&self, index: u32) -> &[Token] {
        self.scored.get(index as usize / self.choices_per_prompt).map_or(&[], Vec::as_slice)
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
