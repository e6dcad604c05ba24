//! Settings of the adapter, `train.lora` in Hone's configuration.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{Modules, Patterns};

/// The type of the frozen base's weights in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BaseDtype {
    /// As in the model's files: 16-bit matrices are upcast to f32 when they are used.
    #[default]
    Auto,
    /// All weights are upcast to f32 at load time.
    Float32,
}

/// Initial values of A. B starts at zero, so that the policy starts as the base.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LoraInit {
    /// Uniform in `±1/sqrt(in_features)`: PEFT's default, `kaiming_uniform_(a=sqrt(5))`.
    #[default]
    Kaiming,
    /// Normal with standard deviation `1/r`: PEFT's `init_lora_weights="gaussian"`.
    Gaussian,
}

hone_core::parameters! {
    /// The adapter. Keys that PEFT also has mean the same as in PEFT.
    pub struct LoraConfig {
        /// Rank.
        pub r: usize = 16,
        /// The low-rank product is scaled by `alpha / r`.
        pub alpha: f64 = 32.0,
        /// Scale by `alpha / sqrt(r)` instead (Kalajdzievski 2023).
        pub use_rslora: bool = false,
        /// Dropout on the adapter's input while training.
        pub dropout: f32 = 0.0,
        /// Linear layers that have an adapter.
        pub target_modules: Modules = Modules::AllLinear,
        /// Exceptions from `target_modules`.
        pub exclude_modules: Modules = Modules::Names(Vec::new()),
        /// Indices of the decoder layers whose linear layers have an adapter; empty means all.
        pub layers_to_transform: Vec<usize> = Vec::new(),
        /// Ranks other than `r`, by pattern.
        pub rank_pattern: Patterns<usize> = Patterns::default(),
        /// Alphas other than `alpha`, by pattern.
        pub alpha_pattern: Patterns<f64> = Patterns::default(),
        /// Initial values of A.
        pub init_weights: LoraInit = LoraInit::default(),
        /// A PEFT directory to start from instead of fresh weights; empty means fresh weights.
        pub init_adapter: PathBuf = PathBuf::new(),
    }
}

impl LoraConfig {
    /// The settings of a run that starts from an adapter with the settings `found`: rank, alpha and
    /// modules are the adapter's, `dropout` and the initialization are from `self`.
    ///
    /// # Errors
    /// A key that is neither its default nor the adapter's value: `(key, own value, adapter's value)`.
    pub fn adopt(&self, found: Self) -> Result<Self, (&'static str, String, String)> {
        let default = Self::default();
        macro_rules! agree {
            ($($key:ident),*) => {$(
                if self.$key != default.$key && self.$key != found.$key {
                    let text = |config: &Self| toml_text(&config.$key);
                    return Err((stringify!($key), text(self), text(&found)));
                }
            )*};
        }
        agree!(r, alpha, use_rslora, exclude_modules, layers_to_transform);
        agree!(target_modules, rank_pattern, alpha_pattern);
        Ok(Self {
            dropout: self.dropout,
            init_weights: self.init_weights,
            init_adapter: self.init_adapter.clone(),
            ..found
        })
    }
}

fn toml_text<T: Serialize>(value: &T) -> String {
    toml::Value::try_from(value).map_or_else(|e| e.to_string(), |value| value.to_string())
}
