//! The macros that define parameters and kinds.

/// Defines a struct of parameters. A field is written `pub field: Type = default`; one without a
/// default is required. Serde refuses unknown keys. If every field has a default, so has the struct.
macro_rules! parameters {
    (
        $(#[$meta:meta])*
        pub struct $name:ident {
            $($(#[$field_meta:meta])* pub $field:ident: $type:ty $(= $default:expr)?,)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, serde::Serialize)]
        pub struct $name {
            $($(#[$field_meta])* pub $field: $type,)*
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
                })
            }
        }

        $crate::kinds::define::parameters!(@all $name { $($field $(= $default)?,)* });
    };
    (@absent $field:ident $default:expr) => { $default };
    (@absent $field:ident) => {
        return Err(serde::de::Error::missing_field(stringify!($field)))
    };
    (@all $name:ident { $($field:ident = $default:expr,)* }) => {
        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)* }
            }
        }
    };
    (@all $name:ident { $($field:ident $(= $default:expr)?,)* }) => {};
}
pub(crate) use parameters;

/// Defines a kind: the struct of its parameters as in [`parameters!`], then the fields of its
/// [`KindEntry`](super::KindEntry), beginning with `kind`. The field `parameters` is generated.
macro_rules! define_kind {
    (
        $(#[$meta:meta])*
        pub struct $name:ident {
            $($(#[$field_meta:meta])* pub $field:ident: $type:ty $(= $default:expr)?,)*
        }
        kind: $kind:literal,
        $($key:ident: $value:expr,)+
    ) => {
        $crate::kinds::define::parameters! {
            #[doc = concat!("Parameters of `kind = \"", $kind, "\"`.\n")]
            $(#[$meta])*
            pub struct $name {
                $($(#[$field_meta])* pub $field: $type $(= $default)?,)*
            }
        }

        impl $crate::kinds::kind::Documented for $name {
            fn entry() -> $crate::kinds::kind::KindEntry {
                let parameters: &[String] =
                    &[$($crate::kinds::define::define_kind!(@shown $field: $type $(= $default)?)),*];
                $crate::kinds::kind::KindEntry {
                    kind: $kind,
                    parameters: $crate::kinds::kind::listed(parameters),
                    $($key: $value,)+
                    ..$crate::kinds::kind::KindEntry::default()
                }
            }
        }
    };
    (@shown $field:ident: $type:ty = $default:expr) => {
        $crate::kinds::kind::with_default::<$type>(stringify!($field), &$default)
    };
    (@shown $field:ident: $type:ty) => { stringify!($field).to_owned() };
}
pub(super) use define_kind;
