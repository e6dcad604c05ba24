//! LoRA adapters: settings, weights, PEFT files, and merging into a base model.

mod check;
mod config;
pub mod merge;
mod module_matching;
mod modules;
pub mod peft;
pub mod weights;

pub use crate::spec::LinearKind;
pub use config::{BaseDtype, LoraConfig, LoraInit};
pub use module_matching::{ModuleMatcher, ModuleScale};
pub use modules::{Modules, Patterns};
