//! One declaration of a value: its name, type, default, range and documentation.
//!
//! Sections of the configuration and parameters of rewards are declared with [`parameters!`](crate::parameters),
//! which gives the struct, its reading with refusal of unknown keys, its defaults and the checks of its ranges.

use serde::Serialize;
use serde_json::Value;

use super::Checked;

/// Parameters as JSON.
pub type ToJson = serde_json::Result<Value>;

/// The JSON of parameters.
///
/// # Errors
/// If a value cannot be written.
pub fn to_json<T: Serialize>(parameters: &T) -> ToJson {
    serde_json::to_value(parameters)
}

/// What `parameters!` generates in addition to the struct.
pub trait Parameters {
    /// Checks each parameter that has a range. The error's key is relative to the section or part.
    fn check_ranges(&self) -> Checked;

    /// [`Self::check_ranges`] with full keys: `section` ends with its dot.
    fn check_in(&self, section: &str) -> Checked {
        self.check_ranges().map_err(|problem| problem.prefixed(section))
    }

    /// The parameters as JSON.
    fn to_json(&self) -> ToJson;
}

/// The checks that a declaration of parameters names, by reference.
pub mod ranges {
    use std::fmt::Display;

    use crate::config::{self, Checked, quoted, require};
    pub use crate::config::{above, at_least, finite, texts};

    /// As [`config::between`].
    pub fn between<T>(key: &str, value: &T, low: T, high: T) -> Checked
    where
        T: PartialOrd + Display + Copy,
    {
        config::between(key, *value, low, high)
    }

    /// As [`config::below`].
    pub fn below<T: PartialOrd + Display + Copy>(key: &str, value: &T, low: T, high: T) -> Checked {
        config::below(key, *value, low, high)
    }

    /// Finite and at most 0.
    pub fn at_most_zero(key: &str, value: &f64) -> Checked {
        let fits = value.is_finite() && *value <= 0.0;
        require(fits, key, value, "a finite number, 0 or less")
    }

    /// 1 to 16 different names of tags, of letters, digits, `_` and `-`.
    pub fn tags(key: &str, tags: &[String]) -> Checked {
        let shown = format!("a list of {}", tags.len());
        let fits = (1..=16).contains(&tags.len());
        require(fits, key, shown, "a list of 1 to 16 names of tags")?;
        for (i, tag) in tags.iter().enumerate() {
            let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
            let fits = (1..=64).contains(&tag.len()) && tag.bytes().all(plain);
            let allowed = "1 to 64 letters, digits, '_' or '-', each tag once";
            require(
                fits && !tags[..i].contains(tag),
                &format!("{key}[{i}]"),
                quoted(tag),
                allowed,
            )?;
        }
        Ok(())
    }

    /// As [`texts`], or no text.
    pub fn no_texts_or(key: &str, list: &[String], most: usize) -> Checked {
        if list.is_empty() { Ok(()) } else { texts(key, list, most) }
    }

    /// Greater than 0 and at most 1.
    pub fn share(key: &str, value: &f64) -> Checked {
        require(*value > 0.0 && *value <= 1.0, key, value, "greater than 0 and at most 1")
    }

    /// A whole number of steps, or a share of them below 1, if there is a value.
    pub fn steps_or_share(key: &str, value: &Option<f64>) -> Checked {
        let steps = value.unwrap_or_default();
        let fits = steps >= 0.0 && (steps < 1.0 || steps.fract() == 0.0);
        require(fits, key, steps, "a number of steps, or a share of them below 1")
    }

    /// As [`finite`], if there is a value.
    pub fn finite_if_any(key: &str, value: &Option<f64>) -> Checked {
        value.map_or(Ok(()), |value| finite(key, value))
    }
}

/// Defines a struct of parameters. A field is written `pub field: Type = default => check(bounds)`, the check being
/// one of [`ranges`]; one without a default is required. A secret, which is neither read nor written, comes last,
/// after a semicolon. Serde refuses unknown keys. If every field has a default, so has the struct.
#[macro_export]
macro_rules! parameters {
    (
        $(#[$meta:meta])*
        pub struct $name:ident {
            $($(#[$field_meta:meta])* pub $field:ident: $type:ty $(= $default:expr)?
                $(=> $check:ident($($bound:expr),*))?,)*
            $(; $(#[$secret_meta:meta])* pub $secret:ident: $secret_type:ty,)?
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, serde::Serialize)]
        pub struct $name {
            $($(#[$field_meta])* pub $field: $type,)*
            $($(#[$secret_meta])* #[serde(skip)] pub $secret: $secret_type,)?
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                /// The same keys, each of which may be absent.
                #[derive(serde::Deserialize)]
                #[serde(deny_unknown_fields)]
                struct Keys {
                    $($(#[$field_meta])* $field: Option<$type>,)*
                }
                let Keys { $($field),* } = serde::Deserialize::deserialize(deserializer)?;
                Ok(Self {
                    $($field: match $field {
                        Some(value) => value,
                        None => $crate::parameters!(@absent $field $($default)?),
                    },)*
                    $($secret: Default::default(),)?
                })
            }
        }

        impl $crate::config::section::Parameters for $name {
            fn check_ranges(&self) -> $crate::config::Checked {
                $($($crate::config::section::ranges::$check(
                    stringify!($field), &self.$field, $($bound),*
                )?;)?)*
                Ok(())
            }

            fn to_json(&self) -> $crate::config::section::ToJson {
                $crate::config::section::to_json(self)
            }
        }

        $crate::parameters!(
            @all $name [$($secret)?] { $($field $(= $default)?,)* }
        );
    };
    (@absent $field:ident $default:expr) => { $default };
    (@absent $field:ident) => {
        return Err(serde::de::Error::missing_field(stringify!($field)))
    };
    (@all $name:ident [$($secret:ident)?] { $($field:ident = $default:expr,)* }) => {
        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* $($secret: Default::default(),)? }
            }
        }
    };
    (@all $name:ident [$($secret:ident)?] { $($field:ident $(= $default:expr)?,)* }) => {};
}
