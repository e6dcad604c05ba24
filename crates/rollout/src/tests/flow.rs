//! Which prompts get a group, and when.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::PathBuf;
use std::time::Duration;

use hone_core::testing::policy;
use hone_core::types::{
    GroupState, PolicyRecord, PolicyState, PolicyVersion, PromptSource, SampleOrigin,
    SamplingParams,
};
use hone_dataset::StageConfig;
use hone_engine::{Engine, GenerateRequest, Priority};
use hone_store::Op;

use super::world::World;

#[tokio::test]
async fn prompts_without_a_group_are_counted_with_the_reason() {
    let mut world = World::with(|fake| {
        (fake.slots, fake.delay) = (1, Duration::from_millis(200));
    });
    world.config.queue = 2;
    let rollout = world.start();
    world.submit(&rollout, "users", 1).await;
    assert_eq!(world.skipped("route_unscored"), 1);
    world.submit(&rollout, "graded", 1).await;
    world.until(|| world.engine.requests().len() == 1).await;
    for _ in 0..3 {
        world.submit(&rollout, "graded", 1).await;
    }
    assert_eq!((world.skipped("queue_full"), world.metrics.rollout_queue.get()), (1, 2));
    let tokens = world.metrics.engine_tokens.with_label_values(&["shadow"]);
    let before = tokens.get();
    rollout.stop().await;
    let during = tokens.get() - before;
    assert!(during < 10, "stop waits for the engine: {during} tokens; a sample has 17");
    assert_eq!((world.skipped("stopping"), world.metrics.rollout_queue.get()), (2, 0));
    world.submit(&rollout, "graded", 1).await;
    assert_eq!(world.skipped("stopping"), 3);
    world.until(|| world.engine.load().shadow_running == 0).await;
    assert_eq!(
        *world.store.watch_ready().borrow(),
        0,
        "a group of only the short samples is biased"
    );
}

#[tokio::test]
async fn stop_commits_a_group_that_only_waits_for_feedback() {
    let mut world = World::new();
    world.config.feedback_wait_ms = 3_600_000;
    let rollout = world.start();
    let (asked, _) = world.submit(&rollout, "both", 1).await;
    world.until(|| world.metrics.rollout_samples.get() == 3).await;
    assert!(world.store.groups_of(asked.id).unwrap().is_empty());
    // A task that waited longer would be aborted, and its group lost.
    rollout.stop().await;
    assert_eq!(world.store.groups_of(asked.id).unwrap().len(), 1);
    rollout.stop().await;
}

#[tokio::test]
async fn sampling_pauses_at_the_backlog_limit_then_takes_the_newest() {
    let mut world = World::new();
    world.config.max_ready_groups = 2;
    world.config.queue = 3;
    let rollout = world.start();
    for count in 1..=2 {
        world.submit(&rollout, "graded", 1).await;
        world.until(|| world.formed("live") == count).await;
    }
    let mut waiting = Vec::new();
    for _ in 0..4 {
        let (asked, _) = world.submit(&rollout, "graded", 1).await;
        waiting.push(asked.id);
    }
    assert_eq!(world.skipped("backlog"), 1, "the trainer is the bottleneck");
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(world.engine.requests().len(), 6, "no sampling while the backlog is at its limit");
    assert_eq!(*world.store.watch_ready().borrow(), 2);

    world.train().await;
    world.until(|| world.formed("live") == 4).await;
    let has_group = |i: usize| !world.store.groups_of(waiting[i]).unwrap().is_empty();
    assert_eq!([0, 1, 2, 3].map(has_group), [false, true, true, false]);
}

#[tokio::test]
async fn groups_of_ratings_do_not_stop_sampling() {
    // A step needs eight samples. With three the trainer would wait for rollout forever; and with more
    // ratings than the limit has samples, graded routes must learn too.
    let mut world = World::new();
    world.config.max_ready_groups = 2;
    let rollout = world.start();
    for count in 1..=9 {
        let (asked, _) = world.serve("users", 1).await;
        world.feedback(asked.id, 0, "thumbs", 1.0).await;
        world.until(|| world.formed("feedback") == count).await;
    }
    let (asked, _) = world.submit(&rollout, "graded", 1).await;
    world.groups(asked.id, 1).await;
}

