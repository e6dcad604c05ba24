//! Fused attention against its candle graph, and for equal bits on any number of threads.

use candle_core::{Device, Tensor, Var};

use hone_core::testing::assert_same_bits;
use hone_kernels::float::Real;
use hone_kernels::parallel::with_threads;

use super::{Attention, graph_attention};
use super::{Softmax, SoftmaxGrad, tiles};
use crate::spec::{AttentionOptions, HeadLayout};
use crate::testing::{values, waves};
use crate::transformer::{Segment, Segments};

fn wave(rows: usize, columns: usize, phase: f64) -> Tensor {
    let x: Vec<f64> = (0..rows * columns).map(|i| (i as f64 * 1.3 + phase).sin() * 1.5).collect();
    Tensor::from_vec(x, (rows, columns), &Device::Cpu).unwrap()
}

fn segments(table: &[(usize, Option<usize>)]) -> Segments {
    let mut start = 0;
    let table: Vec<Segment> = table
        .iter()
        .map(|(len, prefix)| {
            start += len;
            Segment { start: start - len, len: *len, prefix: *prefix }
        })
        .collect();
    Segments::new(&table).unwrap()
}

/// A prompt with three branches, one of them empty, and a sequence without branches.
fn small() -> Segments {
    segments(&[(3, None), (2, Some(0)), (0, Some(0)), (4, Some(0)), (2, None)])
}

/// Four levels, with branches of an inner and of an empty segment, and a second tree.
fn deep() -> Segments {
    let first = [(3, None), (2, Some(0)), (4, Some(1)), (1, Some(1)), (3, Some(3)), (2, Some(3))];
    let second = [(2, None), (5, Some(8)), (1, Some(8))];
    segments(&[&first[..], &[(0, Some(0)), (2, Some(6))], &second].concat())
}

fn options() -> [AttentionOptions; 4] {
    let plain = AttentionOptions { scale: 0.6, softcap: None, window: None };
    [
        plain,
        AttentionOptions { softcap: Some(1.2), ..plain },
        AttentionOptions { window: Some(3), ..plain },
        AttentionOptions { softcap: Some(2.0), window: Some(1), ..plain },
    ]
}

const HEADS: HeadLayout = HeadLayout { queries: 4, keys: 2, dim: 3 };

fn difference(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.dims(), b.dims());
    values(a).iter().zip(values(b)).fold(0.0, |max, (x, y)| max.max((x - y).abs()))
}

fn probe(tokens: usize) -> Tensor {
    wave(tokens, HEADS.queries * HEADS.dim, 0.9)
}

/// Output, and gradients of q, k and v under a fixed probe.
fn run<T: Real>(
    segments: &Segments,
    options: AttentionOptions,
    inputs: &[Tensor; 3],
) -> (Tensor, [Tensor; 3]) {
    let kernel = Attention::new(segments, HEADS, options).unwrap();
    let typed = |x: &Tensor| -> Vec<T> {
        x.to_dtype(T::DTYPE).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    };
    let [q, k, v] = inputs.each_ref().map(typed);
    let (out, lse) = kernel.forward([&q, &k, &v]);
    let grads = kernel.backward([&q, &k, &v], (&out, &typed(&probe(segments.tokens())), &lse));
    let tensor = |x, like: &Tensor| Tensor::from_vec(x, like.shape(), &Device::Cpu).unwrap();
    let [dq, dk, dv] = grads;
    let grads = [tensor(dq, &inputs[0]), tensor(dk, &inputs[1]), tensor(dv, &inputs[2])];
    (tensor(out, &inputs[0]), grads)
}

fn run_graph(
    segments: &Segments,
    options: AttentionOptions,
    inputs: &[Tensor; 3],
) -> (Tensor, [Tensor; 3]) {
    let vars = inputs.each_ref().map(|x| Var::from_tensor(x).unwrap());
    let [q, k, v] = vars.each_ref().map(|var| var.as_tensor());
    let y = graph_attention((q, k, v), segments, HEADS, options).unwrap();
    let store = (&y * probe(segments.tokens())).unwrap().sum_all().unwrap().backward().unwrap();
    (y, vars.each_ref().map(|var| store.get(var.as_tensor()).unwrap().clone()))
}

fn inputs(tokens: usize) -> [Tensor; 3] {
    let HeadLayout { queries, keys, dim } = HEADS;
    [wave(tokens, queries * dim, 0.2), wave(tokens, keys * dim, 0.5), wave(tokens, keys * dim, 1.1)]
}

