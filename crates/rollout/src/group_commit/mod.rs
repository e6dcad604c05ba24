//! From shadow samples to a committed group: score, wait for feedback, commit once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use hone_core::types::{
    Group, GroupId, GroupState, Interaction, PolicyVersion, PromptSource, Reward, RewardSource,
    Sample, SampleId, now_ms,
};
use hone_reward::{Route, ScoreInput, record};
use hone_store::{Op, StoreError};

use crate::context::{PromptJob, RolloutContext};

/// Reason of a group that a newer one displaced while a canary runs.
const DISPLACED: &str = "displaced";

/// Values of the graders: `(part, values by member)`.
type Grades = Vec<(String, Vec<Option<f64>>)>;
/// Feedback that no group uses yet, by served member.
type Feedback = BTreeMap<SampleId, Vec<Reward>>;

/// Collects the `wanted` shadows, scores all members, waits for feedback and commits the group.
pub(super) async fn run(
    context: &RolloutContext,
    job: PromptJob,
    mut sampling: JoinSet<Option<Sample>>,
    wanted: usize,
) {
    let mut shadows = Vec::with_capacity(wanted);
    while let Some(sample) = sampling.join_next().await {
        shadows.extend(sample.ok().flatten());
    }
    context.metrics.rollout_samples.inc_by(shadows.len() as u64);
    if context.is_stopping() && shadows.len() < wanted {
        // The missing shadows are the longer ones; a group of the others is biased.
        return context.count_skipped("stopping");
    }
    shadows.retain(|sample| sample.untrainable.is_none());
    if wanted > 0 && shadows.is_empty() {
        return context.count_skipped("no_shadow");
    }
    let members: Vec<Sample> = job.served.iter().cloned().chain(shadows).collect();
    let inputs = score_inputs(&job.interaction, &members);
    let grades = job.route.grade_tokens(&job.interaction.prompt_ids, &inputs).await;
    if let Some(prompt) = job.prompt {
        let totals = total_rewards(&job.route, members.len(), &grades);
        context.prompt_rewards.lock().push((prompt, totals));
    }
    if job.route.has_feedback() && !job.served.is_empty() {
        wait_for_feedback(context, &job).await;
    }
    if let Err(error) = commit(context, &job, &members, &grades).await {
        tracing::warn!(%error, interaction = %job.interaction.id, "a group was not recorded");
        context.count_skipped("store");
    }
}

/// The weighted sum of each member's grades; `None` if one is missing.
fn total_rewards(route: &Route, members: usize, grades: &Grades) -> Vec<Option<f64>> {
    let total = |member: usize| {
        let parts = grades.iter().map(|(part, values)| {
            Some(route.weight(part)? * values.get(member).copied().flatten()?)
        });
        parts.sum::<Option<f64>>()
    };
    (0..members).map(total).collect()
}

