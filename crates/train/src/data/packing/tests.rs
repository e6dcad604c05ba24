//! Shards and layouts of given and of random samples.

use std::collections::{BTreeMap, HashSet};

use candle_core::Device;
use proptest::prelude::*;

use super::{PREFIX_TIMES, PackedBatch, PrefixTree, Sequence, ShardLimits, TrainSample};
use super::{may_exceed, sequences, shards};

/// A prompt of one repeated token, and a completion that begins as no other.
fn sample(prompt: u32, prompt_len: usize, len: usize, first: u32) -> TrainSample {
    TrainSample {
        prompt_ids: vec![prompt; prompt_len],
        ids: [vec![100 + first], vec![0; len - 1]].concat(),
        ..TrainSample::default()
    }
}

fn turn(prompt: &[u32], ids: &[u32]) -> TrainSample {
    TrainSample { prompt_ids: prompt.to_vec(), ids: ids.to_vec(), ..TrainSample::default() }
}

fn split(samples: &[TrainSample], target: usize, longest: usize) -> Vec<Vec<usize>> {
    let active: Vec<usize> = (0..samples.len()).collect();
    shards(samples, &active, usize::MAX, ShardLimits { target, longest }).remove(0)
}

fn computed_tokens(samples: &[TrainSample], members: &[usize]) -> usize {
    layout(samples, members).segments.tokens()
}

fn layout(samples: &[TrainSample], members: &[usize]) -> PackedBatch {
    let part = |index: &usize| {
        let sample = &samples[*index];
        (sample.prompt_ids.as_slice(), sample.ids.as_slice(), sample.temperature)
    };
    PackedBatch::new(&members.iter().map(part).collect::<Vec<_>>(), &Device::Cpu).unwrap()
}

#[test]
fn shards_are_filled_with_the_largest_prompts_first() {
    // Computed tokens: 4 + 2 + 2, 6 + 4 + 4 + 4, 2 + 1 and 3 + 1.
    let lengths = [(0, 4, 3), (0, 4, 3), (1, 6, 5), (1, 6, 5), (1, 6, 5), (2, 2, 2), (3, 3, 2)];
    let mut first = 0..;
    let samples = lengths
        .map(|(prompt, prompt_len, len)| sample(prompt, prompt_len, len, first.next().unwrap()));
    let split = |micro_batch, tokens| {
        let limits = ShardLimits { target: tokens, longest: tokens };
        shards(&samples, &[0, 1, 2, 3, 4, 5, 6], micro_batch, limits)
    };
    assert_eq!(split(64, 14), [vec![vec![2, 3], vec![4], vec![0, 1, 6], vec![5]]]);
    assert_eq!(split(64, 15), [vec![vec![2, 3], vec![4], vec![0, 1, 6, 5]]]);
    assert_eq!(split(64, 18), [vec![vec![2, 3, 4], vec![0, 1, 6, 5]]]);
    assert_eq!(split(64, 1), [[2, 3, 4, 0, 1, 6, 5].map(|index| vec![index])]);
    let batches = [vec![vec![2, 3, 4]], vec![vec![0, 1, 6]], vec![vec![5]]];
    assert_eq!(split(3, 100), batches);
    assert_eq!(split(0, 100).len(), 7, "a micro-batch has at least one sample");
    let limits = ShardLimits { target: 100, longest: 100 };
    assert_eq!(shards(&samples, &[4, 6], 64, limits), [[[4, 6]]]);
}

#[test]
fn a_long_prompt_is_shared_up_to_the_longest_shard() {
    // A prompt of 90 tokens with four completions of 10 computed ones, and a short one.
    let mut samples: Vec<_> = (0..4).map(|first| sample(0, 90, 11, first)).collect();
    samples.push(sample(1, 5, 6, 4));
    let split = |longest| split(&samples, 64, longest);
    assert_eq!(split(64), [vec![0], vec![1], vec![2], vec![3], vec![4]]);
    assert_eq!(split(110), [vec![0, 1], vec![2, 3], vec![4]]);
    assert_eq!(split(130), [vec![0, 1, 2, 3], vec![4]]);
    assert_eq!(split(usize::MAX), [vec![0, 1, 2, 3], vec![4]]);
}

