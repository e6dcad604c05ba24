//! Groups of earlier steps in later ones.

use std::ops::RangeInclusive;
use std::path::Path;

use hone_core::types::{GroupId, GroupState, PolicyVersion};
use hone_reward::Routes;

use super::world::{ROUTES, World};
use crate::data::batch_builder::{BatchGroup, VersionAges};

async fn start(dir: &Path) -> World {
    World::start_with(dir, |config| config.replay.share = 0.5).await
}

/// The groups of `steps` that a draw returns for weights of version `head`.
fn drawn(world: &World, head: u64, steps: RangeInclusive<u64>, most: usize) -> Vec<GroupId> {
    let lineage = world.store.lineage();
    let ages = VersionAges { lineage, head: PolicyVersion(head), ahead: 0 };
    let routes = crate::testing::routes(ROUTES);
    let draw = |fits: fn(&BatchGroup) -> bool| {
        let routes: &Routes = &routes;
        crate::data::draw_replayed(&world.store, routes, &ages, 0, steps.clone(), most, fits)
            .unwrap()
    };
    assert!(draw(|_| false).groups.is_empty());
    let batch = draw(|group| group.completions().count() == 2 && group.longest_tokens() == 5);
    assert!(batch.members().all(|(_, member)| member.late));
    assert_eq!(batch.group_ids(), draw(|_| true).group_ids(), "the draw is repeatable");
    batch.group_ids()
}

#[tokio::test(flavor = "multi_thread")]
async fn steps_train_again_on_groups_of_earlier_steps() {
    let dir = tempfile::tempdir().unwrap();
    let world = start(dir.path()).await;
    world.train_versions(3).await;
    let steps = world.store.steps(1, 10).unwrap();
    assert!(!steps[0].metrics.contains_key("replay/samples"), "there is nothing to replay");
    for step in &steps[1..] {
        assert_eq!(step.metrics["replay/samples"], 4.0);
        assert_eq!(step.groups.len(), 2, "replayed groups are not those of the step");
        assert!(world.all_are(&step.groups, &GroupState::Trained(step.step)));
        assert_eq!(step.metrics["reward_mean"], 0.5);
    }
    assert_eq!(world.metrics.train.replayed.get(), 8);
    // Twelve ratings, each counted once.
    assert_eq!(world.metrics.feedback_to_policy.get_sample_count(), 12);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draw_has_samples_of_the_lineage_and_the_window_alone() {
    let dir = tempfile::tempdir().unwrap();
    let world = start(dir.path()).await;
    world.train_versions(3).await;
    let trained: Vec<Vec<GroupId>> =
        world.store.steps(1, 3).unwrap().into_iter().map(|step| step.groups).collect();
    let sorted = |mut ids: Vec<GroupId>| {
        ids.sort_unstable();
        ids
    };
    // Step 3 trained on samples of version 2.
    for (head, steps, expected) in [
        (3, 1..=3, trained.concat()),
        (1, 1..=3, trained[..2].concat()),
        (3, 3..=3, trained[2].clone()),
        (3, 2..=2, trained[1].clone()),
        (1, 3..=3, Vec::new()),
    ] {
        assert_eq!(sorted(drawn(&world, head, steps, 100)), sorted(expected));
    }
    assert!(drawn(&world, 3, RangeInclusive::new(1, 0), 100).is_empty());
    for most in 0..8 {
        // Each group has two members.
        assert_eq!(drawn(&world, 3, 1..=3, most).len(), most / 2);
    }
    world.stop().await;
}
