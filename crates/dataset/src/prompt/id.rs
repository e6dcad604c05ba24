//! Identifies prompts by their content.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use hone_core::digest::Digest;
use hone_core::types::Message;

/// Identifies a prompt by its content: the first 128 bits of the SHA-256 of the row's conversation,
/// without the configuration's system message and examples. Rows with the same conversation share
/// it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PromptId(pub u128);

impl PromptId {
    /// The id of a conversation.
    pub fn of(messages: &[Message]) -> Self {
        let digest = messages.iter().fold(Digest::new(), |digest, message| {
            digest.field(message.role.as_str()).field(&message.content)
        });
        Self(u128::from_be_bytes(digest.prefix()))
    }

    /// Parses the output of `Display`; `None` for any other text.
    pub fn parse(text: &str) -> Option<Self> {
        let hex = text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit());
        hex.then(|| u128::from_str_radix(text, 16).ok().map(Self)).flatten()
    }
}

impl fmt::Display for PromptId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for PromptId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl Serialize for PromptId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PromptId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| serde::de::Error::custom("a prompt id has 32 hex digits"))
    }
}