#[test]
fn fused_attention_and_its_gradients_equal_the_graph() {
    // The last two have segments of several tiles, and windows that begin in each level.
    let large = segments(&[(70, None), (90, Some(0)), (5, Some(0)), (130, None), (3, Some(3))]);
    let tree =
        [(70, None), (30, Some(0)), (90, Some(1)), (66, Some(1)), (7, Some(3)), (3, Some(0))];
    let cases =
        [(small(), [3, 1]), (deep(), [4, 2]), (large, [100, 20]), (segments(&tree), [110, 75])];
    for (segments, windows) in cases {
        for (i, mut options) in options().into_iter().enumerate() {
            options.window = options.window.map(|_| windows[i % 2]);
            let inputs = inputs(segments.tokens());
            let fused = run::<f64>(&segments, options, &inputs);
            let graph = run_graph(&segments, options, &inputs);
            assert!(difference(&fused.0, &graph.0) < 1e-12);
            for (a, b) in fused.1.iter().zip(&graph.1) {
                assert!(difference(a, b) < 1e-11, "{options:?}");
            }
        }
    }
}

#[test]
fn attention_in_single_precision_has_the_same_bits_on_any_number_of_threads() {
    let segments = segments(&[(70, None), (90, Some(0)), (5, Some(1)), (9, Some(0)), (40, None)]);
    let inputs = inputs(segments.tokens());
    let with = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let run = || run::<f32>(&segments, options()[1], &inputs);
        pool.install(|| with_threads(threads, run))
    };
    let (one, three) = (with(1), with(3));
    assert_eq!(values(&one.0), values(&three.0));
    for (a, b) in one.1.iter().zip(&three.1) {
        assert_eq!(values(a), values(b));
    }
    let exact = run_graph(&segments, options()[1], &inputs);
    assert!(difference(&one.0, &exact.0) < 1e-5);
}

#[test]
fn segments_that_break_the_rules_are_rejected() {
    let table = |list: &[(usize, usize, Option<usize>)]| {
        let table: Vec<Segment> = list
            .iter()
            .map(|(start, len, prefix)| Segment { start: *start, len: *len, prefix: *prefix })
            .collect();
        Segments::new(&table).map_err(|e| e.to_string())
    };
    assert!(table(&[(0, 3, None), (4, 1, None)]).unwrap_err().contains("starts at 4"));
    // A branch after another tree, of itself, and without a tree.
    assert!(table(&[(0, 3, None), (3, 1, None), (4, 1, Some(0))]).is_err());
    assert!(table(&[(0, 3, None), (3, 1, Some(1))]).is_err());
    assert!(table(&[(0, 3, Some(0))]).is_err());
    assert_eq!(small().positions(), [0, 1, 2, 3, 4, 3, 4, 5, 6, 0, 1]);
    let branches = [0, 1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 8, 6, 7, 3, 4];
    assert_eq!(deep().positions(), [&branches[..], &[0, 1, 2, 3, 4, 5, 6, 2]].concat());
}

#[test]
fn every_instruction_set_computes_the_same_probabilities_and_gradients() {
    let segments = segments(&[(70, None), (90, Some(0)), (5, Some(1)), (19, None)]);
    for options in options() {
        for tile in
            &segments.trees().iter().flat_map(|t| tiles(t, options.window)).collect::<Vec<_>>()
        {
            let len = tile.rows * tile.keys;
            let (scores, grads) = (waves(len, 0.3), waves(len, 1.1));
            let (g, o) = (waves(tile.rows * 20, 0.5), waves(tile.rows * 20, 0.9));
            assert_same_bits(|instructions| {
                let (mut p, mut lse) = (scores.clone(), vec![0.0; tile.rows]);
                let task = Softmax { tile, options, scores: &mut p, lse: &mut lse };
                instructions.run(task);
                let rows: Vec<_> = lse
                    .iter()
                    .zip(g.chunks(20).zip(o.chunks(20)))
                    .map(|(lse, (g, o))| (*lse, g, o))
                    .collect();
                let (mut scores, mut grads) = (scores.clone(), grads.clone());
                let (s, ds) = (&mut scores, &mut grads);
                instructions.run(SoftmaxGrad { tile, options, scores: s, grads: ds, rows: &rows });
                [p, lse, scores, grads].concat()
            });
        }
    }
}
