//! Routes: which requests they match, and the parts of their reward.

mod adaptive;
mod config;
mod coverage;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use async_trait::async_trait;
use hone_core::config::{Problem, quoted};
use hone_core::types::TokenId;

use crate::kinds::{BuildContext, FeedbackParams, LearnedPart, RewardKind, catalogue};
use crate::reward_fn::{RewardFn, ScoreInput, score_guarded};
use crate::tools::Tools;

pub use adaptive::{AdaptiveConfig, AdaptiveState, AdaptiveWeight};
pub use config::{Preset, RewardConfig, RouteConfig, RouteList};
pub use coverage::{MissingPart, PartCoverage};

/// Why the routes cannot be built, or a route cannot be found: a sentence that names the route, and the part and the
/// key if they are wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct RewardError(String);

/// One named, weighted part of a route's reward.
pub struct RewardPart {
    /// Identifies the part in the ledger and in metrics; clients post feedback under it.
    pub name: String,
    /// The weight; an adaptive one starts with it.
    pub weight: f64,
    /// The adaptive weight in its initial state; `None` for a constant weight.
    pub adaptive: Option<AdaptiveWeight>,
    /// The grader; `None` for client feedback.
    pub grader: Option<Arc<dyn RewardFn>>,
    /// The values that clients may post; `None` for a grader.
    pub feedback: Option<FeedbackParams>,
    /// What the trainer gives its predictions to; `None` unless the part is learned.
    pub learned: Option<Arc<LearnedPart>>,
    /// The name of its kind.
    pub kind: &'static str,
    /// The metadata keys of which it needs at least one; empty if it needs no metadata.
    pub reads: Vec<String>,
    /// The models that an OpenAI grader asks.
    pub models: Vec<String>,
    /// Whether scoring may depend on a process or a service, so that a missing value may be
    /// temporary.
    pub calls_out: bool,
}

/// A route with its parts, ready to score.
pub struct Route {
    /// Identifies the route in the ledger and in metrics.
    pub name: String,
    /// Whether requests of the route may be recorded and learned from.
    pub store: bool,
    /// The parts, in order.
    pub parts: Vec<RewardPart>,
}

impl Route {
    /// Whether any part is a grader that scores any completion, as exams need.
    pub fn has_graders(&self) -> bool {
        self.parts.iter().any(|p| p.grader.is_some() && p.learned.is_none())
    }

    /// Whether completions that no client sees can be scored now.
    pub fn scores_shadows(&self) -> bool {
        self.has_graders() || self.learned().any(|(_, part)| part.is_ready())
    }

    /// The learned parts with their names.
    pub fn learned(&self) -> impl Iterator<Item = (&str, &Arc<LearnedPart>)> {
        self.parts.iter().filter_map(|p| Some((p.name.as_str(), p.learned.as_ref()?)))
    }

    /// Whether any part is feedback.
    pub fn has_feedback(&self) -> bool {
        self.parts.iter().any(|p| p.grader.is_none())
    }

    /// Whether a feedback part has this name.
    pub fn takes_feedback(&self, name: &str) -> bool {
        self.parts.iter().any(|p| p.grader.is_none() && p.name == name)
    }

    /// The values that clients may post under this name; `None` unless it is a feedback part's.
    pub fn feedback(&self, name: &str) -> Option<&FeedbackParams> {
        self.parts.iter().find(|p| p.name == name)?.feedback.as_ref()
    }

    /// The weight of a part.
    pub fn weight(&self, part: &str) -> Option<f64> {
        self.parts.iter().find(|p| p.name == part).map(|p| p.weight)
    }

    /// Runs every grader concurrently on the samples of one group (see [`RewardFn::score`]); returns `(part, one value per sample)` in the order of the
    /// parts. Values are finite: a grader that panics, or that returns NaN or too few values, leaves
    /// `None` in their places. Learned parts are left out.
    pub async fn grade(&self, samples: &[ScoreInput]) -> Vec<(String, Vec<Option<f64>>)> {
        let graded = self.parts.iter().filter(|part| part.learned.is_none()).filter_map(|part| {
            let grader = part.grader.as_ref()?;
            Some(async move {
                let values = score_guarded(grader.as_ref(), samples, &self.name, &part.name).await;
                (part.name.clone(), values)
            })
        });
        futures::future::join_all(graded).await
    }

    /// As [`Self::grade`], with the learned parts after the others.
    pub async fn grade_tokens(
        &self,
        prompt: &[TokenId],
        samples: &[ScoreInput],
    ) -> Vec<(String, Vec<Option<f64>>)> {
        let learned = self.learned().map(|(name, part)| async move {
            let values = score_guarded(&OfPrompt { part, prompt }, samples, &self.name, name).await;
            (name.to_owned(), values)
        });
        let learned = futures::future::join_all(learned);
        let (mut all, learned) = futures::future::join(self.grade(samples), learned).await;
        all.extend(learned);
        all
    }
}

/// A learned part on the completions of one prompt.
struct OfPrompt<'a> {
    part: &'a LearnedPart,
    prompt: &'a [TokenId],
}

#[async_trait]
impl RewardFn for OfPrompt<'_> {
    async fn score(&self, samples: &[ScoreInput]) -> Vec<Option<f64>> {
        self.part.score_tokens(self.prompt, samples).await
    }
}

/// All routes, in order.
pub struct Routes {
    list: Vec<(RouteConfig, Arc<Route>)>,
}

impl Routes {
    /// Builds routes that need no [`Tools`].
    ///
    /// # Errors
    /// As for [`Self::with`].
    pub fn new(config: &RouteList) -> Result<Self, RewardError> {
        Self::with(config, &Tools::default())
    }

