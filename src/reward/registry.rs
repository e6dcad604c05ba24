//! Routes: which requests, and which parts judge their completions.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures::FutureExt;
use regex::Regex;

use super::builtin::{self, Each};
use super::{RewardFn, ScoreInput};
use crate::config::{RewardConfig, RewardKind, RouteConfig, RouteList};

/// What is wrong with a route.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RewardError {
    /// Names stand for routes in the ledger and in metrics.
    #[error("route: name = `{0}` stands twice; every route needs a name of its own")]
    DuplicateRoute(String),
    /// Names stand for parts in the ledger and in metrics.
    #[error("route `{route}`: reward.name = `{part}` stands twice; every part needs its own name")]
    DuplicatePart {
        /// The route.
        route: String,
        /// The part.
        part: String,
    },
    /// A key of a route or of one of its rewards.
    #[error("{place}: {key} = {value} {reason}")]
    Value {
        /// The route, and the part where it is about one.
        place: String,
        /// The key.
        key: &'static str,
        /// What it is set to.
        value: String,
        /// What is wrong with that.
        reason: String,
    },
    /// A key elsewhere names a route that does not exist.
    #[error("{key} = `{route}` is not a route; routes are: {known}")]
    UnknownRoute {
        /// The key that names it.
        key: &'static str,
        /// The name.
        route: String,
        /// The names that exist.
        known: String,
    },
}

/// One named, weighted part.
pub struct Part {
    /// The name.
    pub name: String,
    /// The weight.
    pub weight: f64,
    /// The grader; `None` for client feedback.
    pub grader: Option<Arc<dyn RewardFn>>,
}

/// A route with its parts made ready.
pub struct Route {
    /// The name.
    pub name: String,
    /// Its parts.
    pub parts: Vec<Part>,
}

impl Route {
    /// Whether any part is a grader (shadow siblings can be scored).
    pub fn has_graders(&self) -> bool {
        self.parts.iter().any(|p| p.grader.is_some())
    }

    /// Whether clients' feedback is a part.
    pub fn has_feedback(&self) -> bool {
        self.parts.iter().any(|p| p.grader.is_none())
    }

    /// Whether clients' feedback under this name is a part.
    pub fn takes_feedback(&self, name: &str) -> bool {
        self.parts.iter().any(|p| p.grader.is_none() && p.name == name)
    }

    /// The weight of a part.
    pub fn weight(&self, part: &str) -> Option<f64> {
        self.parts.iter().find(|p| p.name == part).map(|p| p.weight)
    }

    /// Runs every grader: `(part, values by sample)`, in the order of the parts.
    ///
    /// Each list is as long as `samples` and holds finite values only: a grader that panics, that
    /// answers NaN or too little, leaves `None` where its values should be.
    pub async fn grade(&self, samples: &[ScoreInput]) -> Vec<(String, Vec<Option<f64>>)> {
        let graded = self.parts.iter().filter_map(|part| {
            let grader = part.grader.as_ref()?;
            Some(async move { (part.name.clone(), self.run(&part.name, grader, samples).await) })
        });
        futures::future::join_all(graded).await
    }

    async fn run(
        &self,
        part: &str,
        grader: &Arc<dyn RewardFn>,
        samples: &[ScoreInput],
    ) -> Vec<Option<f64>> {
        let scored = AssertUnwindSafe(async { grader.score(samples).await }).catch_unwind().await;
        let mut values = scored.unwrap_or_else(|_| {
            tracing::error!(route = self.name, part, "a grader panicked; its values are missing");
            Vec::new()
        });
        values.resize(samples.len(), None);
        values.into_iter().map(|value| value.filter(|v| v.is_finite())).collect()
    }
}

/// What a request must have to take a route.
struct Condition {
    model: Option<String>,
    metadata: BTreeMap<String, String>,
}

impl Condition {
    fn holds(&self, model: &str, metadata: &BTreeMap<String, String>) -> bool {
        self.model.as_deref().is_none_or(|wanted| wanted == model)
            && self.metadata.iter().all(|(key, wanted)| {
                metadata.get(key).is_some_and(|value| wanted == "*" || wanted == value)
            })
    }
}

/// Every route, in order.
pub struct Routes {
    list: Vec<(Condition, Arc<Route>)>,
}

impl Routes {
    /// Builds the functions.
    ///
    /// # Errors
    /// Names the route, the part and the key of what is wrong.
    pub fn new(config: &RouteList) -> Result<Self, RewardError> {
        let mut names = BTreeSet::new();
        let mut list = Vec::with_capacity(config.0.len());
        for route in &config.0 {
            if route.name.is_empty() {
                let reason = "is empty; every route needs a name".to_owned();
                let place = "route".to_owned();
                return Err(RewardError::Value { place, key: "name", value: "``".into(), reason });
            }
            if !names.insert(&route.name) {
                return Err(RewardError::DuplicateRoute(route.name.clone()));
            }
            let condition =
                Condition { model: route.model.clone(), metadata: route.metadata.clone() };
            list.push((condition, Arc::new(build_route(route)?)));
        }
        Ok(Self { list })
    }

