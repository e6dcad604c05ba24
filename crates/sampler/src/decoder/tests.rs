use std::fs;

use proptest::prelude::*;
use serde_json::Value;

use hone_core::config::Compute;
use hone_core::types::TokenId;

use super::linear::MinWork;
use super::{PassOutcome, PassSettings, PromptChunk, RowAdapter};
use crate::testing::{
    DecoderHarness, FAMILIES, POOL_PAGES, best, family, ids, model, random_lora, trainer_logits,
};
use crate::{AdapterWeights, SequencePages};

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
        let mut harness = DecoderHarness::new(&model(&family(name)), None);
        let mut batch = [harness.sequence(&prompt, expected.len(), 64)];
        let mut found = Vec::new();
        for _ in &expected {
            harness.step(&mut batch);
            found.push(best(harness.scratch.logits(0)));
            batch[0].push(found[found.len() - 1]);
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
            let mut harness = DecoderHarness::new(&model, lora.as_ref());
            let (prompt_ids, rest) = all.split_at(prompt);
            let found = harness.decode_alone(prompt_ids, rest);
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
    assert!(worst > 0.0, "the decoder and the trainer run different code");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    /// A sequence's logits have the same bits in every batch as alone, for all numbers of threads and
    /// sizes of prefill passes, with shared and separate prompts, in passes that also compute a part of
    /// another prompt, and while others start and end, in f32 and in bf16.
    #[test]
    fn the_batch_changes_no_bit_of_a_sequence(
        which in 0..FAMILIES.len(),
        arrivals in prop::collection::vec((0..4_u64, 0..12_usize, 1..9_usize, 0..99_u64), 1..40),
        chunk in 1..40_usize,
        threads in 1..4_usize,
        adapted: bool,
        compute in prop::sample::select(&Compute::ALL),
    ) {
        // Stored in bf16.
        let name = if compute == Compute::Bf16 { "llama3" } else { FAMILIES[which] };
        let model = model(&family(name)).with_compute(compute);
        let vocab = model.spec().vocab_size;
        let lora = adapted.then(|| random_lora(model.spec(), 2, 9));
        let mut harness = DecoderHarness::new(&model, lora.as_ref());
        let mut prompts: Vec<Vec<TokenId>> =
            (0..3).map(|seed| ids(1 + 15 * seed as usize, vocab, seed)).collect();
        // Agrees with another prompt up to the middle of its second page.
        let forked = [&prompts[2][..20], &ids(20, vocab, 7)].concat();
        prompts.push(forked);
        let mut alone = Vec::new();
        for (prompt, _, len, seed) in &arrivals {
            let rest = ids(*len, vocab, *seed);
            alone.push(harness.decode_alone(&prompts[*prompt as usize], &rest));
        }
        harness.threads = threads;
        let mut running: Vec<SequencePages> = Vec::new();
        // The arrival and the number of decoded tokens of each running sequence.
        let mut progress: Vec<(usize, usize)> = Vec::new();
        for step in 0..24 {
            for (index, (prompt, start, len, _)) in arrivals.iter().enumerate() {
                if *start == step {
                    running.push(harness.sequence(&prompts[*prompt as usize], len + 1, chunk));
                    progress.push((index, 0));
                }
            }
            if running.is_empty() {
                continue;
            }
            if running.len() <= 40 {
                let others = [1000, 2000].map(|seed| ids(30, vocab, seed + step as u64));
                let others = others.each_ref().map(Vec::as_slice);
                mixed_step(&mut harness, &mut running, others);
            } else {
                harness.step(&mut running);
            }
            let mut done = Vec::new();
            for (row, (member, (index, decoded))) in
                running.iter_mut().zip(&mut progress).enumerate()
            {
                let (_, _, len, seed) = arrivals[*index];
                let pairs = harness.scratch.logits(row).iter().zip(&alone[*index][*decoded]);
                prop_assert!(pairs.into_iter().all(|(a, b)| a.to_bits() == b.to_bits()));
                member.push(ids(len, vocab, seed).get(*decoded).copied().unwrap_or_default());
                *decoded += 1;
                if *decoded > len {
                    done.push(row);
                }
            }
            for row in done.into_iter().rev() {
                running.swap_remove(row).free(&mut harness.pool);
                progress.swap_remove(row);
            }
        }
        prop_assert!(running.is_empty());
        prop_assert_eq!(harness.pool.usage()[0], 0);
        prop_assert_eq!(harness.pool.available(), POOL_PAGES);
    }
}

