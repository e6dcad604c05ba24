//! Clients' corrections in steps.

use std::path::Path;
use std::sync::atomic::Ordering;

use hone_core::types::{GroupId, GroupState, InteractionId, TokenId, now_ms};
use hone_store::Op;

use super::world::World;
use crate::testing::{correction, interaction as prompt, sample};

/// A trainer that gives corrections this weight.
async fn start(dir: &Path, weight: f64) -> World {
    World::start_with(dir, |config| config.correction_weight = weight).await
}

impl World {
    /// Records a served completion and a correction of it with `length` tokens.
    async fn correction(&self, token: TokenId, length: usize) -> GroupId {
        let interaction = InteractionId::new();
        let ops = vec![
            Op::Interaction(Box::new(prompt(interaction, "route", vec![1, 2, 3]))),
            Op::Sample(Box::new(sample(interaction, 0))),
            correction(interaction, vec![token; length], None, now_ms()),
        ];
        self.store.commit(ops).await.unwrap();
        self.store.groups_of(interaction).unwrap()[0].id
    }

    fn corrections(&self, outcome: &str) -> u64 {
        self.metrics.train.corrections.with_label_values(&[outcome]).get()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn corrections_make_steps_with_groups_and_alone() {
    let dir = tempfile::tempdir().unwrap();
    let world = start(dir.path(), 0.5).await;
    let group = world.group(4, 0).await;
    let both = [world.correction(5, 2).await, world.correction(6, 3).await];
    world.wait_for_version(1).await;
    let step = world.last_step();
    assert_eq!(step.groups, [group, both[0], both[1]]);
    assert!(world.all_are(&step.groups, &GroupState::Trained(1)));
    assert_eq!((step.metrics["samples"], step.metrics["correction/samples"]), (2.0, 2.0));
    assert!(step.metrics["correction/nll"] > 0.0);
    assert_eq!(step.metrics["completion_length"], 2.0, "corrections are no completions");
    assert_eq!(world.metrics.train.correction_nll.get(), step.metrics["correction/nll"]);
    // Two ratings and two corrections have reached clients.
    assert_eq!(world.metrics.feedback_to_policy.get_sample_count(), 4);
    for token in [5, 6, 7, 8] {
        world.correction(token, 2).await;
    }
    world.wait_for_version(2).await;
    let step = world.last_step();
    assert_eq!((step.groups.len(), step.metrics["correction/samples"]), (4, 4.0));
    assert!(!step.metrics.contains_key("reward_mean") && step.metrics["loss"] > 0.0);
    assert_eq!((world.corrections("trained"), world.metrics.corrections_waiting.get()), (6, 0));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn corrections_of_a_rejected_version_are_trained_on_again() {
    let dir = tempfile::tempdir().unwrap();
    let world = start(dir.path(), 1.0).await;
    world.publisher.rejects.store(1, Ordering::Release);
    let mut corrections = Vec::new();
    for token in [4, 5, 6, 7] {
        corrections.push(world.correction(token, 2).await);
    }
    world.wait_for_version(2).await;
    assert!(world.all_are(&corrections, &GroupState::Trained(2)));
    assert_eq!(world.metrics.corrections_received.get(), 8);
    assert_eq!((world.corrections("trained"), world.metrics.corrections_waiting.get()), (8, 0));
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn corrections_without_weight_and_long_ones_are_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let world = start(dir.path(), 0.0).await;
    for token in [4, 5, 6, 7] {
        world.correction(token, 2).await;
    }
    world.until("dropped", |w| w.corrections("correction_weight") == 4).await;
    world.stop().await;
    let world = World::start_with(dir.path(), |config| {
        config.correction_weight = 1.0;
        config.max_tokens = 12;
    });
    let world = world.await;
    world.correction(4, 10).await;
    for token in [5, 6, 7, 8] {
        world.correction(token, 9).await;
    }
    world.wait_for_version(1).await;
    assert_eq!((world.corrections("too_long"), world.corrections("trained")), (1, 4));
    world.stop().await;
}
