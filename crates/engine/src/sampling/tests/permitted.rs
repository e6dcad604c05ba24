//! Grammars, stop tokens and the repetition penalty.

use std::sync::Arc;

use hone_core::types::GrammarSpec;

use super::*;
use crate::CompiledGrammar;
use crate::testing::codec;

fn sampler(
    codec: &Codec,
    params: &SamplingParams,
    grammar: Option<&Arc<CompiledGrammar>>,
) -> TokenSampler {
    let mut request = GenerateRequest::probe(&[5, 6, 5], params);
    request.top_logprobs = 20;
    request.grammar = grammar.cloned();
    TokenSampler::for_request(&request, codec, &Metrics::new().unwrap()).unwrap()
}

async fn compiled(codec: &Arc<Codec>, choices: &[&str]) -> Arc<CompiledGrammar> {
    let texts = choices.iter().map(|text| (*text).to_owned()).collect();
    codec.compile_grammar(&GrammarSpec::Choice(texts)).await.unwrap()
}

fn random_logits(random: &mut ChaCha8Rng, vocab: usize) -> Vec<f32> {
    (0..vocab).map(|_| random.random_range(-6.0..6.0)).collect()
}

/// Permitted tokens have the probabilities of the definition: those of all tokens, restricted to the
/// permitted ones and divided by their mass, then truncated.
#[tokio::test]
async fn the_distribution_under_a_grammar_is_renormalized() {
    let codec = codec();
    let grammar = compiled(codec, &["no", "nothing", "yes", "yes!", "maybe"]).await;
    let mut random = ChaCha8Rng::seed_from_u64(3);
    let mut seen = (0, 0);
    for seed in 0..150 {
        let truncated = SamplingParams { top_p: 0.9, top_k: 40, min_p: 0.01, ..params(0.8) };
        let params = [params(1.0), params(0.7), truncated][seed % 3].clone();
        let params = SamplingParams { seed: seed as u64, ..params };
        let mut sampler = sampler(codec, &params, Some(&grammar));
        let mut matcher = grammar.matcher();
        loop {
            let logits = random_logits(&mut random, codec.vocab());
            let allowed = matcher.allowed().unwrap();
            let mut masked = logits.clone();
            allowed.mask(&mut masked);
            let token = sampler.draw(&logits).unwrap();
            assert!(allowed.contains(token.id));
            let is_stop = codec.stop_ids().contains(&token.id);
            let all = softmax(&logits, f64::from(params.temperature));
            let Some(behavior) = truncated_by_definition(&masked, &params) else { break };
            let behavior: Vec<_> = behavior.into_iter().filter(|c| c.1 > 0.0).collect();
            let mass: f64 = behavior.iter().map(|c| all[c.0 as usize]).sum();
            let (_, p) = behavior.iter().find(|c| c.0 == token.id).unwrap();
            assert!((f64::from(token.logprob) - p.ln()).abs() < 1e-5, "{token:?} {p}");
            assert!((f64::from(token.kept_mass) / mass - 1.0).abs() < 1e-5, "{token:?} {mass}");
            let full = f64::from(token.full_logprob());
            assert!((full - all[token.id as usize].ln()).abs() < 1e-4);
            assert_eq!(ids(&behavior).len().min(20), token.top.len());
            if behavior.len() <= 20 {
                let sum: f64 = token.top.iter().map(|t| f64::from(t.1).exp()).sum();
                assert!((sum - 1.0).abs() < 1e-5, "{sum}");
            }
            let only_stops = codec.stop_ids().len() == allowed.count()
                && codec.stop_ids().iter().all(|id| allowed.contains(*id));
            assert_eq!(token.forced, allowed.count() == 1 || only_stops);
            seen = (seen.0 + 1, seen.1 + usize::from(token.forced));
            if is_stop {
                break;
            }
            matcher.push(token.id).unwrap();
        }
    }
    assert!(seen.0 > 300 && seen.1 > 50 && seen.1 < seen.0, "{seen:?}");
}

#[tokio::test]
async fn greedy_draws_the_best_permitted_token() {
    let codec = codec();
    let grammar = compiled(codec, &["a", "b", "c"]).await;
    let token = |text: &str| codec.encode(text).unwrap()[0];
    let mut logits = vec![0.0; codec.vocab()];
    logits[token("z") as usize] = 9.0;
    logits[token("b") as usize] = 2.0;
    let biased = SamplingParams { logit_bias: [(token("c"), 3.0)].into(), ..params(0.0) };
    for (params, expected) in [(params(0.0), "b"), (biased, "c")] {
        let drawn = sampler(codec, &params, Some(&grammar)).draw(&logits).unwrap();
        assert_eq!(drawn.id, token(expected));
        // Under the raw logits of a, b and c.
        let raw = if expected == "b" { 2.0_f64 } else { 0.0 };
        let p = raw.exp() / (2.0_f64.exp() + 2.0);
        assert!((f64::from(drawn.logprob) - p.ln()).abs() < 1e-5);
        assert_eq!((drawn.top.len(), drawn.top[0].0), (3, token("b")));
        assert!(!drawn.forced && drawn.kept_mass < 0.01);
    }
}

