//! From sampled completions to a committed group: score, wait for feedback, commit once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

use hone_core::types::{
    Group, GroupId, GroupState, Interaction, PolicyVersion, PromptSource, Reward, RewardId,
    RewardSource, Sample, SampleId, now_ms,
};
use hone_reward::{Route, ScoreInput, record};
use hone_store::{Op, StoreError};

use super::Shared;
use super::queue::PromptJob;

/// Grader values: `(part, values by member)`.
type Grades = Vec<(String, Vec<Option<f64>>)>;
/// Feedback that no group trains on yet, by member.
type Feedback = BTreeMap<SampleId, Vec<Reward>>;

/// Collects a group's shadows, scores everything, waits for feedback and commits.
pub(super) async fn run(
    shared: &Shared,
    job: PromptJob,
    mut sampling: JoinSet<Option<Sample>>,
    wanted: usize,
) {
    let mut shadows = Vec::with_capacity(wanted);
    while let Some(done) = sampling.join_next().await {
        shadows.extend(done.ok().flatten());
    }
    shared.metrics.rollout_samples.inc_by(shadows.len() as u64);
    if shared.is_stopping() && shadows.len() < wanted {
        // The shadows that are missing are the longer ones; a group of the others is biased.
        return shared.skip("stopping");
    }
    shadows.retain(|sample| sample.untrainable.is_none());
    if wanted > 0 && shadows.is_empty() {
        return shared.skip("no_shadow");
    }
    let members: Vec<Sample> = job.served.iter().cloned().chain(shadows).collect();
    let grades = job.route.grade(&inputs(&job.interaction, &members)).await;
    if let Some(prompt) = job.prompt {
        shared.outcomes().push((prompt, totals(&job.route, members.len(), &grades)));
    }
    if job.route.has_feedback() && !job.served.is_empty() {
        wait_for_feedback(shared, &job).await;
    }
    match commit(shared, &job, &members, &grades).await {
        Ok(()) => {}
        Err(error) => {
            tracing::warn!(%error, interaction = %job.interaction.id, "a group was not recorded");
            shared.skip("store");
        }
    }
}

/// Each member's weighted sum; `None` where a part is missing.
fn totals(route: &Route, members: usize, grades: &Grades) -> Vec<Option<f64>> {
    let total = |member: usize| {
        let parts = grades.iter().map(|(part, values)| {
            Some(route.weight(part)? * values.get(member).copied().flatten()?)
        });
        parts.sum::<Option<f64>>()
    };
    (0..members).map(total).collect()
}

fn inputs(interaction: &Interaction, members: &[Sample]) -> Vec<ScoreInput> {
    let messages = Arc::new(interaction.messages.clone());
    let metadata = Arc::new(interaction.metadata.clone());
    let input = |sample: &Sample| ScoreInput {
        messages: Arc::clone(&messages),
        metadata: Arc::clone(&metadata),
        text: sample.text.clone(),
        ids: sample.ids.clone(),
    };
    members.iter().map(input).collect()
}

/// Waits until each served member has all the feedback its route knows, or time is up.
async fn wait_for_feedback(shared: &Shared, job: &PromptJob) {
    let mut changes = shared.store.watch_feedback();
    let deadline = job.completed + shared.config.feedback_wait_ms;
    loop {
        changes.mark_unchanged();
        let left = deadline.saturating_sub(now_ms());
        if left == 0 || shared.is_stopping() || has_all_feedback(shared, job) {
            return;
        }
        tokio::select! {
            () = shared.stopped() => return,
            () = tokio::time::sleep(Duration::from_millis(left)) => return,
            changed = changes.changed() => if changed.is_err() { return },
        }
    }
}

fn has_all_feedback(shared: &Shared, job: &PromptJob) -> bool {
    let parts = job.route.parts.iter().filter(|part| part.grader.is_none()).count();
    job.served.iter().all(|sample| {
        let rewards = shared.store.rewards_of(sample.id).unwrap_or_default();
        rewards.iter().filter(|reward| is_feedback(&job.route, reward)).count() == parts
    })
}

/// Whether a reward is a client's, under a name that the route learns from.
fn is_feedback(route: &Route, reward: &Reward) -> bool {
    reward.source == RewardSource::Feedback && route.takes_feedback(&reward.name)
}

