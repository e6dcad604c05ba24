//! Learned reward parts (`kind = "learned"`): the expected rating of a completion, from the completion and its prompt.
//!
//! Each rating is predicted before it is learned. The predictions of the newest ratings decide whether the part is trusted:
//! they must order the ratings, and must not be above them. A policy that exploits the prediction (Gao et al. 2022, "Scaling
//! laws for reward model overoptimization") gets high predictions and low ratings, so that trust ends.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use rayon::ThreadPool;
use serde::{Deserialize, Serialize};

use hone_core::types::{GroupId, TokenId};
use hone_model::Model;
use hone_reward::Routes;
use hone_reward::kinds::{LearnedPart, TokenScorer};

use super::{Observation, Posterior, Regression};
use crate::data::batch_builder::TrainBatch;
use crate::error::Result;
use crate::learning::features::{features, rated_features};
use crate::learning::float_bits;

/// Effective number of ratings that a part remembers: after a change of taste, 500 ratings outweigh all before them.
const WINDOW: f64 = 256.0;

/// The newest ratings, on which trust depends.
const JUDGED: usize = 128;

/// Least share of pairs of ratings that the predictions order as the ratings do (Harrell et al. 1982; of thumbs, the area
/// under the ROC curve).
const LEAST_CONCORDANCE: f64 = 0.65;

/// Standard errors of a random order by which it must be above a half.
const LEAST_ERRORS: f64 = 2.0;

/// Largest mean by which predictions exceed ratings, as a share of the part's range.
const MOST_EXCESS: f64 = 0.15;

/// Least number of ratings of the newest version before its excess is judged by itself.
const LEAST_OF_VERSION: usize = 16;

/// Groups that are remembered as learned, the newest ones: more than wait between two publications.
const MOST_SEEN: usize = 4096;

/// Steps of a value within the part's range: smaller differences between completions are noise, which the comparison within
/// a group would scale up.
const STEPS: f64 = 5.0;

/// A rating with its prediction before it was learned, both from 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct CheckedPrediction {
    #[serde(with = "float_bits")]
    predicted: f64,
    #[serde(with = "float_bits")]
    observed: f64,
    /// The policy version of the completion.
    version: u64,
}

/// What the predictions of the newest ratings are worth.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Judgement {
    /// Share of pairs of different ratings that the predictions order alike; a half is chance.
    pub concordance: f64,
    /// Mean of predicted minus observed on the newest policy version, or on all versions while it has few ratings.
    pub excess: f64,
    pub is_trusted: bool,
}

/// A learned part of one route; a part of the checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct LearnedHead {
    regression: Regression,
    /// Oldest first.
    judged: VecDeque<CheckedPrediction>,
}

/// A rated completion.
pub(crate) struct RatedText<'a> {
    pub features: &'a [f64],
    /// From 0 to 1.
    pub observed: f64,
    pub weight: f64,
    pub version: u64,
}

impl LearnedHead {
    /// Predicts the ratings of a batch, then learns them.
    pub fn learn(&mut self, ratings: &[RatedText<'_>]) {
        if let Some(posterior) = self.regression.posterior() {
            for rating in ratings {
                let Some((predicted, _)) = posterior.predict(rating.features) else { continue };
                let (observed, version) = (rating.observed, rating.version);
                self.judged.push_back(CheckedPrediction { predicted, observed, version });
            }
            self.judged.drain(..self.judged.len().saturating_sub(JUDGED));
        }
        let observation = |rating: &RatedText<'_>| Observation {
            features: rating.features.to_vec(),
            target: rating.observed,
            weight: rating.weight,
        };
        let observations: Vec<_> = ratings.iter().map(observation).collect();
        self.regression.observe(&observations, 1.0 - 1.0 / WINDOW);
    }

