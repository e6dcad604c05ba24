//! PEFT's module matching: which modules have an adapter, and of which rank and scale.
//!
//! A module's name is its name in the model, `model.layers.3.self_attn.q_proj`. Reference:
//! `check_target_module_exists` and `get_pattern_key` of PEFT (`peft.tuners.tuners_utils`,
//! `peft.utils.other`); `tests/reference/peft/peft_rules.json` holds results of PEFT, which a test of
//! [`super::peft`] compares.

use regex::Regex;
use serde::{Deserialize, Serialize};

use super::config::LoraConfig;
use super::{Modules, Patterns};

/// Rank and scale of one module's adapter: `scale * B A`, A `[r, in]`, B `[out, r]`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModuleScale {
    /// Rank.
    pub r: usize,
    /// `alpha / r`, or `alpha / sqrt(r)` with rslora.
    pub scale: f64,
}

/// Whether a name of a list names a module.
fn names(name: &str, module: &str) -> bool {
    module.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

fn regex(pattern: &str) -> Result<Regex, String> {
    // The last line of the message has the reason; those before it show the place.
    Regex::new(pattern).map_err(|e| {
        e.to_string().lines().last().unwrap_or("it is not a regular expression").trim().to_owned()
    })
}

/// The settings of an adapter with compiled patterns.
pub(super) struct ModuleMatcher {
    config: LoraConfig,
    targets: Regex,
    excluded: Regex,
    ranks: Vec<(Regex, usize)>,
    alphas: Vec<(Regex, f64)>,
}

impl ModuleMatcher {
    /// Compiles the patterns of an adapter's settings. The error is the key and the reason of a pattern that is
    /// not a regular expression of the `regex` crate, which has no look-around and no back-references.
    pub fn new(config: &LoraConfig) -> Result<Self, (&'static str, String)> {
        /// Matches a name from its beginning, or from after one of its dots, to its end.
        fn suffix(pattern: &str) -> Result<Regex, String> {
            regex(&format!(r"\A(?:.*\.)?(?:{pattern})\z"))
        }
        fn values<T: Copy>(patterns: &Patterns<T>) -> Result<Vec<(Regex, T)>, String> {
            patterns.iter().map(|(pattern, value)| Ok((suffix(pattern)?, *value))).collect()
        }
        let modules = |modules: &Modules| match modules {
            Modules::AllLinear => regex(""),
            Modules::Names(names) => {
                let names: Vec<String> = names.iter().map(|name| regex::escape(name)).collect();
                suffix(&names.join("|"))
            }
            Modules::Pattern(pattern) => regex(&format!(r"\A(?:{pattern})\z")),
        };
        Ok(Self {
            targets: modules(&config.target_modules).map_err(|e| ("target_modules", e))?,
            excluded: modules(&config.exclude_modules).map_err(|e| ("exclude_modules", e))?,
            ranks: values(&config.rank_pattern).map_err(|e| ("rank_pattern", e))?,
            alphas: values(&config.alpha_pattern).map_err(|e| ("alpha_pattern", e))?,
            config: config.clone(),
        })
    }

    /// Rank and scale of the adapter on a linear layer; `None` if the layer has no adapter.
    pub(super) fn matched(&self, module: &str) -> Option<ModuleScale> {
        // As in PEFT, patterns and whole names match in every layer.
        let any_layer = match &self.config.target_modules {
            Modules::AllLinear => false,
            Modules::Names(list) => list.iter().any(|name| name == module),
            Modules::Pattern(_) => true,
        };
        let is_target = self.targets.is_match(module) && (any_layer || self.in_layers(module));
        (is_target && !self.excluded.is_match(module)).then(|| self.scale(module))
    }

    /// Rank and scale of a module's adapter, whether or not the module is a target.
    pub fn scale(&self, module: &str) -> ModuleScale {
        let r = first(&self.ranks, module).unwrap_or(self.config.r);
        let alpha = first(&self.alphas, module).unwrap_or(self.config.alpha);
        let divisor = if self.config.use_rslora { (r as f64).sqrt() } else { r as f64 };
        ModuleScale { r, scale: alpha / divisor }
    }

    /// The names of the target list that name no module of `modules`.
    pub(super) fn unmatched<'a>(&'a self, modules: &[String]) -> Vec<&'a str> {
        let Modules::Names(list) = &self.config.target_modules else { return Vec::new() };
        let unmatched = |name: &&String| !modules.iter().any(|module| names(name, module));
        list.iter().filter(unmatched).map(String::as_str).collect()
    }

    fn in_layers(&self, module: &str) -> bool {
        let layers = &self.config.layers_to_transform;
        layers.is_empty() || layer(module).is_some_and(|layer| layers.contains(&layer))
    }
}

fn first<T: Copy>(patterns: &[(Regex, T)], module: &str) -> Option<T> {
    patterns.iter().find(|(pattern, _)| pattern.is_match(module)).map(|(_, value)| *value)
}

/// The layer's index in a name: the first number between dots after the first two parts.
fn layer(module: &str) -> Option<usize> {
    let parts: Vec<&str> = module.split('.').collect();
    let inner = parts.len().checked_sub(1)?;
    parts.get(2..inner)?.iter().find_map(|part| part.parse().ok())
}

#[cfg(test)]
mod tests;