/// Changes the state of version 1, a child of the base.
async fn set_canary(world: &World, state: PolicyState) {
    let record = PolicyRecord { state, ..policy(1, 0) };
    world.store.commit(vec![Op::Policy(Box::new(record))]).await.unwrap();
}

#[tokio::test]
async fn graders_go_on_during_a_canary_and_the_newest_groups_stay() {
    let mut world = World::new();
    world.config.max_ready_groups = 2;
    let mut rollout = world.start();
    let mut asked = Vec::new();
    for count in 1..=6 {
        if count == 3 {
            set_canary(&world, PolicyState::Canary).await;
            // A restart knows which groups wait.
            rollout.stop().await;
            rollout = world.start();
        }
        let (prompt, mut samples) = world.serve("graded", 1).await;
        samples[0].version = PolicyVersion(u64::from(count > 3));
        rollout.submit(prompt.clone(), samples.clone());
        let group = world.group(prompt.id).await;
        // All members are of the active version, whose samples remain useful whatever becomes of the canary.
        assert_eq!(group.oldest_version, PolicyVersion::BASE);
        assert_eq!(group.members.contains(&samples[0].id), count <= 3, "{count}");
        for member in &group.members {
            assert_eq!(world.store.sample(*member).unwrap().unwrap().version, PolicyVersion::BASE);
        }
        asked.push(prompt.id);
    }
    world.until(|| *world.store.watch_ready().borrow() == 2).await;
    let states: Vec<_> =
        asked.iter().map(|id| world.store.groups_of(*id).unwrap().remove(0).state).collect();
    let displaced = GroupState::Dropped("displaced".to_owned());
    assert_eq!(states[..4], vec![displaced; 4]);
    assert_eq!(states[4..], [GroupState::Ready, GroupState::Ready]);
    // They are counted after the commit that shows them.
    let dropped = || world.metrics.train.dropped_groups.with_label_values(&["displaced"]).get();
    world.until(|| dropped() == 4).await;
    assert_eq!(world.skipped("backlog"), 0);

    // After the canary the limit applies again.
    set_canary(&world, PolicyState::Active).await;
    let (prompt, _) = world.submit(&rollout, "graded", 1).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(world.store.groups_of(prompt.id).unwrap().is_empty());
    world.train().await;
    world.groups(prompt.id, 1).await;
}

#[tokio::test]
async fn live_traffic_goes_first_and_a_preempted_shadow_keeps_its_seed() {
    let world = World::with(|fake| {
        fake.slots = 1;
        fake.delay = Duration::from_millis(50);
    });
    let rollout = world.start();
    let (asked, _) = world.submit(&rollout, "graded", 1).await;
    for preempted in 1..=5 {
        world.until(|| world.engine.load().shadow_running == 1).await;
        let live = GenerateRequest::new(
            vec![1],
            SamplingParams { max_tokens: 1, ..SamplingParams::default() },
            Priority::Live,
        );
        let generation = world.engine.generate(live).await.unwrap();
        // It did not wait for the end of the shadow, which was preempted.
        assert_eq!(world.metrics.engine_preempted.get(), preempted);
        generation.collect().await.unwrap();
    }
    let group = world.group(asked.id).await;
    assert!(world.metrics.engine_preempted.get() >= 5);
    let requests = world.engine.requests();
    let shadows = || requests.iter().filter(|r| r.priority == Priority::Shadow);
    let seeds: HashSet<u64> = shadows().map(|r| r.params.seed).collect();
    assert_eq!(seeds.len(), 3, "preempted shadows keep their seeds");
    assert!(shadows().count() >= 8, "three samples and five repetitions");
    let recorded: HashSet<u64> = group
        .members
        .iter()
        .map(|id| world.store.sample(*id).unwrap().unwrap())
        .filter(|sample| sample.origin == SampleOrigin::Shadow)
        .map(|sample| sample.params.seed)
        .collect();
    assert_eq!(recorded, seeds);
}

