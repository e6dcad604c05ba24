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
pub use format::format_soft::BetweenPairs;
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
    Feedback(external::feedback::FeedbackParams),
    ExactMatch(correctness::exact_match::ExactMatch),
    FuzzyMatch(correctness::fuzzy_match::FuzzyMatch),
    NumericMatch(correctness::numeric_match::NumericMatch),
    MathEqual(correctness::math_equal::MathEqual),
    ReasoningAccuracy(correctness::reasoning_accuracy::ReasoningAccuracy),
    MultipleChoice(correctness::multiple_choice::MultipleChoice),
    Contains(correctness::contains::Contains),
    Regex(format::regex::RegexMatch),
    FormatStrict(format::format_strict::FormatStrict),
    FormatSoft(format::format_soft::FormatSoft),
    FormatIncremental(format::format_incremental::FormatIncremental),
    ThinkFormat(format::think_format::ThinkFormat),
    ThinkAnswer(format::think_answer::ThinkAnswer),
    ThinkGraded(format::think_graded::ThinkGraded),
    JsonValid(format::json_valid::JsonValid),
    JsonSchema(format::json_schema::JsonSchema),
    IntegerAnswer(format::integer_answer::IntegerAnswer),
    Length(token_count::length::Length),
    LengthRange(token_count::length_range::LengthRange),
    CosineScaled(token_count::cosine_scaled::CosineScaled),
    SoftOverlong(token_count::soft_overlong::SoftOverlong),
    ReasoningSteps(style::reasoning_steps::ReasoningSteps),
    Connectors(style::connectors::Connectors),
    Citations(style::citations::Citations),
    RepetitionPenalty(style::repetition_penalty::RepetitionPenalty),
    Diversity(style::diversity::Diversity),
    ForbiddenPhrases(style::forbidden_phrases::ForbiddenPhrases),
    Language(style::language::Language),
    Keywords(correctness::keywords::Keywords),
    Ensemble(ensemble::Ensemble<RewardKind>),
    TextSimilarity(correctness::text_similarity::TextSimilarity),
    Code(external::code::CodeParams),
    CodeSyntax(external::code_syntax::CodeSyntax),
    Python(external::python::PythonParams),
    Script(external::script::ScriptParams),
    Grader(external::grader::GraderParams),
    Webhook(external::webhook::WebhookParams),
    Judge(external::judge::JudgeParams),
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
