//! Rated completions of one prompt are compared with each other.

use hone_core::testing::policy;
use hone_core::types::{Group, GroupState, Interaction, InteractionId, PolicyVersion, SampleId};
use hone_store::{MERGED, Op};

use super::world::{World, interaction, served};

/// Records another request with the same prompt; `change` is applied before.
async fn again(
    world: &World,
    first: &Interaction,
    change: impl FnOnce(&mut Interaction),
) -> (Interaction, SampleId) {
    let mut asked = Interaction { id: InteractionId::new(), ..first.clone() };
    change(&mut asked);
    let sample = served(&asked, 0);
    world.commit(&asked, std::slice::from_ref(&sample)).await;
    (asked, sample.id)
}

fn content(mut groups: Vec<Group>) -> Vec<(Vec<SampleId>, Vec<String>)> {
    groups.sort_by_key(|group| group.members.clone());
    groups.into_iter().map(|group| (group.members, group.parts)).collect()
}

fn thumbs() -> Vec<String> {
    vec!["thumbs".to_owned()]
}

#[tokio::test]
async fn rated_choices_and_answers_to_the_same_prompt_make_one_group() {
    let world = World::new();
    let (first, samples) = world.serve("users", 3).await;
    let (second, regenerated) = again(&world, &first, |_| {}).await;
    // Not comparable: another prompt, route, API key or end, and a choice without a rating.
    let mut others = Vec::new();
    for change in [
        (|asked: &mut Interaction| asked.prompt_ids.push(9)) as fn(&mut Interaction),
        |asked| asked.route = "both".to_owned(),
        |asked| asked.key_id = Some("other".to_owned()),
        |asked| asked.stop = vec!["\n".to_owned()],
        |asked| asked.params.stop_token_ids = vec![7],
        |asked| asked.params.min_tokens = 2,
        |asked| asked.params.ignore_eos = true,
    ] {
        others.push(again(&world, &first, change).await);
    }
    for (id, choice, value) in [(first.id, 0, 1.0), (first.id, 2, 0.0), (second.id, 0, 1.0)] {
        world.feedback(id, choice, "thumbs", value).await;
    }
    for (other, _) in &others {
        world.feedback(other.id, 0, "thumbs", 1.0).await;
    }
    world.start();
    world.until(|| world.formed("feedback") == 8).await;
    let mut expected = vec![(vec![samples[0].id, samples[2].id, regenerated], thumbs())];
    expected.extend(others.iter().map(|(_, sample)| (vec![*sample], thumbs())));
    assert_eq!(content(world.store.ready_groups(9).unwrap()), expected);
    let group = world.group(second.id).await;
    assert_eq!(group.interaction, first.id, "the first member's");
}

#[tokio::test]
async fn a_late_rating_joins_the_group_that_waits_for_the_trainer() {
    let world = World::new();
    world.start();
    let (first, samples) = world.serve("users", 1).await;
    world.feedback(first.id, 0, "thumbs", 1.0).await;
    let alone = world.group(first.id).await;
    let (second, regenerated) = again(&world, &first, |_| {}).await;
    world.feedback(second.id, 0, "thumbs", 0.0).await;
    let both = world.group(second.id).await;
    assert_eq!(both.members, [samples[0].id, regenerated]);
    assert_eq!((both.state, both.created), (GroupState::Ready, alone.created), "its turn stays");
    let alone = world.store.group(alone.id).unwrap().unwrap();
    assert_eq!(alone.state, GroupState::Dropped(MERGED.to_owned()));
    world.until(|| world.metrics.feedback_received.get() == 2).await;
    assert_eq!(world.metrics.feedback_waiting.get(), 2, "a merger is no outcome");
    assert_eq!(world.skipped(MERGED), 0);
    // After training, the next rating has nothing to be compared with.
    world.train().await;
    let (third, last) = again(&world, &first, |_| {}).await;
    world.feedback(third.id, 0, "thumbs", 0.0).await;
    let group = world.group(third.id).await;
    assert_eq!(group.members, [last]);
    assert_eq!(world.metrics.feedback_ratings.with_label_values(&["trained"]).get(), 2);
}

#[tokio::test]
async fn the_members_of_a_group_have_ratings_for_all_of_its_parts() {
    let world = World::new();
    let (first, samples) = world.serve("users", 1).await;
    let (second, regenerated) = again(&world, &first, |_| {}).await;
    for (id, name) in [(first.id, "thumbs"), (second.id, "thumbs"), (second.id, "stars")] {
        world.feedback(id, 0, name, 1.0).await;
    }
    world.start();
    world.until(|| world.formed("feedback") == 2).await;
    let both = (vec![samples[0].id, regenerated], thumbs());
    let stars = (vec![regenerated], vec!["stars".to_owned()]);
    assert_eq!(content(world.store.ready_groups(9).unwrap()), [both, stars]);
}

#[tokio::test]
async fn completions_of_different_branches_stay_apart() {
    let world = World::new();
    // Version 1 was activated again after version 2; version 3 descends from it.
    let policies = [(1, 0), (2, 1), (3, 1)];
    let policies = policies.map(|(version, parent)| Op::Policy(Box::new(policy(version, parent))));
    world.store.commit(policies.into()).await.unwrap();
    let first = interaction("users");
    let mut samples: Vec<_> = (0..3).map(|choice| served(&first, choice)).collect();
    for (sample, version) in samples.iter_mut().zip([2, 1, 3]) {
        sample.version = PolicyVersion(version);
    }
    world.commit(&first, &samples).await;
    for choice in 0..3 {
        world.feedback(first.id, choice, "thumbs", 1.0).await;
    }
    world.start();
    world.until(|| world.formed("feedback") == 2).await;
    let ready = world.store.ready_groups(9).unwrap();
    assert!(ready.iter().any(|group| group.oldest_version == PolicyVersion(1)));
    let abandoned = (vec![samples[0].id], thumbs());
    assert_eq!(content(ready), [abandoned, (vec![samples[1].id, samples[2].id], thumbs())]);
}
