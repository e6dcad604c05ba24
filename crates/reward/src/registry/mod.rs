//! Routes: which requests, and which parts judge their completions.

mod build;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use build::Builder;

use hone_core::config::Problem;

use super::library::compose::guarded;
use super::{AdaptiveWeight, RewardFn, ScoreInput, Tools};
use crate::config::{FeedbackParams, RewardConfig, RewardKind, RouteConfig, RouteList};

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
    #[error("{place}: {}", .problem.sentence())]
    Value {
        /// The route, and the part where it is about one.
        place: String,
        /// The key, its value and what is allowed.
        problem: Problem,
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
    /// The weight, or where an adaptive one begins.
    pub weight: f64,
    /// How the weight follows the success rate, at its beginning; `None` for one that stays.
    pub adaptive: Option<AdaptiveWeight>,
    /// The grader; `None` for client feedback.
    pub grader: Option<Arc<dyn RewardFn>>,
    /// What clients may post; `None` for a grader.
    pub feedback: Option<FeedbackParams>,
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

    /// What clients may post under this name; `None` where it is no feedback part.
    pub fn feedback(&self, name: &str) -> Option<&FeedbackParams> {
        self.parts.iter().find(|p| p.name == name)?.feedback.as_ref()
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
            Some(async move {
                let values = guarded(grader.as_ref(), samples, &self.name, &part.name).await;
                (part.name.clone(), values)
            })
        });
        futures::future::join_all(graded).await
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
    /// Builds the functions of routes that need no [`Tools`].
    ///
    /// # Errors
    /// As for [`Self::with`].
    pub fn new(config: &RouteList) -> Result<Self, RewardError> {
        Self::with(config, &Tools::default())
    }

    /// Builds the functions.
    ///
    /// # Errors
    /// Names the route, the part and the key of what is wrong.
    pub fn with(config: &RouteList, tools: &Tools) -> Result<Self, RewardError> {
        let mut names = BTreeSet::new();
        let mut list = Vec::with_capacity(config.0.len());
        for route in &config.0 {
            if route.name.is_empty() {
                let problem = Problem::value("name", "\"\"", "a name");
                return Err(RewardError::Value { place: "route".to_owned(), problem });
            }
            if !names.insert(&route.name) {
                return Err(RewardError::DuplicateRoute(route.name.clone()));
            }
            let condition =
                Condition { model: route.model.clone(), metadata: route.metadata.clone() };
            list.push((condition, Arc::new(build_route(route, tools)?)));
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

fn build_route(config: &RouteConfig, tools: &Tools) -> Result<Route, RewardError> {
    let mut names = BTreeSet::new();
    // Seen before the preset's are replaced, which would hide a name that stands twice.
    if let Some(twice) = config.rewards.iter().find(|part| !names.insert(&part.name)) {
        let (route, part) = (config.name.clone(), twice.name.clone());
        return Err(RewardError::DuplicatePart { route, part });
    }
    let parts = config.parts();
    let parts = parts.iter().map(|part| {
        build_part(part, &config.name, tools).map_err(|problem| {
            let place = format!("route `{}`, reward `{}`", config.name, part.name);
            RewardError::Value { place, problem }
        })
    });
    Ok(Route { name: config.name.clone(), parts: parts.collect::<Result<_, _>>()? })
}

fn build_part(config: &RewardConfig, route: &str, tools: &Tools) -> Result<Part, Problem> {
    if config.name.is_empty() {
        return Err(Problem::value("name", "\"\"", "a name"));
    }
    config.check()?;
    let feedback = match &config.kind {
        RewardKind::Feedback(params) => Some(params.clone()),
        _ => None,
    };
    Ok(Part {
        feedback,
        name: config.name.clone(),
        weight: config.weight,
        adaptive: config.adaptive.as_ref().map(|rule| AdaptiveWeight::new(config.weight, rule)),
        grader: Builder { tools, route, part: &config.name }.grader(&config.kind, config.shape)?,
    })
}

#[cfg(test)]
mod tests;
