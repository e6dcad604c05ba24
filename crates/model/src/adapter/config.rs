//! Every key of the adapter.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use hone_core::config::describe::{Problem, one_of};
use hone_core::config::range::{Checked, above, below, between};

use super::rules::{ModuleRules, Modules, Patterns};

/// Linear layers of a decoder block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinearKind {
    /// `self_attn.q_proj`
    QProj,
    /// `self_attn.k_proj`
    KProj,
    /// `self_attn.v_proj`
    VProj,
    /// `self_attn.o_proj`
    OProj,
    /// `mlp.gate_proj`
    GateProj,
    /// `mlp.up_proj`
    UpProj,
    /// `mlp.down_proj`
    DownProj,
    /// `self_attn.qkv_proj`: q, k and v as one layer (Phi-3).
    QkvProj,
    /// `mlp.gate_up_proj`: gate and up as one layer (Phi-3).
    GateUpProj,
}

impl LinearKind {
    /// The seven of most families, and the default of `target_modules`. Where layers are fused
    /// (Phi-3), naming all parts of a fused layer means the fused layer.
    pub const ALL: [Self; 7] = [
        Self::QProj,
        Self::KProj,
        Self::VProj,
        Self::OProj,
        Self::GateProj,
        Self::UpProj,
        Self::DownProj,
    ];

    /// Every name that some family has.
    pub const EVERY: [Self; 9] = [
        Self::QProj,
        Self::KProj,
        Self::VProj,
        Self::OProj,
        Self::GateProj,
        Self::UpProj,
        Self::DownProj,
        Self::QkvProj,
        Self::GateUpProj,
    ];

    /// `q_proj` and so on, as PEFT's `target_modules` has it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::QProj => "q_proj",
            Self::KProj => "k_proj",
            Self::VProj => "v_proj",
            Self::OProj => "o_proj",
            Self::GateProj => "gate_proj",
            Self::UpProj => "up_proj",
            Self::DownProj => "down_proj",
            Self::QkvProj => "qkv_proj",
            Self::GateUpProj => "gate_up_proj",
        }
    }

    /// `self_attn` or `mlp`.
    pub fn parent(self) -> &'static str {
        match self {
            Self::QProj | Self::KProj | Self::VProj | Self::OProj | Self::QkvProj => "self_attn",
            Self::GateProj | Self::UpProj | Self::DownProj | Self::GateUpProj => "mlp",
        }
    }

    /// Layers that some families have as one, with their parts.
    pub const FUSED: [(Self, &'static [Self]); 2] = [
        (Self::QkvProj, &[Self::QProj, Self::KProj, Self::VProj]),
        (Self::GateUpProj, &[Self::GateProj, Self::UpProj]),
    ];
}

/// How the frozen base lies in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BaseDtype {
    /// As in the model's files: 16-bit matrices are widened to f32 as each is used.
    #[default]
    Auto,
    /// All widened at the start.
    Float32,
}

/// What A starts from; B starts at zero, so that the policy starts as the base.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LoraInit {
    /// Uniform in `±1/sqrt(in_features)`: PEFT's default, `kaiming_uniform_(a=sqrt(5))`.
    #[default]
    Kaiming,
    /// Normal with standard deviation `1/r`: PEFT's `init_lora_weights="gaussian"`.
    Gaussian,
}

/// The adapter. Keys that PEFT has too mean what they mean there.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoraConfig {
    /// Rank.
    pub r: usize,
    /// The delta is scaled by `alpha / r`.
    pub alpha: f64,
    /// Scale by `alpha / sqrt(r)` instead (Kalajdzievski 2023).
    pub use_rslora: bool,
    /// Dropout on the adapter's input while training.
    pub dropout: f32,
    /// Which linears carry an adapter.
    pub target_modules: Modules,
    /// Which of those do not.
    pub exclude_modules: Modules,
    /// Layers whose linears carry an adapter; empty means all.
    pub layers_to_transform: Vec<usize>,
    /// Ranks other than `r`, by pattern.
    pub rank_pattern: Patterns<usize>,
    /// Alphas other than `alpha`, by pattern.
    pub alpha_pattern: Patterns<f64>,
    /// What A starts from.
    pub init_weights: LoraInit,
    /// A PEFT directory to start from in place of fresh weights; empty means fresh ones.
    pub init_adapter: PathBuf,
}

