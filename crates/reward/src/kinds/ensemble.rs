//! `ensemble`: several kinds as one part.

use std::sync::Arc;

use async_trait::async_trait;
use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};
use toml::Table;

use hone_core::config::{Checked, Problem, quoted};

use super::flat;
use super::kind::{AnyKind, BuildContext, Built, Documented, Kind, KindEntry};
use super::shaping::Shaping;
use crate::reward_fn::{RewardFn, ScoreInput, score_guarded};

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

/// Parameters of `kind = "ensemble"`. `K` is [`RewardKind`](super::RewardKind), which contains this
/// type.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, bound = "K: AnyKind")]
pub struct Ensemble<K> {
    /// How the members' values become one.
    #[serde(default)]
    pub how: EnsembleMethod,
    /// The members (`[[route.reward.of]]`).
    pub of: Vec<EnsembleMember<K>>,
}

/// A member of an ensemble; in TOML one flat table `kind, clip, scale, offset, <the kind's
/// parameters>`, without a name or a weight.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "Table", bound = "K: AnyKind")]
pub struct EnsembleMember<K> {
    /// The member's kind.
    pub kind: K,
    /// How its values are shaped.
    pub shape: Shaping,
}

impl<K: AnyKind> TryFrom<Table> for EnsembleMember<K> {
    type Error = String;

    fn try_from(mut table: Table) -> Result<Self, String> {
        let kind = flat::take_kind::<K>(&mut table)?;
        let (shape, kind) = flat::read_kind(&kind, table)?;
        Ok(Self { kind, shape })
    }
}

impl<K: AnyKind> Serialize for EnsembleMember<K> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        flat::write_kind(&mut map, &self.shape, &self.kind)?;
        map.end()
    }
}

fn in_member(index: usize) -> impl Fn(Problem) -> Problem {
    move |problem| problem.prefixed(&format!("of[{index}]."))
}

impl<K: AnyKind> Documented for Ensemble<K> {
    fn entry() -> KindEntry {
        KindEntry {
            kind: "ensemble",
            formula: "the mean, min, median or max (how) of the values of other kinds, those missing \
                      left out; missing where all are",
            range: "that of the members",
            parameters:
                "how = \"mean\", of = a list of tables with kind, its parameters, and clip, \
                         scale, offset where wanted"
                    .to_owned(),
            typical_weight: "that of the members",
            example: "of = [{ kind = \"think_format\" }, \
                      { kind = \"length\", ideal = 10, spread = 10, scale = 0.5 }]",
            ..KindEntry::default()
        }
    }
}

impl<K: AnyKind> Kind for Ensemble<K> {
    fn check(&self) -> Checked {
        if !(1..=16).contains(&self.of.len()) {
            let shown = format!("a list of {}", self.of.len());
            return Err(Problem::value("of", shown, "a list of 1 to 16 rewards"));
        }
        for (i, member) in self.of.iter().enumerate() {
            let kind = member.kind.name();
            if ["feedback", "ensemble"].contains(&kind) {
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
mod tests {
    use super::*;
    use crate::kinds::tests::samples::{Broken, half, sample};

    #[tokio::test]
    async fn a_broken_member_leaves_the_ensemble_to_the_others() {
        let members: Vec<Arc<dyn RewardFn>> =
            vec![Arc::new(Broken { panics: true }), Arc::new(Broken { panics: false }), half()];
        let ensemble = EnsembleFn { members, how: EnsembleMethod::Min };
        assert_eq!(ensemble.score(&[sample("a", &[]), sample("b", &[])]).await, [Some(0.5); 2]);
    }
}
