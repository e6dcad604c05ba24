//! Completions that a step was trained on, and their rewards.

use std::collections::BTreeMap;
use std::sync::Arc;

use hone_core::types::{Reward, StepRecord};
use hone_reward::{Route, Routes};
use hone_store::{Store, StoreError};

use crate::runs::stats;
use crate::runs::table::ScoredSample;

/// At most `most` completions of a step's groups, the first of each group first.
pub(super) fn of_step(
    store: &Store,
    routes: &Routes,
    record: &StepRecord,
    most: usize,
) -> Result<Vec<ScoredSample>, StoreError> {
    let mut shown = Vec::new();
    for (index, id) in record.groups.iter().enumerate() {
        if shown.len() >= most {
            break;
        }
        let Some(group) = store.group(*id)? else { continue };
        // At least two of each group, to show that its members differ.
        let each = most.div_ceil(record.groups.len() - index).max(2).min(most - shown.len());
        let interaction = store.interaction(group.interaction)?;
        let prompt = interaction.and_then(|i| i.messages.last().map(|m| m.content.clone()));
        let prompt = prompt.unwrap_or_default();
        let route = routes.get(&group.route);
        for member in group.members.iter().take(each) {
            let Some(sample) = store.sample(*member)? else { continue };
            let rewards = store.rewards_of(*member)?;
            let total = weighted_sum(route, &rewards);
            shown.push(ScoredSample {
                prompt: prompt.clone(),
                completion: sample.text,
                parts: rewards.into_iter().map(|reward| (reward.name, reward.value)).collect(),
                total,
                extracted: BTreeMap::new(),
            });
        }
    }
    Ok(shown)
}

/// The weighted sum of a completion's rewards without the missing ones; `None` if all are missing.
fn weighted_sum(route: Option<&Arc<Route>>, rewards: &[Reward]) -> Option<f64> {
    let weighted = |reward: &Reward| Some(route?.weight(&reward.name)? * reward.value?);
    rewards.iter().filter_map(weighted).reduce(|sum, value| sum + value)
}

/// The rewards of all completions of a step, by the name of their histogram: the weighted sum as
/// `rewards/total`, the mean and the deviation of each group's sums as `rewards/group_mean` and
/// `rewards/group_std`, and each part as `rewards/PART`. Missing values are left out.
pub(super) fn distributions(
    store: &Store,
    routes: &Routes,
    record: &StepRecord,
) -> Result<BTreeMap<String, Vec<f64>>, StoreError> {
    let mut values: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    let mut add = |name: &str, value| {
        values.entry(format!("rewards/{name}")).or_default().push(value);
    };
    for id in &record.groups {
        let Some(group) = store.group(*id)? else { continue };
        let route = routes.get(&group.route);
        let mut totals = Vec::with_capacity(group.members.len());
        for member in &group.members {
            let rewards = store.rewards_of(*member)?;
            totals.extend(weighted_sum(route, &rewards));
            for reward in rewards {
                if let Some(value) = reward.value {
                    add(&reward.name, value);
                }
            }
        }
        totals.iter().for_each(|total| add("total", *total));
        if !totals.is_empty() {
            add("group_mean", stats::mean(&totals));
        }
        if let Some(deviation) = stats::deviation(&totals) {
            add("group_std", deviation);
        }
    }
    Ok(values)
}