/// A step that is interrupted once, then runs in one pass with the first 14 tokens of a prompt and the first 9 of
/// another. Returns the bits of the prompts' first pages.
fn mixed_step(
    harness: &mut DecoderHarness,
    batch: &mut [SequencePages],
    prompts: [&[TokenId]; 2],
) -> Vec<u32> {
    const TOKENS: [usize; 2] = [14, 9];
    let mut sequences = prompts.map(|prompt| {
        let new = SequencePages::new(&mut harness.pool, crate::WeightsId(5), prompt, 1);
        let mut sequence = new.unwrap();
        assert!(sequence.ensure_pages(&mut harness.pool, 14));
        sequence
    });
    for member in batch.iter_mut() {
        assert!(member.ensure_pages(&mut harness.pool, 1));
    }
    let rows = 0..batch.len() + TOKENS[0] + TOKENS[1];
    let adapter = harness.adapter.as_ref().map(|adapter| RowAdapter { adapter, rows });
    for set in [true, false] {
        let (interrupt, adapters) = (set.into(), adapter.as_slice());
        let settings =
            PassSettings { adapters, threads: harness.threads, interrupt: Some(&interrupt) };
        let chunks = sequences.iter_mut().zip(TOKENS);
        let chunks = chunks.map(|(sequence, tokens)| PromptChunk { sequence, tokens });
        let mut chunks: Vec<_> = chunks.collect();
        let outcome =
            harness.decoder.compute(&mut *batch, &mut chunks, &mut harness.scratch, settings);
        let expected = if set { PassOutcome::Interrupted } else { PassOutcome::Computed };
        assert_eq!(outcome.unwrap(), expected);
        for ((sequence, prompt), tokens) in sequences.iter().zip(prompts).zip(TOKENS) {
            assert_eq!(sequence.len(), if set { 0 } else { tokens });
            assert_eq!(sequence.remaining(), prompt.len() - 1 - sequence.len());
        }
    }
    let mut bits = Vec::new();
    for sequence in sequences {
        bits.extend(sequence.pages()[0].iter().map(|x| x.to_bits()));
        sequence.free(&mut harness.pool);
    }
    bits
}

#[test]
fn parallel_loops_change_no_bit() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    for name in FAMILIES {
        let model = model(&family(name));
        let vocab = model.spec().vocab_size;
        let lora = random_lora(model.spec(), 3, 9);
        let run = |parallel: bool| {
            let mut harness = DecoderHarness::new(&model, Some(&lora));
            if parallel {
                harness.threads = 3;
                harness.decoder.min_work = MinWork::NONE;
            }
            let prompts = (0..7).map(|i| ids(3 + 5 * i as usize, vocab, i));
            let mut batch: Vec<_> =
                prompts.map(|prompt| harness.sequence(&prompt, 10, 40)).collect();
            let mut bits = Vec::new();
            for step in 0..4 {
                if step < 2 {
                    let prompts = [50, 60].map(|seed| ids(30, vocab, seed + step));
                    let prompts = prompts.each_ref().map(Vec::as_slice);
                    bits.extend(mixed_step(&mut harness, &mut batch, prompts));
                } else {
                    // So few that their heads are divided between the threads.
                    batch.truncate(4);
                    harness.step(&mut batch);
                }
                for (row, member) in batch.iter_mut().enumerate() {
                    let logits = harness.scratch.logits(row);
                    bits.extend(logits.iter().map(|x| x.to_bits()));
                    member.push(best(logits));
                }
            }
            bits
        };
        let expected = run(false);
        assert!(pool.install(|| run(true)) == expected, "{name}");
    }
}

