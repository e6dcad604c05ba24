//! Every kind of reward part: one file per family of kinds, and one list.
//!
//! A kind has its parameters with their defaults and ranges, its documentation, and the trait [`Kind`] for its
//! function and for checks that concern several parameters. The list below generates [`RewardKind`], the dispatch and
//! [`catalogue`]. To add a kind, write it in the file of its family and add it to the list.
//!
//! Functions are near linear in the completion's length: patterns are compiled by the `regex`
//! crate, which matches in linear time, so no completion can stall scoring. A sample without
//! the reference that its kind needs has no value.

mod answer;
pub mod correctness;
pub(crate) mod define;
pub mod external;
pub mod format;
mod kind;
pub mod learned;
pub mod random_text;
mod shaping;
pub mod style;
pub mod token_count;

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use async_trait::async_trait;
use serde::de::DeserializeOwned;
use serde::ser::{Error, SerializeMap};
use serde::{Deserialize, Serialize, Serializer};
use toml::{Table, Value};

use hone_core::config::describe::{describe, one_of};
use hone_core::config::{Checked, Problem, quoted};

use crate::reward_fn::{RewardFn, ScoreInput, score_guarded};
use define::define_kind;

pub use correctness::multiple_choice::MultipleChoice;
pub use correctness::*;
pub use define::{Documented, KindEntry, KindParameters};
pub use external::*;
pub use format::json_schema::JsonSchema;
pub use format::*;
pub use kind::{BuildContext, Built, Kind};
pub use learned::{LearnedParams, LearnedPart, TokenScorer};
pub use shaping::Shaping;
pub use style::*;
pub use token_count::*;

/// The names that most kinds use.
mod prelude {
    pub(super) use hone_core::config::{Checked, Problem, quoted};

    pub(super) use super::answer::{AnswerFinder, answer_key, answer_pattern};
    pub(super) use super::define::{KindParameters, define_kind};
    pub(super) use super::kind::{
        BuildContext, Built, Kind, compared, listed_or_referenced, per_sample, share_of_target,
    };
    pub(super) use crate::reward_fn::indicator;
}

/// Generates [`RewardKind`] and its dispatch from `Variant(Parameters)`.
macro_rules! kinds {
    ($($variant:ident($parameters:ident),)+) => {
        /// A kind of reward part with its parameters; dereferences to the kind.
        #[derive(Clone, Debug, PartialEq)]
        pub enum RewardKind {
            $(
                /// The kind with the variant's name in snake case.
                $variant($parameters),
            )+
        }

        impl RewardKind {
            /// The kind's name in TOML.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$variant(_) => $parameters::entry().kind,)+
                }
            }

            /// Reads the parameters of the kind named `kind`. The error is a sentence that begins with the key.
            pub(crate) fn read(kind: &str, parameters: Table) -> Result<Self, String> {
                $(
                    if kind == $parameters::entry().kind {
                        return read(parameters).map(Self::$variant);
                    }
                )+
                Err(format!("kind is {kind:?}, which is not in the list"))
            }
        }

        /// The documentation of every kind, in the order of the list.
        pub fn catalogue() -> Vec<KindEntry> {
            vec![$($parameters::entry(),)+]
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
    Feedback(FeedbackParams),
    ExactMatch(ExactMatch),
    FuzzyMatch(FuzzyMatch),
    NumericMatch(NumericMatch),
    MathEqual(MathEqual),
    ReasoningAccuracy(ReasoningAccuracy),
    MultipleChoice(MultipleChoice),
    Contains(Contains),
    Regex(RegexMatch),
    FormatStrict(FormatStrict),
    FormatSoft(FormatSoft),
    FormatIncremental(FormatIncremental),
    ThinkFormat(ThinkFormat),
    ThinkAnswer(ThinkAnswer),
    ThinkGraded(ThinkGraded),
    JsonValid(JsonValid),
    JsonSchema(JsonSchema),
    IntegerAnswer(IntegerAnswer),
    Length(Length),
    LengthRange(LengthRange),
    CosineScaled(CosineScaled),
    SoftOverlong(SoftOverlong),
    ReasoningSteps(ReasoningSteps),
    Connectors(Connectors),
    Citations(Citations),
    RepetitionPenalty(RepetitionPenalty),
    Diversity(Diversity),
    ForbiddenPhrases(ForbiddenPhrases),
    Language(Language),
    Keywords(Keywords),
    Ensemble(Ensemble),
    TextSimilarity(TextSimilarity),
    Code(CodeParams),
    CodeSyntax(CodeSyntax),
    Python(PythonParams),
    Grader(GraderParams),
    Webhook(WebhookParams),
    Judge(JudgeParams),
    Learned(LearnedParams),
}

