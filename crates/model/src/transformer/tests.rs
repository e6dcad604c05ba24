//! The forward pass against transformers, single operations against finite differences, and the
//! stability of the digest.

use candle_core::{DType, Device, Tensor, Var};

use hone_core::testing::assert_same_bits;

use super::graph_head::graph_stats;
use super::head::{OutputLayer, SoftcapTask, head_stats};
use super::token_stats::{StatsGradTask, StatsTask, TokenTargets};
use crate::Model;
use crate::kernels::compute::Compute;
use crate::testing::{test_file, tiny_model, tiny_spec, tiny_weights, token_stats, values, waves};
use crate::weights::BaseMatrix;

fn largest_difference(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.dims(), b.dims());
    values(a).iter().zip(values(b)).fold(0.0, |max, (x, y)| max.max((x - y).abs()))
}

#[test]
fn logits_equal_those_of_transformers() {
    let path = test_file("reference/models/qwen2_tiny_logits.safetensors");
    let reference = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    let ids = reference["ids"].to_dtype(DType::U32).unwrap();
    let logits = tiny_model(DType::F32).forward(&ids, None, None).unwrap();
    let difference = largest_difference(&logits, &reference["logits"]);
    assert!(difference < 1e-4, "largest difference {difference:e}");
    assert!(values(&logits).iter().any(|x| x.abs() > 1.0), "the logits are not all small");
}

/// Central differences of `sum(f(x) * probe)` at every entry of `x`.
fn check_operation(x: &Tensor, f: impl Fn(&Tensor) -> Tensor) {
    let var = Var::from_tensor(x).unwrap();
    let probe = |y: &Tensor| {
        let weights: Vec<f64> = (0..y.elem_count()).map(|i| (i as f64 * 0.7 + 0.3).sin()).collect();
        let weights = Tensor::from_vec(weights, y.shape(), &Device::Cpu).unwrap();
        (y * weights).unwrap().sum_all().unwrap()
    };
    let loss = probe(&f(var.as_tensor()));
    let gradient = values(loss.backward().unwrap().get(var.as_tensor()).unwrap());
    let start = values(x);
    for entry in 0..start.len() {
        let at = |step: f64| {
            let mut moved = start.clone();
            moved[entry] += step;
            let moved = Tensor::from_vec(moved, x.shape(), &Device::Cpu).unwrap();
            probe(&f(&moved)).to_scalar::<f64>().unwrap()
        };
        let measured = (at(1e-6) - at(-1e-6)) / 2e-6;
        assert!(
            (measured - gradient[entry]).abs() < 1e-7,
            "entry {entry}: {measured} against {}",
            gradient[entry]
        );
    }
}

/// Values that are not round numbers.
fn wave(shape: (usize, usize)) -> Tensor {
    let x: Vec<f64> = (0..shape.0 * shape.1).map(|i| (i as f64 * 1.3 + 0.2).sin() * 2.0).collect();
    Tensor::from_vec(x, shape, &Device::Cpu).unwrap()
}

#[test]
fn head_statistics_of_huge_logits_are_finite() {
    let logits = Tensor::from_vec(vec![1e30_f32, -1e30, 3e4, 0.0], (2, 2), &Device::Cpu).unwrap();
    let weight = BaseMatrix::from(Tensor::eye(2, DType::F32, &Device::Cpu).unwrap());
    for stats in [head_stats, graph_stats] {
        let layer = output_layer(&weight, None);
        let stats = stats(&logits, layer, &[0, 0], &[1.0, 0.1]).unwrap();
        assert_eq!(values(&stats), vec![0.0, 0.0, 0.0, 0.0]);
    }
}

/// [`head_stats`] or [`graph_stats`].
type Stats = fn(&Tensor, OutputLayer, &[u32], &[f32]) -> candle_core::Result<Tensor>;

fn output_layer(weight: &BaseMatrix, softcap: Option<f64>) -> OutputLayer {
    OutputLayer { weight: weight.clone(), softcap, compute: Compute::F32 }
}