fn dataset(world: &World, lines: &[&str]) -> PathBuf {
    let path = world.dir.path().join("prompts.jsonl");
    std::fs::write(&path, lines.join("\n")).unwrap();
    path
}

#[tokio::test]
async fn a_dataset_fills_idle_time() {
    let mut world = World::new();
    world.config.max_ready_groups = 6;
    world.dataset.path = dataset(
        &world,
        &[
            r#"{"messages":[{"role":"user","content":"1+1="}],"answer":2,"level":"easy"}"#,
            r#"{"messages":[{"role":"user","content":"2+2="}],"answer":"4"}"#,
            &format!(
                r#"{{"messages":[{{"role":"user","content":"{}"}}],"answer":0}}"#,
                "9".repeat(600)
            ),
            r#"{"messages":[{"role":"user","content":"3+3="}],"answer":6}"#,
        ],
    );
    let rollout = world.start();
    world.until(|| world.formed("dataset") == 6).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    let groups = world.store.ready_groups(100).unwrap();
    assert_eq!(groups.len(), 6, "the trainer has enough");
    let mut drawn = BTreeMap::new();
    for group in &groups {
        let asked = world.store.interaction(group.interaction).unwrap().unwrap();
        assert_eq!((asked.source, asked.route.as_str()), (PromptSource::Dataset, "graded"));
        let prompt = format!("user: {}\n", asked.messages[0].content);
        assert_eq!(asked.prompt_ids, world.engine.codec().encode(&prompt).unwrap());
        *drawn.entry(asked.metadata["answer"].clone()).or_insert(0) += 1;
        assert_eq!(asked.metadata.contains_key("level"), asked.metadata["answer"] == "2");
        assert_eq!(group.members.len(), 4);
        assert_eq!(group.parts, ["correct", "said"]);
        for id in &group.members {
            let sample = world.store.sample(*id).unwrap().unwrap();
            assert_eq!(sample.origin, SampleOrigin::Shadow);
        }
    }
    let twice = ["2", "4", "6"].map(|answer| (answer.to_owned(), 2));
    assert_eq!(drawn, BTreeMap::from(twice), "every prompt is drawn once before any is repeated");
    assert_eq!(world.skipped("dataset_prompt"), 1, "a prompt that is too long is left out, once");

    // A live prompt is taken before the dataset's next.
    let (asked, _) = world.submit(&rollout, "graded", 1).await;
    let ready = world.store.ready_groups(1).unwrap().remove(0);
    let state = hone_core::types::GroupState::Trained(1);
    world.store.commit(vec![Op::GroupState(ready.id, state)]).await.unwrap();
    world.groups(asked.id, 1).await;
    world.until(|| world.formed("live") == 1).await;
    assert_eq!(world.formed("dataset"), 6);
}

#[tokio::test]
async fn live_prompts_share_with_the_dataset_as_configured() {
    let mut world = World::new();
    world.config.max_ready_groups = 4;
    let line = r#"{"prompt":"1+1=","answer":2}"#;
    world.dataset.path = dataset(&world, &[line]);
    world.dataset.mix.live_share = 0.5;
    let rollout = world.start();
    world.until(|| world.formed("dataset") == 4).await;
    for _ in 0..4 {
        world.submit(&rollout, "graded", 1).await;
    }
    world.train().await;
    world.until(|| world.formed("dataset") + world.formed("live") == 8).await;
    assert_eq!((world.formed("dataset"), world.formed("live")), (6, 2));
}

