//! STUB: signatures only.
use super::{RewardFn, ScoreInput};
use crate::config::RouteList;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What is wrong with a route.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct RewardError(pub String);

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
    /// The weight of a part.
    pub fn weight(&self, part: &str) -> Option<f64> {
        self.parts.iter().find(|p| p.name == part).map(|p| p.weight)
    }
    /// Runs every grader: `(part, values by sample)`.
    pub async fn grade(&self, samples: &[ScoreInput]) -> Vec<(String, Vec<Option<f64>>)> {
        let mut all = Vec::new();
        for part in &self.parts {
            if let Some(grader) = &part.grader {
                all.push((part.name.clone(), grader.score(samples).await));
            }
        }
        all
    }
}

/// Every route, in order.
pub struct Routes {
    list: Vec<Arc<Route>>,
}

#[expect(unused_variables, reason = "stub")]
impl Routes {
    /// Builds the functions; names the route and key of what is wrong.
    pub fn new(config: &RouteList) -> Result<Self, RewardError> {
        Ok(Self { list: Vec::new() })
    }
    /// The first route that matches.
    pub fn find(&self, model: &str, metadata: &BTreeMap<String, String>) -> Option<&Arc<Route>> {
        None
    }
    /// A route by name.
    pub fn get(&self, name: &str) -> Option<&Arc<Route>> {
        None
    }
    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Route>> {
        self.list.iter()
    }
}

/// `(kind, description)` of every built-in reward function, for `hone rewards list`.
pub fn builtin_kinds() -> &'static [(&'static str, &'static str)] {
    &[]
}