    /// Builds the routes.
    ///
    /// # Errors
    /// The first route, part and key with a wrong value.
    pub fn with(config: &RouteList, tools: &Tools) -> Result<Self, RewardError> {
        let mut names = BTreeSet::new();
        let mut list = Vec::with_capacity(config.0.len());
        for route in &config.0 {
            if route.name.is_empty() {
                let problem = Problem::value("name", "\"\"", "a name");
                return Err(RewardError(format!("route: {}", problem.sentence())));
            }
            if !names.insert(&route.name) {
                let name = &route.name;
                return Err(RewardError(format!(
                    "route: name = `{name}` occurs twice; every route needs its own name"
                )));
            }
            list.push((route.clone(), Arc::new(build_route(route, tools)?)));
        }
        Ok(Self { list })
    }

    /// Finds errors in the parts that only running something shows, such as a syntax error in
    /// Python. Call it once, before the routes are used.
    ///
    /// # Errors
    /// The first route, part and key with such an error.
    pub async fn probe(&self) -> Result<(), RewardError> {
        for route in self.iter() {
            for part in &route.parts {
                let Some(grader) = &part.grader else { continue };
                let found = grader.probe().await;
                found.map_err(|problem| in_part(&route.name, &part.name, problem))?;
            }
        }
        Ok(())
    }

    /// The first route that matches.
    pub fn find(&self, model: &str, metadata: &BTreeMap<String, String>) -> Option<&Arc<Route>> {
        self.list.iter().find(|(config, _)| config.matches(model, metadata)).map(|(_, route)| route)
    }

    /// A route by name.
    pub fn get(&self, name: &str) -> Option<&Arc<Route>> {
        self.iter().find(|route| route.name == name)
    }

    /// The route that the configuration key `key` names.
    ///
    /// # Errors
    /// If there is no such route.
    pub fn require(&self, key: &'static str, name: &str) -> Result<&Arc<Route>, RewardError> {
        self.get(name).ok_or_else(|| {
            let names: Vec<&str> = self.iter().map(|route| route.name.as_str()).collect();
            let known = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            RewardError(format!("{key} = `{name}` is not a route; routes are: {known}"))
        })
    }

    /// The models that OpenAI graders of the routes ask.
    pub fn models(&self) -> BTreeSet<&str> {
        let parts = self.iter().flat_map(|route| &route.parts);
        parts.flat_map(|part| &part.models).map(String::as_str).collect()
    }

    /// All routes, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Route>> {
        self.list.iter().map(|(_, route)| route)
    }
}

fn build_route(config: &RouteConfig, tools: &Tools) -> Result<Route, RewardError> {
    let mut names = BTreeSet::new();
    // Checked before the preset's parts are replaced, which would hide a duplicate name.
    if let Some(twice) = config.rewards.iter().find(|part| !names.insert(&part.name)) {
        let (route, part) = (&config.name, &twice.name);
        return Err(RewardError(format!(
            "route `{route}`: reward.name = `{part}` occurs twice; every part needs its own name"
        )));
    }
    let parts = config.parts();
    let parts = parts.iter().map(|part| {
        build_part(part, &config.name, tools)
            .map_err(|problem| in_part(&config.name, &part.name, problem))
    });
    let store = config.store.unwrap_or(true);
    let parts = parts.collect::<Result<Vec<_>, _>>()?;
    let route = Route { name: config.name.clone(), store, parts };
    for (name, part) in route.learned() {
        let of = &part.params().of;
        if route.feedback(of).and_then(FeedbackParams::bounds).is_none() {
            let problem =
                Problem::value("of", quoted(of), "a feedback part of the route with values");
            return Err(in_part(&route.name, name, problem));
        }
    }
    Ok(route)
}

fn in_part(route: &str, part: &str, problem: Problem) -> RewardError {
    RewardError(format!("route `{route}`, reward `{part}`: {}", problem.sentence()))
}

fn build_part(config: &RewardConfig, route: &str, tools: &Tools) -> Result<RewardPart, Problem> {
    if config.name.is_empty() {
        return Err(Problem::value("name", "\"\"", "a name"));
    }
    config.check()?;
    let feedback = match &config.kind {
        RewardKind::Feedback(params) => Some(params.clone()),
        _ => None,
    };
    let context = BuildContext { tools, route, part: &config.name };
    let learned = match &config.kind {
        RewardKind::Learned(params) => Some(Arc::new(LearnedPart::new(params.clone()))),
        _ => None,
    };
    let function = match &learned {
        Some(part) => Some(Arc::clone(part) as Arc<dyn RewardFn>),
        None => config.kind.build(&context)?,
    };
    Ok(RewardPart {
        learned,
        name: config.name.clone(),
        weight: config.weight,
        adaptive: config.adaptive.as_ref().map(|rule| AdaptiveWeight::new(config.weight, rule)),
        grader: function.map(|function| config.shape.wrap(function)),
        feedback,
        kind: config.kind.name(),
        reads: config.kind.reads(),
        models: config.kind.grader_models(),
        calls_out: may_call_out(&config.kind),
    })
}

fn may_call_out(kind: &RewardKind) -> bool {
    // The members of an ensemble, and the graders of a multigrader, may be models.
    matches!(kind, RewardKind::Grader(_) | RewardKind::Ensemble(_))
        || catalogue().iter().any(|entry| entry.kind == kind.name() && entry.calls_out)
}

#[cfg(test)]
mod tests;
