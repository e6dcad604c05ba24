//! The members, parts and states of groups.

use std::collections::HashSet;

use hone_core::testing::policy;
use hone_core::types::{
    FinishReason, GroupState, PolicyVersion, RewardSource, Sample, SampleOrigin, SamplingParams,
};
use hone_engine::{EngineError, Priority, Publisher};
use hone_store::Op;

use super::world::{World, interaction, served};

#[tokio::test]
async fn a_served_prompt_gets_a_scored_group_in_one_commit() {
    let world = World::new();
    let rollout = world.start();
    let (asked, samples) = world.submit(&rollout, "graded", 1).await;
    let group = world.group(asked.id).await;
    assert_eq!(group.state, GroupState::Ready);
    assert_eq!((group.route.as_str(), group.oldest_version), ("graded", PolicyVersion(0)));
    assert_eq!(group.parts, ["correct", "said"]);
    assert_eq!(group.members.len(), 4);
    assert_eq!(group.members[0], samples[0].id, "the served completion is a member");
    let mut seeds = HashSet::new();
    for id in &group.members {
        let sample = world.store.sample(*id).unwrap().unwrap();
        let rewards = world.store.rewards_of(*id).unwrap();
        let digit_is_5 = sample.text.contains('5');
        let values: Vec<_> = rewards.iter().map(|r| (r.name.as_str(), r.value)).collect();
        let correct = Some(f64::from(u8::from(digit_is_5)));
        assert_eq!(values, [("correct", correct), ("said", Some(1.0))], "{}", sample.text);
        assert!(rewards.iter().all(|r| r.source == RewardSource::Grader));
        if sample.origin == SampleOrigin::Shadow {
            assert!(seeds.insert(sample.params.seed), "every shadow has its own seed");
            let expected = SamplingParams {
                temperature: world.config.temperature,
                max_tokens: 64,
                seed: sample.params.seed,
                ..SamplingParams::default()
            };
            assert_eq!(sample.params, expected, "temperature sampling, at most as long as served");
            assert_eq!(sample.ids.len(), sample.logprobs.len());
            assert_eq!(sample.text, format!("The answer is {}.", sample.params.seed % 10));
            assert_eq!((sample.finish, sample.untrainable), (FinishReason::Stop, None));
        }
    }
    assert_eq!(seeds.len(), 3);
    assert!(world.engine.requests().iter().all(|r| r.priority == Priority::Shadow));
    world.until(|| world.formed("live") == 1).await;
    assert_eq!(world.metrics.rollout_samples.get(), 3);
    let said = world.metrics.reward_value.with_label_values(&["graded", "said"]);
    assert_eq!(said.get_sample_count(), 4);
}

#[tokio::test]
async fn every_trainable_choice_is_a_member_and_shadows_fill_the_group() {
    let world = World::new();
    let rollout = world.start();
    let (asked, _) = world.submit(&rollout, "graded", 5).await;
    assert_eq!(world.group(asked.id).await.members.len(), 5);
    assert!(world.engine.requests().is_empty(), "more choices than a group needs");
    let asked = interaction("graded");
    let mut samples: Vec<_> = (0..3).map(|choice| served(&asked, choice)).collect();
    samples[1].untrainable = Some("top_p".to_owned());
    world.submit_recorded(&rollout, &asked, &samples).await;
    let group = world.group(asked.id).await;
    assert_eq!(group.members.len(), 4);
    assert_eq!(group.members[..2], [samples[0].id, samples[2].id]);
    assert!(!group.members.contains(&samples[1].id));
    assert_eq!(world.engine.requests().len(), 2);
}

