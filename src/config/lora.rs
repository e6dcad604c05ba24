//! Every key of the adapter.

use serde::{Deserialize, Serialize};

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
}

/// The adapter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoraConfig {
    /// Rank.
    pub r: usize,
    /// The delta is scaled by `alpha / r`.
    pub alpha: f64,
    /// Dropout on the adapter's input while training.
    pub dropout: f32,
    /// Which linears carry an adapter.
    pub target_modules: Vec<LinearKind>,
}

impl Default for LoraConfig {
    fn default() -> Self {
        Self { r: 16, alpha: 32.0, dropout: 0.0, target_modules: LinearKind::ALL.to_vec() }
    }
}
