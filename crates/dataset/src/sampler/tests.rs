use insta::assert_snapshot;
use proptest::prelude::*;

use hone_core::types::{Message, Role};

use super::*;
use crate::StageConfig;

/// `count` prompts; the first half is `easy`.
fn prompts(count: usize) -> Vec<Arc<Prompt>> {
    (0..count).map(|n| prompt(n, count)).collect()
}

fn prompt(n: usize, count: usize) -> Arc<Prompt> {
    let messages = vec![Message::new(Role::User, n.to_string())];
    let level = if 2 * n < count { "easy" } else { "hard" };
    Arc::new(Prompt {
        id: PromptId::of(&messages),
        place: RowPlace::Line(n as u64 + 1),
        messages,
        metadata: BTreeMap::from([("level".to_owned(), level.to_owned())]),
    })
}

fn config(strategy: SamplingStrategy) -> DatasetConfig {
    DatasetConfig { strategy: strategy.into(), seed: 3, ..DatasetConfig::default() }
}

fn line(draw: &Draw) -> u64 {
    let (RowPlace::Line(line) | RowPlace::Row(line)) = draw.prompt.place;
    line
}

fn draw(sampler: &mut PromptSampler, count: usize) -> Vec<u64> {
    (0..count).map(|_| line(&sampler.next(1).unwrap())).collect()
}

fn sorted(mut lines: Vec<u64>) -> Vec<u64> {
    lines.sort_unstable();
    lines
}

#[test]
fn every_pass_draws_every_prompt_once() {
    let all: Vec<u64> = (1..=20).collect();
    let mut walk = PromptSampler::new(&prompts(20), &config(SamplingStrategy::Sequential)).unwrap();
    assert_eq!((draw(&mut walk, 20), draw(&mut walk, 20)), (all.clone(), all.clone()));
    let mut shuffle = PromptSampler::new(&prompts(20), &config(SamplingStrategy::Shuffle)).unwrap();
    let passes: Vec<Vec<u64>> = (0..3).map(|_| draw(&mut shuffle, 20)).collect();
    assert!(passes.iter().all(|pass| sorted(pass.clone()) == all));
    assert!(passes[0] != passes[1] && passes[1] != passes[2] && passes[0] != all);
    assert_eq!(shuffle.next(1).unwrap().number, 60);
    let other = DatasetConfig { seed: 4, ..config(SamplingStrategy::Shuffle) };
    let mut other = PromptSampler::new(&prompts(20), &other).unwrap();
    assert_ne!(super::tests::draw(&mut other, 20), passes[0]);
}

#[test]
fn added_and_removed_prompts_do_not_move_the_position() {
    let mut sampler = PromptSampler::new(&prompts(20), &config(SamplingStrategy::Shuffle)).unwrap();
    let first = draw(&mut sampler, 8);
    let mut more = prompts(20);
    more.retain(|p| p.place != RowPlace::Line(first[0]));
    more.push(prompt(99, 20));
    let state = sampler.state();
    let mut resumed =
        PromptSampler::resume(&more, &config(SamplingStrategy::Shuffle), state).unwrap();
    // The new prompt may come in this pass or not; the others keep their order.
    let rest = draw(&mut sampler, 12);
    let mut continued = Vec::new();
    while continued.len() < 12 {
        let line = line(&resumed.next(1).unwrap());
        continued.extend((line != 100).then_some(line));
    }
    assert_eq!(continued, rest);
}

#[test]
fn excluded_prompts_are_never_drawn_again() {
    for strategy in [SamplingStrategy::Shuffle, SamplingStrategy::Difficulty] {
        let all = prompts(5);
        let mut sampler = PromptSampler::new(&all, &config(strategy)).unwrap();
        for _ in 0..5 {
            let draw = sampler.next(1).unwrap();
            sampler.leave_out(draw.prompt.id);
        }
        assert_eq!(sampler.next(1), None);
        assert!(sampler.takes_live(true), "only live prompts are left");
        assert!(PromptSampler::new(&[], &config(strategy)).unwrap().next(1).is_none());
    }
}

/// Draws prompts and reports groups whose success rate `success` computes from line and draw
/// number. Returns the drawn lines.
fn run(sampler: &mut PromptSampler, draws: usize, success: impl Fn(u64, u64) -> f64) -> Vec<u64> {
    (0..draws)
        .map(|_| {
            let draw = sampler.next(1).unwrap();
            let wins = (success(line(&draw), draw.number) * 8.0).round() as usize;
            let rewards: Vec<_> = (0..8).map(|i| Some(f64::from(u8::from(i < wins)))).collect();
            assert!(sampler.report(draw.prompt.id, &rewards));
            line(&draw)
        })
        .collect()
}

