//! Feedback that no other group trains on: each judged completion becomes a group of one.
//!
//! That is all feedback on routes without graders, feedback that came after its group was formed,
//! and whatever a crash left over. The ledger says what it is ([`Store::ungrouped_feedback`]), so
//! nothing is lost with this process.
//!
//! [`Store::ungrouped_feedback`]: crate::store::Store::ungrouped_feedback

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use super::Shared;
use super::finish::is_feedback;
use crate::reward::record;
use crate::store::{Op, StoreError};
use crate::types::{Group, GroupId, GroupState, Sample, SampleId, now_ms};

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
        let mut ops = Vec::new();
        for (id, names) in open {
            seen.extend(names.iter().map(|name| (id, name.clone())));
            match shared.store.sample(id)? {
                Some(sample) => ops.extend(groups_of_one(shared, &sample, names)?),
                None => tracing::warn!(sample = %id, "feedback on a sample that is not recorded"),
            }
        }
        let ops = ops.into_iter().map(|group| Op::Group(Box::new(group))).collect();
        shared.store.commit(ops).await?;
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
    let dropped = |parts: Vec<String>, reason: &str| {
        shared.skip(reason);
        group(sample, &route_name, parts, GroupState::Dropped(reason.to_owned()))
    };
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
        for reward in shared.store.rewards_of(sample.id)? {
            if is_feedback(route, &reward) && known.contains(&reward.name) {
                record(&shared.metrics, &route.name, &reward.name, [reward.value]);
            }
        }
        shared.metrics.rollout_groups.with_label_values(&["feedback"]).inc();
        groups.push(group(sample, &route_name, known, GroupState::Ready));
    }
    if !unknown.is_empty() {
        groups.push(dropped(unknown, "unknown_part"));
    }
    Ok(groups)
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
