//! Members of a group are sampled with the same settings.

use hone_core::types::{FinishReason, Sample, SampleOrigin, SamplingParams};

use super::world::{World, interaction, served};

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
