//! The feedback sweep: feedback that no other group uses becomes groups of rated completions, of which
//! a group has those of one prompt, usually one.
//!
//! This is all feedback on routes without graders, feedback that arrived after its group was
//! committed, and feedback that a crash left over. It is read from the ledger
//! ([`Store::ungrouped_feedback`]), so a crash loses none.
//!
//! [`Store::ungrouped_feedback`]: hone_store::Store::ungrouped_feedback

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use hone_core::types::{Group, GroupId, GroupState, Sample, SampleId, now_ms};
use hone_reward::record;
use hone_store::{MERGED, Op, StoreError};

use crate::context::RolloutContext;
use crate::siblings::{RatedSample, Regrouping};

/// Longest time between two sweeps, because reservations expire without a wake-up.
const TICK: Duration = Duration::from_millis(500);
/// Ledger rows read at once. More than can be reserved by the queue and the groups in flight.
const ROWS: usize = 4096;
/// Completions grouped in one commit.
const BATCH: usize = 256;

/// Runs until [`crate::Rollout::stop`].
pub(super) async fn run(context: Arc<RolloutContext>) {
    let mut changes = context.store.watch_feedback();
    loop {
        changes.mark_unchanged();
        match sweep(&context).await {
            Ok(()) => {}
            Err(StoreError::Closed) => return,
            Err(error) => tracing::warn!(%error, "feedback stays ungrouped in the ledger"),
        }
        tokio::select! {
            biased;
            () = context.stopped() => return,
            changed = changes.changed() => if changed.is_err() { return },
            () = context.wake_sweep.notified() => {}
            () = tokio::time::sleep(TICK) => {}
        }
    }
}

/// Groups all ungrouped feedback that is not reserved.
async fn sweep(context: &RolloutContext) -> Result<(), StoreError> {
    // Ensures that the sweep ends even if a commit does not clear a row.
    let mut seen = HashSet::new();
    while !context.is_stopping() {
        let _grouping = context.grouping.lock().await;
        let rows = context.store.ungrouped_feedback(now_ms(), ROWS)?;
        let mut open: BTreeMap<SampleId, Vec<String>> = BTreeMap::new();
        for (sample, part) in rows {
            let full = open.len() == BATCH && !open.contains_key(&sample);
            if !full && !context.is_reserved(sample) && !seen.contains(&(sample, part.clone())) {
                open.entry(sample).or_default().push(part);
            }
        }
        if open.is_empty() {
            return Ok(());
        }
        let (mut rated, mut dropped) = (Vec::new(), Vec::new());
        for (id, parts) in open {
            seen.extend(parts.iter().map(|part| (id, part.clone())));
            match context.store.sample(id)? {
                Some(sample) => rated.extend(usable(context, sample, parts, &mut dropped)?),
                None => tracing::warn!(sample = %id, "feedback on a sample that is not recorded"),
            }
        }
        let values: Vec<_> = rated.iter().map(RatedParts::of).collect();
        let Regrouping { groups, merged } = Regrouping::of(context, rated)?;
        let formed = groups.len().saturating_sub(merged.len());
        let skipped: Vec<GroupState> = dropped.iter().map(|group| group.state.clone()).collect();
        let merge = |id| Op::GroupState(id, GroupState::Dropped(MERGED.to_owned()));
        let mut ops: Vec<Op> =
            groups.into_iter().chain(dropped).map(|group| Op::Group(Box::new(group))).collect();
        // Last: members of a group that the trainer used meanwhile leave the new group.
        ops.extend(merged.into_iter().map(merge));
        context.store.commit(ops).await?;
        context.metrics.rollout_groups.with_label_values(&["feedback"]).inc_by(formed as u64);
        for state in skipped {
            if let GroupState::Dropped(reason) = state {
                context.count_skipped(&reason);
            }
        }
        values.iter().try_for_each(|rated| rated.record(context))?;
    }
    Ok(())
}

/// The completion with the parts that the route learns from, if there are any. A dropped group of the
/// other parts is added to `dropped`, so that the commit clears them.
fn usable(
    context: &RolloutContext,
    sample: Sample,
    parts: Vec<String>,
    dropped: &mut Vec<Group>,
) -> Result<Option<RatedSample>, StoreError> {
    let interaction = context.store.interaction(sample.interaction)?;
    let route_name = interaction.as_ref().map(|i| i.route.clone()).unwrap_or_default();
    let route = context.routes.get(&route_name).cloned();
    let mut drop = |parts, reason: &str| {
        dropped.push(Group {
            id: GroupId::new(),
            interaction: sample.interaction,
            route: route_name.clone(),
            members: vec![sample.id],
            parts,
            oldest_version: sample.version,
            created: now_ms(),
            state: GroupState::Dropped(reason.to_owned()),
        });
    };
    let (Some(interaction), Some(route)) = (interaction, route) else {
        drop(parts, if route_name.is_empty() { "no_route" } else { "unknown_route" });
        return Ok(None);
    };
    if interaction.held_out {
        drop(parts, "held_out");
        return Ok(None);
    }
    if let Some(reason) = &sample.untrainable {
        drop(parts, reason);
        return Ok(None);
    }
    let (parts, unknown): (Vec<String>, Vec<String>) =
        parts.into_iter().partition(|part| route.takes_feedback(part));
    if !unknown.is_empty() {
        drop(unknown, "unknown_part");
    }
    let has_parts = !parts.is_empty();
    Ok(has_parts.then_some(RatedSample { sample, interaction, route, parts }))
}

/// The rated parts of a completion, for metrics.
struct RatedParts {
    sample: SampleId,
    route: String,
    parts: Vec<String>,
}

impl RatedParts {
    fn of(rated: &RatedSample) -> Self {
        let (route, parts) = (rated.route.name.clone(), rated.parts.clone());
        Self { sample: rated.sample.id, route, parts }
    }

    /// Counts the values of a committed group.
    fn record(&self, context: &RolloutContext) -> Result<(), StoreError> {
        for reward in context.store.rewards_of(self.sample)? {
            if self.parts.contains(&reward.name) {
                record(&context.metrics, &self.route, &reward.name, [reward.value]);
            }
        }
        Ok(())
    }
}