#[tokio::test]
async fn permitted_tokens_of_hardly_any_mass_are_forced_and_finite() {
    let codec = codec();
    let grammar = compiled(codec, &["a", "b"]).await;
    let mut logits = vec![0.0; codec.vocab()];
    let favorite = codec.encode("z").unwrap()[0] as usize;
    for (height, forced) in [(20.0, false), (60.0, false), (80.0, true), (3000.0, true)] {
        logits[favorite] = height;
        let drawn = sampler(codec, &params(1.0), Some(&grammar)).draw(&logits).unwrap();
        assert_eq!(drawn.forced, forced, "{height}");
        assert!((f64::from(drawn.logprob) - 0.5_f64.ln()).abs() < 1e-6);
        assert!(drawn.kept_mass > 0.0 && drawn.full_logprob().is_finite());
    }
    // A model that excludes every permitted token.
    for text in ["a", "b"] {
        logits[codec.encode(text).unwrap()[0] as usize] = f32::NEG_INFINITY;
    }
    let error = sampler(codec, &params(1.0), Some(&grammar)).draw(&logits).unwrap_err();
    assert_eq!(error, SampleError::NoMass);
}

#[tokio::test]
async fn stop_tokens_wait_for_the_least_number_and_for_the_grammar() {
    let codec = codec();
    let (eos, further) = (codec.stop_ids()[0], codec.encode("x").unwrap()[0]);
    let mut logits = vec![0.0; codec.vocab()];
    logits[eos as usize] = 20.0;
    logits[further as usize] = 19.0;
    let asked = SamplingParams { stop_token_ids: vec![further, eos], ..params(1.0) };
    let waiting = SamplingParams { min_tokens: 3, ..asked.clone() };
    let mut drawn = Vec::new();
    let mut patient = sampler(codec, &waiting, None);
    for _ in 0..4 {
        drawn.push(patient.draw(&logits).unwrap());
    }
    let is_stop = |token: &Token| token.id == eos || token.id == further;
    assert_eq!(drawn.iter().map(is_stop).collect::<Vec<_>>(), [false, false, false, true]);
    // The mass of the excluded tokens is recorded, and nothing is forced.
    let others = (codec.vocab() as f64 - 2.0) / (20.0_f64.exp() + 19.0_f64.exp() + 277.0);
    assert!((f64::from(drawn[0].kept_mass) / others - 1.0).abs() < 0.01, "{:?}", drawn[0]);
    assert!(drawn.iter().all(|token| !token.forced) && drawn[3].kept_mass == 1.0);
    let endless = SamplingParams { ignore_eos: true, ..asked.clone() };
    let ends: Vec<TokenId> = (0..20)
        .map(|seed| {
            let params = SamplingParams { seed, ..endless.clone() };
            sampler(codec, &params, None).draw(&logits).unwrap().id
        })
        .collect();
    assert!(ends.iter().all(|id| !codec.stop_ids().contains(id)) && ends.contains(&further));
    // With a grammar, a further stop token is no part of the text.
    let grammar = compiled(codec, &["ab", "a"]).await;
    let mut following = sampler(codec, &asked, Some(&grammar));
    logits[further as usize] = 30.0;
    let drawn: Vec<TokenId> = (0..2).map(|_| following.draw(&logits).unwrap().id).collect();
    assert!(codec.token_bytes(drawn[0]).starts_with(b"a"), "{drawn:?}");
    assert_eq!(drawn[1], further, "the text may end after its first token");
}

#[test]
fn the_repetition_penalty_scales_logits_of_prompt_and_completion() {
    let penalized = SamplingParams { repetition_penalty: 2.0, ..params(0.0) };
    let codec = codec();
    // The prompt has the tokens 5 and 6.
    let mut sampler = sampler(codec, &penalized, None);
    let mut logits = vec![-9.0; codec.vocab()];
    (logits[5], logits[6], logits[7], logits[8]) = (4.0, -1.0, 3.0, 1.8);
    // In turn: 5 has 2.0 and 6 has -2.0; 7 has 3.0, then 1.5.
    let drawn: Vec<TokenId> = (0..4).map(|_| sampler.draw(&logits).unwrap().id).collect();
    assert_eq!(drawn, [7, 5, 5, 5]);
}