    /// The first route that matches.
    pub fn find(&self, model: &str, metadata: &BTreeMap<String, String>) -> Option<&Arc<Route>> {
        self.list.iter().find(|(when, _)| when.holds(model, metadata)).map(|(_, route)| route)
    }

    /// A route by name.
    pub fn get(&self, name: &str) -> Option<&Arc<Route>> {
        self.iter().find(|route| route.name == name)
    }

    /// A route by name that configuration key `key` asks for.
    ///
    /// # Errors
    /// If there is none.
    pub fn require(&self, key: &'static str, name: &str) -> Result<&Arc<Route>, RewardError> {
        self.get(name).ok_or_else(|| {
            let names: Vec<&str> = self.iter().map(|route| route.name.as_str()).collect();
            let known = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            RewardError::UnknownRoute { key, route: name.to_owned(), known }
        })
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Route>> {
        self.list.iter().map(|(_, route)| route)
    }
}

fn build_route(config: &RouteConfig) -> Result<Route, RewardError> {
    let mut names = BTreeSet::new();
    let mut parts = Vec::with_capacity(config.rewards.len());
    for reward in &config.rewards {
        let place = Place { route: &config.name, part: &reward.name };
        if reward.name.is_empty() {
            return Err(place.error("name", "``", "is empty; every part needs a name"));
        }
        if !names.insert(&reward.name) {
            let (route, part) = (config.name.clone(), reward.name.clone());
            return Err(RewardError::DuplicatePart { route, part });
        }
        if !reward.weight.is_finite() {
            return Err(place.error("weight", reward.weight, "is not a finite number"));
        }
        let grader = place.grader(reward)?;
        parts.push(Part { name: reward.name.clone(), weight: reward.weight, grader });
    }
    Ok(Route { name: config.name.clone(), parts })
}

/// Where a key stands, for errors.
struct Place<'a> {
    route: &'a str,
    part: &'a str,
}

impl Place<'_> {
    fn error(
        &self,
        key: &'static str,
        value: impl ToString,
        reason: impl Into<String>,
    ) -> RewardError {
        let place = format!("route `{}`, reward `{}`", self.route, self.part);
        RewardError::Value { place, key, value: value.to_string(), reason: reason.into() }
    }

    fn regex(&self, key: &'static str, pattern: &str) -> Result<Regex, RewardError> {
        Regex::new(pattern).map_err(|error| {
            // Syntax errors are drawn over several lines; the last one says what is wrong.
            let text = error.to_string();
            let last = text.lines().last().unwrap_or_default().trim();
            let what = last.strip_prefix("error: ").unwrap_or(last);
            self.error(key, format!("`{pattern}`"), format!("is not a regular expression: {what}"))
        })
    }

    fn extract(&self, pattern: &str) -> Result<Option<Regex>, RewardError> {
        if pattern.is_empty() {
            return Ok(None);
        }
        let regex = self.regex("extract", pattern)?;
        if regex.captures_len() < 2 {
            let reason = "has no group; put the answer in parentheses";
            return Err(self.error("extract", format!("`{pattern}`"), reason));
        }
        Ok(Some(regex))
    }

    fn grader(&self, reward: &RewardConfig) -> Result<Option<Arc<dyn RewardFn>>, RewardError> {
        Ok(match &reward.kind {
            RewardKind::Feedback {} => None,
            RewardKind::ExactMatch { reference, ignore_case, extract } => {
                let (reference, ignore_case) = (reference.clone(), *ignore_case);
                let extract = self.extract(extract)?;
                each(move |input| {
                    builtin::exact_match(input, &reference, ignore_case, extract.as_ref())
                })
            }
            RewardKind::NumericMatch { reference, tolerance, extract } => {
                if !tolerance.is_finite() || *tolerance < 0.0 {
                    let reason = "is not a finite number of at least 0";
                    return Err(self.error("tolerance", tolerance, reason));
                }
                let (reference, tolerance) = (reference.clone(), *tolerance);
                let extract = self.extract(extract)?;
                each(move |input| {
                    builtin::numeric_match(input, &reference, tolerance, extract.as_ref())
                })
            }
            RewardKind::Regex { pattern } => {
                let pattern = self.regex("pattern", pattern)?;
                each(move |input| Some(builtin::regex_match(input, &pattern)))
            }
            RewardKind::FormatStrict {} => each(|input| Some(builtin::format_strict(&input.text))),
            RewardKind::FormatIncremental {} => {
                each(|input| Some(builtin::format_incremental(&input.text)))
            }
            RewardKind::Length { ideal, spread } => {
                if *spread == 0 {
                    return Err(self.error("spread", spread, "is not at least 1 token"));
                }
                let (ideal, spread) = (*ideal, *spread);
                each(move |input| Some(builtin::length(input.ids.len(), ideal, spread)))
            }
        })
    }
}

fn each(
    score: impl Fn(&ScoreInput) -> Option<f64> + Send + Sync + 'static,
) -> Option<Arc<dyn RewardFn>> {
    Some(Arc::new(Each(score)))
}

#[cfg(test)]
mod tests;