#[test]
fn intermediate_success_is_drawn_more_often_but_every_prompt_is_drawn() {
    let mut sampler =
        PromptSampler::new(&prompts(200), &config(SamplingStrategy::Difficulty)).unwrap();
    // Lines up to 80 always fail; lines from 121 always succeed.
    let success = |line: u64, _| match line {
        ..=80 => 0.0,
        81..=120 => 0.5,
        _ => 1.0,
    };
    run(&mut sampler, 2000, success);
    let lines = run(&mut sampler, 4000, success);
    let medium = lines.iter().filter(|line| (81..=120).contains(*line)).count() as f64 / 4000.0;
    // Weighted draws are 0.9 of all, and these 40 prompts have 40 x 0.27 of the weight 40 x 0.27 +
    // 160 x 0.02. With the draws in turn that is 0.71. The cooldown of 11 of the 40 prompts reduces
    // it to 0.66.
    assert!((0.62..0.70).contains(&medium), "{medium}");
    // The tenth of 4000 draws that takes prompts in turn visits all 200 prompts twice.
    let counts = |line| lines.iter().filter(|l| **l == line).count();
    assert!((1..=200).all(|line| counts(line) >= 2));
    assert_eq!(sampler.state().outcomes[&prompts(200)[0].id].success(), Some(0.0));
    assert!(!sampler.report(PromptId(0), &[Some(1.0)]), "the dataset does not contain it");
}

#[test]
fn weighted_draws_do_not_repeat_recent_prompts() {
    let mut sampler =
        PromptSampler::new(&prompts(100), &config(SamplingStrategy::Difficulty)).unwrap();
    let drawn: Vec<_> = (0..400).map(|_| sampler.next(1).unwrap()).collect();
    for (n, draw) in drawn.iter().enumerate().filter(|(n, _)| (n + 1) % 10 != 0) {
        let recent = &drawn[n.saturating_sub(12)..n];
        assert!(recent.iter().all(|r| r.prompt.id != draw.prompt.id), "draw {n}");
    }
}

fn staged(stages: Vec<StageConfig>) -> DatasetConfig {
    DatasetConfig { stages, ..config(SamplingStrategy::Shuffle) }
}