#[tokio::test]
async fn a_served_completion_of_an_old_version_is_replaced_by_a_shadow() {
    let world = World::new();
    // Version 5 was activated again after version 7.
    let parents = [0, 1, 2, 3, 4, 5, 6, 5, 8];
    let policies = parents.into_iter().zip(1..);
    let policies = policies.map(|(parent, version)| Op::Policy(Box::new(policy(version, parent))));
    world.store.commit(policies.collect()).await.unwrap();
    world.engine.stage(PolicyVersion(9), None).await.unwrap();
    world.engine.activate().await.unwrap();
    let rollout = world.start();
    let (asked, samples) = world.submit(&rollout, "graded", 1).await;
    let group = world.group(asked.id).await;
    assert_eq!((group.members.len(), group.oldest_version), (4, PolicyVersion(9)));
    assert!(!group.members.contains(&samples[0].id));

    for (version, is_member) in [(5, true), (7, false)] {
        let recent = interaction("graded");
        let mut sample = served(&recent, 0);
        sample.version = PolicyVersion(version);
        world.submit_recorded(&rollout, &recent, std::slice::from_ref(&sample)).await;
        let group = world.group(recent.id).await;
        assert_eq!(group.members.contains(&sample.id), is_member, "version {version}");
    }
}

#[tokio::test]
async fn a_group_without_scores_is_dropped_with_the_reason() {
    let world = World::new();
    let rollout = world.start();
    let (asked, samples) = world.serve_without_answer().await;
    rollout.submit(asked.clone(), samples.clone());
    let group = world.group(asked.id).await;
    assert_eq!(group.state, GroupState::Dropped("unscored".to_owned()));
    world.until(|| world.skipped("unscored") == 1).await;
    assert_eq!(world.formed("live"), 0);
    let missing = world.metrics.reward_missing.with_label_values(&["numbers", "correct"]);
    assert_eq!(missing.get(), 4);
    // Feedback on it still gets a group.
    world.feedback(asked.id, 0, "thumbs", 1.0).await;
    let groups = world.groups(asked.id, 2).await;
    assert_eq!(
        (groups[1].parts.clone(), groups[1].members.clone()),
        (vec!["thumbs".to_owned()], vec![samples[0].id])
    );
}

#[tokio::test]
async fn a_transient_failure_is_retried_and_a_permanent_one_is_not() {
    let world = World::new();
    world.engine.fail_next_generation(EngineError::Internal("a hiccup".to_owned()));
    let rollout = world.start();
    let (asked, _) = world.submit(&rollout, "graded", 1).await;
    assert_eq!(world.groups(asked.id, 1).await[0].members.len(), 4);
    let requests = world.engine.requests();
    let seeds: HashSet<u64> = requests.iter().map(|r| r.params.seed).collect();
    assert_eq!(
        (requests.len(), seeds.len()),
        (4, 3),
        "the failed shadow is repeated with its seed"
    );

    let mut asked = interaction("graded");
    asked.prompt_ids = vec![1; 600];
    let samples = vec![served(&asked, 0)];
    world.submit_recorded(&rollout, &asked, &samples).await;
    world.until(|| world.skipped("no_shadow") == 1).await;
    assert!(world.store.groups_of(asked.id).unwrap().is_empty());
}

#[tokio::test]
async fn progress_counts_groups_and_names_what_their_parts_lack() {
    let world = World::new();
    let rollout = world.start();
    let (asked, samples) = world.serve_without_answer().await;
    rollout.submit(asked, samples);
    world.until(|| rollout.progress().unscored == 1).await;
    let progress = rollout.progress();
    assert!(progress.ready == 0 && progress.unscored_since.is_some());
    let [part] = &progress.missing[..] else { panic!("{progress:?}") };
    assert_eq!(
        (part.part.as_str(), part.kind, part.calls_out),
        ("correct", "numeric_match", false)
    );
    assert_eq!(part.lacks.as_deref(), Some("there is no metadata `answer`"));
    world.submit(&rollout, "graded", 1).await;
    world.until(|| rollout.progress().ready == 1).await;
    assert_eq!(rollout.progress().unscored, 1);
}