#[test]
fn chunked_head_statistics_and_gradients_equal_those_of_logits() {
    // A chunk has at most 512 rows, so that these rows are two chunks.
    let (rows, vocab) = (515, 700);
    let (x, weight) = (wave((rows, 4)), wave((vocab, 4)));
    let matrix = BaseMatrix::from(weight.clone());
    let targets: Vec<u32> = (0..rows as u32).map(|i| i * 100 % 700).collect();
    let temperatures: Vec<f32> = (0..rows).map(|i| [1.0, 0.6, 1.7][i % 3]).collect();
    for cap in [None, Some(3.0)] {
        let var = Var::from_tensor(&x).unwrap();
        let of = |stats: Stats, x: &Tensor| {
            stats(x, output_layer(&matrix, cap), &targets, &temperatures).unwrap()
        };
        let plain = |x: &Tensor| {
            let logits = x.matmul(&weight.t().unwrap()).unwrap();
            let logits = match cap {
                Some(cap) => ((logits / cap).unwrap().tanh().unwrap() * cap).unwrap(),
                None => logits,
            };
            token_stats(&logits, &targets, &temperatures)
        };
        let whole = plain(var.as_tensor());
        for stats in [head_stats, graph_stats] {
            assert!(largest_difference(&of(stats, &x), &whole) < 1e-11);
            assert_eq!(values(&of(stats, &x)), values(&of(stats, var.as_tensor())));
        }
        // Gradients of log-probabilities alone, as without an entropy bonus, and of both.
        for columns in [1, 2] {
            let probe = wave((rows, columns)).pad_with_zeros(1, 0, 2 - columns).unwrap();
            let gradient = |y: &Tensor| {
                let sum = (y * &probe).unwrap().sum_all().unwrap();
                sum.backward().unwrap().remove(var.as_tensor()).unwrap()
            };
            let [fused, graph] =
                [head_stats, graph_stats].map(|stats: Stats| gradient(&of(stats, var.as_tensor())));
            assert!(largest_difference(&fused, &graph) < 1e-11);
            assert!(largest_difference(&fused, &gradient(&whole)) < 1e-10);
        }
    }
}

#[test]
fn gradients_of_head_statistics_equal_finite_differences() {
    let weight = BaseMatrix::from(wave((5, 4)));
    for (stats, cap) in
        [head_stats, graph_stats].into_iter().flat_map(|f: Stats| [(f, None), (f, Some(1.5))])
    {
        check_operation(&wave((3, 4)), |x| {
            stats(x, output_layer(&weight, cap), &[4, 0, 2], &[1.0, 0.5, 2.0]).unwrap()
        });
    }
}

#[test]
fn wrong_weights_are_rejected_by_name() {
    let mut weights = tiny_weights(DType::F32);
    weights.insert(
        "model.norm.weight".to_owned(),
        Tensor::zeros(31, DType::F32, &Device::Cpu).unwrap(),
    );
    let message = Model::new(tiny_spec(), weights).unwrap_err().to_string();
    assert!(message.contains("`model.norm.weight` has shape [31]"), "{message}");
    let mut weights = tiny_weights(DType::F32);
    weights.remove("model.layers.1.self_attn.q_proj.bias");
    let message = Model::new(tiny_spec(), weights).unwrap_err().to_string();
    assert!(message.contains("`model.layers.1.self_attn.q_proj.bias` is missing"), "{message}");
}

/// Checkpoints contain [`Model::digest`], which hashes this text. A new name of a type, field or variant
/// in it, or another default, would make the checkpoints of existing runs unreadable.
#[test]
fn the_debug_text_of_the_spec_and_the_digest_are_stable() {
    insta::assert_snapshot!(format!("{:?}", tiny_spec()), @r#"ModelSpec { architecture: "qwen2", vocab_size: 288, hidden_size: 32, intermediate_size: 48, num_layers: 2, num_heads: 4, num_kv_heads: 2, head_dim: 8, rms_norm_eps: 1e-6, rope: RopeSpec { theta: 50000.0, rotary_dim: 8, scaling: Default }, layers: [LayerSpec { rope: true, window: None }, LayerSpec { rope: true, window: None }], qkv_bias: true, output_bias: false, mlp_bias: false, fused: false, head_norms: false, output_norms: false, norm_offset: 0.0, activation: Silu, embedding_scale: None, attention_scale: 0.35355339059327373, attention_softcap: None, final_softcap: None, tie_word_embeddings: false }"#);
    assert_eq!(
        tiny_model(DType::F32).digest().unwrap(),
        "d5ac9ffefd059af86a9ba0656b5751972a1a51215323e0677cf47234ea028c04"
    );
}

#[test]
fn every_instruction_set_computes_the_same_statistics() {
    for vocab in [3, 16, 99, 160] {
        let (ids, temperatures) = ([0, 2, 1], [1.0, 0.7, 1.5]);
        let targets = &TokenTargets::new(&ids, &temperatures, 3, vocab).unwrap();
        let mut logits = waves(3 * vocab, 0.4);
        // A token that can never be drawn.
        logits[vocab] = f32::NEG_INFINITY;
        for (softcap, entropy) in [(None, 0.0), (None, 0.3), (Some(5.0), 0.3)] {
            let grad = [1.0, entropy].repeat(3);
            assert_same_bits(|instructions| {
                let (mut logits, first) = (logits.clone(), 0);
                if let Some(cap) = softcap {
                    instructions.run(SoftcapTask { cap, values: &mut logits });
                }
                let mut stats = vec![0.0; 6];
                let task = StatsTask { targets, first, logits: &logits, stats: &mut stats };
                instructions.run(task);
                let values = logits.clone();
                let (grad, logits_mut) = (Some(&grad[..]), &mut logits);
                instructions.run(StatsGradTask {
                    targets,
                    softcap,
                    first,
                    logits: logits_mut,
                    stats: &stats,
                    grad,
                });
                [values, stats, logits].concat()
            });
        }
    }
}
