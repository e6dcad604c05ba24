//! Identifiers.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::{NoContext, Timestamp, Uuid};

use crate::digest::Digest;

/// A new UUIDv7. While the clock shows a time before 1970, its time is 1970.
pub fn new_uuid() -> Uuid {
    match SystemTime::now().duration_since(UNIX_EPOCH) {
        Ok(_) => Uuid::now_v7(),
        Err(_) => Uuid::new_v7(Timestamp::from_unix(NoContext, 0, 0)),
    }
}

/// Index into the model's vocabulary.
pub type TokenId = u32;

macro_rules! uuid_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub struct $name(#[serde(with = "text_or_bytes")] pub Uuid);

        impl $name {
            /// A new UUIDv7, so that ids sort by creation time.
            #[expect(clippy::new_without_default, reason = "a default id would be a random one")]
            pub fn new() -> Self {
                Self(new_uuid())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0.simple())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0.simple())
            }
        }
    };
}

uuid_id!(
    /// Id of one prompt, served or drawn from a dataset.
    InteractionId
);
uuid_id!(
    /// Id of one completion.
    SampleId
);
uuid_id!(
    /// Id of one group of samples.
    GroupId
);
uuid_id!(
    /// Id of one grade or piece of feedback.
    RewardId
);

/// A UUID as text in JSON, and as its 16 bytes in the ledger.
mod text_or_bytes {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use uuid::Uuid;
    use uuid::serde::compact;

    pub fn serialize<S: Serializer>(id: &Uuid, serializer: S) -> Result<S::Ok, S::Error> {
        let is_text = serializer.is_human_readable();
        if is_text { id.serialize(serializer) } else { compact::serialize(id, serializer) }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Uuid, D::Error> {
        let is_text = deserializer.is_human_readable();
        if is_text { Uuid::deserialize(deserializer) } else { compact::deserialize(deserializer) }
    }
}

fn route_digest(route: &str) -> [u8; 2] {
    let digest: [u8; 8] = Digest::new().field(route).prefix();
    [digest[0], digest[1]]
}

/// The version of a UUID whose layout its author defines (RFC 9562).
const CUSTOM: u8 = 8;

impl InteractionId {
    /// A new id whose last two bytes are a digest of the route's name, so that a server of a fleet that did not answer
    /// the prompt can validate its feedback.
    pub fn of_route(route: &str) -> Self {
        let mut bytes = *new_uuid().as_bytes();
        [bytes[14], bytes[15]] = route_digest(route);
        Self(Uuid::from_bytes(bytes))
    }

    /// Whether the id can be one of [`Self::of_route`] for the route.
    pub fn is_of_route(self, route: &str) -> bool {
        self.0.as_bytes().ends_with(&route_digest(route))
    }

    /// A new id of a prompt that is not recorded: a UUIDv7 with the version number 8. So the id itself
    /// says that nothing was kept.
    pub fn unstored() -> Self {
        let mut bytes = *new_uuid().as_bytes();
        bytes[6] = (bytes[6] & 0x0f) | (CUSTOM << 4);
        Self(Uuid::from_bytes(bytes))
    }

    /// Whether the id is one of [`Self::unstored`].
    pub fn is_unstored(self) -> bool {
        self.0.get_version_num() == usize::from(CUSTOM)
    }

    /// The id that clients of chat completions see: `chatcmpl-` and 32 hexadecimal digits.
    pub fn completion_id(self) -> String {
        format!("chatcmpl-{}", self.0.simple())
    }

    /// The id that clients of text completions see: `cmpl-` and 32 hexadecimal digits.
    pub fn text_completion_id(self) -> String {
        format!("cmpl-{}", self.0.simple())
    }

    /// The id that clients of OpenAI's Responses see: `resp_` and 32 hexadecimal digits.
    pub fn response_id(self) -> String {
        format!("resp_{}", self.0.simple())
    }

    /// The id that clients of Anthropic's messages see: `msg_` and 32 hexadecimal digits.
    pub fn message_id(self) -> String {
        format!("msg_{}", self.0.simple())
    }

    /// The inverse of [`Self::completion_id`], [`Self::text_completion_id`], [`Self::response_id`] and
    /// [`Self::message_id`]; `None` for any other text.
    pub fn from_completion_id(text: &str) -> Option<Self> {
        const PREFIXES: [&str; 4] = ["chatcmpl-", "cmpl-", "resp_", "msg_"];
        let hex = PREFIXES.iter().find_map(|prefix| text.strip_prefix(prefix))?;
        (hex.len() == 32).then(|| Uuid::try_parse(hex).ok().map(Self))?
    }
}

/// Version of the weights that produced a completion. Version 0 is the base model without an
/// adapter.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    JsonSchema,
)]
pub struct PolicyVersion(pub u64);

impl PolicyVersion {
    /// The base model without an adapter, which is also the reference policy.
    pub const BASE: Self = Self(0);

    /// The value of `system_fingerprint`, such as `hone-v7`.
    pub fn fingerprint(self) -> String {
        format!("hone-v{}", self.0)
    }
}

impl fmt::Display for PolicyVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_know_their_route_and_sort_by_time() {
        let ids: Vec<_> = (0..1000).map(|_| InteractionId::of_route("support")).collect();
        assert!(ids.is_sorted() && ids.windows(2).all(|pair| pair[0] != pair[1]));
        assert!(ids.iter().all(|id| id.is_of_route("support") && !id.is_of_route("sales")));
    }

    #[test]
    fn an_unstored_id_is_recognized_by_itself() {
        let (kept, unkept) = (InteractionId::new(), InteractionId::unstored());
        assert!(!kept.is_unstored() && unkept.is_unstored());
        assert_ne!(unkept, InteractionId::unstored());
        for id in [kept, unkept] {
            for text in
                [id.completion_id(), id.text_completion_id(), id.response_id(), id.message_id()]
            {
                assert_eq!(InteractionId::from_completion_id(&text), Some(id), "{text}");
            }
        }
        for text in ["", "chatcmpl-", "cmpl-0", "run_0190a2b3c4d57e6f8091a2b3c4d5e6f7"] {
            assert_eq!(InteractionId::from_completion_id(text), None, "{text}");
        }
    }
}
