//! The ids of a conversation that goes on from recorded tokens.
//!
//! A sampled completion need not have the tokens that encoding its text gives. If a client returns the
//! completion, its tokens are therefore taken from the record: the ids of the prompt and of the completion
//! come first, and only the text that follows is encoded.
//!
//! Invariants: the ids decode to the rendered text, except that white space within completions is as the
//! policy wrote it, for example between the tokens of JSON. The tokens that follow the recorded ones are those
//! that the whole text would have there, because a token of markup, at which every tokenizer divides its
//! text, is on the border. Otherwise the whole text is encoded.

use hone_core::types::{ChatOptions, Message, TokenId};

use super::StandIns;
use super::{Codec, RenderedChat};
use crate::error::EngineError;
use crate::tools::ToolFormat;

/// The ids of a prompt, and what became of the recorded ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContinuedPrompt {
    /// The ids of the whole prompt.
    pub ids: Vec<TokenId>,
    /// The number of the recorded ids that the prompt begins with: all of them, or all but a stop token that
    /// the template does not write.
    pub kept: Result<usize, EncodedAgain>,
}

/// Why recorded tokens are encoded again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncodedAgain {
    /// The template shows the recorded conversation with another text, for example without its reasoning.
    OtherText,
    /// No token of markup is on the border of the recorded text and the following one.
    NoBorder,
}

impl EncodedAgain {
    /// The label in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::OtherText => "text",
            Self::NoBorder => "border",
        }
    }
}

impl Codec {
    /// [`Self::chat`] with the generation prompt, where `recorded` has the ids of an earlier prompt and of its
    /// completion, which is among the messages.
    pub fn continued_chat(
        &self,
        recorded: &[TokenId],
        messages: &[Message],
        options: &ChatOptions,
        format: ToolFormat,
    ) -> Result<ContinuedPrompt, EngineError> {
        let chat = self.rendered(messages, options, format, true)?;
        let without_stop = recorded.split_last().map(|(_, before)| before);
        let mut kept = Err(EncodedAgain::OtherText);
        for beginning in std::iter::once(recorded).chain(without_stop) {
            match self.following(beginning, &chat)? {
                Ok(following) => {
                    let ids = [beginning, &following].concat();
                    return Ok(ContinuedPrompt { ids, kept: Ok(beginning.len()) });
                }
                Err(reason) if beginning.len() == recorded.len() => kept = Err(reason),
                Err(_) => {}
            }
        }
        let ids = self.encode_rendered(&chat.text, chat.stand_ins.as_ref())?;
        Ok(ContinuedPrompt { ids, kept })
    }

    /// The ids of the text of `chat` after the recorded ones.
    fn following(
        &self,
        recorded: &[TokenId],
        chat: &RenderedChat<'_>,
    ) -> Result<Result<Vec<TokenId>, EncodedAgain>, EngineError> {
        let stand_ins = chat.stand_ins.as_ref();
        let shown = self.as_rendered(recorded, stand_ins);
        let rest = shown.and_then(|shown| after(&chat.text, &shown));
        let Some(rest) = rest else { return Ok(Err(EncodedAgain::OtherText)) };
        let last = recorded.last().filter(|id| self.is_markup(**id));
        let border = last.and_then(|id| Some((*id, self.token(*id)?)));
        if let Some((id, border)) = border {
            // Tokenizers treat the beginning of a text differently.
            let ids = self.encode_rendered(&(border + rest), stand_ins)?;
            if let Some((first, following)) = ids.split_first()
                && *first == id
            {
                return Ok(Ok(following.to_vec()));
            }
        } else if self
            .markup
            .as_ref()
            .and_then(|finder| finder.find(rest))
            .is_some_and(|m| m.start() == 0)
        {
            return Ok(Ok(self.encode_rendered(rest, stand_ins)?));
        }
        Ok(Err(EncodedAgain::NoBorder))
    }

    /// The text of ids as a rendered conversation has it: with the texts of special tokens, but with stand-ins
    /// where other tokens spell such a text. `None` if there is no stand-in for it.
    fn as_rendered(&self, ids: &[TokenId], stand_ins: Option<&StandIns<'_>>) -> Option<String> {
        let mut text = String::new();
        for run in ids.chunk_by(|a, b| self.is_markup(*a) == self.is_markup(*b)) {
            if run.first().is_some_and(|id| self.is_markup(*id)) {
                text.extend(run.iter().filter_map(|id| self.token(*id)));
                continue;
            }
            let bytes: Vec<u8> = run.iter().flat_map(|id| self.token_bytes(*id)).collect();
            let spelled = String::from_utf8_lossy(&bytes);
            let hidden = match stand_ins {
                Some(stand_ins) => stand_ins.hide(&spelled),
                None => spelled,
            };
            if self.markup.as_ref().is_some_and(|finder| finder.is_match(&hidden)) {
                return None;
            }
            text.push_str(&hidden);
        }
        Some(text)
    }
}

/// The part of `text` after `beginning`; `None` if it does not begin so. If it does except for white space,
/// the white space at the end of `beginning` is taken from what follows.
fn after<'t>(text: &'t str, beginning: &str) -> Option<&'t str> {
    if let Some(rest) = text.strip_prefix(beginning) {
        return Some(rest);
    }
    let visible = beginning.trim_end();
    let mut rest = text;
    for character in visible.chars().filter(|c| !c.is_whitespace()) {
        rest = rest.trim_start().strip_prefix(character)?;
    }
    for space in beginning.get(visible.len()..)?.chars() {
        rest = rest.strip_prefix(space).unwrap_or(rest);
    }
    Some(rest)
}

#[cfg(test)]
mod tests {
    use super::after;

    #[test]
    fn white_space_may_differ() {
        let cases = [
            ("ab c", "ab", Some(" c")),
            ("{\"a\": 1}<e>\nx", "{\"a\":1}<e>", Some("\nx")),
            ("{\"a\":1}\n<e>", "{ \"a\":  1}\n", Some("<e>")),
            ("a<e>", " a \n", Some("<e>")),
            ("a b", "a c", None),
            ("a", "ab", None),
        ];
        for (text, beginning, rest) in cases {
            assert_eq!(after(text, beginning), rest, "{text:?} {beginning:?}");
        }
    }
}