#[test]
fn a_common_prefix_is_shared_while_it_is_a_good_part_of_the_shard() {
    // 20 common tokens, then prompts and completions of 5 own computed tokens each.
    let rated: Vec<_> =
        (0..24).map(|i| turn(&[vec![0; 20], vec![10 + i; 3]].concat(), &[i, 1, 1])).collect();
    let counts = |target, longest| -> Vec<usize> {
        let shards = split(&rated, target, longest);
        assert_eq!(shards.concat(), (0..24).collect::<Vec<_>>());
        shards.iter().map(Vec::len).collect()
    };
    // At most six times the prefix, if the memory permits it, in shards of even lengths.
    assert_eq!(counts(30, usize::MAX), [12, 12]);
    assert_eq!(counts(30, 110), [12, 12]);
    assert_eq!(counts(30, 50), [6, 6, 6, 6]);
    assert_eq!(counts(30, 0), [2; 12]);
    assert_eq!(counts(110, 0), [18, 6]);
    assert_eq!(counts(140, 0), [24]);
    // Prompts with most tokens come first, and a group of completions is not divided if it need not be.
    let mut samples = rated[..3].to_vec();
    let prompt = [vec![0; 20], vec![9; 4]].concat();
    samples.extend((0..4).map(|i| turn(&prompt, &[50 + i, 1, 1, 1, 1, 1])));
    assert_eq!(split(&samples, 40, 80), [[3, 4, 5, 6, 0, 1, 2]]);
    assert_eq!(split(&samples, 40, 46), [vec![3, 4, 5, 6], vec![0, 1, 2]]);
}

#[test]
fn a_turn_is_computed_with_the_last_prompt_of_its_conversation() {
    let samples = [
        turn(&[1, 2], &[3]),
        turn(&[1, 2, 3, 4], &[5, 6]),
        turn(&[1, 2, 3, 4, 5, 6, 7], &[8]),
        turn(&[1, 2, 3, 4, 5, 6, 7], &[9]),
        // Another answer to the first prompt, and a turn whose beginning was encoded again.
        turn(&[1, 2], &[4]),
        turn(&[1, 2, 3, 4, 6, 5], &[1]),
    ];
    let all = [0, 1, 2, 3, 4, 5];
    assert_eq!(sequences(&samples, &all), [2, 2, 2, 3, 4, 5]);
    assert_eq!(split(&samples, 100, 100), [[0, 4, 1, 2, 3, 5]]);
    assert_eq!(computed_tokens(&samples, &all), 4 + 3 + 2);
    // Without the last turn, the first one goes on in the other prompt that begins with it.
    assert_eq!(sequences(&samples, &[0, 1, 4]), [1, 1, 2, 3, 4, 5]);
    assert_eq!(sequences(&samples, &[0, 4, 5]), [5, 1, 2, 3, 4, 5]);
}

/// Samples whose prompts and completions often begin as others, with conversations.
fn any_samples() -> impl Strategy<Value = Vec<TrainSample>> {
    let part = || prop::collection::vec(0..2_u32, 1..8);
    let one = (part(), part(), prop::option::of(any::<prop::sample::Index>()), 0..30_usize);
    prop::collection::vec(one, 1..14).prop_map(|list| {
        let mut samples: Vec<TrainSample> = Vec::new();
        for (prompt, ids, after, common) in list {
            let before = match after {
                Some(after) if !samples.is_empty() => {
                    let sample = &samples[after.index(samples.len())];
                    [&sample.prompt_ids[..], &sample.ids].concat()
                }
                _ => vec![7; common],
            };
            samples.push(turn(&[before, prompt].concat(), &ids));
        }
        samples
    })
}

