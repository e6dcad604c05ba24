//! Feedback that no other group trains on: each judged completion becomes a group of one.
//!
//! That is all feedback on routes without graders, feedback that came after its group was formed,
//! and whatever a crash left over. The ledger says what it is ([`Store::ungrouped_feedback`]), so
//! nothing is lost with this process.
//!
//! [`Store::ungrouped_feedback`]: hone_store::Store::ungrouped_feedback

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use hone_core::types::{Group, GroupId, GroupState, Sample, SampleId, now_ms};
use hone_reward::record;
use hone_store::{Op, StoreError};

use super::Shared;

/// How often held feedback is looked at again when nothing else wakes the sweep.
const TICK: Duration = Duration::from_millis(500);
/// Ledger rows read at once: more than can be held back (the queue, and groups under way).
const ROWS: usize = 4096;
/// Completions grouped in one commit.
const BATCH: usize = 256;

/// Runs until [`super::Rollout::stop`].
pub(super) async fn run(shared: Arc<Shared>) {
    let mut changes = shared.store.watch_feedback();
    loop {
        changes.mark_unchanged();
        match sweep(&shared).await {
            Ok(()) => {}
            Err(StoreError::Closed) => return,
            Err(error) => tracing::warn!(%error, "feedback waits in the ledger"),
        }
        tokio::select! {
            biased;
            () = shared.stopped() => return,
            changed = changes.changed() => if changed.is_err() { return },
            () = shared.released.notified() => {}
            () = tokio::time::sleep(TICK) => {}
        }
    }
}

/// Groups everything that is open and not held.
async fn sweep(shared: &Shared) -> Result<(), StoreError> {
    // Looked at in this sweep already: were a row ever not cleared, the sweep must still end.
    let mut seen = HashSet::new();
    while !shared.is_stopping() {
        let _forming = shared.forming.lock().await;
        let rows = shared.store.ungrouped_feedback(now_ms(), ROWS)?;
        let mut open: BTreeMap<SampleId, Vec<String>> = BTreeMap::new();
        for (sample, name) in rows {
            let full = open.len() == BATCH && !open.contains_key(&sample);
            if !full && !shared.is_held(sample) && !seen.contains(&(sample, name.clone())) {
                open.entry(sample).or_default().push(name);
            }
        }
        if open.is_empty() {
            return Ok(());
        }
        let mut groups = Vec::new();
        for (id, names) in open {
            seen.extend(names.iter().map(|name| (id, name.clone())));
            match shared.store.sample(id)? {
                Some(sample) => groups.extend(groups_of_one(shared, &sample, names)?),
                None => tracing::warn!(sample = %id, "feedback on a sample that is not recorded"),
            }
        }
        let ops = groups.iter().map(|group| Op::Group(Box::new(group.clone()))).collect();
        shared.store.commit(ops).await?;
        groups.iter().try_for_each(|group| count(shared, group))?;
    }
    Ok(())
}

/// One group of what the route learns from, and dropped ones of the rest, so that all is cleared.
fn groups_of_one(
    shared: &Shared,
    sample: &Sample,
    names: Vec<String>,
) -> Result<Vec<Group>, StoreError> {
    let interaction = shared.store.interaction(sample.interaction)?;
    let route_name = interaction.map(|interaction| interaction.route).unwrap_or_default();
    let of = |parts, state| group(sample, &route_name, parts, state);
    let dropped = |parts, reason: &str| of(parts, GroupState::Dropped(reason.to_owned()));
    let Some(route) = shared.routes.get(&route_name) else {
        return Ok(vec![dropped(names, "unknown_route")]);
    };
    if sample.untrainable.is_some() {
        return Ok(vec![dropped(names, "untrainable")]);
    }
    let (known, unknown): (Vec<String>, Vec<String>) =
        names.into_iter().partition(|name| route.takes_feedback(name));
    let mut groups = Vec::new();
    if !known.is_empty() {
        groups.push(of(known, GroupState::Ready));
    }
    if !unknown.is_empty() {
        groups.push(dropped(unknown, "unknown_part"));
    }
    Ok(groups)
}

/// Counts a group that is committed.
fn count(shared: &Shared, group: &Group) -> Result<(), StoreError> {
    if let GroupState::Dropped(reason) = &group.state {
        shared.skip(reason);
        return Ok(());
    }
    shared.metrics.rollout_groups.with_label_values(&["feedback"]).inc();
    for member in &group.members {
        for reward in shared.store.rewards_of(*member)? {
            if group.parts.contains(&reward.name) {
                record(&shared.metrics, &group.route, &reward.name, [reward.value]);
            }
        }
    }
    Ok(())
}

fn group(sample: &Sample, route: &str, parts: Vec<String>, state: GroupState) -> Group {
    Group {
        id: GroupId::new(),
        interaction: sample.interaction,
        route: route.to_owned(),
        members: vec![sample.id],
        parts,
        oldest_version: sample.version,
        created: now_ms(),
        state,
    }
}