    pub fn judgement(&self) -> Judgement {
        let (mut pairs, mut ordered) = (0.0, 0.0);
        for (index, a) in self.judged.iter().enumerate() {
            for b in self.judged.iter().skip(index + 1).filter(|b| b.observed != a.observed) {
                let product = (a.predicted - b.predicted) * (a.observed - b.observed);
                pairs += 1.0;
                ordered +=
                    if product > 0.0 { 1.0 } else { f64::from(u8::from(product == 0.0)) / 2.0 };
            }
        }
        let concordance = if pairs > 0.0 { ordered / pairs } else { 0.5 };
        // The standard error of the Mann-Whitney statistic under chance.
        let error = ((self.judged.len() as f64 + 1.0) / (12.0 * f64::max(pairs, 1.0))).sqrt();
        let newest = self.judged.iter().map(|one| one.version).max().unwrap_or_default();
        let excess_of = |from: u64| {
            let excess = self.judged.iter().filter(|one| one.version >= from);
            let excess: Vec<f64> = excess.map(|one| one.predicted - one.observed).collect();
            (excess.len(), excess.iter().sum::<f64>() / excess.len().max(1) as f64)
        };
        let (count, of_newest) = excess_of(newest);
        let excess = if count >= LEAST_OF_VERSION { of_newest } else { excess_of(0).1 };
        let is_trusted = concordance >= LEAST_CONCORDANCE
            && concordance >= 0.5 + LEAST_ERRORS * error
            && excess <= MOST_EXCESS;
        Judgement { concordance, excess, is_trusted }
    }
}

/// The learned parts of all routes. A part of the checkpoint.
///
/// They learn a rating once, as soon as the trainer sees it: before a step trains on it, and whatever becomes of the step and
/// of its version, because features and ratings depend on neither.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct LearnedHeads {
    /// Route -> part -> head.
    heads: BTreeMap<String, BTreeMap<String, LearnedHead>>,
    /// Groups whose ratings are learned and that may be seen again.
    seen: BTreeSet<GroupId>,
}

impl LearnedHeads {
    /// Learns the ratings of a batch, whose feedback is capped, but those of groups that it has seen. Returns whether any.
    ///
    /// # Errors
    /// If the base cannot compute features.
    pub fn learn(&mut self, routes: &Routes, base: &Model, batch: &TrainBatch) -> Result<bool> {
        let rated = rated_features(base, batch, |group| {
            let route = routes.get(&group.route);
            route.is_some_and(|r| r.learned().next().is_some()) && !self.seen.contains(&group.id)
        })?;
        for route in routes.iter() {
            for (name, part) in route.learned() {
                let of = &part.params().of;
                let Some(params) = route.feedback(of) else { continue };
                let rating = |(place, features): (&(usize, usize), &'_ Vec<f64>)| {
                    let group = &batch.groups[place.0];
                    let member = &group.members[place.1];
                    let value = member.parts.get(of).filter(|_| group.group.route == route.name)?;
                    Some((params.scaled(*value)?, member, features.clone()))
                };
                let found: Vec<_> = rated.iter().filter_map(rating).collect();
                let ratings: Vec<_> = found
                    .iter()
                    .map(|(observed, member, features)| RatedText {
                        features,
                        observed: *observed,
                        weight: member.cap_weights.get(of).copied().unwrap_or(1.0),
                        version: member.sample.version.0,
                    })
                    .collect();
                if !ratings.is_empty() {
                    let heads = self.heads.entry(route.name.clone()).or_default();
                    heads.entry(name.to_owned()).or_default().learn(&ratings);
                }
            }
        }
        self.seen.extend(rated.keys().map(|(group, _)| batch.groups[*group].group.id));
        while self.seen.len() > MOST_SEEN {
            self.seen.pop_first();
        }
        Ok(!rated.is_empty())
    }

    /// Forgets a group that will not be seen again, unless it is rated again.
    pub fn forget(&mut self, group: &GroupId) {
        self.seen.remove(group);
    }