#[test]
fn stages_select_the_prompts() {
    let stage = |steps, filter: &str| StageConfig {
        steps,
        filter: filter.to_owned(),
        ..StageConfig::default()
    };
    let config = staged(vec![stage(2, "level = easy"), stage(2, "level = hard"), stage(0, "")]);
    let mut sampler = PromptSampler::new(&prompts(20), &config).unwrap();
    let mut at = |step, count| {
        let draws: Vec<Draw> = (0..count).map(|_| sampler.next(step).unwrap()).collect();
        assert!(draws.iter().all(|draw| draw.stage == sampler.curriculum().at(step).index));
        sorted(draws.iter().map(line).collect())
    };
    assert_eq!(at(1, 10), (1..=10).collect::<Vec<_>>());
    assert!(at(2, 3).iter().all(|line| *line <= 10));
    assert_eq!(at(3, 10), (11..=20).collect::<Vec<_>>());
    assert_eq!(at(5, 20), (1..=20).collect::<Vec<_>>());
    let error =
        PromptSampler::new(&prompts(20), &staged(vec![stage(0, "level = medium")])).unwrap_err();
    assert_snapshot!(error, @r#"dataset.stage[0].filter = "level = medium": it matches no prompt; the columns are level"#);
}

#[test]
fn a_stage_skips_prompts_that_are_too_difficult() {
    let stage = StageConfig { max_difficulty: Some(0.6), ..StageConfig::default() };
    let mut sampler = PromptSampler::new(&prompts(20), &staged(vec![stage])).unwrap();
    let success = |line: u64, _| if line <= 10 { 0.5 } else { 0.0 };
    let first = run(&mut sampler, 20, success);
    assert_eq!(
        sorted(first),
        (1..=20).collect::<Vec<_>>(),
        "unscored prompts are not too difficult"
    );
    assert_eq!(sorted(run(&mut sampler, 10, success)), (1..=10).collect::<Vec<_>>());
    // If every prompt is too difficult, all are drawn.
    for prompt in prompts(20) {
        (0..50).for_each(|_| assert!(sampler.report(prompt.id, &[Some(0.0)])));
    }
    draw(&mut sampler, 10);
    let all = draw(&mut sampler, 20).into_iter().collect::<BTreeSet<_>>();
    assert!(all.len() > 10, "{all:?}");
}

#[test]
fn a_state_of_another_configuration_is_refused() {
    let all = prompts(4);
    let mut sampler = PromptSampler::new(&all, &config(SamplingStrategy::Shuffle)).unwrap();
    draw(&mut sampler, 2);
    let state = sampler.state();
    let error = |config: &DatasetConfig, state: PromptSamplerState| {
        PromptSampler::resume(&all, config, state).unwrap_err().to_string()
    };
    let other = DatasetConfig { seed: 9, ..config(SamplingStrategy::Shuffle) };
    assert_snapshot!(error(&other, state.clone()), @"the saved position in the dataset cannot be resumed: its dataset.seed is 3, the configuration's 9");
    assert_snapshot!(error(&config(SamplingStrategy::Difficulty), state.clone()), @"the saved position in the dataset cannot be resumed: its dataset.strategy is shuffle, the configuration's difficulty");
    let later = PromptSamplerState { stage: 2, ..state };
    assert_snapshot!(error(&config(SamplingStrategy::Shuffle), later), @"the saved position in the dataset cannot be resumed: it is in stage 3 of 1");
}

/// One step of a run: decides the mix, draws, and reports unequal rewards.
fn advance(sampler: &mut PromptSampler, step: u64) -> Option<Draw> {
    if sampler.takes_live(step.is_multiple_of(2)) {
        return None;
    }
    let draw = sampler.next(step / 10)?;
    // Every third reward is missing.
    let reward = |i: u64| {
        let known = !(draw.number * 7 + i).is_multiple_of(3);
        known.then_some(0.1 * (line(&draw) + i) as f64)
    };
    sampler.report(draw.prompt.id, &(0..4).map(reward).collect::<Vec<_>>());
    if draw.number == 5 {
        sampler.leave_out(draw.prompt.id);
    }
    Some(draw)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn a_resumed_run_equals_an_uninterrupted_one(
        count in 2_usize..30,
        stop in 0_u64..60,
        seed: u64,
        strategy in prop::sample::select(vec![
            SamplingStrategy::Sequential, SamplingStrategy::Shuffle, SamplingStrategy::Difficulty,
        ]),
    ) {
        let stage = |steps, filter: &str| StageConfig {
            steps, filter: filter.to_owned(), max_difficulty: Some(0.7), ..StageConfig::default()
        };
        let mut config = DatasetConfig {
            seed, strategy: strategy.into(), stages: vec![stage(3, "level = easy"), stage(0, "")],
            ..DatasetConfig::default()
        };
        config.mix.live_share = 0.3;
        // Two prompts with the same content.
        let mut all = prompts(count);
        all.push(Arc::new(Prompt { place: RowPlace::Line(500), ..(*all[0]).clone() }));
        let mut whole = PromptSampler::new(&all, &config).unwrap();
        let mut cut = PromptSampler::new(&all, &config).unwrap();
        for step in 0..stop {
            prop_assert_eq!(advance(&mut whole, step), advance(&mut cut, step));
        }
        let json = serde_json::to_string(&cut.state()).unwrap();
        let state: PromptSamplerState = serde_json::from_str(&json).unwrap();
        prop_assert_eq!(&state, &cut.state());
        let mut resumed = PromptSampler::resume(&all, &config, state).unwrap();
        for step in stop..stop + 60 {
            prop_assert_eq!(advance(&mut whole, step), advance(&mut resumed, step));
        }
        prop_assert_eq!(whole.state(), resumed.state());
    }
}

mod mix {
    use super::super::*;

    #[test]
    fn groups_without_a_choice_do_not_change_the_share() {
        let mut mix = LiveMix::new(0.5);
        for _ in 0..10 {
            assert!(mix.takes_live(true, false));
            assert!(!mix.takes_live(false, true));
            assert!(!mix.takes_live(false, false));
        }
        assert_eq!(mix, LiveMix::new(0.5));
        let always = [LiveMix::new(1.0); 1].map(|mut m| (0..9).all(|_| m.takes_live(true, true)));
        let never = [LiveMix::new(0.0); 1].map(|mut m| (0..9).any(|_| m.takes_live(true, true)));
        assert_eq!((always, never), ([true], [false]));
    }

    proptest::proptest! {
        #[test]
        fn every_window_contains_its_share(millionths in 0_u32..=WHOLE, skip in 0_usize..50, n in 1_usize..200) {
            let share = f64::from(millionths) / f64::from(WHOLE);
            let mut mix = LiveMix::new(share);
            let taken: Vec<bool> = (0..skip + n).map(|_| mix.takes_live(true, true)).collect();
            let live = taken[skip..].iter().filter(|live| **live).count() as f64;
            let exact = n as f64 * share;
            proptest::prop_assert!(live >= (exact - 1e-9).floor() && live <= (exact + 1e-9).ceil());
        }
    }
}

mod outcome {
    use super::super::*;

    fn outcome(groups: &[&[Option<f64>]]) -> PromptOutcome {
        let mut outcome = PromptOutcome::default();
        groups.iter().for_each(|group| outcome.add(group, 1.0));
        outcome
    }

    #[test]
    fn old_groups_decay_and_missing_rewards_are_not_zero() {
        let none = outcome(&[&[None, None], &[Some(f64::NAN)], &[]]);
        assert_eq!((none.success(), none.difficulty()), (None, None));
        assert_eq!(none.weight(), 0.27);
        let half = outcome(&[&[Some(1.5), None, Some(0.5), None]]);
        assert_eq!(half.success(), Some(0.5));
        // With a window of 4, the first group has three quarters of the weight of the last.
        let two = outcome(&[&[Some(0.0); 2], &[Some(1.0); 2]]);
        assert!((two.success().unwrap() - 4.0 / 7.0).abs() < 1e-12);
        assert!((two.weight() - (12.0 / 49.0 + 0.02)).abs() < 1e-12);
    }
}
