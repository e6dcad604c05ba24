//! Ratings of several completions of one prompt become one group, so that they are compared with each other.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hone_core::types::{
    EndRules, GrammarSpec, Group, GroupId, GroupState, Interaction, InteractionId, Lineage,
    PolicyVersion, Sample, SampleId, SampleOrigin, TokenId, now_ms,
};
use hone_reward::Route;
use hone_store::StoreError;

use crate::context::RolloutContext;

/// Largest number of members of such a group. A popular prompt makes several groups.
const MAX_MEMBERS: usize = 32;
/// Earlier requests with the same prompt whose groups a rating may join, newest first.
const EARLIER_REQUESTS: usize = 32;

/// A completion with ratings that wait for a group.
pub(super) struct RatedSample {
    pub sample: Sample,
    pub interaction: Interaction,
    pub route: Arc<Route>,
    /// The rated parts. The route has all of them.
    pub parts: Vec<String>,
}

/// A member of a group of rated completions. Older ones come first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Sibling {
    id: SampleId,
    interaction: InteractionId,
    version: PolicyVersion,
}

impl From<&Sample> for Sibling {
    fn from(sample: &Sample) -> Self {
        Self { id: sample.id, interaction: sample.interaction, version: sample.version }
    }
}

/// New groups, and the ready groups whose members they have.
#[derive(Default)]
pub(super) struct Regrouping {
    pub groups: Vec<Group>,
    pub merged: Vec<GroupId>,
}

impl Regrouping {
    /// Groups rated completions of one prompt, route and API key, with the members of waiting ready groups.
    /// Versions of different branches stay apart, because only one of them can be trained on.
    pub fn of(context: &RolloutContext, rated: &[RatedSample]) -> Result<Self, StoreError> {
        let lineage = context.store.lineage();
        let mut by_prompt: BTreeMap<_, Vec<&RatedSample>> = BTreeMap::new();
        for sample in rated {
            by_prompt.entry(PromptKey::of(&sample.interaction)).or_default().push(sample);
        }
        let mut all = Self::default();
        for mut rated in by_prompt.into_values() {
            while let Some(newest) = rated.iter().map(|r| r.sample.version).max() {
                let is_ancestor =
                    |rated: &&RatedSample| lineage.age(newest, rated.sample.version).is_some();
                let (siblings, others): (Vec<_>, Vec<_>) = rated.into_iter().partition(is_ancestor);
                rated = others;
                for siblings in siblings.chunks(MAX_MEMBERS) {
                    all.add(context, &lineage, siblings)?;
                }
            }
        }
        Ok(all)
    }

    /// Groups completions of one prompt, one with more parts than its siblings in several groups.
    fn add(
        &mut self,
        context: &RolloutContext,
        lineage: &Lineage,
        rated: &[&RatedSample],
    ) -> Result<(), StoreError> {
        let Some(first) = rated.first() else { return Ok(()) };
        let ready = ready_groups(context, rated)?;
        let mut by_part: BTreeMap<&str, BTreeSet<Sibling>> = BTreeMap::new();
        for rated in rated {
            for part in &rated.parts {
                by_part.entry(part).or_default().insert(Sibling::from(&rated.sample));
            }
        }
        let (mut count, mut created) = (rated.len(), now_ms());
        let mut newest = rated.iter().map(|r| r.sample.version).max().unwrap_or_default();
        for (group, members) in &ready {
            let shares_part = group.parts.iter().any(|part| by_part.contains_key(part.as_str()));
            let newer = members.iter().map(|m| m.version).fold(newest, PolicyVersion::max);
            let mut versions = members.iter().map(|m| m.version).chain([newest]);
            if !shares_part
                || count + members.len() > MAX_MEMBERS
                || self.merged.contains(&group.id)
                || versions.any(|version| lineage.age(newer, version).is_none())
            {
                continue;
            }
            for part in &group.parts {
                by_part.entry(part).or_default().extend(members);
            }
            self.merged.push(group.id);
            (count, created) = (count + members.len(), created.min(group.created));
            newest = newer;
        }
        let mut by_members: BTreeMap<Vec<Sibling>, Vec<String>> = BTreeMap::new();
        for part in first.route.parts.iter().map(|part| part.name.as_str()) {
            let Some(members) = by_part.remove(part) else { continue };
            by_members.entry(members.into_iter().collect()).or_default().push(part.to_owned());
        }
        self.groups.extend(by_members.into_iter().filter_map(|(members, parts)| {
            Some(Group {
                id: GroupId::new(),
                interaction: members.first()?.interaction,
                route: first.route.name.clone(),
                members: members.iter().map(|member| member.id).collect(),
                parts,
                oldest_version: members.iter().map(|member| member.version).min()?,
                created,
                state: GroupState::Ready,
            })
        }));
        Ok(())
    }
}

/// What prompts must have in common so that ratings of their completions are compared.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct PromptKey {
    route: String,
    api_key: Option<String>,
    prompt_ids: Vec<TokenId>,
    grammar: Option<GrammarSpec>,
    end_rules: EndRules,
}

impl PromptKey {
    fn of(interaction: &Interaction) -> Self {
        Self {
            route: interaction.route.clone(),
            api_key: interaction.api_key().map(str::to_owned),
            prompt_ids: interaction.prompt_ids.clone(),
            grammar: interaction.grammar.clone(),
            end_rules: interaction.end_rules(),
        }
    }
}

/// The ready groups of ratings alone of a prompt, oldest first, with their members.
fn ready_groups(
    context: &RolloutContext,
    rated: &[&RatedSample],
) -> Result<Vec<(Group, Vec<Sibling>)>, StoreError> {
    let Some(first) = rated.first() else { return Ok(Vec::new()) };
    let own: BTreeSet<InteractionId> = rated.iter().map(|r| r.interaction.id).collect();
    let mut requests = own.clone();
    let key = PromptKey::of(&first.interaction);
    for id in context.store.same_prompt(&first.interaction, EARLIER_REQUESTS)? {
        if !own.contains(&id)
            && let Some(other) = context.store.interaction(id)?
            && PromptKey::of(&other) == key
        {
            requests.insert(id);
        }
    }
    let mut found: BTreeMap<GroupId, (Group, Vec<Sibling>)> = BTreeMap::new();
    for id in requests {
        for group in context.store.groups_of(id)? {
            let is_rated = group.parts.iter().all(|part| first.route.takes_feedback(part));
            if group.state != GroupState::Ready || !is_rated || found.contains_key(&group.id) {
                continue;
            }
            let mut members = Vec::with_capacity(group.members.len());
            for member in &group.members {
                members.extend(context.store.sample(*member)?);
            }
            if members.iter().all(|sample| sample.origin == SampleOrigin::Served) {
                let siblings = members.iter().map(Sibling::from).collect();
                found.insert(group.id, (group, siblings));
            }
        }
    }
    Ok(found.into_values().collect())
}