#[test]
fn rows_of_several_adapters_compute_what_each_computes_alone() {
    // The adapter of each row. The prompt of the last sequence is computed in the first step.
    const ROWS: [Option<usize>; 7] = [None, None, Some(0), Some(1), Some(1), Some(1), Some(0)];
    const STEPS: usize = 4;
    for name in FAMILIES {
        let model = model(&family(name));
        let (spec, vocab) = (model.spec(), model.spec().vocab_size);
        let loras = [random_lora(spec, 2, 5), random_lora(spec, 3, 6)];
        let adapters = loras.each_ref().map(|lora| AdapterWeights::new(spec, lora).unwrap());
        let text = |row: usize| ids(20 + STEPS, vocab, 70 + row as u64);
        let alone = ROWS.iter().enumerate().map(|(row, adapter)| {
            let mut harness = DecoderHarness::new(&model, adapter.map(|index| &loras[index]));
            let text = text(row);
            harness.decode_alone(&text[..20], &text[20..])
        });
        let alone: Vec<_> = alone.collect();
        let bits = |logits: &[f32]| -> Vec<u32> { logits.iter().map(|x| x.to_bits()).collect() };
        let mut harness = DecoderHarness::new(&model, None);
        let DecoderHarness { decoder, pool, scratch, .. } = &mut harness;
        let mut batch = Vec::new();
        for (row, adapter) in ROWS.iter().enumerate() {
            let prompt = &text(row)[..20];
            let new = SequencePages::new(pool, crate::WeightsId(5), prompt, STEPS + 1);
            let mut sequence = new.unwrap();
            assert!(sequence.ensure_pages(pool, 20));
            if row < 6 {
                let adapter = adapter.map(|index| &adapters[index]);
                decoder.prefill(&mut sequence, 19, adapter, scratch, 1).unwrap();
            }
            batch.push(sequence);
        }
        let mut last = [batch.pop().unwrap()];
        for step in 0..STEPS {
            for member in &mut batch {
                assert!(member.ensure_pages(pool, 1));
            }
            let tokens = if step == 0 { 19 } else { 0 };
            let part = |index: usize, rows| RowAdapter { adapter: &adapters[index], rows };
            let parts = [part(0, 2..3), part(1, 3..6), part(0, 6..6 + tokens)];
            let settings = PassSettings { adapters: &parts, threads: 1, interrupt: None };
            let mut chunk = [PromptChunk { sequence: &mut last[0], tokens }];
            let chunk = if step == 0 { &mut chunk[..] } else { &mut [] };
            decoder.compute(&mut batch, chunk, scratch, settings).unwrap();
            for (row, member) in batch.iter_mut().enumerate() {
                let expected = &alone[row];
                assert_eq!(bits(scratch.logits(row)), bits(&expected[step]), "{name}, {row}");
                member.push(text(row)[20 + step]);
            }
        }
        decoder.step(&mut last, Some(&adapters[0]), scratch, 1).unwrap();
        assert_eq!(bits(scratch.logits(0)), bits(&alone[6][0]), "{name}");
    }
}

