//! LoRA adapters: their settings, weights, files, and merging into a base model.

mod config;
pub mod merge;
pub mod peft;
mod rules;
pub mod weights;

pub use config::{BaseDtype, LinearKind, LoraConfig, LoraInit};
pub use rules::{ModuleRules, ModuleScale, Modules, Patterns};
