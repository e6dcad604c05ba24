//! Plain data of the learning loop: conversations, samples, rewards, groups and policy versions.
//!
//! These types do no I/O and round-trip through `serde`. Log-probabilities are natural logarithms
//! everywhere; times are Unix milliseconds.

mod chat;
mod ids;
mod lineage;
mod records;
mod sampling;
mod time;
mod tools;

pub use chat::{Message, Role};
pub use ids::{GroupId, InteractionId, PolicyVersion, RewardId, SampleId, TokenId};
pub use lineage::Lineage;
pub use records::{
    Group, GroupState, Interaction, PolicyCheck, PolicyRecord, PolicyState, PromptSource, Rating,
    Reward, RewardSource, Sample, SampleOrigin, StepRecord,
};
pub use sampling::{FinishReason, SamplingParams};
pub use time::{UnixMillis, now_ms};
pub use tools::{ChatOptions, Tool, ToolCall, ToolChoice};
