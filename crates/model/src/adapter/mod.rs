//! LoRA adapters: settings, weights, PEFT files, and merging into a base model.

mod config;
pub mod merge;
mod module_matching;
mod modules;
pub mod peft;
pub mod weights;

use hone_core::config::describe::{Problem, one_of};
use hone_core::config::{Checked, above, below, between};

pub use crate::spec::LinearKind;
pub use config::{BaseDtype, LoraConfig, LoraInit};
use module_matching::ModuleMatcher;
pub use module_matching::ModuleScale;
pub use modules::{Modules, Patterns};

// Checks of the adapter's settings that need no model.

impl LoraConfig {
    /// Checks every range.
    ///
    /// # Errors
    /// The first value out of range, with its full key.
    pub fn check(&self) -> Checked {
        between("train.lora.r", self.r, 1, 4096)?;
        above("train.lora.alpha", self.alpha, 0.0)?;
        below("train.lora.dropout", self.dropout, 0.0, 1.0)?;
        check_names("train.lora.target_modules", &self.target_modules)?;
        if self.target_modules == Modules::Names(Vec::new()) {
            let allowed = "\"all-linear\", a regular expression or at least one name";
            return Err(Problem::value("train.lora.target_modules", "[]", allowed));
        }
        check_names("train.lora.exclude_modules", &self.exclude_modules)?;
        if self.exclude_modules == Modules::AllLinear {
            let allowed = "less than every linear layer";
            return Err(Problem::value("train.lora.exclude_modules", "\"all-linear\"", allowed));
        }
        if matches!(self.target_modules, Modules::Pattern(_))
            && !self.layers_to_transform.is_empty()
        {
            let allowed =
                "[] where train.lora.target_modules is a regular expression: name the layers there";
            let value = format!("{:?}", self.layers_to_transform);
            return Err(Problem::value("train.lora.layers_to_transform", value, allowed));
        }
        for (pattern, r) in &self.rank_pattern {
            between(&format!("train.lora.rank_pattern.{pattern:?}"), *r, 1, 4096)?;
        }
        for (pattern, alpha) in &self.alpha_pattern {
            above(&format!("train.lora.alpha_pattern.{pattern:?}"), *alpha, 0.0)?;
        }
        let compiled = ModuleMatcher::new(self).map(drop);
        compiled.map_err(|(key, why)| Problem::new(format!("train.lora.{key}"), format!(": {why}")))
    }
}

/// Every name of a list ends in that of a linear layer, and is in the list once.
fn check_names(key: &str, modules: &Modules) -> Checked {
    let Modules::Names(names) = modules else { return Ok(()) };
    let fused = LinearKind::FUSED.map(|(kind, _)| kind);
    let known: Vec<&str> =
        LinearKind::ALL.into_iter().chain(fused).map(LinearKind::as_str).collect();
    for (i, name) in names.iter().enumerate() {
        let last = name.rsplit('.').next().unwrap_or(name);
        let allowed = if !known.contains(&last) {
            let known: Vec<String> = known.iter().map(|name| format!("{name:?}")).collect();
            format!("{}, or a name that ends in a dot and one of them", one_of(&known))
        } else if names[..i].contains(name) {
            "a name that is not in the list already".to_owned()
        } else {
            continue;
        };
        return Err(Problem::value(&format!("{key}[{i}]"), format!("{name:?}"), &allowed));
    }
    Ok(())
}