// The flat TOML form of a part: `kind` and the kind's parameters in one table with the part's other keys.
// `#[serde(flatten)]` would accept unknown keys and lose the key of a wrong value. Therefore the table is split by
// key, and each piece is read by itself.

/// Reads a table. The error is a sentence that begins with the key.
pub(crate) fn read<T: DeserializeOwned>(table: Table) -> Result<T, String> {
    let value = Value::Table(table);
    serde_path_to_error::deserialize(value.clone())
        .map_err(|e| describe(e.path(), e.inner().message(), &value).sentence())
}

/// Moves these keys into a table of their own.
pub(crate) fn split_off(table: &mut Table, keys: &[&str]) -> Table {
    keys.iter().filter_map(|key| table.remove_entry(*key)).collect()
}

/// Removes `kind`, which must be a name in the list of kinds.
pub(crate) fn take_kind(table: &mut Table) -> Result<String, String> {
    let names = || catalogue().into_iter().map(|entry| entry.kind);
    let allowed = || one_of(&names().map(quoted).collect::<Vec<_>>());
    match table.remove("kind") {
        Some(Value::String(kind)) if names().any(|name| name == kind) => Ok(kind),
        Some(other) => Err(format!("kind is {other}: it must be {}", allowed())),
        None => Err(format!("kind is missing: it must be {}", allowed())),
    }
}

/// Reads a table of the keys of [`Shaping`] and the parameters of `kind`.
pub(crate) fn read_kind(kind: &str, mut table: Table) -> Result<(Shaping, RewardKind), String> {
    let shape = read(split_off(&mut table, &Shaping::KEYS))?;
    Ok((shape, RewardKind::read(kind, table)?))
}

/// Writes the shape where it is not the default, then the kind and its parameters.
pub(crate) fn write_kind<M: SerializeMap>(
    map: &mut M,
    shape: &Shaping,
    kind: &RewardKind,
) -> Result<(), M::Error> {
    let mut write = |value: serde_json::Result<serde_json::Value>| {
        let value = value.map_err(M::Error::custom)?;
        let mut entries = value.as_object().into_iter().flatten();
        entries.try_for_each(|(key, value)| map.serialize_entry(key, value))
    };
    if !shape.is_default() {
        write(serde_json::to_value(shape))?;
    }
    write(Ok(serde_json::json!({ "kind": kind.name() })))?;
    write(kind.to_json())
}

/// How the members' values become one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EnsembleMethod {
    /// The mean.
    #[default]
    Mean,
    /// The least value.
    Min,
    /// The median; of an even number of values the mean of the middle two.
    Median,
    /// The greatest value.
    Max,
}

define_kind! {
    pub struct Ensemble {
        /// How the members' values become one.
        pub how: EnsembleMethod = EnsembleMethod::Mean,
        /// The members (`[[route.reward.of]]`).
        pub of: Vec<EnsembleMember>,
    }
    kind: "ensemble",
    range: "that of the members",
    typical_weight: "that of the members",
    example: "of = [{ kind = \"think_format\" }, \
              { kind = \"length\", ideal = 10, spread = 10, scale = 0.5 }]",
    formula: "the mean, min, median or max (how) of the values of other kinds, those missing left out; missing \
              where all are; of is a list of tables with kind, its parameters, and clip, scale, offset where wanted",
}