/// A sequence with pages for its prompt, whose first tokens but `left` are computed with an adapter.
fn begun(
    harness: &mut DecoderHarness,
    adapter: Option<&AdapterWeights>,
    prompt: &[TokenId],
    left: usize,
) -> SequencePages {
    let DecoderHarness { decoder, pool, scratch, .. } = harness;
    let mut sequence = SequencePages::new(pool, crate::WeightsId(5), prompt, 1).unwrap();
    assert!(sequence.ensure_pages(pool, prompt.len()));
    let tokens = prompt.len() - 1 - left;
    decoder.prefill(&mut sequence, tokens, adapter, scratch, 1).unwrap();
    sequence
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// A pass over up to 50 adapters, of sequences that decode and of parts of prompts: each has the bits of a pass
    /// with its adapter alone.
    #[test]
    fn rows_of_fifty_adapters_have_the_bits_of_each_alone(
        which in 0..FAMILIES.len(),
        // Rows and adapters; the last one is the base model.
        runs in prop::collection::vec((1..12_usize, 0..51_usize), 0..60),
        parts in prop::collection::vec((1..18_usize, 0..51_usize), 0..4),
        threads in 1..4_usize,
        parallel: bool,
        compute in prop::sample::select(&Compute::ALL),
    ) {
        let name = if compute == Compute::Bf16 { "llama3" } else { FAMILIES[which] };
        let model = model(&family(name)).with_compute(compute);
        let (spec, vocab) = (model.spec(), model.spec().vocab_size);
        let adapters: Vec<AdapterWeights> = (0..50)
            .map(|i| AdapterWeights::new(spec, &random_lora(spec, 1 + i % 19, i as u64)).unwrap())
            .collect();
        let mut harness = DecoderHarness::new(&model, None);
        // Each sequence computes its whole prompt.
        harness.pool = crate::PagePool::new(harness.decoder.shape(), 256).without_reuse();
        if parallel {
            harness.decoder.min_work = MinWork::NONE;
        }
        // The adapter and the prompt of each row, at most 64 with the parts.
        let left = 64 - parts.iter().map(|(tokens, _)| tokens).sum::<usize>();
        let rows = runs.iter().flat_map(|(rows, adapter)| vec![*adapter; *rows]).take(left);
        let rows: Vec<_> = rows.enumerate().map(|(i, a)| (a, ids(2 + i % 20, vocab, i as u64))).collect();
        let prompts: Vec<_> = parts.iter().enumerate()
            .map(|(i, (tokens, a))| (*a, ids(tokens + 1, vocab, 100 + i as u64))).collect();
        let mut alone = Vec::new();
        for (adapter, prompt) in rows.iter().chain(&prompts) {
            let adapter = adapters.get(*adapter);
            let mut batch = [begun(&mut harness, adapter, prompt, 0)];
            harness.decoder.step(&mut batch, adapter, &mut harness.scratch, 1).unwrap();
            alone.push(harness.scratch.logits(0).to_vec());
            let [sequence] = batch;
            sequence.free(&mut harness.pool);
        }
        let mut begin = |(adapter, prompt): &(usize, Vec<TokenId>), left| {
            begun(&mut harness, adapters.get(*adapter), prompt, left)
        };
        let mut batch: Vec<_> = rows.iter().map(|row| begin(row, 0)).collect();
        let mut others: Vec<_> =
            prompts.iter().map(|prompt| begin(prompt, prompt.1.len() - 1)).collect();
        let lengths = rows.iter().map(|(a, _)| (a, 1));
        let (mut held, mut row) = (Vec::new(), 0);
        for (adapter, count) in lengths.chain(parts.iter().map(|(tokens, a)| (a, *tokens))) {
            // Adjacent rows of one adapter are sometimes one product and sometimes several.
            let adapter = adapters.get(*adapter);
            match held.last_mut() {
                Some(RowAdapter { adapter: last, rows })
                    if rows.end == row && row % 5 > 0 && adapter.is_some_and(|a| std::ptr::eq(*last, a)) =>
                {
                    rows.end += count;
                }
                _ => held.extend(adapter.map(|adapter| RowAdapter { adapter, rows: row..row + count })),
            }
            row += count;
        }
        let settings = PassSettings { adapters: &held, threads, interrupt: None };
        let mut chunks: Vec<_> = others.iter_mut().zip(&parts)
            .map(|(sequence, (tokens, _))| PromptChunk { sequence, tokens: *tokens }).collect();
        harness.decoder.compute(&mut batch, &mut chunks, &mut harness.scratch, settings).unwrap();
        let bits = |logits: &[f32]| -> Vec<u32> { logits.iter().map(|x| x.to_bits()).collect() };
        for (row, (adapter, _)) in rows.iter().enumerate() {
            let found = bits(harness.scratch.logits(row));
            prop_assert!(found == bits(&alone[row]), "{}, row {row} of adapter {adapter}", name);
        }
        for ((sequence, (adapter, _)), alone) in others.into_iter().zip(&prompts).zip(&alone[rows.len()..]) {
            let adapter = adapters.get(*adapter);
            harness.decoder.step(&mut [sequence], adapter, &mut harness.scratch, 1).unwrap();
            prop_assert!(bits(harness.scratch.logits(0)) == bits(alone), "{}, a prompt", name);
        }
    }
}

