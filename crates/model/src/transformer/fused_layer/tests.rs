//! Fused layers against candle graphs: values, and every gradient.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use crate::Model;
use crate::adapter::weights::{Dropout, LoraWeights};
use crate::adapter::{LinearKind, LoraConfig, Patterns};
use crate::spec::family::tests::model64;
use crate::testing::{FAMILIES, randomize, relative_difference, values};
use crate::transformer::{Segment, Segments};

fn lora(model: &Model, config: &LoraConfig) -> LoraWeights {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let lora =
        LoraWeights::fresh(model.spec(), config, &mut rng, DType::F64, &Device::Cpu).unwrap();
    randomize(&lora, 2);
    lora
}

/// Lengths and prefixes of a tree of three levels, which is deeper than the windows, and of a sequence that is
/// longer than them.
const TREE: [(usize, Option<usize>); 8] = [
    (9, None),
    (8, Some(0)),
    (5, Some(1)),
    (20, Some(1)),
    (4, Some(0)),
    (7, Some(4)),
    (1, Some(4)),
    (26, None),
];

fn segments_of(table: &[(usize, Option<usize>)]) -> Arc<Segments> {
    let mut end = 0;
    let segment = |&(len, prefix): &(usize, Option<usize>)| {
        end += len;
        Segment { start: end - len, len, prefix }
    };
    Arc::new(Segments::new(&table.iter().map(segment).collect::<Vec<_>>()).unwrap())
}

fn segments() -> Arc<Segments> {
    segments_of(&TREE)
}

fn ids(places: impl IntoIterator<Item = usize>) -> Tensor {
    let ids: Vec<u32> = places.into_iter().map(|place| place as u32 * 31 % 97).collect();
    Tensor::new(ids.as_slice(), &Device::Cpu).unwrap()
}

/// The largest differences of hidden states and of gradients between fused layers and graphs.
fn differences(model: &Model, lora: &LoraWeights, p: f32, keep: usize) -> (f64, f64) {
    let mut graphs = model.clone();
    assert!(model.fused_layers);
    graphs.fused_layers = false;
    let segments = segments();
    let ids = ids(0..segments.tokens());
    let dropout = || Dropout { p, rng: ChaCha8Rng::seed_from_u64(3) };
    let hidden =
        |model: &Model| model.hidden(&ids, &segments, Some(lora), Some(&mut dropout())).unwrap();
    let saved = model.forward_saving(&ids, &segments, lora, Some(&mut dropout()), keep).unwrap();
    let (fused, graph) = (saved.hidden().clone(), hidden(&graphs));
    assert_eq!(values(&fused), values(&hidden(model)), "with and without saving");
    let probe: Vec<f64> = (0..fused.elem_count()).map(|i| (i as f64 * 0.7).sin()).collect();
    let probe = Tensor::from_vec(probe, fused.shape(), &Device::Cpu).unwrap();
    let store = (&graph * &probe).unwrap().sum_all().unwrap().backward().unwrap();
    let of_graph = lora.parameters().into_iter().map(|(name, var)| {
        let zeros = || var.zeros_like().unwrap();
        (name, store.get(var.as_tensor()).cloned().unwrap_or_else(zeros))
    });
    let gradients = model.backward(saved, &fused, &probe, lora).unwrap();
    let a = (values(&fused), gradients);
    let b = (values(&graph), of_graph.collect());
    let largest = a.0.iter().zip(&b.0).fold(0.0, |most: f64, (x, y)| most.max((x - y).abs()));
    assert!(a.0.iter().any(|x| x.abs() > 0.1));
    (largest, relative_difference(&a.1, &b.1))
}

#[test]
fn fused_layers_equal_graphs_in_every_family() {
    for name in FAMILIES {
        let model = model64(name);
        let config = LoraConfig { r: 3, alpha: 4.0, ..LoraConfig::default() };
        let lora = lora(&model, &config);
        for (p, keep) in [(0.0, 0), (0.0, 9), (0.3, 1)] {
            let (of_values, of_gradients) = differences(&model, &lora, p, keep);
            assert!(of_values < 1e-11, "{name}, {p}: {of_values:e}");
            assert!(of_gradients < 1e-11, "{name}, {p}: {of_gradients:e}");
        }
    }
}

