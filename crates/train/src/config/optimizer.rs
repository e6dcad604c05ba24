//! Choices of the optimizer, the schedule and the memory.

use serde::{Deserialize, Serialize};

/// How the learning rate changes after warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleKind {
    /// Stays at the peak.
    #[default]
    Constant,
    /// Falls linearly to 0 at the schedule's end.
    Linear,
    /// Falls to `min_learning_rate` at the schedule's end along half a cosine.
    Cosine,
    /// Falls to `min_learning_rate` at the schedule's end with the power `schedule_power`.
    Polynomial,
    /// Falls with the inverse square root of the steps, without an end.
    InverseSqrt,
}

/// The optimizer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OptimizerKind {
    /// AdamW with moments in 32 bits.
    #[default]
    #[serde(rename = "adamw")]
    AdamW,
    /// AdamW with moments in 8 bits (Dettmers et al. 2021): a quarter of their memory.
    #[serde(rename = "adamw_8bit")]
    AdamW8bit,
}

/// Which layers the backward pass recomputes instead of keeping their activations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// The first layers, as many as needed to keep at most 768 MiB of activations.
    #[default]
    Auto,
    /// All layers: least memory, about a third more time.
    Always,
    /// No layer.
    Never,
}
