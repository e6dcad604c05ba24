//! Current weights of adaptive reward parts; a part of the checkpoint.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use hone_reward::{AdaptiveState, AdaptiveWeight, Routes};

use super::batch_builder::TrainBatch;

/// State of every adaptive part that was observed: route -> part -> state.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct AdaptiveWeights(BTreeMap<String, BTreeMap<String, AdaptiveState>>);

impl AdaptiveWeights {
    /// Replaces the configured weights of the batch's adaptive parts with their current ones.
    pub(crate) fn apply(&self, routes: &Routes, batch: &mut TrainBatch) {
        for group in &mut batch.groups {
            for (part, weight) in &mut group.weights {
                if let Some(adaptive) = self.adaptive(routes, &group.group.route, part) {
                    *weight = adaptive.weight();
                }
            }
        }
    }

    /// Updates the weights from a batch that was trained on, group by group.
    pub(crate) fn observe(&mut self, routes: &Routes, batch: &TrainBatch) {
        for group in &batch.groups {
            let route = &group.group.route;
            for part in group.weights.keys() {
                let Some(mut adaptive) = self.adaptive(routes, route, part) else { continue };
                adaptive.observe(group.members.iter().map(|m| m.parts.get(part).copied()));
                let parts = self.0.entry(route.clone()).or_default();
                parts.insert(part.clone(), adaptive.state());
            }
        }
    }

    /// `(route, part, weight)` of every adaptive part that was observed.
    pub(crate) fn all(&self) -> impl Iterator<Item = (&str, &str, f64)> {
        self.0.iter().flat_map(|(route, parts)| {
            parts.iter().map(move |(part, state)| (route.as_str(), part.as_str(), state.weight))
        })
    }

    /// The configured adaptive weight of a part with its saved state; `None` for fixed weights.
    fn adaptive(&self, routes: &Routes, route: &str, part: &str) -> Option<AdaptiveWeight> {
        let parts = &routes.get(route)?.parts;
        let mut adaptive = parts.iter().find(|p| p.name == part)?.adaptive.clone()?;
        if let Some(state) = self.0.get(route).and_then(|parts| parts.get(part)) {
            adaptive.restore(*state);
        }
        Some(adaptive)
    }
}
