//! The macro that defines kinds: one declaration gives the parameters, as in [`hone_core::parameters!`], and their
//! documentation.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

pub use hone_core::config::section::Parameters as KindParameters;

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

/// Defines a kind: the struct of its parameters as in [`hone_core::parameters!`], then the fields of its
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
        hone_core::parameters! {
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
