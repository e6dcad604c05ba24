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

/// A prompt with two branches, and a sequence that is longer than the windows.
fn segments() -> Arc<Segments> {
    let segment = |start, len, prefix| Segment { start, len, prefix };
    let table = [segment(0, 9, None), segment(9, 4, Some(0)), segment(13, 7, Some(0))];
    Arc::new(Segments::new(&[table.as_slice(), &[segment(20, 26, None)]].concat()).unwrap())
}

/// The largest differences of hidden states and of gradients between fused layers and graphs.
fn differences(model: &Model, lora: &LoraWeights, p: f32, keep: usize) -> (f64, f64) {
    let mut graphs = model.clone();
    assert!(model.fused_layers);
    graphs.fused_layers = false;
    let segments = segments();
    let ids: Vec<u32> = (0..segments.tokens() as u32).map(|i| i * 31 % 97).collect();
    let ids = Tensor::new(ids.as_slice(), &Device::Cpu).unwrap();
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
    let ids = Tensor::zeros(45, DType::U32, &Device::Cpu).unwrap();
    let error = model.hidden(&ids, &segments(), None, None).unwrap_err();
    assert!(error.to_string().contains("do not fit segments of 46 tokens"), "{error}");
}