    /// `(route, part, judgement)` of every part with a judged rating.
    pub fn judgements(&self) -> impl Iterator<Item = (&str, &str, Judgement)> {
        self.heads.iter().flat_map(|(route, parts)| {
            let judged = parts.iter().filter(|(_, head)| !head.judged.is_empty());
            judged.map(move |(part, head)| (route.as_str(), part.as_str(), head.judgement()))
        })
    }

    /// Gives each part the predictions of its head, or takes them away while they are not trusted.
    pub fn share(&self, routes: &Routes, base: &Model, pool: &Arc<ThreadPool>) {
        for route in routes.iter() {
            for (name, part) in route.learned() {
                let head = self.heads.get(&route.name).and_then(|parts| parts.get(name));
                let trusted = head.filter(|head| head.judgement().is_trusted);
                let bounds = route.feedback(&part.params().of).and_then(|params| params.bounds());
                let posterior = trusted.and_then(|head| head.regression.posterior());
                let scorer = posterior.zip(bounds).map(|(posterior, bounds)| {
                    let pessimism = part.params().pessimism;
                    let (base, pool) = (base.clone(), Arc::clone(pool));
                    Arc::new(BaseScorer { base, pool, posterior, pessimism, bounds })
                        as Arc<dyn TokenScorer>
                });
                log_change(part, &route.name, name, scorer.is_some(), head);
                part.set_scorer(scorer);
            }
        }
    }
}

fn log_change(
    part: &LearnedPart,
    route: &str,
    name: &str,
    is_trusted: bool,
    head: Option<&LearnedHead>,
) {
    let Judgement { concordance, excess, .. } =
        head.map(LearnedHead::judgement).unwrap_or_default();
    match (part.is_ready(), is_trusted) {
        (false, true) => {
            tracing::info!(route, part = name, concordance, "a learned part scores completions");
        }
        (true, false) => tracing::warn!(
            route,
            part = name,
            concordance,
            excess,
            "a learned part predicts new ratings badly and scores nothing until it follows them"
        ),
        _ => {}
    }
}

/// The predictions of a head, from hidden states of the frozen base.
struct BaseScorer {
    base: Model,
    pool: Arc<ThreadPool>,
    posterior: Posterior,
    pessimism: f64,
    bounds: [f64; 2],
}

impl TokenScorer for BaseScorer {
    fn score(&self, prompt: &[TokenId], completions: &[Vec<TokenId>]) -> Vec<Option<f64>> {
        let texts: Vec<_> = completions.iter().map(|ids| (prompt, &ids[..])).collect();
        let found = self.pool.install(|| features(&self.base, &texts));
        let found = found.unwrap_or_else(|error| {
            tracing::warn!(%error, "a learned part cannot score completions");
            Vec::new()
        });
        let value = |features: &Vec<f64>| {
            let predicted = self.posterior.predict(features)?;
            Some(pessimistic(predicted, self.pessimism, self.bounds))
        };
        found.iter().map(value).collect()
    }
}

