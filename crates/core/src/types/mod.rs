//! Plain data of the learning loop: conversations, samples, rewards, groups and policy versions.
//!
//! These types do no I/O and round-trip through `serde`. Log-probabilities are natural logarithms
//! everywhere; times are Unix milliseconds.

mod chat;
mod endpoint;
mod grammar;
mod ids;
mod lineage;
mod rater;
mod records;
mod sampling;
mod spans;
mod time;
mod tools;

pub use chat::{Message, Role};
pub use endpoint::{ClientEndpoint, ResponseOptions};
pub use grammar::GrammarSpec;
pub use ids::{GroupId, InteractionId, PolicyVersion, RewardId, SampleId, TokenId};
pub use lineage::Lineage;
pub use rater::{concerns_rater, include_rater, key_of_rater, rater_id};
pub use records::{
    Continuation, Group, GroupState, Interaction, PolicyCheck, PolicyRecord, PolicyState,
    PromptSource, Rating, Reward, RewardSource, Sample, SampleOrigin, StepRecord, session_of,
};
pub use sampling::{EndRules, FinishReason, SamplingParams};
pub use spans::TokenSpan;
pub use time::{UnixMillis, now_ms};
pub use tools::{ChatOptions, Tool, ToolCall, ToolChoice};
