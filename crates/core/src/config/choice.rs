//! Choices with parameters of their own: a name, or a table of the kind and its parameters, such as `"cosine"` or
//! `{ kind = "cosine", steps = 200 }`. Parameters of other kinds are refused, because they would have no effect.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::str::FromStr;

use serde::de::{self, Deserializer, MapAccess, Visitor};
use serde::ser::{SerializeMap, Serializer};
use serde_json::Value;
use strum::VariantNames;

use super::Checked;

/// What [`choice!`](crate::choice) generates in addition to the struct.
pub trait ConfigChoice: Copy + From<Self::Kind> {
    /// The enum of the names.
    type Kind: FromStr + Into<&'static str> + VariantNames;

    /// The kind.
    fn kind(&self) -> Self::Kind;

    /// The names and places of the parameters of its kind.
    fn parameters(&mut self) -> Vec<(&'static str, &mut dyn Scalar)>;

    /// Checks the ranges of the parameters of its kind. `key` is the choice's own.
    ///
    /// # Errors
    /// The first value out of range.
    fn check(&self, key: &str) -> Checked;
}

/// The value of a parameter.
pub trait Scalar {
    /// The value in JSON.
    fn get(&self) -> Value;

    /// Sets the value; `false` if `value` does not have the parameter's type.
    fn set(&mut self, value: f64) -> bool;
}

impl Scalar for f64 {
    fn get(&self) -> Value {
        (*self).into()
    }

    fn set(&mut self, value: f64) -> bool {
        *self = value;
        true
    }
}

impl Scalar for u64 {
    fn get(&self) -> Value {
        (*self).into()
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked")]
    fn set(&mut self, value: f64) -> bool {
        let fits = value >= 0.0 && value.fract() == 0.0;
        if fits {
            *self = value as u64;
        }
        fits
    }
}

/// Writes the name, or a table with those parameters that differ from their defaults.
///
/// # Errors
/// Those of the serializer.
pub fn serialize<C: ConfigChoice, S: Serializer>(
    choice: &C,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let values = |mut choice: C| -> Vec<(&str, Value)> {
        choice.parameters().into_iter().map(|(name, place)| (name, place.get())).collect()
    };
    let defaults = values(C::from(choice.kind()));
    let changed = values(*choice).into_iter().filter(|value| !defaults.contains(value));
    let changed: Vec<_> = changed.collect();
    let kind: &'static str = choice.kind().into();
    if changed.is_empty() {
        return serializer.serialize_str(kind);
    }
    let mut map = serializer.serialize_map(None)?;
    map.serialize_entry("kind", kind)?;
    for (name, value) in changed {
        map.serialize_entry(name, &value)?;
    }
    map.end()
}

/// Reads a name or a table.
///
/// # Errors
/// For an unknown name, an unknown parameter, or a value of the wrong type.
pub fn deserialize<'de, C: ConfigChoice, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<C, D::Error> {
    deserializer.deserialize_any(ChoiceVisitor(PhantomData))
}

struct ChoiceVisitor<C>(PhantomData<C>);

impl<'de, C: ConfigChoice> Visitor<'de> for ChoiceVisitor<C> {
    type Value = C;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name, or a table of a kind and its parameters")
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<C, E> {
        name.parse::<C::Kind>()
            .map(C::from)
            .map_err(|_| E::unknown_variant(name, C::Kind::VARIANTS))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<C, A::Error> {
        let (mut kind, mut values) = (None::<String>, BTreeMap::<String, f64>::new());
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "kind" => kind = Some(map.next_value()?),
                _ => drop(values.insert(key, map.next_value()?)),
            }
        }
        let kind = kind.ok_or_else(|| de::Error::missing_field("kind"))?;
        let mut choice: C = self.visit_str(&kind)?;
        let mut known = vec!["kind"];
        for (name, place) in choice.parameters() {
            known.push(name);
            if values.remove(name).is_some_and(|value| !place.set(value)) {
                return Err(de::Error::custom(format!("{name} must be a whole number, 0 or more")));
            }
        }
        match values.keys().next() {
            None => Ok(choice),
            Some(key) => {
                let known = known.join("`, `");
                Err(de::Error::custom(format!("unknown field `{key}`, expected one of `{known}`")))
            }
        }
    }
}

/// Defines a [`ConfigChoice`](crate::config::choice::ConfigChoice): a struct of the kind, whose default is that of its
/// enum, and of the parameters of some kinds, each as in [`parameters!`](crate::parameters).
#[macro_export]
macro_rules! choice {
    (
        $(#[$meta:meta])*
        pub struct $name:ident of $kind:ident {
            $(for $($of:ident)|+ {
                $($(#[$field_meta:meta])* pub $field:ident: $type:ty = $default:expr
                    $(=> $check:ident($($bound:expr),*))?,)*
            })*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub struct $name {
            /// The kind.
            pub kind: $kind,
            $($($(#[$field_meta])* pub $field: $type,)*)*
        }

        impl Default for $name {
            fn default() -> Self {
                $kind::default().into()
            }
        }

        impl From<$kind> for $name {
            fn from(kind: $kind) -> Self {
                Self { kind, $($($field: $default,)*)* }
            }
        }

        impl $crate::config::choice::ConfigChoice for $name {
            type Kind = $kind;

            fn kind(&self) -> $kind {
                self.kind
            }

            fn parameters(&mut self) -> Vec<(&'static str, &mut dyn $crate::config::choice::Scalar)> {
                let mut all: Vec<(&'static str, &mut dyn $crate::config::choice::Scalar)> = Vec::new();
                $(if matches!(self.kind, $($kind::$of)|+) {
                    $(all.push((stringify!($field), &mut self.$field));)*
                })*
                all
            }

            fn check(&self, key: &str) -> $crate::config::Checked {
                $(if matches!(self.kind, $($kind::$of)|+) {
                    $($($crate::config::section::ranges::$check(
                        &format!("{key}.{}", stringify!($field)), &self.$field, $($bound),*
                    )?;)?)*
                })*
                Ok(())
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                $crate::config::choice::serialize(self, serializer)
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                $crate::config::choice::deserialize(deserializer)
            }
        }
    };
}