/// The value of a completion whose rating from 0 to 1 has this predicted mean and standard deviation.
fn pessimistic((mean, deviation): (f64, f64), pessimism: f64, [low, high]: [f64; 2]) -> f64 {
    let share = (mean - pessimism * deviation).clamp(0.0, 1.0);
    low + (high - low) * (share * STEPS).round() / STEPS
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Answer, answers};
    use super::*;

    fn rate(taste: impl Fn(&Answer) -> bool, version: u64) -> Vec<RatedText<'static>> {
        let rating = |answer: &'static Answer| RatedText {
            features: &answer.features,
            observed: f64::from(u8::from(taste(answer))),
            weight: 1.0,
            version,
        };
        answers().iter().map(rating).collect()
    }

    /// Share of pairs of answers that a trusted head orders as a taste does; `None` without trust.
    fn agreement(head: &LearnedHead, taste: impl Fn(&Answer) -> bool, from: usize) -> Option<f64> {
        let posterior = head.regression.posterior().filter(|_| head.judgement().is_trusted)?;
        let mut by_taste = [Vec::new(), Vec::new()];
        for answer in &answers()[from..] {
            let (mean, _) = posterior.predict(&answer.features).unwrap();
            by_taste[usize::from(taste(answer))].push(mean);
        }
        let [bad, good] = by_taste;
        let wins = good.iter().flat_map(|a| bad.iter().map(move |b| f64::from(u8::from(a > b))));
        Some(wins.sum::<f64>() / (good.len() * bad.len()) as f64)
    }

    #[test]
    fn after_a_change_of_taste_the_part_follows_within_500_ratings() {
        let form = |answer: &Answer| answer.is_formed;
        let content = |answer: &Answer| answer.is_right && !answer.is_formed;
        let mut head = LearnedHead::default();
        for batch in rate(form, 1)[..512].chunks(32) {
            head.learn(batch);
        }
        let before = agreement(&head, form, 1024).unwrap();
        assert!(before > 0.9, "{before}");
        let (mut lost, mut regained) = (None, None);
        let ratings = rate(content, 2);
        for (index, batch) in ratings[512..1012].chunks(25).enumerate() {
            head.learn(batch);
            let rated = 25 * (index + 1);
            match head.judgement().is_trusted {
                false => lost = lost.or(Some(rated)),
                true if lost.is_some() => regained = regained.or(Some(rated)),
                true => {}
            }
        }
        let after = agreement(&head, content, 1024);
        println!(
            "agreement {before:.3}, lost after {lost:?}, regained after {regained:?}, {after:?}"
        );
        // Within the batches that show the new taste the old one scores nothing.
        assert!(lost.is_some_and(|rated| rated <= 100), "{lost:?}");
        assert!(regained.is_some_and(|rated| rated <= 500), "{regained:?}");
        assert!(after.is_some_and(|after| after > 0.75), "{after:?}");
        let json = serde_json::to_string(&head).unwrap();
        assert_eq!(serde_json::from_str::<LearnedHead>(&json).unwrap(), head);
    }

    #[test]
    fn ratings_without_a_pattern_are_not_trusted() {
        let mut head = LearnedHead::default();
        assert!(!head.judgement().is_trusted);
        let ratings = rate(|answer| answer.features[0].to_bits() % 7 < 3, 1);
        for batch in ratings[..1024].chunks(32) {
            head.learn(batch);
            let judgement = head.judgement();
            assert!(!judgement.is_trusted, "{judgement:?}");
        }
    }

    #[test]
    fn a_version_whose_ratings_stay_below_the_predictions_ends_the_trust() {
        let mut head = LearnedHead::default();
        let ratings = rate(|answer| answer.is_formed, 1);
        ratings[..512].chunks(32).for_each(|batch| head.learn(batch));
        assert!(head.judgement().is_trusted);
        // The new version has found form that users do not like.
        let hacked = rate(|_| false, 2);
        let formed: Vec<_> =
            hacked.into_iter().zip(answers()).filter(|(_, a)| a.is_formed).collect();
        let formed: Vec<_> = formed.into_iter().map(|(rating, _)| rating).take(16).collect();
        head.learn(&formed);
        let judgement = head.judgement();
        assert!(judgement.excess > 0.5 && !judgement.is_trusted, "{judgement:?}");
    }

    #[test]
    fn values_are_pessimistic_and_coarse() {
        let stars = [1.0, 5.0];
        assert_eq!(pessimistic((1.0, 0.0), 1.0, stars), 5.0);
        assert_eq!(pessimistic((0.9, 0.1), 1.0, stars), 4.2);
        assert_eq!(pessimistic((0.9, 0.1), 3.0, stars), 3.4);
        assert_eq!(pessimistic((2.0, 0.1), 0.0, stars), 5.0);
        assert_eq!(pessimistic((-1.0, 0.1), 0.0, [0.0, 1.0]), 0.0);
    }
}
