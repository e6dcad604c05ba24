//! Which modules carry an adapter, and of which rank and scale: PEFT's rules.
//!
//! A module is named as in the model, `model.layers.3.self_attn.q_proj`.

use std::fmt;
use std::marker::PhantomData;

use regex::Regex;
use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::config::{LinearKind, LoraConfig};

/// PEFT's word for every linear layer but the output layer.
const ALL_LINEAR: &str = "all-linear";

/// Modules by name or pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Modules {
    /// Every linear layer of every block: `"all-linear"`.
    AllLinear,
    /// Each names the modules that are called so or end in a dot and it: `"q_proj"`,
    /// `"self_attn.q_proj"`, `"layers.3.mlp.up_proj"`.
    Names(Vec<String>),
    /// A regular expression that must match the whole name.
    Pattern(String),
}

impl Modules {
    /// No module.
    pub fn is_empty(&self) -> bool {
        matches!(self, Self::Names(names) if names.is_empty())
    }

    /// What the list means where layers are fused: all parts of a fused layer mean that layer.
    #[must_use]
    pub fn fused(&self) -> Self {
        let Self::Names(names) = self else { return self.clone() };
        let mut names = names.clone();
        for (whole, parts) in LinearKind::FUSED {
            let is_part = |name: &String| parts.iter().any(|part| part.as_str() == name.as_str());
            let named = parts.iter().filter(|part| names.iter().any(|n| n == part.as_str()));
            if named.count() == parts.len() {
                names.retain(|name| !is_part(name));
                names.push(whole.as_str().to_owned());
            }
        }
        Self::Names(names)
    }

    /// A text means what it means in PEFT, and plain names with commas between them are a list, so
    /// that an environment variable can hold one.
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
        struct Text;
        impl<'de> Visitor<'de> for Text {
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

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Modules, A::Error> {
                let mut names = Vec::<String>::new();
                while let Some(name) = seq.next_element()? {
                    names.push(name);
                }
                Ok(Modules::Names(names))
            }
        }
        deserializer.deserialize_any(Text)
    }
}

/// Values by pattern, in the order they are tried: a pattern is a regular expression that must
/// match a module's name from its beginning, or from behind one of its dots, to its end.
///
/// A TOML table has no order: there they are tried in the order of the alphabet. PEFT tries those of
/// a JSON object in the order they are written, and so does this.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patterns<T>(pub Vec<(String, T)>);

impl<T> Default for Patterns<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: Serialize> Serialize for Patterns<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (pattern, value) in &self.0 {
            map.serialize_entry(pattern, value)?;
        }
        map.end()
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Patterns<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Entries<T> {
            type Value = Patterns<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map")
            }

            fn visit_unit<E: de::Error>(self) -> Result<Patterns<T>, E> {
                Ok(Patterns::default())
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Patterns<T>, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Patterns(entries))
            }
        }
        deserializer.deserialize_any(Entries(PhantomData))
    }
}

/// Rank and scale of one module's adapter: `scale * B A`, A `[r, in]`, B `[out, r]`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModuleScale {
    /// Rank.
    pub r: usize,
    /// `alpha / r`, or `alpha / sqrt(r)` with rslora.
    pub scale: f64,
}

enum Matcher {
    All,
    Names(Vec<String>),
    Pattern(Regex),
}

impl Matcher {
    fn new(modules: &Modules) -> Result<Self, String> {
        Ok(match modules {
            Modules::AllLinear => Self::All,
            Modules::Names(names) => Self::Names(names.clone()),
            Modules::Pattern(pattern) => Self::Pattern(regex(&format!(r"\A(?:{pattern})\z"))?),
        })
    }
}

