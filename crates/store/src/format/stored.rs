//! How stored forms convert to and from the plain types.

use std::collections::BTreeMap;

use serde_json::{Map, Value};
use uuid::Uuid;

use hone_core::types::{GroupId, InteractionId, PolicyVersion, RewardId, SampleId};

/// The stored form of `P`.
pub(crate) trait StoredForm<P>: Sized {
    /// Converts a record for writing.
    fn store(plain: &P) -> Self;
    /// Converts a stored record to its current form.
    fn load(self) -> P;
}

macro_rules! stored_as_is {
    ($($t:ty),+ $(,)?) => {$(
        impl StoredForm<$t> for $t {
            fn store(plain: &$t) -> Self {
                plain.clone()
            }
            fn load(self) -> $t {
                self
            }
        }
    )+};
}

stored_as_is!(
    bool,
    u32,
    u64,
    f32,
    f64,
    String,
    BTreeMap<String, String>,
    BTreeMap<String, f64>,
    BTreeMap<u32, f32>,
);

macro_rules! stored_id {
    ($($t:ident),+) => {$(
        impl StoredForm<$t> for [u8; 16] {
            fn store(plain: &$t) -> Self {
                plain.0.into_bytes()
            }
            fn load(self) -> $t {
                $t(Uuid::from_bytes(self))
            }
        }
    )+};
}

stored_id!(InteractionId, SampleId, GroupId, RewardId);

impl StoredForm<PolicyVersion> for u64 {
    fn store(plain: &PolicyVersion) -> Self {
        plain.0
    }
    fn load(self) -> PolicyVersion {
        PolicyVersion(self)
    }
}

/// JSON is stored as text.
impl StoredForm<Value> for String {
    fn store(plain: &Value) -> Self {
        plain.to_string()
    }
    fn load(self) -> Value {
        serde_json::from_str(&self).unwrap_or(Value::String(self))
    }
}

impl StoredForm<Map<String, Value>> for String {
    fn store(plain: &Map<String, Value>) -> Self {
        serde_json::to_string(plain).unwrap_or_default()
    }
    fn load(self) -> Map<String, Value> {
        serde_json::from_str(&self).unwrap_or_default()
    }
}

impl<P, S: StoredForm<P>> StoredForm<Vec<P>> for Vec<S> {
    fn store(plain: &Vec<P>) -> Self {
        plain.iter().map(S::store).collect()
    }
    fn load(self) -> Vec<P> {
        self.into_iter().map(S::load).collect()
    }
}

impl<P, S: StoredForm<P>> StoredForm<Option<P>> for Option<S> {
    fn store(plain: &Option<P>) -> Self {
        plain.as_ref().map(S::store)
    }
    fn load(self) -> Option<P> {
        self.map(S::load)
    }
}

macro_rules! mirror_enum {
    ($stored:ident = $plain:ident {
        $($variant:ident $(($value:ident: $type:ty))?),+ $(,)?
    }) => {
        #[derive(Serialize, Deserialize)]
        pub(crate) enum $stored { $($variant $(($type))?),+ }

        impl StoredForm<$plain> for $stored {
            fn store(plain: &$plain) -> Self {
                match plain {
                    $($plain::$variant $(($value))? => {
                        Self::$variant $((StoredForm::store($value)))?
                    })+
                }
            }
            fn load(self) -> $plain {
                match self {
                    $(Self::$variant $(($value))? => $plain::$variant $(($value.load()))?),+
                }
            }
        }
    };
}

macro_rules! mirror_struct {
    ($stored:ident = $plain:ident { $($field:ident: $type:ty),+ $(,)? }) => {
        #[derive(Serialize, Deserialize)]
        pub(crate) struct $stored { $($field: $type),+ }

        impl StoredForm<$plain> for $stored {
            fn store(plain: &$plain) -> Self {
                let $plain { $($field),+ } = plain;
                Self { $($field: StoredForm::store($field)),+ }
            }
            fn load(self) -> $plain {
                $plain { $($field: self.$field.load()),+ }
            }
        }
    };
}

pub(super) use {mirror_enum, mirror_struct};
