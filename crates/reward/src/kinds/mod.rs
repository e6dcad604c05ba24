//! Every kind of reward part: one file per kind, and one list.
//!
//! A kind's file has its parameters with their defaults, its documentation, and the trait [`Kind`]
//! for its check and its function. The list below generates [`RewardKind`], the dispatch and
//! [`catalogue`]. To add a kind, write its file, declare it in its folder's `mod.rs` and add a line
//! to the list.
//!
//! Functions are near linear in the completion's length: patterns are compiled by the `regex`
//! crate, which matches in linear time, so no completion can stall scoring. A sample without
//! the reference that its kind needs has no value.

mod answer;
pub mod correctness;
pub(crate) mod define;
mod ensemble;
pub mod external;
pub(crate) mod flat;
pub mod format;
mod kind;
mod prelude;
pub mod random_text;
mod shaping;
pub mod style;
pub mod token_count;

use std::ops::{Deref, DerefMut};

use serde_json::Value;
use toml::Table;

pub use correctness::fuzzy_match::FuzzyMethod;
pub use ensemble::{EnsembleMember, EnsembleMethod};
pub use format::BetweenPairs;
pub use kind::{AnyKind, BuildContext, Built, Documented, Kind, KindEntry};
pub use shaping::Shaping;
pub use token_count::LengthUnit;

/// Generates [`RewardKind`] and its dispatch from `Variant(path::of::Parameters)`.
macro_rules! kinds {
    ($($variant:ident($($path:ident)::+ $(<$member:ident>)?),)+) => {
        $(pub use $($path)::+;)+

        /// A kind of reward part with its parameters; dereferences to the kind.
        #[derive(Clone, Debug, PartialEq)]
        pub enum RewardKind {
            $(
                /// The kind with the variant's name in snake case.
                $variant($($path)::+ $(<$member>)?),
            )+
        }

        impl AnyKind for RewardKind {
            fn entries() -> Vec<KindEntry> {
                vec![$(<$($path)::+ $(<$member>)? as Documented>::entry(),)+]
            }

            fn read(kind: &str, parameters: Table) -> Result<Self, String> {
                $(
                    if kind == <$($path)::+ $(<$member>)? as Documented>::entry().kind {
                        return flat::read(parameters).map(Self::$variant);
                    }
                )+
                Err(format!("kind is {kind:?}, which is not in the list"))
            }

            fn parameters(&self) -> serde_json::Result<Value> {
                match self {
                    $(Self::$variant(parameters) => serde_json::to_value(parameters),)+
                }
            }

            fn name(&self) -> &'static str {
                match self {
                    $(Self::$variant(_) => <$($path)::+ $(<$member>)? as Documented>::entry().kind,)+
                }
            }
        }

        impl Deref for RewardKind {
            type Target = dyn Kind;

            fn deref(&self) -> &Self::Target {
                match self {
                    $(Self::$variant(kind) => kind,)+
                }
            }
        }

        impl DerefMut for RewardKind {
            fn deref_mut(&mut self) -> &mut Self::Target {
                match self {
                    $(Self::$variant(kind) => kind,)+
                }
            }
        }
    };
}

kinds! {
    Feedback(external::FeedbackParams),
    ExactMatch(correctness::ExactMatch),
    FuzzyMatch(correctness::fuzzy_match::FuzzyMatch),
    NumericMatch(correctness::NumericMatch),
    MathEqual(correctness::MathEqual),
    ReasoningAccuracy(correctness::ReasoningAccuracy),
    MultipleChoice(correctness::multiple_choice::MultipleChoice),
    Contains(correctness::contains::Contains),
    Regex(format::RegexMatch),
    FormatStrict(format::FormatStrict),
    FormatSoft(format::FormatSoft),
    FormatIncremental(format::FormatIncremental),
    ThinkFormat(format::ThinkFormat),
    ThinkAnswer(format::ThinkAnswer),
    ThinkGraded(format::ThinkGraded),
    JsonValid(format::JsonValid),
    JsonSchema(format::json_schema::JsonSchema),
    IntegerAnswer(format::IntegerAnswer),
    Length(token_count::Length),
    LengthRange(token_count::LengthRange),
    CosineScaled(token_count::CosineScaled),
    SoftOverlong(token_count::SoftOverlong),
    ReasoningSteps(style::ReasoningSteps),
    Connectors(style::connectors::Connectors),
    Citations(style::citations::Citations),
    RepetitionPenalty(style::RepetitionPenalty),
    Diversity(style::Diversity),
    ForbiddenPhrases(style::ForbiddenPhrases),
    Language(style::Language),
    Keywords(correctness::Keywords),
    Ensemble(ensemble::Ensemble<RewardKind>),
    TextSimilarity(correctness::TextSimilarity),
    Code(external::CodeParams),
    CodeSyntax(external::CodeSyntax),
    Python(external::PythonParams),
    Script(external::ScriptParams),
    Grader(external::grader::GraderParams),
    Webhook(external::WebhookParams),
    Judge(external::JudgeParams),
}

impl RewardKind {
    /// The kind's name in TOML.
    pub fn name(&self) -> &'static str {
        AnyKind::name(self)
    }
}

/// The documentation of every kind, in the order of the list.
pub fn catalogue() -> Vec<KindEntry> {
    RewardKind::entries()
}

#[cfg(test)]
pub(crate) mod tests;
