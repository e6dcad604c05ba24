//! Feedback reaches exactly one group.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use hone_core::types::{Group, GroupState, Interaction, InteractionId, SampleId};
use hone_store::MERGED;

use super::world::{World, interaction, served};

#[tokio::test]
async fn feedback_in_time_joins_its_group() {
    let mut world = World::new();
    world.config.feedback_wait_ms = 3_600_000;
    let rollout = world.start();
    let (asked, samples) = world.submit(&rollout, "both", 1).await;
    world.until(|| world.metrics.rollout_samples.get() == 3).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(world.store.groups_of(asked.id).unwrap().is_empty(), "the group waits for feedback");
    world.feedback(asked.id, 0, "thumbs", 1.0).await;
    // The group waits no longer than necessary.
    let group = world.group(asked.id).await;
    assert_eq!((group.members.len(), group.members[0]), (4, samples[0].id));
    assert_eq!(group.parts, ["said", "thumbs"]);
    assert!(world.ungrouped().is_empty());
    assert_eq!(world.formed("feedback"), 0);
    let thumbs = world.metrics.reward_value.with_label_values(&["both", "thumbs"]);
    world.until(|| thumbs.get_sample_count() == 1).await;
}

#[tokio::test]
async fn late_feedback_gets_its_own_group() {
    let mut world = World::new();
    world.config.feedback_wait_ms = 30;
    let rollout = world.start();
    let (asked, samples) = world.submit(&rollout, "both", 1).await;
    let group = world.group(asked.id).await;
    assert_eq!(group.parts, ["said"]);
    world.feedback(asked.id, 0, "thumbs", 0.0).await;
    let late = world.groups(asked.id, 2).await.remove(1);
    assert_eq!((late.members, late.parts), (vec![samples[0].id], vec!["thumbs".to_owned()]));
    assert_eq!((late.state, late.route.as_str()), (GroupState::Ready, "both"));
    world.until(|| (world.formed("live"), world.formed("feedback")) == (1, 1)).await;
}

#[tokio::test]
async fn feedback_on_one_of_several_choices_joins_for_that_choice() {
    let mut world = World::new();
    world.config.feedback_wait_ms = 2_000;
    let rollout = world.start();
    let (asked, samples) = world.submit(&rollout, "both", 2).await;
    world.feedback(asked.id, 1, "thumbs", 1.0).await;
    let group = world.group(asked.id).await;
    assert_eq!(group.parts, ["said", "thumbs"]);
    assert!(group.members.contains(&samples[1].id));
    let names = |id| world.store.rewards_of(id).unwrap().len();
    assert_eq!((names(samples[0].id), names(samples[1].id)), (1, 2));
}

#[tokio::test]
async fn a_route_without_graders_learns_from_feedback_alone() {
    let mut world = World::new();
    world.config.enabled = false;
    let rollout = world.start();
    let (asked, samples) = world.submit(&rollout, "users", 2).await;
    world.feedback(asked.id, 1, "thumbs", 1.0).await;
    let group = world.group(asked.id).await;
    assert_eq!((group.members, group.parts), (vec![samples[1].id], vec!["thumbs".to_owned()]));
    assert_eq!(world.skipped("disabled"), 1);
}

#[tokio::test]
async fn feedback_left_by_a_crash_is_grouped_or_dropped_with_a_reason() {
    let world = World::new();
    let (both, both_samples) = world.serve("both", 1).await;
    let (users, users_samples) = world.serve("users", 1).await;
    let gone = world.serve("gone", 1).await.0;
    let greedy = interaction("users");
    let mut sample = served(&greedy, 0);
    sample.untrainable = Some("greedy".to_owned());
    world.commit(&greedy, &[sample]).await;
    let exam = Interaction { held_out: true, ..interaction("users") };
    world.commit(&exam, &[served(&exam, 0)]).await;
    for (id, name) in [
        (both.id, "thumbs"),
        (users.id, "thumbs"),
        (users.id, "stars"),
        (users.id, "smiles"),
        (both.id, "said"),
        (gone.id, "thumbs"),
        (greedy.id, "thumbs"),
        (exam.id, "thumbs"),
    ] {
        world.feedback(id, 0, name, 1.0).await;
    }
    world.start();
    world.until(|| world.ungrouped().is_empty()).await;
    let groups = |id: InteractionId| {
        let mut groups = world.store.groups_of(id).unwrap();
        groups.sort_by_key(|group| group.parts.clone());
        groups.into_iter().map(|g| (g.members, g.parts, g.state)).collect::<Vec<_>>()
    };
    let names = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
    let dropped = |reason: &str| GroupState::Dropped(reason.to_owned());
    let id = vec![both_samples[0].id];
    assert_eq!(
        groups(both.id),
        [
            (id.clone(), names(&["said"]), dropped("unknown_part")),
            (id, names(&["thumbs"]), GroupState::Ready),
        ]
    );
    let id = vec![users_samples[0].id];
    assert_eq!(
        groups(users.id),
        [
            (id.clone(), names(&["smiles"]), dropped("unknown_part")),
            (id, names(&["thumbs", "stars"]), GroupState::Ready),
        ]
    );
    assert_eq!(groups(gone.id)[0].2, dropped("unknown_route"));
    assert_eq!(groups(greedy.id)[0].2, dropped("greedy"));
    assert_eq!(groups(exam.id)[0].2, dropped("held_out"));
    world.until(|| world.formed("feedback") == 2 && world.skipped("unknown_part") == 2).await;
}