/// Whether a name of a list means a module.
fn names(name: &str, module: &str) -> bool {
    module.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

fn regex(pattern: &str) -> Result<Regex, String> {
    Regex::new(pattern).map_err(|e| {
        e.to_string().lines().last().unwrap_or("it is no regular expression").trim().to_owned()
    })
}

/// The settings of an adapter, ready to be asked.
pub struct ModuleRules {
    targets: Matcher,
    excluded: Matcher,
    layers: Vec<usize>,
    ranks: Vec<(Regex, usize)>,
    alphas: Vec<(Regex, f64)>,
    r: usize,
    alpha: f64,
    use_rslora: bool,
}

impl ModuleRules {
    /// Compiles the patterns of an adapter's settings.
    ///
    /// # Errors
    /// A pattern that is not a regular expression of the `regex` crate (which has no look-around and
    /// no back-references): its key and why.
    pub fn new(config: &LoraConfig) -> Result<Self, (&'static str, String)> {
        fn compiled<T: Copy>(patterns: &Patterns<T>) -> Result<Vec<(Regex, T)>, String> {
            let one = |(pattern, value): &(String, T)| {
                Ok((regex(&format!(r"\A(?:.*\.)?(?:{pattern})\z"))?, *value))
            };
            patterns.0.iter().map(one).collect()
        }
        Ok(Self {
            targets: Matcher::new(&config.target_modules).map_err(|e| ("target_modules", e))?,
            excluded: Matcher::new(&config.exclude_modules).map_err(|e| ("exclude_modules", e))?,
            layers: config.layers_to_transform.clone(),
            ranks: compiled(&config.rank_pattern).map_err(|e| ("rank_pattern", e))?,
            alphas: compiled(&config.alpha_pattern).map_err(|e| ("alpha_pattern", e))?,
            r: config.r,
            alpha: config.alpha,
            use_rslora: config.use_rslora,
        })
    }

    /// Rank and scale of the adapter on a linear layer; `None` where it carries none.
    pub fn factor(&self, module: &str) -> Option<ModuleScale> {
        let excluded = match &self.excluded {
            Matcher::All => true,
            Matcher::Names(list) => list.iter().any(|name| names(name, module)),
            Matcher::Pattern(pattern) => pattern.is_match(module),
        };
        let chosen = match &self.targets {
            Matcher::All => self.in_layers(module),
            // As in PEFT, a whole name stands whatever the layers.
            Matcher::Names(list) => {
                list.iter().any(|name| name == module)
                    || list.iter().any(|name| names(name, module)) && self.in_layers(module)
            }
            Matcher::Pattern(pattern) => pattern.is_match(module),
        };
        (chosen && !excluded).then(|| self.scaled(module))
    }

    /// Rank and scale that a module would have.
    pub fn scaled(&self, module: &str) -> ModuleScale {
        let r = first(&self.ranks, module).unwrap_or(self.r);
        let alpha = first(&self.alphas, module).unwrap_or(self.alpha);
        let divisor = if self.use_rslora { (r as f64).sqrt() } else { r as f64 };
        ModuleScale { r, scale: alpha / divisor }
    }

    /// The names of the target list that mean none of `modules`.
    pub fn unmatched<'a>(&'a self, modules: &[String]) -> Vec<&'a str> {
        let Matcher::Names(list) = &self.targets else { return Vec::new() };
        let none = |name: &&String| !modules.iter().any(|module| names(name, module));
        list.iter().filter(none).map(String::as_str).collect()
    }

    fn in_layers(&self, module: &str) -> bool {
        self.layers.is_empty() || layer(module).is_some_and(|layer| self.layers.contains(&layer))
    }
}

fn first<T: Copy>(patterns: &[(Regex, T)], module: &str) -> Option<T> {
    patterns.iter().find(|(pattern, _)| pattern.is_match(module)).map(|(_, value)| *value)
}

/// The first number that stands between dots, two names or more from the beginning.
fn layer(module: &str) -> Option<usize> {
    let parts: Vec<&str> = module.split('.').collect();
    let inner = parts.len().checked_sub(1)?;
    parts.get(2..inner)?.iter().find_map(|part| part.parse().ok())
}

#[cfg(test)]
mod tests;