/// Of each leaf of [`TREE`], the indices of its sequence's tokens.
fn sequences() -> Vec<Vec<usize>> {
    let mut chains: Vec<Vec<usize>> = Vec::new();
    let mut start = 0;
    for (len, prefix) in TREE {
        let before = prefix.map_or(Vec::new(), |prefix| chains[prefix].clone());
        chains.push(before.into_iter().chain(start..start + len).collect());
        start += len;
    }
    let is_leaf = |index: &usize| TREE.iter().all(|(_, prefix)| *prefix != Some(*index));
    (0..TREE.len()).filter(is_leaf).map(|leaf| chains[leaf].clone()).collect()
}

#[test]
fn a_tree_of_prefixes_equals_separate_sequences_in_every_family() {
    let sequences = sequences();
    let separate: Vec<_> = sequences.iter().map(|places| (places.len(), None)).collect();
    let separate = segments_of(&separate);
    let places: Vec<usize> = sequences.concat();
    // The loss of a shared token is the sum of those of its copies.
    let weights: Vec<f64> = (0..places.len()).map(|i| (i as f64 * 0.7).sin()).collect();
    let mut sums = vec![0.0; segments().tokens()];
    for (place, weight) in places.iter().zip(&weights) {
        sums[*place] += weight;
    }
    for name in FAMILIES {
        let model = model64(name);
        let lora = lora(&model, &LoraConfig { r: 3, alpha: 4.0, ..LoraConfig::default() });
        let mut graphs = model.clone();
        graphs.fused_layers = false;
        let gradients = |ids: &Tensor, segments: &Arc<Segments>, weights: &[f64]| {
            let probe = Tensor::new(weights, &Device::Cpu).unwrap().unsqueeze(1).unwrap();
            let saved = model.forward_saving(ids, segments, &lora, None, 1).unwrap();
            let (hidden, width) = (saved.hidden().clone(), saved.hidden().dims()[1]);
            let probe = probe.broadcast_as((weights.len(), width)).unwrap();
            (values(&hidden), model.backward(saved, &hidden, &probe, &lora).unwrap())
        };
        let (tree_ids, separate_ids) = (ids(0..sums.len()), ids(places.iter().copied()));
        let tree = gradients(&tree_ids, &segments(), &sums);
        let alone = gradients(&separate_ids, &separate, &weights);
        let width = tree.0.len() / sums.len();
        let check = |tree: &[f64], alone: &[f64], what: &str| {
            for (place, row) in places.iter().zip(alone.chunks(width)) {
                let shared = &tree[place * width..][..width];
                let same = row.iter().zip(shared).all(|(a, b)| (a - b).abs() < 1e-11);
                assert!(same, "{name}, {what}: token {place}");
            }
        };
        check(&tree.0, &alone.0, "with the adapter");
        let of_gradients = relative_difference(&tree.1, &alone.1);
        assert!(of_gradients < 1e-11, "{name}: {of_gradients:e}");
        // The reference pass, and candle graphs.
        for (model, lora) in [(&model, None), (&graphs, None), (&graphs, Some(&lora))] {
            let hidden = |ids, segments| values(&model.hidden(ids, segments, lora, None).unwrap());
            let (tree, alone) = (hidden(&tree_ids, &segments()), hidden(&separate_ids, &separate));
            check(&tree, &alone, "without saving");
        }
    }
}

#[test]
fn fused_layers_equal_graphs_with_adapters_of_different_ranks_on_some_linears() {
    for (name, modules) in [
        ("qwen2", ["k_proj", "up_proj"]),
        ("phi3", ["qkv_proj", "down_proj"]),
        ("gemma2", ["o_proj", "v_proj"]),
    ] {
        let model = model64(name);
        let config = LoraConfig {
            r: 2,
            target_modules: modules.into(),
            rank_pattern: Patterns::from([(modules[0].to_owned(), 5)]),
            ..LoraConfig::default()
        };
        let lora = lora(&model, &config);
        assert!(lora.pair(0, LinearKind::GateUpProj).is_none());
        let (of_values, of_gradients) = differences(&model, &lora, 0.0, 1);
        assert!(
            of_values < 1e-11 && of_gradients < 1e-11,
            "{name}: {of_values:e}, {of_gradients:e}"
        );
    }
}

#[test]
fn ids_that_do_not_fit_their_segments_are_rejected() {
    let model = model64("llama2");
    let ids = Tensor::zeros(79, DType::U32, &Device::Cpu).unwrap();
    let error = model.hidden(&ids, &segments(), None, None).unwrap_err();
    assert!(error.to_string().contains("do not fit segments of 80 tokens"), "{error}");
}