impl Default for LoraConfig {
    fn default() -> Self {
        Self {
            r: 16,
            alpha: 32.0,
            use_rslora: false,
            dropout: 0.0,
            target_modules: Modules::AllLinear,
            exclude_modules: Modules::Names(Vec::new()),
            layers_to_transform: Vec::new(),
            rank_pattern: Patterns::default(),
            alpha_pattern: Patterns::default(),
            init_weights: LoraInit::default(),
            init_adapter: PathBuf::new(),
        }
    }
}

impl LoraConfig {
    /// These settings with an adapter's shape: what a run that starts from the adapter trains with.
    /// The adapter decides rank, alpha and modules; `dropout` and the starting point stay.
    ///
    /// # Errors
    /// A key here that is neither its default nor what the adapter has: `(key, own, found)`.
    pub fn adopt(&self, found: Self) -> Result<Self, (&'static str, String, String)> {
        let default = Self::default();
        macro_rules! agree {
            ($($key:ident),*) => {$(
                if self.$key != default.$key && self.$key != found.$key {
                    let shown = |config: &Self| shown(&config.$key);
                    return Err((stringify!($key), shown(self), shown(&found)));
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

    /// Checks every range.
    ///
    /// # Errors
    /// The first value out of range, with its full key.
    pub fn check(&self) -> Checked {
        between("train.lora.r", self.r, 1, 4096)?;
        above("train.lora.alpha", self.alpha, 0.0)?;
        below("train.lora.dropout", self.dropout, 0.0, 1.0)?;
        named("train.lora.target_modules", &self.target_modules)?;
        if self.target_modules.is_empty() {
            let allowed = "\"all-linear\", a regular expression or at least one name";
            return Err(Problem::value("train.lora.target_modules", "[]", allowed));
        }
        named("train.lora.exclude_modules", &self.exclude_modules)?;
        if self.exclude_modules == Modules::AllLinear {
            let allowed = "less than every linear layer";
            return Err(Problem::value("train.lora.exclude_modules", "\"all-linear\"", allowed));
        }
        if matches!(self.target_modules, Modules::Pattern(_))
            && !self.layers_to_transform.is_empty()
        {
            let allowed =
                "[] where train.lora.target_modules is a regular expression: name the layers there";
            let shown = format!("{:?}", self.layers_to_transform);
            return Err(Problem::value("train.lora.layers_to_transform", shown, allowed));
        }
        for (pattern, r) in &self.rank_pattern.0 {
            between(&format!("train.lora.rank_pattern.{pattern:?}"), *r, 1, 4096)?;
        }
        for (pattern, alpha) in &self.alpha_pattern.0 {
            above(&format!("train.lora.alpha_pattern.{pattern:?}"), *alpha, 0.0)?;
        }
        let compiled = ModuleRules::new(self).map(|_| ());
        compiled.map_err(|(key, why)| Problem::new(format!("train.lora.{key}"), format!(": {why}")))
    }
}

fn shown<T: Serialize>(value: &T) -> String {
    toml::Value::try_from(value).map_or_else(|e| e.to_string(), |value| value.to_string())
}

/// Every name of a list ends in a linear layer's and stands there once.
fn named(key: &str, modules: &Modules) -> Checked {
    let Modules::Names(names) = modules else { return Ok(()) };
    for (i, name) in names.iter().enumerate() {
        let last = name.rsplit('.').next().unwrap_or(name);
        let known = LinearKind::EVERY.map(LinearKind::as_str);
        let allowed = if !known.contains(&last) {
            let known = known.map(|name| format!("{name:?}"));
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