#[tokio::test]
async fn a_long_wait_in_the_queue_does_not_delay_feedback() {
    let mut world = World::with(|fake| (fake.slots, fake.delay) = (1, Duration::from_secs(60)));
    world.config.feedback_wait_ms = 20;
    let rollout = world.start();
    world.submit(&rollout, "graded", 1).await;
    world.until(|| world.engine.requests().len() == 1).await;
    let (asked, _) = world.submit(&rollout, "both", 1).await;
    world.feedback(asked.id, 0, "thumbs", 1.0).await;
    assert_eq!(world.groups(asked.id, 1).await[0].parts, ["thumbs"]);
}

/// Feedback at every stage of a group, from several threads, is grouped exactly once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn feedback_enters_exactly_one_group() {
    let mut world = World::with(|fake| fake.slots = 8);
    world.config.feedback_wait_ms = 50;
    world.config.max_ready_groups = 1_000;
    let rollout = world.start();
    let mut asked = Vec::new();
    for round in 0..200_u64 {
        let (interaction, samples) = world.submit(&rollout, "both", 2).await;
        asked.push((interaction.id, samples));
        // The last twenty prompts are at different stages.
        let (judged, _) = &asked[asked.len() - 1 - (round % 20).min(round) as usize];
        world.feedback(*judged, (round % 2) as u32, "thumbs", 1.0).await;
    }
    world.until(|| asked.iter().all(|(id, _)| has_graded_group(&world, *id))).await;
    // Further feedback on prompts whose group is committed.
    for (id, _) in asked.iter().step_by(10) {
        world.feedback(*id, 1, "thumbs", 0.0).await;
    }
    world.until(|| world.ungrouped().is_empty()).await;
    rollout.stop().await;
    let mut joined = 0;
    for (id, samples) in &asked {
        let groups = world.store.groups_of(*id).unwrap();
        let mut trained: HashMap<SampleId, usize> = HashMap::new();
        let is_merged = |group: &Group| group.state == GroupState::Dropped(MERGED.to_owned());
        let rated = groups.iter().filter(|group| group.parts.iter().any(|p| p == "thumbs"));
        for group in rated.filter(|group| !is_merged(group)) {
            joined += usize::from(group.parts.len() == 2);
            for member in &group.members {
                *trained.entry(*member).or_default() += 1;
            }
        }
        let judged: HashSet<SampleId> = samples
            .iter()
            .map(|sample| sample.id)
            .filter(|id| world.store.rewards_of(*id).unwrap().iter().any(|r| r.name == "thumbs"))
            .collect();
        for id in judged {
            assert_eq!(trained.get(&id), Some(&1), "{groups:?}");
        }
    }
    assert!(joined > 0, "some feedback must arrive in time");
    assert!(world.formed("feedback") > 0, "some feedback must arrive late");
}

fn has_graded_group(world: &World, id: InteractionId) -> bool {
    let groups = world.store.groups_of(id).unwrap();
    groups.iter().any(|group| group.parts.iter().any(|part| part == "said"))
}

#[tokio::test]
async fn a_part_used_for_one_choice_is_not_used_again_for_it() {
    let mut world = World::with(|fake| (fake.slots, fake.delay) = (1, Duration::from_millis(40)));
    world.config.feedback_wait_ms = 1;
    let rollout = world.start();
    world.submit(&rollout, "graded", 3).await;
    world.until(|| world.engine.requests().len() == 1).await;
    // Feedback while the prompt waits in the queue becomes a group of one.
    let (asked, samples) = world.submit(&rollout, "both", 2).await;
    world.feedback(asked.id, 1, "thumbs", 1.0).await;
    assert_eq!(world.groups(asked.id, 1).await[0].members, [samples[1].id]);
    // Feedback while the group is being sampled.
    world.until(|| world.engine.requests().len() == 2).await;
    world.feedback(asked.id, 0, "thumbs", 0.0).await;
    let mut groups = world.groups(asked.id, 3).await;
    groups.retain(|group| group.members.contains(&samples[1].id));
    let parts: Vec<_> =
        groups.iter().map(|g| (g.parts.concat(), g.state == GroupState::Ready)).collect();
    let merged = ("thumbs".to_owned(), false);
    assert_eq!(parts, [merged, ("said".to_owned(), true), ("thumbs".to_owned(), true)]);
    assert_eq!(groups[2].members, [samples[0].id, samples[1].id], "both choices are compared");
}

#[tokio::test]
async fn feedback_on_a_conversation_makes_a_group_of_each_turn() {
    let world = World::new();
    let (first, first_samples) = world.serve("users", 1).await;
    let (second, second_samples) = world.serve("users", 1).await;
    world.conversation(&[first.id, second.id], "thumbs", 1.0).await;
    world.start();
    for (asked, samples) in [(first, first_samples), (second, second_samples)] {
        let group = world.group(asked.id).await;
        assert_eq!((group.state, group.members), (GroupState::Ready, vec![samples[0].id]));
        let rewards = world.store.rewards_of(samples[0].id).unwrap();
        assert_eq!((rewards[0].name.as_str(), rewards[0].value), ("thumbs", Some(1.0)));
    }
    assert!(world.ungrouped().is_empty());
}
