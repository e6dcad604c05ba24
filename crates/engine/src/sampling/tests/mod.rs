mod permitted;
mod softmax;

use proptest::prelude::*;
use rand::Rng as _;

use super::*;

fn params(temperature: f32) -> SamplingParams {
    SamplingParams { temperature, ..Default::default() }
}

fn draw(logits: &[f32], params: &SamplingParams, top: u8) -> Token {
    TokenSampler::new(params, top).unwrap().draw(logits).unwrap()
}

fn softmax(logits: &[f32], temperature: f64) -> Vec<f64> {
    let weights: Vec<f64> = logits.iter().map(|l| (f64::from(*l) / temperature).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.into_iter().map(|w| w / total).collect()
}

/// The definition of truncation: sort all tokens, then cut. `None` if a sum or a probability is so
/// close to a cut that rounding decides.
fn truncated_by_definition(logits: &[f32], params: &SamplingParams) -> Option<Vec<(TokenId, f64)>> {
    let is_close = |a: f64, b: f64| (a - b).abs() < 1e-10 * b;
    let probabilities = softmax(logits, f64::from(params.temperature));
    let mut all: Vec<(TokenId, f64)> = (0..).zip(probabilities).collect();
    // Stable, so that equal tokens stay in the order of their ids.
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    if params.top_k > 0 {
        all.truncate(params.top_k as usize);
    }
    if params.top_p < 1.0 {
        let least = f64::from(params.top_p) * all.iter().map(|c| c.1).sum::<f64>();
        // The shortest prefix that has at least this probability.
        let sums = (1..=all.len()).map(|n| (n, all[..n].iter().map(|c| c.1).sum::<f64>()));
        let (n, sum) = sums.clone().find(|(_, sum)| *sum >= least).unwrap_or((all.len(), least));
        let before = sums.clone().nth(n.wrapping_sub(2)).map_or(0.0, |(_, sum)| sum);
        if is_close(sum, least) || is_close(before, least) {
            return None;
        }
        all.truncate(n);
    }
    let least = f64::from(params.min_p) * all[0].1;
    if params.min_p > 0.0 && all.iter().any(|c| is_close(c.1, least)) {
        return None;
    }
    all.retain(|c| c.1 >= least);
    let mass: f64 = all.iter().map(|c| c.1).sum();
    Some(all.into_iter().map(|(id, p)| (id, p / mass)).collect())
}

/// What [`super`] leaves: `(id, p)`, best first, and the probability of all of them together.
fn truncated(logits: &[f32], params: &SamplingParams) -> (Vec<(TokenId, f64)>, f64) {
    let mut sampler = TokenSampler::new(params, 0).unwrap();
    sampler.logits = logits.to_vec();
    let total = sampler.weigh().unwrap().total;
    sampler.list_candidates();
    let mut candidates = sampler.candidates;
    let kept = truncate(&mut candidates, params, total);
    candidates.sort_unstable_by(best_first);
    (candidates.into_iter().map(|(id, weight)| (id, weight / kept)).collect(), kept / total)
}

#[test]
fn a_plain_draw_takes_the_numbers_of_a_draw() {
    let logits: Vec<f32> = (0..300_u16).map(|i| f32::from(i * 37 % 101) / 12.0).collect();
    for temperature in [0.3, 1.0, 1.7] {
        let [mut whole, mut plain] =
            [0, 1].map(|_| TokenSampler::new(&params(temperature), 0).unwrap());
        for _ in 0..300 {
            let expected = whole.draw(&logits).unwrap();
            let PlainDraw { temperature, uniform } = plain.plain_draw(300).unwrap();
            let mut weights = SoftmaxWeights::default();
            let mass = TotalMass::of(&mut weights, &logits, f64::from(temperature)).unwrap();
            let (id, weight) = weights.pick(uniform * mass.total).unwrap();
            let logprob = (weight / mass.total).ln() as f32;
            assert_eq!(plain.accept(id as TokenId, logprob).unwrap(), expected);
        }
    }
    // The first of four equal logits; truncation changes nothing.
    let params = SamplingParams { top_k: 1, top_p: 0.5, min_p: 0.5, ..params(0.0) };
    let [mut whole, mut plain] = [0, 1].map(|_| TokenSampler::new(&params, 0).unwrap());
    let expected = whole.draw(&[0.0, 3.0, 3.0, -1.0, 3.0, 3.0]).unwrap();
    assert_eq!(plain.plain_draw(6), Some(PlainDraw { temperature: 0.0, uniform: 0.0 }));
    let logprob = -(4.0 + (-3.0_f64).exp() + (-4.0_f64).exp()).ln();
    assert_eq!(plain.accept(1, logprob as f32).unwrap(), expected);
}

#[test]
fn what_depends_on_more_than_the_temperature_is_not_plain() {
    let is_plain = |change: &dyn Fn(&mut SamplingParams), top| {
        let mut params = params(0.7);
        change(&mut params);
        TokenSampler::new(&params, top).unwrap().plain_draw(20).is_some()
    };
    assert!(is_plain(&|_| (), 0) && is_plain(&|p| p.top_k = 20, 0) && !is_plain(&|_| (), 1));
    let truncations: [&dyn Fn(&mut SamplingParams); 3] =
        [&|p| p.top_k = 19, &|p| p.top_p = 0.9, &|p| p.min_p = 0.1];
    assert!(truncations.iter().all(|change| !is_plain(change, 0)));
    let changes: [&dyn Fn(&mut SamplingParams); 6] = [
        &|p| p.presence_penalty = 0.1,
        &|p| p.frequency_penalty = 0.1,
        &|p| p.repetition_penalty = 1.1,
        &|p| p.logit_bias.extend([(3, 1.0)]),
        &|p| p.min_tokens = 1,
        &|p| p.ignore_eos = true,
    ];
    for change in changes {
        let greedy = |p: &mut SamplingParams| {
            p.temperature = 0.0;
            change(p);
        };
        assert!(!is_plain(change, 0) && !is_plain(&greedy, 0));
    }
    let scored = GenerateRequest::score(&[1], &[2], 0);
    assert!(scored.params.temperature == 0.0);
    let mut sampler = TokenSampler::new(&scored.params, 0).unwrap();
    sampler.scored = scored.scored;
    assert!(sampler.plain_draw(4).is_none());
    // From the token on that nothing restricts any more.
    let mut sampler =
        TokenSampler::new(&SamplingParams { min_tokens: 1, ..params(0.7) }, 0).unwrap();
    assert!(sampler.plain_draw(4).is_none());
    sampler.draw(&[0.0; 4]).unwrap();
    assert!(sampler.plain_draw(4).is_some());
}

fn ids(distribution: &[(TokenId, f64)]) -> Vec<TokenId> {
    distribution.iter().map(|c| c.0).collect()
}

/// Logits far apart, nearly equal, or with many equal ones.
fn logits(most: usize) -> impl Strategy<Value = Vec<f32>> {
    let far = prop::collection::vec(-12.0_f32..12.0, 1..most);
    let near = prop::collection::vec(-0.5_f32..0.5, 1..most);
    let equal = prop::collection::vec((-8_i8..8).prop_map(|x| f32::from(x) / 2.0), 1..most);
    prop_oneof![far, near, equal]
}

prop_compose! {
    fn truncation()(
        temperature in 0.2_f32..3.0,
        top_k in prop_oneof![Just(0_u32), 1_u32..40],
        top_p in prop_oneof![Just(1.0_f32), 0.05_f32..0.99],
        min_p in prop_oneof![Just(0.0_f32), 0.001_f32..0.5],
        seed: u64,
    ) -> SamplingParams {
        SamplingParams { temperature, top_k, top_p, min_p, seed, ..Default::default() }
    }
}

proptest! {
    #[test]
    fn truncation_matches_its_definition(logits in logits(700), params in truncation()) {
        let wanted = truncated_by_definition(&logits, &params);
        prop_assume!(wanted.is_some());
        let wanted = wanted.unwrap();
        let (got, _) = truncated(&logits, &params);
        prop_assert_eq!(ids(&got), ids(&wanted));
        for (got, wanted) in got.iter().zip(&wanted) {
            prop_assert!((got.1 - wanted.1).abs() < 1e-9);
        }
    }

    #[test]
    fn reported_probabilities_are_those_of_the_behavior_policy(
        logits in logits(300), params in truncation(), top in 0_u8..=20,
    ) {
        let behavior = truncated_by_definition(&logits, &params);
        prop_assume!(behavior.is_some());
        let behavior = behavior.unwrap();
        let drawn = draw(&logits, &params, top);
        let (_, p) = behavior.iter().find(|c| c.0 == drawn.id).unwrap();
        prop_assert!(drawn.logprob.is_finite() && drawn.logprob <= 0.0);
        prop_assert!((f64::from(drawn.logprob) - p.ln()).abs() < 1e-5);
        let kept: f64 = {
            let all = softmax(&logits, f64::from(params.temperature));
            behavior.iter().map(|c| all[c.0 as usize]).sum()
        };
        prop_assert!((f64::from(drawn.kept_mass) - kept).abs() < 1e-5);
        prop_assert_eq!(drawn.top.len(), usize::from(top).min(behavior.len()));
        for (got, wanted) in drawn.top.iter().zip(&behavior) {
            prop_assert!(got.0 == wanted.0 && (f64::from(got.1) - wanted.1.ln()).abs() < 1e-5);
        }
    }

    #[test]
    fn the_seed_determines_the_tokens(logits in logits(100), params in truncation()) {
        let run = |params: &SamplingParams| {
            let mut sampler = TokenSampler::new(params, 3).unwrap();
            (0..20).map(|_| sampler.draw(&logits).unwrap()).collect::<Vec<_>>()
        };
        prop_assert_eq!(run(&params), run(&params));
    }

    #[test]
    fn greedy_draws_the_greatest_logit(logits in logits(300)) {
        let drawn = draw(&logits, &params(0.0), 1);
        let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        prop_assert_eq!(logits[drawn.id as usize], greatest);
        let p = softmax(&logits, 1.0)[drawn.id as usize];
        prop_assert!((f64::from(drawn.logprob) - p.ln()).abs() < 1e-5);
        prop_assert_eq!((drawn.kept_mass, drawn.top.len()), (1.0, 1));
    }

    #[test]
    fn any_floats_give_a_token_or_an_error(
        logits in prop::collection::vec(prop::num::f32::ANY, 0..50), params in truncation(), greedy: bool,
    ) {
        let mut params = params;
        if greedy {
            params.temperature = 0.0;
        }
        match TokenSampler::new(&params, 20).unwrap().draw(&logits) {
            Ok(drawn) => {
                prop_assert!(drawn.logprob.is_finite());
                prop_assert!(logits[drawn.id as usize] > f32::NEG_INFINITY);
            }
            Err(SampleError::NotFinite { id, value }) => {
                prop_assert!(value.is_nan() || value == f32::INFINITY);
                prop_assert!(logits[id as usize].to_bits() == value.to_bits());
            }
            Err(error) => {
                prop_assert_eq!(error, SampleError::NoMass);
                prop_assert!(logits.iter().all(|l| *l == f32::NEG_INFINITY));
            }
        }
    }
}

/// Equal logits have weights of exactly 1, so these sums are at the cut without any rounding.
#[test]
fn cuts_include_a_token_exactly_at_the_bound() {
    let kept = |logits: &[f32], params| ids(&truncated(logits, &params).0);
    for (top_p, wanted) in [(0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4)] {
        let got = kept(&[2.0; 4], SamplingParams { top_p, ..params(1.0) });
        assert_eq!(got, (0..wanted).collect::<Vec<_>>(), "top_p {top_p}");
    }
    // Of equal tokens, those with the lowest ids stay.
    let logits = [1.0, 3.0, 1.0, 3.0, 1.0];
    for (top_k, wanted) in [(1, &[1][..]), (2, &[1, 3]), (3, &[1, 3, 0]), (4, &[1, 3, 0, 2])] {
        assert_eq!(kept(&logits, SamplingParams { top_k, ..params(1.0) }), wanted);
    }
    assert_eq!(kept(&logits, SamplingParams { min_p: 1.0, ..params(1.0) }), [1, 3]);
    // The search for the nucleus sorts 64, then 512 candidates.
    for n in [1, 63, 64, 65, 511, 512, 513, 600] {
        let top_p = n as f32 / 1024.0;
        let got = kept(&[0.0; 1024], SamplingParams { top_p, ..params(1.0) });
        assert_eq!(got, (0..n).collect::<Vec<_>>());
    }
}

/// Cases of `tests/reference/sampling/truncation.py`.
#[test]
fn truncation_equals_that_of_transformers() {
    #[derive(serde::Deserialize)]
    struct Case {
        temperature: f32,
        top_k: u32,
        top_p: f32,
        min_p: f32,
        logits: Vec<f32>,
        ids: Vec<TokenId>,
        greatest_probabilities: Vec<f64>,
        kept_mass: f64,
    }
    let file =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/reference/sampling/truncation.json");
    let reference: serde_json::Value =
        serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let cases: Vec<Case> = serde_json::from_value(reference["cases"].clone()).unwrap();
    assert_eq!(cases.len(), 15);
    for case in cases {
        let Case { temperature, top_k, top_p, min_p, .. } = case;
        let params = SamplingParams { temperature, top_k, top_p, min_p, ..params(1.0) };
        let (got, kept_mass) = truncated(&case.logits, &params);
        assert_eq!(ids(&got), case.ids, "{params:?}");
        assert!((kept_mass - case.kept_mass).abs() < 1e-12, "{params:?}: {kept_mass}");
        for (got, wanted) in got.iter().zip(&case.greatest_probabilities) {
            assert!((got.1 - wanted).abs() < 1e-12, "{params:?}: {got:?} against {wanted}");
        }
        // The definition that the other tests compare with agrees.
        assert_eq!(ids(&truncated_by_definition(&case.logits, &params).unwrap()), case.ids);
    }
}

/// Pearson's chi-squared statistic of 40,000 draws is below its 99.9 % quantile.
#[test]
fn frequencies_match_the_distribution() {
    let logits = [1.0, 0.5, -0.3, 2.0, -1.5, 0.0, 1.2, -4.0];
    for (params, quantile) in [
        (params(1.0), 24.3),
        (params(0.7), 24.3),
        (SamplingParams { top_k: 5, ..params(1.0) }, 18.5),
        (SamplingParams { top_p: 0.8, ..params(1.3) }, 18.5),
        (SamplingParams { min_p: 0.2, ..params(1.0) }, 18.5),
    ] {
        let expected = truncated_by_definition(&logits, &params).unwrap();
        let mut sampler = TokenSampler::new(&params, 0).unwrap();
        let mut counts = HashMap::new();
        let n = 40_000;
        for _ in 0..n {
            *counts.entry(sampler.draw(&logits).unwrap().id).or_insert(0) += 1;
        }
        let mut statistic = 0.0;
        for (id, p) in &expected {
            let expected = p * f64::from(n);
            let got = f64::from(counts.remove(id).unwrap_or(0));
            statistic += (got - expected).powi(2) / expected;
        }
        assert!(counts.is_empty(), "drew truncated tokens: {counts:?}");
        assert!(statistic < quantile, "{params:?}: {statistic}");
    }
}

#[test]
fn penalties_and_biases_change_logits() {
    let logits = [2.0, 1.85, 0.0];
    let penalized = SamplingParams { frequency_penalty: 0.1, presence_penalty: 0.2, ..params(0.0) };
    let mut sampler = TokenSampler::new(&penalized, 0).unwrap();
    // Token 0 has the logits 2.0, 1.7, 1.6 and 1.5 in turn; token 1 has 1.85, then 1.55.
    let drawn: Vec<TokenId> = (0..5).map(|_| sampler.draw(&logits).unwrap().id).collect();
    assert_eq!(drawn, [0, 1, 0, 0, 1]);
    let biased = SamplingParams { logit_bias: [(2, 5.0)].into(), ..params(0.0) };
    let drawn = draw(&logits, &biased, 0);
    assert_eq!(drawn.id, 2);
    assert!((f64::from(drawn.logprob) - softmax(&logits, 1.0)[2].ln()).abs() < 1e-6);
    let unknown = SamplingParams { logit_bias: [(3, 5.0)].into(), ..params(1.0) };
    let error = TokenSampler::new(&unknown, 0).unwrap().draw(&logits).unwrap_err();
    assert_eq!(error.to_string(), "logit_bias names token 3; the vocabulary holds 3");
    let far = SamplingParams { logit_bias: [(1, -500.0)].into(), ..params(1.0) };
    assert!((0..100).all(|seed| draw(&logits, &SamplingParams { seed, ..far.clone() }, 0).id != 1));
}

#[test]
fn each_penalty_acts_without_the_other() {
    for penalized in [
        SamplingParams { frequency_penalty: 0.2, ..params(0.0) },
        SamplingParams { presence_penalty: 0.2, ..params(0.0) },
    ] {
        let mut sampler = TokenSampler::new(&penalized, 0).unwrap();
        let drawn: Vec<TokenId> = (0..2).map(|_| sampler.draw(&[2.0, 1.9]).unwrap().id).collect();
        assert_eq!(drawn, [0, 1], "{penalized:?}");
    }
}

#[test]
fn logits_that_are_not_finite_are_reported() {
    for (value, at) in [(f32::NAN, 0), (f32::NAN, 2), (f32::INFINITY, 1)] {
        let mut logits = [0.5, 1.0, -1.0];
        logits[at] = value;
        for temperature in [0.0, 1.0] {
            let error =
                TokenSampler::new(&params(temperature), 0).unwrap().draw(&logits).unwrap_err();
            let SampleError::NotFinite { id, value: reported } = error else { panic!("{error}") };
            assert_eq!((id as usize, reported.to_bits()), (at, value.to_bits()));
        }
    }
}

#[test]
fn weights_and_biases_at_the_edge_of_f32_are_finite_or_errors() {
    assert_eq!(pick(&[(0, 0.0), (1, 1.0)], 0.0).unwrap(), (1, 1.0));
    let biased = SamplingParams { logit_bias: [(1, 3000.0)].into(), ..params(0.0) };
    let drawn = draw(&[5.0, -2000.0], &biased, 0);
    assert_eq!((drawn.id, drawn.logprob), (1, -2005.0));
    let biased = SamplingParams { logit_bias: [(0, f32::MAX)].into(), ..params(1.0) };
    let error = TokenSampler::new(&biased, 0).unwrap().draw(&[f32::MAX, 0.0]).unwrap_err();
    assert_eq!(error, SampleError::NotFinite { id: 0, value: f32::INFINITY });
}

#[test]
fn errors_name_the_invalid_parameter() {
    for (params, expected) in [
        (params(f32::NAN), "temperature is NaN; 0 or more was expected"),
        (params(-1.0), "temperature is -1; 0 or more was expected"),
        (SamplingParams { top_p: 1.5, ..params(1.0) }, "top_p is 1.5;"),
        (SamplingParams { min_p: -0.1, ..params(1.0) }, "min_p is -0.1;"),
        (SamplingParams { min_p: 1.5, ..params(1.0) }, "min_p is 1.5;"),
        (SamplingParams { max_tokens: 0, ..params(1.0) }, "max_tokens is 0;"),
        (
            SamplingParams { min_tokens: 9, max_tokens: 8, ..params(1.0) },
            "min_tokens is 9; at most max_tokens (8) was expected",
        ),
        (
            SamplingParams { repetition_penalty: 0.0, ..params(1.0) },
            "repetition_penalty is 0; more than 0 was expected",
        ),
        (SamplingParams { presence_penalty: f32::INFINITY, ..params(1.0) }, "presence_penalty"),
        (SamplingParams { logit_bias: [(7, f32::NAN)].into(), ..params(1.0) }, "logit_bias[7]"),
    ] {
        let error = TokenSampler::new(&params, 0).err().unwrap().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
    assert!(TokenSampler::new(&params(1.0), 21).is_err());
}
