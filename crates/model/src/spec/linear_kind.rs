//! The linear layers of a decoder block.

/// A linear layer of a decoder block, by its Hugging Face name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
    /// The seven layers of most families.
    pub const ALL: [Self; 7] = [
        Self::QProj,
        Self::KProj,
        Self::VProj,
        Self::OProj,
        Self::GateProj,
        Self::UpProj,
        Self::DownProj,
    ];

    /// The layers that Phi-3 fuses, with their parts.
    pub(crate) const FUSED: [(Self, &'static [Self]); 2] = [
        (Self::QkvProj, &[Self::QProj, Self::KProj, Self::VProj]),
        (Self::GateUpProj, &[Self::GateProj, Self::UpProj]),
    ];

    /// The module it is in, and its name there.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::QProj => ("self_attn", "q_proj"),
            Self::KProj => ("self_attn", "k_proj"),
            Self::VProj => ("self_attn", "v_proj"),
            Self::OProj => ("self_attn", "o_proj"),
            Self::GateProj => ("mlp", "gate_proj"),
            Self::UpProj => ("mlp", "up_proj"),
            Self::DownProj => ("mlp", "down_proj"),
            Self::QkvProj => ("self_attn", "qkv_proj"),
            Self::GateUpProj => ("mlp", "gate_up_proj"),
        }
    }

    /// `self_attn` or `mlp`.
    pub fn parent(self) -> &'static str {
        self.names().0
    }

    /// The name without its parent: `q_proj` and so on, as in PEFT's `target_modules`.
    pub fn as_str(self) -> &'static str {
        self.names().1
    }

    /// The name in a model: `model.layers.3.self_attn.q_proj`.
    pub fn module(self, layer: usize) -> String {
        let (parent, name) = self.names();
        format!("model.layers.{layer}.{parent}.{name}")
    }
}