#[tokio::test]
async fn stages_are_scored_by_their_routes() {
    let mut world = World::new();
    world.config.max_ready_groups = 2;
    let lines = ["easy", "hard"]
        .map(|level| format!(r#"{{"prompt":"1+1=","answer":2,"level":"{level}"}}"#));
    world.dataset.path = dataset(&world, &[&lines[0], &lines[1]]);
    let stage = StageConfig {
        filter: "level = hard".to_owned(),
        route: "both".to_owned(),
        ..StageConfig::default()
    };
    world.dataset.stages = vec![stage];
    let rollout = world.start();
    world.until(|| world.formed("dataset") == 2).await;
    for group in world.store.ready_groups(10).unwrap() {
        let asked = world.store.interaction(group.interaction).unwrap().unwrap();
        assert_eq!((group.route.as_str(), asked.metadata["level"].as_str()), ("both", "hard"));
        assert_eq!(group.parts, ["said"]);
    }
    rollout.stop().await;
    world.dataset.stages[0].route = "users".to_owned();
    let error = world.try_start().err().unwrap().to_string();
    assert!(error.starts_with("dataset.stage.route = `users` has no reward"), "{error}");
}

#[tokio::test]
async fn a_restart_resumes_in_the_datasets_order() {
    let mut world = World::with(|fake| fake.slots = 1);
    let rows: Vec<String> = (0..8)
        .map(|i| format!(r#"{{"messages":[{{"role":"user","content":"{i}+0="}}],"answer":"{i}"}}"#))
        .collect();
    let rows: Vec<&str> = rows.iter().map(String::as_str).collect();
    world.dataset.path = dataset(&world, &rows);
    for (start, groups) in [3, 8].into_iter().enumerate() {
        world.config.max_ready_groups = groups;
        let rollout = world.start();
        world.until(|| world.store.ready_groups(100).unwrap().len() >= groups).await;
        rollout.stop().await;
        let ready = world.store.ready_groups(100).unwrap();
        let asked = ready.iter().map(|g| world.store.interaction(g.interaction).unwrap().unwrap());
        let answers: BTreeSet<String> = asked.map(|i| i.metadata["answer"].clone()).collect();
        assert_eq!(
            answers.len(),
            ready.len().min(8),
            "start {start}: no prompt is repeated before all are drawn"
        );
    }
    // An unreadable state file is not an error.
    std::fs::write(world.dir.path().join("dataset.json"), b"{").unwrap();
    world.start().stop().await;
}

#[tokio::test]
async fn a_dataset_is_checked_at_start() {
    let mut world = World::new();
    let good = r#"{"messages":[{"role":"user","content":"1+1="}],"answer":2}"#;
    world.dataset.path = dataset(&world, &[good, good, r#"{"answer":2}"#]);
    let refused = |world: &World| world.try_start().err().unwrap().to_string();
    let error = refused(&world);
    assert!(error.starts_with("dataset.path: ") && error.contains(", line 3: "), "{error}");
    world.dataset.path = dataset(&world, &["", ""]);
    assert!(refused(&world).ends_with("holds no prompt"));
    world.dataset.path = world.dir.path().join("nowhere.jsonl");
    assert!(refused(&world).contains("nowhere.jsonl"));
    world.dataset.path = dataset(&world, &[good]);
    for (route, wanted) in [
        ("poems", "rollout.dataset_route = `poems` is not a route"),
        ("users", "rollout.dataset_route = `users` has no reward that can score"),
    ] {
        world.config.dataset_route = route.to_owned();
        assert!(refused(&world).starts_with(wanted), "{wanted}");
    }
}

#[tokio::test]
async fn the_seed_and_the_ledger_determine_the_samples_and_a_restart_draws_others() {
    let mut seeds = Vec::new();
    let worlds = [(); 2].map(|()| World::with(|fake| fake.slots = 1));
    for world in &worlds {
        for _ in 0..2 {
            let rollout = world.start();
            let (asked, _) = world.submit(&rollout, "graded", 1).await;
            world.groups(asked.id, 1).await;
            rollout.stop().await;
        }
        seeds.push(world.engine.requests().iter().map(|r| r.params.seed).collect::<Vec<_>>());
    }
    assert_eq!(seeds[0], seeds[1]);
    assert_eq!(seeds[0].iter().collect::<HashSet<_>>().len(), 6);
}