/// A member of an ensemble; in TOML one flat table `kind, clip, scale, offset, <the kind's
/// parameters>`, without a name or a weight.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "Table")]
pub struct EnsembleMember {
    /// The member's kind.
    pub kind: RewardKind,
    /// How its values are shaped.
    pub shape: Shaping,
}

impl TryFrom<Table> for EnsembleMember {
    type Error = String;

    fn try_from(mut table: Table) -> Result<Self, String> {
        let kind = take_kind(&mut table)?;
        let (shape, kind) = read_kind(&kind, table)?;
        Ok(Self { kind, shape })
    }
}

impl Serialize for EnsembleMember {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        write_kind(&mut map, &self.shape, &self.kind)?;
        map.end()
    }
}

fn in_member(index: usize) -> impl Fn(Problem) -> Problem {
    move |problem| problem.prefixed(&format!("of[{index}]."))
}

impl Kind for Ensemble {
    fn check(&self) -> Checked {
        if !(1..=16).contains(&self.of.len()) {
            let shown = format!("a list of {}", self.of.len());
            return Err(Problem::value("of", shown, "a list of 1 to 16 rewards"));
        }
        for (i, member) in self.of.iter().enumerate() {
            let kind = member.kind.name();
            if ["feedback", "ensemble", "learned"].contains(&kind) {
                let allowed = "a kind that computes its value, and no ensemble";
                return Err(in_member(i)(Problem::value("kind", quoted(kind), allowed)));
            }
            let checked = member.shape.check().and_then(|()| member.kind.check());
            checked.map_err(in_member(i))?;
        }
        Ok(())
    }

    fn build(&self, context: &BuildContext<'_>) -> Built {
        let mut members = Vec::with_capacity(self.of.len());
        for (i, member) in self.of.iter().enumerate() {
            let function = member.kind.build(context).map_err(in_member(i))?;
            members.extend(function.map(|function| member.shape.wrap(function)));
        }
        Ok(Some(Arc::new(EnsembleFn { members, how: self.how })))
    }

    fn resolve(&mut self, lookup: &dyn Fn(&str) -> Option<String>) -> Result<(), String> {
        self.of.iter_mut().try_for_each(|member| member.kind.resolve(lookup))
    }

    fn needs_sandbox(&self) -> bool {
        self.of.iter().any(|member| member.kind.needs_sandbox())
    }

    fn needs_self_judge(&self) -> bool {
        self.of.iter().any(|member| member.kind.needs_self_judge())
    }

    fn grader_models(&self) -> Vec<String> {
        self.of.iter().flat_map(|member| member.kind.grader_models()).collect()
    }
}

struct EnsembleFn {
    members: Vec<Arc<dyn RewardFn>>,
    how: EnsembleMethod,
}

#[async_trait]
impl RewardFn for EnsembleFn {
    async fn score(&self, samples: &[ScoreInput]) -> Vec<Option<f64>> {
        let members = self.members.iter();
        let scored = members.map(|member| score_guarded(member.as_ref(), samples, "", "ensemble"));
        let scored = futures::future::join_all(scored).await;
        let of_sample = |i: usize| {
            let values = scored.iter().filter_map(|values| values.get(i).copied().flatten());
            combine(self.how, values.collect())
        };
        (0..samples.len()).map(of_sample).collect()
    }

    async fn probe(&self) -> Checked {
        for (i, member) in self.members.iter().enumerate() {
            member.probe().await.map_err(in_member(i))?;
        }
        Ok(())
    }
}

/// One value from several finite ones; `None` from an empty list.
fn combine(how: EnsembleMethod, mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let (first, last) = (*values.first()?, *values.last()?);
    let middle = values.len() / 2;
    Some(match how {
        EnsembleMethod::Min => first,
        EnsembleMethod::Max => last,
        // Rounding may carry the sum beyond the members' range.
        EnsembleMethod::Mean => {
            (values.iter().sum::<f64>() / values.len() as f64).clamp(first, last)
        }
        EnsembleMethod::Median if values.len() % 2 == 1 => values[middle],
        EnsembleMethod::Median => values[middle - 1] / 2.0 + values[middle] / 2.0,
    })
}

#[cfg(test)]
pub(crate) mod tests;