async fn commit(
    shared: &Shared,
    job: &PromptJob,
    members: &[Sample],
    grades: &Grades,
) -> Result<(), StoreError> {
    // Against the sweep: between reading feedback and committing it, nobody else may group it.
    let _forming = if job.route.has_feedback() { Some(shared.forming.lock().await) } else { None };
    let feedback = open_feedback(shared, job)?;
    let group = form(&job.interaction, &job.route, members, grades, &feedback);
    let ready = group.state == GroupState::Ready;
    let mut ops = Vec::new();
    if job.interaction.source == PromptSource::Dataset {
        ops.push(Op::Interaction(Box::new((*job.interaction).clone())));
    }
    let is_served = |sample: &&Sample| job.served.iter().any(|served| served.id == sample.id);
    let shadows = members.iter().filter(|sample| !is_served(sample));
    ops.extend(shadows.map(|sample| Op::Sample(Box::new(sample.clone()))));
    ops.extend(grader_rewards(members, grades).map(|reward| Op::Reward(Box::new(reward))));
    ops.push(Op::Group(Box::new(group)));
    shared.store.commit(ops).await?;

    for (part, values) in grades {
        record(&shared.metrics, &job.route.name, part, values.iter().copied());
    }
    for reward in feedback.values().flatten() {
        record(&shared.metrics, &job.route.name, &reward.name, [reward.value]);
    }
    if ready {
        let source = match job.interaction.source {
            PromptSource::Live => "live",
            PromptSource::Dataset => "dataset",
        };
        shared.metrics.rollout_groups.with_label_values(&[source]).inc();
    } else {
        shared.skip("unscored");
    }
    Ok(())
}

/// The served members' feedback that may join their group.
///
/// A part that another group trains on already for one of them is left to the sweep for all of
/// them: this group would otherwise name it for that one again.
fn open_feedback(shared: &Shared, job: &PromptJob) -> Result<Feedback, StoreError> {
    let mut open = Feedback::new();
    if job.served.is_empty() || !job.route.has_feedback() {
        return Ok(open);
    }
    let groups = shared.store.groups_of(job.interaction.id)?;
    let is_member = |group: &Group| job.served.iter().any(|s| group.members.contains(&s.id));
    let taken: BTreeSet<String> =
        groups.into_iter().filter(is_member).flat_map(|group| group.parts).collect();
    for sample in &job.served {
        let mut rewards = shared.store.rewards_of(sample.id)?;
        rewards.retain(|reward| {
            reward.value.is_some()
                && is_feedback(&job.route, reward)
                && !taken.contains(&reward.name)
        });
        if !rewards.is_empty() {
            open.insert(sample.id, rewards);
        }
    }
    Ok(open)
}

fn grader_rewards<'a>(
    members: &'a [Sample],
    grades: &'a Grades,
) -> impl Iterator<Item = Reward> + 'a {
    let created = now_ms();
    grades.iter().flat_map(move |(part, values)| {
        members.iter().zip(values).map(move |(sample, value)| Reward {
            id: RewardId::new(),
            sample: sample.id,
            name: part.clone(),
            value: *value,
            source: RewardSource::Grader,
            created,
            idempotency_key: None,
            comment: None,
            key_id: None,
        })
    })
}

/// The group of what could be scored. A member without any value leaves it: missing is not zero.
fn form(
    interaction: &Interaction,
    route: &Route,
    members: &[Sample],
    grades: &Grades,
    feedback: &Feedback,
) -> Group {
    let graded = |i: usize| grades.iter().any(|(_, values)| values[i].is_some());
    let scored: Vec<(usize, &Sample)> = members
        .iter()
        .enumerate()
        .filter(|(i, sample)| graded(*i) || feedback.contains_key(&sample.id))
        .collect();
    let has_value = |part: &str| {
        grades.iter().any(|(name, values)| name == part && values.iter().any(Option::is_some))
            || feedback.values().flatten().any(|reward| reward.name == part)
    };
    let parts = route.parts.iter().map(|part| &part.name).filter(|part| has_value(part));
    let (kept, state): (Vec<&Sample>, _) = if scored.is_empty() {
        (members.iter().collect(), GroupState::Dropped("unscored".to_owned()))
    } else {
        (scored.into_iter().map(|(_, sample)| sample).collect(), GroupState::Ready)
    };
    Group {
        id: GroupId::new(),
        interaction: interaction.id,
        route: route.name.clone(),
        members: kept.iter().map(|sample| sample.id).collect(),
        parts: parts.cloned().collect(),
        oldest_version: kept.iter().map(|s| s.version).min().unwrap_or(PolicyVersion::BASE),
        created: now_ms(),
        state,
    }
}

#[cfg(test)]
mod tests;
