//! The macros that define parameters and kinds: one declaration gives the struct, its reading, the checks of its
//! ranges and its documentation.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use hone_core::config::Checked;

/// What `parameters!` generates in addition to the struct.
pub trait KindParameters {
    /// Checks each parameter that has a range. The error's key is relative to the part.
    fn check_ranges(&self) -> Checked;

    /// The parameters as JSON.
    fn to_json(&self) -> serde_json::Result<Value>;
}

/// The documentation of a kind, which `define_kind!` implements.
pub trait Documented: KindParameters {
    /// The kind's documentation.
    fn entry() -> KindEntry
    where
        Self: Sized;
}

/// Documentation of a kind, as `hone rewards list` prints it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KindEntry {
    /// The `kind` in a route's reward.
    pub kind: &'static str,
    /// How a value is computed.
    pub formula: &'static str,
    /// The least and the greatest value, in words.
    pub range: &'static str,
    /// The parameters with their defaults; one without a default is required or may be absent.
    pub parameters: String,
    /// A weight to start from.
    pub typical_weight: &'static str,
    /// TOML of the required parameters, for tests and benchmarks.
    pub example: &'static str,
    /// The least and the greatest value of the example; infinite where there is no bound.
    pub bounds: [f64; 2],
    /// Whether scoring starts processes or calls other services: benchmarks and tests of random
    /// completions leave such kinds out.
    #[serde(skip)]
    pub calls_out: bool,
}

/// `key = default` in TOML, then the other names if there is a choice; the key alone for an optional parameter.
pub fn with_default<T: Serialize + DeserializeOwned>(key: &str, default: &T) -> String {
    let key = key.trim_start_matches("r#");
    let Ok(default) = toml::Value::try_from(default) else { return key.to_owned() };
    let shown = default.to_string();
    // serde's error names the choices in backticks.
    let error = T::deserialize(Value::from("?")).err().map(|error| error.to_string());
    let names = error.as_deref().and_then(|error| error.strip_prefix("unknown variant `?`"));
    let names = names.unwrap_or_default().split('`').skip(1).step_by(2);
    let others: Vec<String> =
        names.map(|name| format!("{name:?}")).filter(|name| *name != shown).collect();
    let choice =
        if others.is_empty() { String::new() } else { format!(" (or {})", others.join(", ")) };
    format!("{key} = {shown}{choice}")
}

/// A list of parameters as the documentation shows it.
pub fn listed(parameters: &[String]) -> String {
    if parameters.is_empty() { "none".to_owned() } else { parameters.join(", ") }
}

/// The checks that a declaration of parameters names, by reference.
pub mod ranges {
    use std::fmt::Display;

    use hone_core::config::{self, Checked, Problem, quoted};

    /// As [`config::between`].
    pub fn between<T>(key: &str, value: &T, low: T, high: T) -> Checked
    where
        T: PartialOrd + Display + Copy,
    {
        config::between(key, *value, low, high)
    }

    /// As [`config::at_least`].
    pub fn at_least(key: &str, value: &f64, low: f64) -> Checked {
        config::at_least(key, *value, low)
    }

    /// Finite and at most 0.
    pub fn at_most_zero(key: &str, value: &f64) -> Checked {
        if value.is_finite() && *value <= 0.0 {
            return Ok(());
        }
        Err(Problem::value(key, value, "a finite number, 0 or less"))
    }

    /// As [`config::texts`].
    pub fn texts(key: &str, list: &[String], most: usize) -> Checked {
        config::texts(key, list, most)
    }

    /// 1 to 16 different names of tags, of letters, digits, `_` and `-`.
    pub fn tags(key: &str, tags: &[String]) -> Checked {
        if !(1..=16).contains(&tags.len()) {
            let shown = format!("a list of {}", tags.len());
            return Err(Problem::value(key, shown, "a list of 1 to 16 names of tags"));
        }
        for (i, tag) in tags.iter().enumerate() {
            let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
            let fits = (1..=64).contains(&tag.len()) && tag.bytes().all(plain);
            if !fits || tags[..i].contains(tag) {
                let allowed = "1 to 64 letters, digits, '_' or '-', each tag once";
                return Err(Problem::value(&format!("{key}[{i}]"), quoted(tag), allowed));
            }
        }
        Ok(())
    }

    /// As [`texts`], or no text.
    pub fn no_texts_or(key: &str, list: &[String], most: usize) -> Checked {
        if list.is_empty() { Ok(()) } else { texts(key, list, most) }
    }
}

/// Defines a struct of parameters. A field is written `pub field: Type = default => check(bounds)`, the check being
/// one of [`ranges`]; one without a default is required. A secret, which is neither read nor written, comes last,
/// after a semicolon. Serde refuses unknown keys. If every field has a default, so has the struct.
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
                        None => $crate::kinds::define::parameters!(@absent $field $($default)?),
                    },)*
                    $($secret: Default::default(),)?
                })
            }
        }

        impl $crate::kinds::define::KindParameters for $name {
            fn check_ranges(&self) -> hone_core::config::Checked {
                $($($crate::kinds::define::ranges::$check(
                    stringify!($field), &self.$field, $($bound),*
                )?;)?)*
                Ok(())
            }

            fn to_json(&self) -> serde_json::Result<serde_json::Value> {
                serde_json::to_value(self)
            }
        }

        $crate::kinds::define::parameters!(
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
pub(crate) use parameters;

/// Defines a kind: the struct of its parameters as in [`parameters!`], then the fields of its
/// [`KindEntry`], beginning with `kind`; those left out suit a kind with values from 0 to 1 and without required
/// parameters. The field `parameters` is generated.
macro_rules! define_kind {
    (
        $(#[$meta:meta])*
        pub struct $name:ident {
            $($(#[$field_meta:meta])* pub $field:ident: $type:ty $(= $default:expr)?
                $(=> $check:ident($($bound:expr),*))?,)*
            $(; $(#[$secret_meta:meta])* pub $secret:ident: $secret_type:ty,)?
        }
        kind: $kind:literal,
        $($key:ident: $value:expr,)+
    ) => {
        $crate::kinds::define::parameters! {
            #[doc = concat!("Parameters of `kind = \"", $kind, "\"`.\n")]
            $(#[$meta])*
            pub struct $name {
                $($(#[$field_meta])* pub $field: $type $(= $default)?
                    $(=> $check($($bound),*))?,)*
                $(; $(#[$secret_meta])* pub $secret: $secret_type,)?
            }
        }

        impl $crate::kinds::define::Documented for $name {
            fn entry() -> $crate::kinds::define::KindEntry {
                let parameters: &[String] =
                    &[$($crate::kinds::define::define_kind!(@shown $field: $type $(= $default)?)),*];
                let mut entry = $crate::kinds::define::KindEntry {
                    kind: $kind,
                    formula: "",
                    range: "0 to 1",
                    parameters: $crate::kinds::define::listed(parameters),
                    typical_weight: "",
                    example: "",
                    bounds: [0.0, 1.0],
                    calls_out: false,
                };
                $(entry.$key = $value;)+
                entry
            }
        }
    };
    (@shown $field:ident: $type:ty = $default:expr) => {
        $crate::kinds::define::with_default::<$type>(stringify!($field), &$default)
    };
    (@shown $field:ident: $type:ty) => { stringify!($field).to_owned() };
}
pub(crate) use define_kind;
