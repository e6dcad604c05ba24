//! Completions that a step was trained on.

use std::collections::BTreeMap;

use hone_core::types::StepRecord;
use hone_reward::Routes;
use hone_store::{Store, StoreError};

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
            let weighted: Vec<f64> = rewards
                .iter()
                .filter_map(|reward| Some(route?.weight(&reward.name)? * reward.value?))
                .collect();
            shown.push(ScoredSample {
                prompt: prompt.clone(),
                completion: sample.text,
                parts: rewards.into_iter().map(|reward| (reward.name, reward.value)).collect(),
                total: (!weighted.is_empty()).then(|| weighted.iter().sum()),
                extracted: BTreeMap::new(),
            });
        }
    }
    Ok(shown)
}