#[test]
fn decoding_and_prefill_compute_the_same_pages() {
    for name in FAMILIES {
        let model = model(&family(name));
        let lora = random_lora(model.spec(), 2, 9);
        let all = ids(60, model.spec().vocab_size, 3);
        let mut harness = DecoderHarness::new(&model, Some(&lora));
        harness.pool = crate::PagePool::new(harness.decoder.shape(), POOL_PAGES).without_reuse();
        let whole = harness.sequence(&all, 1, 64);
        let mut decoded = [harness.sequence(&all[..11], 50, 3)];
        for next in &all[11..] {
            harness.step(&mut decoded);
            decoded[0].push(*next);
        }
        assert_eq!((whole.len(), decoded[0].len()), (59, 59));
        let full = |sequence: &SequencePages| -> Vec<u32> {
            sequence.pages()[..3].iter().flat_map(|page| page.iter().map(|x| x.to_bits())).collect()
        };
        assert_eq!(full(&whole), full(&decoded[0]), "{name}");
    }
}

#[test]
fn a_step_refuses_rows_tokens_and_positions_that_do_not_fit() {
    let model = model(&family("qwen2"));
    let mut harness = DecoderHarness::new(&model, None);
    let mut batch: Vec<SequencePages> =
        (0..65).map(|_| harness.sequence(&[1, 2, 3], 1, 64)).collect();
    for member in &mut batch {
        assert!(member.ensure_pages(&mut harness.pool, 1));
    }
    let error = harness.decoder.step(&mut batch, None, &mut harness.scratch, 1).unwrap_err();
    insta::assert_snapshot!(error, @"65 rows do not fit in 64");
    batch.truncate(1);
    harness.decoder.step(&mut batch, None, &mut harness.scratch, 1).unwrap();
    let error = harness.decoder.step(&mut batch, None, &mut harness.scratch, 1).unwrap_err();
    insta::assert_snapshot!(error, @"a sequence has no token for the next step");
    for _ in 3..16 {
        batch[0].push(1);
        harness.decoder.step(&mut batch, None, &mut harness.scratch, 1).unwrap();
    }
    // The sequence was promised one page.
    batch[0].push(1);
    assert!(!batch[0].ensure_pages(&mut harness.pool, 1));
    let error = harness.decoder.step(&mut batch, None, &mut harness.scratch, 1).unwrap_err();
    insta::assert_snapshot!(error, @"the cache has no page left for a token");
    let mut batch = [harness.sequence(&[10_000], 1, 64)];
    assert!(batch[0].ensure_pages(&mut harness.pool, 1));
    let error = harness.decoder.step(&mut batch, None, &mut harness.scratch, 1).unwrap_err();
    insta::assert_snapshot!(error, @"token 10000 is outside the vocabulary of 112");
    let mut longrope =
        super::Decoder::new(&crate::testing::model(&family("phi3-longrope"))).unwrap();
    assert!(longrope.reserve_positions(64).is_ok() && longrope.reserve_positions(65).is_err());
}

mod rope {
    use hone_core::testing::assert_same_bits_if_fused;
    use hone_model::testing::waves;

    use super::super::*;

    #[test]
    fn every_instruction_set_that_fuses_rotates_to_the_same_bits() {
        for dim in [6, 16, 54] {
            let (x, weight, angles) = (waves(3 * dim, 0.3), waves(dim, 1.9), waves(dim, 0.7));
            for half in [dim / 2, dim / 2 - 1] {
                assert_same_bits_if_fused(|instructions| {
                    let mut x = x.clone();
                    let norm = Some((&weight[..], 1e-6));
                    let rotation = Some((&angles[..half], &angles[half..2 * half]));
                    instructions.run(NormAndRotate { x: &mut x, dim, norm, rotation });
                    x
                });
            }
        }
    }
}