#[tokio::test]
async fn siblings_use_the_clients_temperature_limit_and_stop_strings() {
    let world = World::new();
    let rollout = world.start();
    let mut asked = interaction("graded");
    asked.params =
        SamplingParams { temperature: 0.25, max_tokens: 40, ..SamplingParams::default() };
    asked.stop = vec![" is".to_owned()];
    let samples = vec![served(&asked, 0)];
    world.submit_recorded(&rollout, &asked, &samples).await;
    let group = world.group(asked.id).await;
    assert_eq!((group.members.len(), group.members[0]), (4, samples[0].id));
    for request in world.engine.requests() {
        let params = SamplingParams { seed: request.params.seed, ..asked.params.clone() };
        assert_eq!((request.params, request.stop), (params, asked.stop.clone()));
    }
    for id in &group.members[1..] {
        let sample = world.store.sample(*id).unwrap().unwrap();
        // The stop string ends the text, and its tokens are trained on like all others.
        assert_eq!((sample.text.as_str(), sample.finish), ("The answer", FinishReason::Stop));
        assert!(sample.ids.len() > "The answer".len(), "{:?}", sample.ids);
        assert_eq!((sample.origin, sample.untrainable), (SampleOrigin::Shadow, None));
    }
}

#[tokio::test]
async fn a_served_completion_with_other_settings_is_left_out_of_its_group() {
    let world = World::new();
    let rollout = world.start();
    let cancelled = interaction("graded");
    let sample = Sample { finish: FinishReason::Cancelled, ..served(&cancelled, 0) };
    world.submit_recorded(&rollout, &cancelled, std::slice::from_ref(&sample)).await;
    assert!(!world.group(cancelled.id).await.members.contains(&sample.id), "it is not graded");
    let others = world.engine.requests().len();
    let plain = SamplingParams { max_tokens: 64, ..SamplingParams::default() };
    let cases = [
        SamplingParams { temperature: 0.0, ..plain.clone() },
        SamplingParams { top_p: 0.9, temperature: 0.5, ..plain.clone() },
        SamplingParams { top_k: 5, ..plain.clone() },
        SamplingParams { min_p: 0.1, ..plain.clone() },
        SamplingParams { presence_penalty: 1.0, ..plain.clone() },
        SamplingParams { logit_bias: [(7, 1.0)].into(), ..plain.clone() },
        SamplingParams { max_tokens: world.config.max_tokens + 1, temperature: 0.5, ..plain },
    ];
    for (count, params) in (1..).zip(cases) {
        let mut asked = interaction("graded");
        asked.params = params;
        let mut sample = served(&asked, 0);
        sample.untrainable = asked.params.untrainable_reason().map(str::to_owned);
        let reason = if sample.untrainable.is_some() { "untrainable" } else { "settings" };
        let left_out = world.metrics.rollout_left_out.with_label_values(&[reason]);
        let before = left_out.get();
        world.submit_recorded(&rollout, &asked, std::slice::from_ref(&sample)).await;
        let group = world.group(asked.id).await;
        assert_eq!((group.members.len(), group.members.contains(&sample.id)), (4, false));
        assert_eq!(left_out.get() - before, 1, "{:?}", asked.params);
        let requests = world.engine.requests().split_off(others + 4 * (count - 1));
        assert_eq!(requests.len(), 4);
        for request in &requests {
            let expected = SamplingParams {
                temperature: world.config.temperature,
                max_tokens: world.config.max_tokens.min(asked.params.max_tokens),
                seed: request.params.seed,
                ..SamplingParams::default()
            };
            assert_eq!(request.params, expected);
        }
    }
}

#[tokio::test]
async fn a_limit_beyond_the_context_is_that_of_the_context() {
    let mut world = World::new();
    world.config.max_tokens = 600;
    let rollout = world.start();
    let mut asked = interaction("graded");
    asked.params.max_tokens = 100_000;
    let samples = vec![served(&asked, 0)];
    world.submit_recorded(&rollout, &asked, &samples).await;
    let group = world.group(asked.id).await;
    assert_eq!(group.members[0], samples[0].id);
    // The fake's context has 512 tokens, and the prompt 3.
    assert!(world.engine.requests().iter().all(|request| request.params.max_tokens == 509));
}