fn score_inputs(interaction: &Interaction, members: &[Sample]) -> Vec<ScoreInput> {
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

/// Waits until each served member has all feedback that it can get, or until the time for feedback is over.
async fn wait_for_feedback(context: &RolloutContext, job: &PromptJob) {
    let mut changes = context.store.watch_feedback();
    let deadline = job.completed + context.config.feedback_wait_ms;
    loop {
        changes.mark_unchanged();
        let left = deadline.saturating_sub(now_ms());
        if left == 0 || context.is_stopping() || has_all_feedback(context, job) {
            return;
        }
        tokio::select! {
            () = context.stopped() => return,
            () = tokio::time::sleep(Duration::from_millis(left)) => return,
            changed = changes.changed() => if changed.is_err() { return },
        }
    }
}

fn has_all_feedback(context: &RolloutContext, job: &PromptJob) -> bool {
    let parts = job.route.parts.iter().filter(|part| part.grader.is_none()).count();
    job.served.iter().all(|sample| {
        let rewards = context.store.rewards_of(sample.id).unwrap_or_default();
        rewards.iter().filter(|reward| is_feedback(&job.route, reward)).count() == parts
    })
}

/// Whether a reward is a client's, for a part that the route learns from.
fn is_feedback(route: &Route, reward: &Reward) -> bool {
    reward.source == RewardSource::Feedback && route.takes_feedback(&reward.name)
}

async fn commit(
    context: &RolloutContext,
    job: &PromptJob,
    members: &[Sample],
    grades: &Grades,
) -> Result<(), StoreError> {
    // The sweep must not group the same feedback between the read and the commit.
    let _grouping =
        if job.route.has_feedback() { Some(context.grouping.lock().await) } else { None };
    let feedback = ungrouped_feedback(context, job)?;
    let group = build_group(&job.interaction, &job.route, members, grades, &feedback);
    let ready = group.state == GroupState::Ready;
    let (id, kept) = (group.id, group.members.len());
    let mut ops = Vec::new();
    if job.interaction.source == PromptSource::Dataset {
        ops.push(Op::Interaction(Box::new((*job.interaction).clone())));
    }
    let shadows = &members[job.served.len()..];
    ops.extend(shadows.iter().map(|sample| Op::Sample(Box::new(sample.clone()))));
    ops.extend(grader_rewards(members, grades).map(|reward| Op::Reward(Box::new(reward))));
    ops.push(Op::Group(Box::new(group)));
    context.store.commit(ops).await?;

    for (part, values) in grades {
        record(&context.metrics, &job.route.name, part, values.iter().copied());
    }
    for reward in feedback.values().flatten() {
        record(&context.metrics, &job.route.name, &reward.name, [reward.value]);
    }
    if ready {
        let source = match job.interaction.source {
            PromptSource::Live => "live",
            PromptSource::Dataset => "dataset",
        };
        context.metrics.rollout_groups.with_label_values(&[source]).inc();
        context.progress.lock().ready += 1;
        for displaced in context.displace(id, kept) {
            let state = GroupState::Dropped(DISPLACED.to_owned());
            context.store.commit(vec![Op::GroupState(displaced, state)]).await?;
            context.metrics.train.dropped_groups.with_label_values(&[DISPLACED]).inc();
        }
    } else {
        context.count_skipped("unscored");
        count_unscored(context, job);
    }
    Ok(())
}

/// Counts a group without any value. A warning for the first one shows why nothing is trained.
fn count_unscored(context: &RolloutContext, job: &PromptJob) {
    let missing = job.route.missing(&job.interaction.metadata);
    let mut progress = context.progress.lock();
    if progress.ready == 0 && progress.unscored == 0 {
        tracing::warn!(route = %job.route.name, ?missing, "no part scored the first group");
    }
    progress.unscored += 1;
    progress.unscored_since.get_or_insert_with(Instant::now);
    progress.missing = missing;
}

/// The served members' feedback that may join their group, which has one list of parts for all members. If
/// another group already uses a part for one of them, the sweep groups that part for all of them.
fn ungrouped_feedback(context: &RolloutContext, job: &PromptJob) -> Result<Feedback, StoreError> {
    let mut feedback = Feedback::new();
    if job.served.is_empty() || !job.route.has_feedback() {
        return Ok(feedback);
    }
    let groups = context.store.groups_of(job.interaction.id)?;
    let is_member = |group: &Group| job.served.iter().any(|s| group.members.contains(&s.id));
    let used: BTreeSet<String> =
        groups.into_iter().filter(is_member).flat_map(|group| group.parts).collect();
    for sample in &job.served {
        let mut rewards = context.store.rewards_of(sample.id)?;
        rewards.retain(|reward| {
            reward.value.is_some()
                && is_feedback(&job.route, reward)
                && !used.contains(&reward.name)
        });
        if !rewards.is_empty() {
            feedback.insert(sample.id, rewards);
        }
    }
    Ok(feedback)
}

fn grader_rewards<'a>(
    members: &'a [Sample],
    grades: &'a Grades,
) -> impl Iterator<Item = Reward> + 'a {
    grades.iter().flat_map(move |(part, values)| {
        let rewards = members.iter().zip(values);
        rewards.map(move |(sample, value)| Reward::graded(sample.id, part, *value))
    })
}

/// The group of all members with a value; a missing reward is not 0. Dropped if no member has one.
fn build_group(
    interaction: &Interaction,
    route: &Route,
    members: &[Sample],
    grades: &Grades,
    feedback: &Feedback,
) -> Group {
    let has_value = |part: &str| {
        grades.iter().any(|(name, values)| name == part && values.iter().any(Option::is_some))
            || feedback.values().flatten().any(|reward| reward.name == part)
    };
    let parts = route.parts.iter().map(|part| &part.name).filter(|part| has_value(part));
    let is_scored = |(i, sample): &(usize, &Sample)| {
        grades.iter().any(|(_, values)| values[*i].is_some()) || feedback.contains_key(&sample.id)
    };
    let scored = members.iter().enumerate().filter(is_scored).map(|(_, sample)| sample);
    let mut kept: Vec<&Sample> = scored.collect();
    let mut state = GroupState::Ready;
    if kept.is_empty() {
        kept = members.iter().collect();
        state = GroupState::Dropped("unscored".to_owned());
    }
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
