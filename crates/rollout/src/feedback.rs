//! The feedback sweep: feedback that no other group uses becomes groups of one.
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
use hone_store::{Op, StoreError};

use crate::context::RolloutContext;

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
        let mut groups = Vec::new();
        for (id, parts) in open {
            seen.extend(parts.iter().map(|part| (id, part.clone())));
            match context.store.sample(id)? {
                Some(sample) => groups.extend(groups_of_one(context, &sample, parts)?),
                None => tracing::warn!(sample = %id, "feedback on a sample that is not recorded"),
            }
        }
        let ops = groups.iter().map(|group| Op::Group(Box::new(group.clone()))).collect();
        context.store.commit(ops).await?;
        groups.iter().try_for_each(|group| count_group(context, group))?;
    }
    Ok(())
}

/// A ready group of the parts that the route learns from, and a dropped group of the other parts,
/// so that the commit clears all of them.
fn groups_of_one(
    context: &RolloutContext,
    sample: &Sample,
    parts: Vec<String>,
) -> Result<Vec<Group>, StoreError> {
    let interaction = context.store.interaction(sample.interaction)?;
    let route_name = interaction.map(|interaction| interaction.route).unwrap_or_default();
    let group = |parts, state| Group {
        id: GroupId::new(),
        interaction: sample.interaction,
        route: route_name.clone(),
        members: vec![sample.id],
        parts,
        oldest_version: sample.version,
        created: now_ms(),
        state,
    };
    let dropped = |parts, reason: &str| group(parts, GroupState::Dropped(reason.to_owned()));
    let Some(route) = context.routes.get(&route_name) else {
        return Ok(vec![dropped(parts, "unknown_route")]);
    };
    if sample.untrainable.is_some() {
        return Ok(vec![dropped(parts, "untrainable")]);
    }
    let (known, unknown): (Vec<String>, Vec<String>) =
        parts.into_iter().partition(|part| route.takes_feedback(part));
    let mut groups = Vec::new();
    if !known.is_empty() {
        groups.push(group(known, GroupState::Ready));
    }
    if !unknown.is_empty() {
        groups.push(dropped(unknown, "unknown_part"));
    }
    Ok(groups)
}

/// Counts a committed group and its rewards.
fn count_group(context: &RolloutContext, group: &Group) -> Result<(), StoreError> {
    if let GroupState::Dropped(reason) = &group.state {
        context.count_skipped(reason);
        return Ok(());
    }
    context.metrics.rollout_groups.with_label_values(&["feedback"]).inc();
    for member in &group.members {
        for reward in context.store.rewards_of(*member)? {
            if group.parts.contains(&reward.name) {
                record(&context.metrics, &group.route, &reward.name, [reward.value]);
            }
        }
    }
    Ok(())
}
