//! Heads that learn from the ratings of steps.

use std::path::Path;
use std::sync::Arc;

use hone_reward::{Routes, ScoreInput};

use super::world::{Parts, World, every_step};
use crate::testing::routes;

const LEARNED: &str = "[[route]]\nname = \"route\"\nreward = [\
    { name = \"thumbs\", kind = \"feedback\", type = \"boolean\" }, \
    { name = \"taste\", kind = \"learned\", of = \"thumbs\" }]";

/// A trainer on a route with a learned part.
async fn start(dir: &Path) -> (World, Arc<Routes>) {
    let mut parts = Parts::open(dir, every_step(), |_| ()).await;
    let routes = Arc::new(routes(LEARNED));
    parts.setup.routes = Arc::clone(&routes);
    (World::of(parts), routes)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_learned_part_scores_completions_once_it_predicts_ratings() {
    let dir = tempfile::tempdir().unwrap();
    let (world, routes) = start(dir.path()).await;
    let route = routes.get("route").unwrap();
    assert!(!route.scores_shadows());
    for version in 0..10 {
        world.rewarded_group(4, version, [1.0, 1.0]).await;
        world.rewarded_group(6, version, [0.0, 0.0]).await;
        world.wait_for_version(version + 1).await;
    }
    assert!(route.scores_shadows());
    let input = |token| ScoreInput {
        messages: Arc::default(),
        metadata: Arc::default(),
        text: String::new(),
        ids: vec![token, 5],
    };
    let graded = route.grade_tokens(&[1, 2, 3], &[input(4), input(6)]).await;
    let [Some(liked), Some(disliked)] = graded[0].1[..] else { panic!("{graded:?}") };
    assert!(liked >= 0.6 && disliked <= 0.4, "{liked} {disliked}");
    let gauge = &world.metrics.train.learned_reward;
    assert_eq!(gauge.with_label_values(&["route", "taste", "trusted"]).get(), 1.0);
    world.stop().await;

    // The heads are a part of the checkpoint.
    let (world, routes) = start(dir.path()).await;
    let route = Arc::clone(routes.get("route").unwrap());
    world.until("the part is ready", |_| route.scores_shadows()).await;
    let again = route.grade_tokens(&[1, 2, 3], &[input(4), input(6)]).await;
    assert_eq!(again, graded);
    world.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_learned_part_learns_ratings_that_wait_for_a_paused_trainer() {
    let dir = tempfile::tempdir().unwrap();
    let (world, routes) = start(dir.path()).await;
    let handle = world.pause().await;
    for _ in 0..32 {
        world.rewarded_group(4, 0, [1.0, 1.0]).await;
        world.rewarded_group(6, 0, [0.0, 0.0]).await;
    }
    let route = Arc::clone(routes.get("route").unwrap());
    world.until("the part is trusted", |_| route.scores_shadows()).await;
    let status = handle.status();
    assert_eq!((status.step, status.ready_groups), (0, 64), "{status:?}");
    world.stop().await;
}