proptest! {
    #[test]
    fn every_sequence_is_the_chain_of_its_nodes(samples in any_samples()) {
        let all: Vec<Sequence> =
            samples.iter().map(|s| Sequence::new(&s.prompt_ids, &s.ids)).collect();
        let tree = PrefixTree::new(&all, (0..all.len()).collect());
        let mut chains: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
        let mut tokens = 0;
        for (index, node) in tree.nodes.iter().enumerate() {
            tokens += node.positions.len();
            prop_assert!(index == 0 || !node.positions.is_empty());
            prop_assert!(node.parent.is_none_or(|parent| parent < index));
            for member in &node.members {
                let (chain, ids) = (chains.entry(*member).or_default(), &all[*member].ids);
                prop_assert_eq!(chain.len(), node.positions.start);
                chain.extend_from_slice(&ids[chain.len()..ids.len().min(node.positions.end)]);
            }
            // Nothing is computed twice.
            let first = |child: &usize| {
                let child = &tree.nodes[*child];
                all[child.members[0]].ids[child.positions.start]
            };
            let firsts: HashSet<u32> = node.children.iter().map(first).collect();
            prop_assert_eq!(firsts.len(), node.children.len());
        }
        prop_assert_eq!(tokens, tree.nodes[0].tokens);
        prop_assert!(chains.iter().all(|(member, chain)| *chain == all[*member].ids));
        let mut order = tree.order();
        order.sort_unstable();
        prop_assert_eq!(order, (0..samples.len()).collect::<Vec<_>>());
        // Each sampled token is predicted from the one before it.
        let layout = layout(&samples, &(0..samples.len()).collect::<Vec<_>>());
        let ids = layout.ids.to_vec1::<u32>().unwrap();
        prop_assert_eq!(ids.len(), tokens);
        let rows = layout.rows.to_vec1::<u32>().unwrap();
        let fed: Vec<u32> = rows.iter().map(|row| ids[*row as usize]).collect();
        let expected: Vec<u32> = samples
            .iter()
            .flat_map(|s| s.prompt_ids.last().into_iter().chain(&s.ids[..s.ids.len() - 1]))
            .copied()
            .collect();
        prop_assert_eq!(fed, expected);
        prop_assert_eq!(layout.targets, samples.iter().flat_map(|s| s.ids.clone()).collect::<Vec<_>>());
    }

    #[test]
    fn shards_respect_their_limits(
        samples in any_samples(),
        micro_batch in 1..20_usize,
        target in 1..80_usize,
        longest in 0..200_usize,
        left_out in 0..4_usize,
    ) {
        let limits = ShardLimits { target, longest };
        let active: Vec<usize> = (left_out.min(samples.len() - 1)..samples.len()).collect();
        let batches = shards(&samples, &active, micro_batch, limits);
        let mut all = batches.concat().concat();
        all.sort_unstable();
        prop_assert_eq!(&all, &active);
        let parts = samples.iter().map(|s| (s.prompt_ids.as_slice(), s.ids.as_slice()));
        let may_exceed = may_exceed(target, parts);
        for batch in &batches {
            prop_assert!((1..=micro_batch).contains(&batch.iter().map(Vec::len).sum::<usize>()));
            for members in batch {
                let layout = layout(&samples, members);
                let tokens = layout.segments.tokens();
                let longest_sample = members
                    .iter()
                    .map(|i| samples[*i].prompt_ids.len() + samples[*i].ids.len() - 1)
                    .max();
                let is_one_sequence = longest_sample == Some(tokens);
                prop_assert!(tokens <= target.max(longest) || is_one_sequence);
                prop_assert!(may_exceed || tokens <= target);
                let rows = layout.targets.len();
                prop_assert!(rows <= target.max(longest).max(tokens) || members.len() == 1);
                let all = members.iter().map(|i| Sequence::new(&samples[*i].prompt_ids, &samples[*i].ids));
                let all: Vec<Sequence> = all.collect();
                let tree = PrefixTree::new(&all, (0..all.len()).collect());
                let most = target.max(PREFIX_TIMES * tree.nodes[0].positions.end);
                prop_assert!(tokens <= most || tree.is_prompt(&tree.nodes[0]) || is_one_sequence);
            }
        }
    }
}
