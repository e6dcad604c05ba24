use std::fs;

use proptest::prelude::*;
use serde_json::Value;

use hone_core::types::TokenId;

use crate::testing::{
    Bench, FAMILIES, Told, best, family, ids, model, random_lora, trainer_logits,
};

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().fold(f64::NEG_INFINITY, |m, x| m.max(f64::from(*x)));
    let sum: f64 = logits.iter().map(|x| (f64::from(*x) - max).exp()).sum();
    logits.iter().map(|x| f64::from(*x) - max - sum.ln()).collect()
}

#[test]
fn greedy_tokens_of_every_family_equal_those_of_transformers() {
    for name in FAMILIES {
        let text = fs::read(family(name).join("greedy.json")).unwrap();
        let text: Value = serde_json::from_slice(&text).unwrap();
        let list =
            |key: &str| -> Vec<TokenId> { serde_json::from_value(text[key].clone()).unwrap() };
        let (prompt, expected) = (list("prompt_ids"), list("greedy_ids"));
        let mut bench = Bench::new(&model(&family(name)), None);
        let shared = bench.prompt(&prompt, 64);
        let mut told = [bench.told(&shared, expected.len())];
        let mut found = Vec::new();
        for _ in &expected {
            bench.step(&mut told);
            told[0].token = best(bench.scratch.logits(0));
            found.push(told[0].token);
        }
        assert_eq!(found, expected, "{name}");
    }
}

#[test]
fn logprobs_of_every_family_equal_the_trainers() {
    let mut worst = 0.0_f64;
    for name in FAMILIES {
        let model = model(&family(name));
        let vocab = model.spec().vocab_size;
        for (r, prompt) in [(0, 1), (2, 20), (3, 33)] {
            let lora = (r > 0).then(|| random_lora(model.spec(), r, 5));
            let all = ids(60, vocab, prompt as u64);
            let expected = trainer_logits(&model, &all, lora.as_ref());
            let mut bench = Bench::new(&model, lora.as_ref());
            let (prompt_ids, rest) = all.split_at(prompt);
            let found = bench.alone(prompt_ids, rest);
            assert_eq!(found.len(), 60 - prompt + 1);
            let mut greatest = 0.0_f64;
            for (found, expected) in found.iter().zip(&expected[prompt - 1..]) {
                for (a, b) in log_softmax(found).iter().zip(log_softmax(expected)) {
                    greatest = greatest.max((a - b).abs());
                }
            }
            assert!(greatest < 1e-5, "{name}, rank {r}: {greatest:e}");
            worst = worst.max(greatest);
        }
    }
    assert!(worst > 0.0, "two ways of computing it were compared");
}

#[test]
fn an_adapter_changes_what_is_computed() {
    let model = model(&family("qwen3"));
    let lora = random_lora(model.spec(), 2, 1);
    let (prompt, rest) = (ids(7, 100, 1), ids(5, 100, 2));
    let base = Bench::new(&model, None).alone(&prompt, &rest);
    let adapted = Bench::new(&model, Some(&lora)).alone(&prompt, &rest);
    assert!(base.iter().zip(&adapted).all(|(a, b)| a.iter().zip(b).all(|(a, b)| a != b)));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    /// Sequences that come and go in any order, share prompts or not, with any number of threads and
    /// any pieces of a prompt, get the bits that each gets alone.
    #[test]
    fn a_batch_changes_no_bit_of_a_sequence(
        which in 0..FAMILIES.len(),
        arrivals in prop::collection::vec((0..3_u64, 0..12_usize, 1..9_usize, 0..99_u64), 1..40),
        chunk in 1..40_usize,
        threads in 1..4_usize,
        adapted: bool,
    ) {
        let model = model(&family(FAMILIES[which]));
        let vocab = model.spec().vocab_size;
        let lora = adapted.then(|| random_lora(model.spec(), 2, 9));
        let mut bench = Bench::new(&model, lora.as_ref());
        let prompts: Vec<Vec<TokenId>> =
            (0..3).map(|seed| ids(1 + 15 * seed as usize, vocab, seed)).collect();
        let mut alone = Vec::new();
        for (prompt, _, len, seed) in &arrivals {
            alone.push(bench.alone(&prompts[*prompt as usize], &ids(*len, vocab, *seed)));
        }
        bench.threads = threads;
        let shared: Vec<_> = prompts.iter().map(|ids| bench.prompt(ids, chunk)).collect();
        let mut running: Vec<Told> = Vec::new();
        let mut meta: Vec<(usize, usize)> = Vec::new();
        for step in 0..24 {
            for (index, (prompt, start, len, _)) in arrivals.iter().enumerate() {
                if *start == step {
                    running.push(bench.told(&shared[*prompt as usize], len + 1));
                    meta.push((index, 0));
                }
            }
            if running.is_empty() {
                continue;
            }
            bench.step(&mut running);
            let mut done = Vec::new();
            for (row, (told, (index, at))) in running.iter_mut().zip(&mut meta).enumerate() {
                let (_, _, len, seed) = arrivals[*index];
                let logits = bench.scratch.logits(row);
                prop_assert!(logits.iter().zip(&alone[*index][*at]).all(|(a, b)| a.to_bits() == b.to_bits()));
                told.token = ids(len, vocab, seed).get(*at).copied().unwrap_or_default();
                *at += 1;
                if *at > len {
                    done.push(row);
                }
            }
            for row in done.into_iter().rev() {
                running.swap_remove(row).sequence.free(&mut bench.pool);
                meta.swap_remove(row);
            }
        }
        prop_assert!(running.is_empty());
        for prompt in shared {
            std::sync::Arc::into_inner(prompt).unwrap().free(&mut bench.pool);
        }
        prop_assert_eq!(bench.pool.reserved(), 0);
    }
}

#[test]
fn a_step_refuses_what_does_not_fit() {
    let model = model(&family("qwen2"));
    let mut bench = Bench::new(&model, None);
    let prompt = bench.prompt(&[1, 2, 3], 64);
    let mut told: Vec<Told> = (0..65).map(|_| bench.told(&prompt, 1)).collect();
    for told in &mut told {
        assert!(told.sequence.make_room(&mut bench.pool));
    }
    let error = bench.decoder.step(&mut told, None, &mut bench.scratch, 1).unwrap_err();
    insta::assert_snapshot!(error, @"65 rows do not fit in 64");
    told.truncate(1);
    told[0].token = 10_000;
    let error = bench.decoder.step(&mut told, None, &mut bench.scratch, 1).unwrap_err();
    insta::assert_snapshot!(error, @"token 10000 is outside the vocabulary of 112");
    told[0].token = 1;
    for _ in 0..16 {
        bench.decoder.step(&mut told, None, &mut bench.scratch, 1).unwrap();
    }
    // One page is all that was promised.
    assert!(!told[0].sequence.make_room(&mut bench.pool));
    let error = bench.decoder.step(&mut told, None, &mut bench.scratch, 1).unwrap_err();
    insta::assert_snapshot!(error, @"a sequence has no room for a token");
    let mut longrope =
        super::Decoder::new(&crate::testing::model(&family("phi3-longrope"))).unwrap();
    assert!(longrope.reach(64).is_ok() && longrope.reach(65).is_err());
}
