//! Settings that name modules, with PEFT's meaning and PEFT's forms in files.

use std::fmt;

use indexmap::IndexMap;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::spec::LinearKind;

/// PEFT's word for every linear layer except the output layer.
const ALL_LINEAR: &str = "all-linear";

/// Modules by name or pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Modules {
    /// Every linear layer of every block: `"all-linear"`.
    AllLinear,
    /// Each entry names the modules whose name equals it or ends in a dot and it: `"q_proj"`,
    /// `"self_attn.q_proj"`, `"layers.3.mlp.up_proj"`.
    Names(Vec<String>),
    /// A regular expression that must match the whole name.
    Pattern(String),
}

impl Modules {
    /// The list for a model with fused layers (Phi-3): the names of all parts of a fused layer become
    /// the name of the fused layer.
    #[must_use]
    pub(super) fn fused(&self) -> Self {
        let Self::Names(names) = self else { return self.clone() };
        let mut names = names.clone();
        for (whole, parts) in LinearKind::FUSED {
            if parts.iter().all(|part| names.iter().any(|name| name == part.as_str())) {
                names.retain(|name| !parts.iter().any(|part| part.as_str() == name));
                names.push(whole.as_str().to_owned());
            }
        }
        Self::Names(names)
    }

    /// A string as in PEFT. In addition, plain names separated by commas are a list, so that an
    /// environment variable can hold one.
    fn from_text(text: &str) -> Self {
        let plain = |c: char| c.is_ascii_alphanumeric() || "_.-, ".contains(c);
        if text.eq_ignore_ascii_case(ALL_LINEAR) {
            Self::AllLinear
        } else if text.chars().all(plain) {
            let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
            Self::Names(names.map(str::to_owned).collect())
        } else {
            Self::Pattern(text.to_owned())
        }
    }
}

impl<S: Into<String>, const N: usize> From<[S; N]> for Modules {
    fn from(names: [S; N]) -> Self {
        Self::Names(names.into_iter().map(Into::into).collect())
    }
}

impl Serialize for Modules {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::AllLinear => serializer.serialize_str(ALL_LINEAR),
            Self::Names(names) => names.serialize(serializer),
            Self::Pattern(pattern) => serializer.serialize_str(pattern),
        }
    }
}

impl<'de> Deserialize<'de> for Modules {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ModulesVisitor;
        impl<'de> Visitor<'de> for ModulesVisitor {
            type Value = Modules;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of names, a regular expression or \"all-linear\"")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Modules, E> {
                Ok(Modules::from_text(text))
            }

            fn visit_unit<E: de::Error>(self) -> Result<Modules, E> {
                Ok(Modules::Names(Vec::new()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Modules, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(seq)).map(Modules::Names)
            }
        }
        deserializer.deserialize_any(ModulesVisitor)
    }
}

/// Values by pattern: the value of a module is that of the first pattern that matches. A pattern is a
/// regular expression for a module's name from its beginning, or from after one of its dots, to its
/// end.
///
/// The order is the order in a JSON object, as in PEFT, and alphabetic for a TOML table, which has no
/// order.
pub type Patterns<T> = IndexMap<String, T>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_string_is_a_pattern_unless_it_is_plain_names() {
        let modules = |json: &str| serde_json::from_str::<Modules>(json).unwrap();
        assert_eq!(modules("\"ALL-linear\""), Modules::AllLinear);
        assert_eq!(modules("\"q_proj, v_proj\""), ["q_proj", "v_proj"].into());
        assert_eq!(modules("[\"q_proj\"]"), ["q_proj"].into());
        assert_eq!(modules("\".*q_proj\""), Modules::Pattern(".*q_proj".to_owned()));
        for json in ["\"all-linear\"", "[\"q_proj\"]", "\".*q_proj\""] {
            assert_eq!(serde_json::to_string(&modules(json)).unwrap(), json);
        }
    }
}
