//! Fused layers against candle graphs: values, and every gradient.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use crate::Model;
use crate::adapter::weights::{Dropout, LoraWeights};
use crate::adapter::{LinearKind, LoraConfig, Patterns};
use crate::spec::family::tests::{model64, weights64};
use crate::testing::{FAMILIES, graphs, randomize, relative_difference, values};
use crate::transformer::{Segment, Segments};

fn lora(model: &Model, config: &LoraConfig) -> LoraWeights {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let lora =
        LoraWeights::fresh(model.spec(), config, &mut rng, model.dtype(), &Device::Cpu).unwrap();
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
    assert!(model.fused);
    let segments = segments();
    let ids = ids(0..segments.tokens());
    let run = |model: &Model| {
        let dropout = || Dropout { p, rng: ChaCha8Rng::seed_from_u64(3) };
        let hidden = model.hidden(&ids, &segments, Some(lora), Some(&mut dropout())).unwrap();
        let saved =
            model.forward_saving(&ids, &segments, lora, Some(&mut dropout()), keep).unwrap();
        let y = saved.hidden().clone();
        assert_eq!(values(&y), values(&hidden), "with and without saving");
        let probe: Vec<f64> = (0..y.elem_count()).map(|i| (i as f64 * 0.7).sin()).collect();
        let probe = Tensor::from_vec(probe, y.shape(), &Device::Cpu).unwrap();
        let probe = probe.to_dtype(y.dtype()).unwrap();
        (values(&y), model.backward(saved, &y, &probe, lora).unwrap())
    };
    let (a, b) = (run(model), run(&graphs(model)));
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

#[test]
fn fused_layers_equal_graphs_with_matrices_in_16_bits() {
    for dtype in [DType::BF16, DType::F16] {
        let weights = weights64("gemma2").into_iter().map(|(name, weight)| {
            let dtype = if weight.rank() == 2 { dtype } else { DType::F32 };
            (name, weight.to_dtype(dtype).unwrap())
        });
        let model = Model::new(model64("gemma2").spec().clone(), weights.collect()).unwrap();
        let lora = lora(&model, &LoraConfig::default());
        let (of_values, of_gradients) = differences(&model, &lora, 0.0, 1);
        assert!(of_values < 1e-4 && of_gradients < 1e-4, "{of_values:e}, {of_gradients:e}");
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
        let graphs = graphs(&model);
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

/// Gradients that a backward pass leaves are those of its leaves, constants included.
#[test]
fn graphs_compute_no_gradients_of_frozen_matrices_and_none_that_are_empty() {
    for name in FAMILIES {
        let (model, graphs) = (model64(name), graphs(&model64(name)));
        let lora = lora(&model, &LoraConfig { r: 3, alpha: 4.0, ..LoraConfig::default() });
        let left = |model: &Model, lora: &LoraWeights| {
            let hidden = model.hidden(&ids(0..5), &segments_of(&[(5, None)]), Some(lora), None);
            let logits = model.logits(&hidden.unwrap()).unwrap();
            let store = logits.sum_all().unwrap().backward().unwrap();
            let gradients = store.get_ids().map(|id| store.get_id(*id).unwrap().dims().to_vec());
            gradients.collect::<Vec<_>>()
        };
        let shapes = model.spec().weight_shapes().into_iter().map(|(_, shape)| shape);
        let matrices: Vec<_> = shapes.filter(|shape| shape.len() == 2).collect();
        let is_weight = |dims: &Vec<usize>| {
            let transposed: Vec<_> = dims.iter().rev().copied().collect();
            matrices.contains(dims) || matrices.contains(&transposed)
        };
        let frozen = left(&graphs, &lora);
        assert!(frozen.len() > lora.parameters().len());
        assert!(!frozen.iter().any(is_weight), "{name}: {frozen:?}");
        assert!(frozen.iter().all(|dims| !dims.contains(&0)), "{name}: {frozen:?}");
        // All matrices of a base that is trained have one; the embedding is tied, or read by index.
        let vars = weights64(name)
            .into_iter()
            .map(|(name, weight)| (name, Var::from_tensor(&weight).unwrap().into_inner()));
        let trained = Model::new(model.spec().clone(), vars.collect()).unwrap();
        let count = left(&trained, &lora).iter().filter(|dims| is_weight(dims)).count();
        assert!(count >= matrices.len(), "{name}: {count} of {}", matrices.len());
    }
}

#[test]
fn ids_that_do_not_fit_their_segments_are_rejected() {
    let model = model64("llama2");
    let ids = Tensor::zeros(79, DType::U32, &Device::Cpu).unwrap();
    let error = model.hidden(&ids, &segments(), None, None).unwrap_err();
    assert!(error.to_string().contains("do not fit segments of 80 tokens"), "{error}");
}
