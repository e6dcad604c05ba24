//! Identifiers.

use std::fmt;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Index into the model's vocabulary.
pub type TokenId = u32;

macro_rules! uuid_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub struct $name(pub Uuid);

        impl $name {
            /// A new UUIDv7, so that ids sort by creation time.
            #[expect(clippy::new_without_default, reason = "a default id would be a random one")]
            pub fn new() -> Self {
                Self(Uuid::now_v7())
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

impl InteractionId {
    /// The id that clients see: `chatcmpl-` and 32 hexadecimal digits.
    pub fn completion_id(self) -> String {
        format!("chatcmpl-{}", self.0.simple())
    }

    /// The inverse of [`Self::completion_id`]; `None` for any other text.
    pub fn from_completion_id(text: &str) -> Option<Self> {
        let hex = text.strip_prefix("chatcmpl-")?;
        (hex.len() == 32).then(|| Uuid::try_parse(hex).ok().map(Self))?
    }
}

/// Version of the weights that produced a completion. Version 0 is the base model without an
/// adapter.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
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
