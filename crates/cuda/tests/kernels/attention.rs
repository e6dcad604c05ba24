//! Attention over segments and over pages.

use hone_cuda::{AttentionTables, KernelSource, PackedSegment};

use super::emulator::{Buffers, Emulator, assert_close, dot, gradient, values};

const PAGE: usize = 16;
const SPLIT: usize = 256;

#[derive(Clone, Copy, Debug)]
struct Shape {
    heads: usize,
    key_heads: usize,
    dim: usize,
    scale: f64,
    softcap: f64,
    window: usize,
}

impl Shape {
    fn new(heads: usize, key_heads: usize, dim: usize) -> Self {
        Self { heads, key_heads, dim, scale: 2.0 / (dim as f64).sqrt(), softcap: 0.0, window: 0 }
    }

    /// Larger scores have larger errors.
    fn tolerance(&self, emulator: &Emulator) -> f64 {
        emulator.tolerance() * (self.scale * (self.dim as f64).sqrt() / 2.0).max(1.0)
    }

    fn key_head(&self, head: usize) -> usize {
        head / (self.heads / self.key_heads)
    }

    /// Values of a row of queries, keys and values.
    fn stride(&self) -> usize {
        (self.heads + 2 * self.key_heads) * self.dim
    }
}

/// Rows `[queries | keys | values]` of a packed pass, and what a token attends to.
struct Case {
    shape: Shape,
    rows: Vec<f64>,
    /// For each token the tokens that it attends to.
    visible: Vec<Vec<usize>>,
}

fn segments(table: &[(usize, Option<usize>)]) -> Vec<PackedSegment> {
    let mut start = 0;
    let segment = |&(len, prefix): &(usize, Option<usize>)| {
        start += len;
        PackedSegment { start: start - len, len, prefix }
    };
    table.iter().map(segment).collect()
}

impl Case {
    fn new(shape: Shape, segments: &[PackedSegment], seed: u64) -> Self {
        let mut visible = Vec::new();
        for segment in segments {
            let mut before = Vec::new();
            let mut of = segment.prefix;
            while let Some(index) = of {
                let prefix = segments[index];
                before.splice(0..0, prefix.start..prefix.start + prefix.len);
                of = prefix.prefix;
            }
            for token in segment.start..segment.start + segment.len {
                before.push(token);
                let first =
                    if shape.window == 0 { 0 } else { before.len().saturating_sub(shape.window) };
                visible.push(before[first..].to_vec());
            }
        }
        let rows = values(visible.len() * shape.stride(), seed).iter().map(|x| 2.0 * x).collect();
        Self { shape, rows, visible }
    }

    fn tokens(&self) -> usize {
        self.visible.len()
    }

    /// Part 0, 1 or 2 of a row: queries, keys or values.
    fn part<'a>(&self, rows: &'a [f64], part: usize, token: usize, head: usize) -> &'a [f64] {
        let Shape { heads, key_heads, dim, .. } = self.shape;
        let first = [0, heads, heads + key_heads][part];
        &rows[token * self.shape.stride() + (first + head) * dim..][..dim]
    }

    /// Softmax weights of the visible tokens, derivatives of scores by products, and the logarithm of the sum.
    fn weights(&self, rows: &[f64], token: usize, head: usize) -> (Vec<f64>, Vec<f64>, f64) {
        let (q, shape) = (self.part(rows, 0, token, head), &self.shape);
        let score = |key: &usize| {
            let s = shape.scale * dot(q, self.part(rows, 1, *key, shape.key_head(head)));
            if shape.softcap == 0.0 {
                return (s, shape.scale);
            }
            let t = (s / shape.softcap).tanh();
            (shape.softcap * t, shape.scale * (1.0 - t * t))
        };
        let (scores, derivatives): (Vec<f64>, Vec<f64>) =
            self.visible[token].iter().map(score).unzip();
        let most = scores.iter().copied().fold(f64::MIN, f64::max);
        let lse = most + scores.iter().map(|s| (s - most).exp()).sum::<f64>().ln();
        (scores.iter().map(|s| (s - lse).exp()).collect(), derivatives, lse)
    }

    /// The output `[tokens, heads, dim]` and lse `[tokens, heads]`.
    fn forward(&self, rows: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let Shape { heads, dim, .. } = self.shape;
        let (mut out, mut lses) = (Vec::new(), Vec::new());
        for (token, head) in (0..self.tokens()).flat_map(|t| (0..heads).map(move |h| (t, h))) {
            let (p, _, lse) = self.weights(rows, token, head);
            let mut sum = vec![0.0; dim];
            for (p, key) in p.iter().zip(&self.visible[token]) {
                let v = self.part(rows, 2, *key, self.shape.key_head(head));
                sum.iter_mut().zip(v).for_each(|(sum, v)| *sum += p * v);
            }
            out.extend(sum);
            lses.push(lse);
        }
        (out, lses)
    }

    /// The gradient of all rows from that of the output.
    fn backward(&self, out: &[f64], grad: &[f64]) -> Vec<f64> {
        let Shape { heads, key_heads, dim, .. } = self.shape;
        let mut result = vec![0.0; self.rows.len()];
        for (token, head) in (0..self.tokens()).flat_map(|t| (0..heads).map(move |h| (t, h))) {
            let (p, derivatives, _) = self.weights(&self.rows, token, head);
            let at = (token * heads + head) * dim;
            let (g, o) = (&grad[at..at + dim], &out[at..at + dim]);
            let key_head = self.shape.key_head(head);
            for ((p, derivative), key) in p.iter().zip(derivatives).zip(&self.visible[token]) {
                let v = self.part(&self.rows, 2, *key, key_head);
                let ds = p * (dot(g, v) - dot(g, o)) * derivative;
                let (row, stride) = (key * self.shape.stride(), self.shape.stride());
                for (d, g) in g.iter().enumerate() {
                    let (q_at, k_at) = (head * dim + d, (heads + key_head) * dim + d);
                    result[token * stride + q_at] += ds * self.rows[row + k_at];
                    result[row + k_at] += ds * self.rows[token * stride + q_at];
                    result[row + key_heads * dim + k_at] += p * g;
                }
            }
        }
        result
    }
}

/// A call of a kernel with the options at its end.
fn with_options<'e>(call: super::emulator::Call<'e>, shape: &Shape) -> Buffers {
    call.float(shape.scale).float(shape.softcap).int(shape.window).run()
}

/// Columns of rows that belong to queries, keys and values.
fn columns(rows: &[f64], shape: &Shape) -> [Vec<f64>; 3] {
    let (q, k) = (shape.heads * shape.dim, shape.key_heads * shape.dim);
    [(0, q), (q, k), (q + k, k)].map(|(first, len)| {
        rows.chunks(shape.stride()).flat_map(|row| row[first..first + len].to_vec()).collect()
    })
}

fn check_training(emulator: &Emulator, shape: Shape, table: &[(usize, Option<usize>)]) {
    let segments = segments(table);
    let case = Case::new(shape, &segments, 1);
    let tables = AttentionTables::new(&segments, shape.dim).unwrap();
    let Shape { heads, key_heads, dim, .. } = shape;
    let (tokens, group) = (case.tokens(), heads / key_heads);
    let (q_width, k_width) = (heads * dim, key_heads * dim);
    let what = format!("{shape:?}, f32: {}", emulator.float);
    let (expected, expected_lse) = case.forward(&case.rows);
    // Queries, keys and values are columns of the same rows; here each has its own copy.
    let [q, k, v] = columns(&case.rows, &shape);
    let tiles = [&tables.query_tiles, &tables.key_tiles].map(|tiles| tiles.concat());
    let call = emulator.call("attention_forward", [tables.query_tiles.len(), heads, 1], 128);
    let call = call.acts(&q).acts(&k).acts(&v).out_acts(tokens * q_width).out(tokens * heads, 4);
    let call = call.ints(&tiles[0]).ints(&tables.key_tokens).int(heads).int(group);
    let result = with_options(call.int(q_width).int(k_width), &shape);
    let (out, lse) = (result.acts(3), result.floats(4));
    assert_close(&out, &expected, shape.tolerance(emulator), &format!("output of {what}"));
    assert_close(&lse, &expected_lse, 1e-5, &format!("lse of {what}"));

    let grad = values(tokens * q_width, 2);
    let call = emulator.call("attention_delta", [(tokens * heads).div_ceil(4), 1, 1], 128);
    let delta =
        call.acts(&out).acts(&grad).out(tokens * heads, 4).int(tokens * heads).run().floats(2);
    let call =
        emulator.call("attention_backward_queries", [tables.query_tiles.len(), heads, 1], 128);
    let call = call.acts(&q).acts(&k).acts(&v).acts(&grad).floats(&lse).floats(&delta);
    let call = call.out_acts(tokens * q_width).ints(&tiles[0]).ints(&tables.key_tokens);
    let call = call.int(heads).int(group).int(q_width).int(k_width);
    let dq = with_options(call, &shape).acts(6);
    let call =
        emulator.call("attention_backward_keys", [tables.key_tiles.len(), key_heads, 1], 128);
    let call = call.acts(&q).acts(&k).acts(&v).acts(&grad).floats(&lse).floats(&delta);
    let call = call.out_acts(tokens * k_width).out_acts(tokens * k_width).ints(&tiles[1]);
    let call = call.ints(&tables.query_tokens).ints(&tables.positions);
    let result = with_options(call.int(heads).int(group).int(q_width).int(k_width), &shape);
    // The gradients depend on the rounded output.
    let expected = columns(&case.backward(&out, &grad), &shape);
    let found = [dq, result.acts(6), result.acts(7)];
    for ((found, expected), name) in found.iter().zip(&expected).zip(["dq", "dk", "dv"]) {
        assert_close(
            found,
            expected,
            2.0 * shape.tolerance(emulator),
            &format!("{name} of {what}"),
        );
    }
}

/// A prompt with completions, one of which continues in two others, an empty segment, and another sequence.
const TREE: [(usize, Option<usize>); 7] =
    [(37, None), (1, Some(0)), (33, Some(0)), (0, Some(0)), (5, Some(2)), (9, Some(2)), (3, None)];

#[test]
fn the_reference_has_the_gradient_of_its_output() {
    let shape = Shape { softcap: 3.0, window: 4, ..Shape::new(4, 2, 8) };
    let case = Case::new(shape, &segments(&[(4, None), (2, Some(0)), (3, Some(0))]), 3);
    let out = case.forward(&case.rows).0;
    let grad = values(out.len(), 4);
    let expected = gradient(&case.rows, |rows| dot(&case.forward(rows).0, &grad));
    assert_close(&case.backward(&out, &grad), &expected, 1e-7, "reference");
}

#[test]
fn attention_and_its_gradients_for_all_head_dims() {
    for dim in [8, 64, 80, 96, 128, 256] {
        let source = KernelSource::attention(dim).unwrap();
        // Rounding does not depend on the dim.
        let kinds: &[bool] = if dim == 64 || dim == 256 { &[true, false] } else { &[true] };
        for emulator in kinds.iter().filter_map(|float| Emulator::new(&source, *float)) {
            let (grouped, single) = (Shape::new(4, 2, dim), Shape::new(3, 1, dim));
            check_training(&emulator, grouped, &TREE);
            if dim == 64 {
                // Scores of several hundred, whose exponentials are not finite.
                check_training(&emulator, Shape { scale: 12.0, ..grouped }, &TREE);
            }
            check_training(&emulator, Shape { softcap: 3.0, window: 7, ..single }, &TREE);
            check_training(&emulator, Shape { window: 40, ..single }, &[(70, None), (1, Some(0))]);
        }
    }
}

/// Keys and values of rows in shuffled pages, poison elsewhere, with the number of each page.
fn paged(emulator: &Emulator, case: &Case, tokens: &[usize]) -> ([Vec<f64>; 2], Vec<i32>) {
    let width = case.shape.key_heads * case.shape.dim;
    let count = tokens.len().div_ceil(PAGE);
    let pages: Vec<i32> = (0..count).map(|page| ((page * 5 + 3) % (count + 8)) as i32).collect();
    let place = |position: usize| pages[position / PAGE] * PAGE as i32 + (position % PAGE) as i32;
    let places: Vec<i32> = (0..tokens.len()).map(place).chain([-1]).collect();
    let [_, k, v] = columns(&case.rows, &case.shape);
    // The last row is not written.
    let rows = |x: &[f64]| -> Vec<f64> {
        tokens.iter().chain([&0]).flat_map(|t| x[t * width..][..width].to_vec()).collect()
    };
    let all = (count + 8) * PAGE * width;
    let call = emulator.call("write_pages", [tokens.len() + 1, 1, 1], 128).acts(&rows(&k));
    let call = call.acts(&rows(&v)).ints(&places).out_acts(all).out_acts(all).int(width).int(width);
    let written = call.run();
    ([3, 4].map(|i| written.acts(i)), pages)
}

/// Whether a row is computed alone or with others, from tokens or from pages, its bits are the same.
#[test]
fn parts_of_a_prompt_over_pages_equal_the_whole_in_bits() {
    for (dim, window) in [(64, 0), (80, 23), (256, 0)] {
        let Some(emulator) = Emulator::new(&KernelSource::attention(dim).unwrap(), true) else {
            return;
        };
        let shape = Shape { window, ..Shape::new(4, 2, dim) };
        let (tokens, heads) = (75, shape.heads);
        let case = Case::new(shape, &segments(&[(tokens, None)]), 7);
        let [q, k, v] = columns(&case.rows, &shape);
        let (q_width, k_width) = (heads * dim, shape.key_heads * dim);
        let tables = AttentionTables::new(&segments(&[(tokens, None)]), dim).unwrap();
        let call = emulator.call("attention_forward", [tables.query_tiles.len(), heads, 1], 128);
        let call = call.acts(&q).acts(&k).acts(&v).out_acts(q.len()).null();
        let call = call.ints(&tables.query_tiles.concat()).ints(&tables.key_tokens);
        let whole = with_options(call.int(heads).int(2).int(q_width).int(k_width), &shape);
        let all: Vec<usize> = (0..tokens).collect();
        let ([k, v], pages) = paged(&emulator, &case, &all);
        // Parts of 7 and then of 16 rows; the page table has the sequence in its second row.
        let table: Vec<i32> = vec![-1; pages.len()].into_iter().chain(pages.clone()).collect();
        let mut tiles = vec![[0, 7, 1, 0]];
        tiles.extend(
            (7..tokens).step_by(16).map(|t| [t, 16.min(tokens - t), 1, t].map(|x| x as i32)),
        );
        let call = emulator.call("attention_prefill", [tiles.len(), heads, 1], 128);
        let call = call.acts(&q).acts(&k).acts(&v).out_acts(q.len()).ints(&tiles.concat());
        let call = call.ints(&table).int(pages.len()).int(heads).int(2).int(q_width);
        let parts = with_options(call, &shape);
        assert!(parts.bytes[3] == whole.bytes[3], "head dim {dim}");
    }
}

#[test]
fn one_token_of_each_sequence_attends_to_its_pages() {
    for dim in [64, 80, 96, 128, 256] {
        let source = KernelSource::attention(dim).unwrap();
        let kinds: &[bool] = if dim == 64 { &[true, false] } else { &[true] };
        for emulator in kinds.iter().filter_map(|float| Emulator::new(&source, *float)) {
            for (shape, lengths) in [
                (Shape::new(12, 2, dim), [1, 256, 301]),
                (Shape { softcap: 3.0, window: 60, ..Shape::new(2, 2, dim) }, [33, 17, 530]),
            ] {
                check_decode(&emulator, shape, &lengths);
            }
        }
    }
}

fn check_decode(emulator: &Emulator, shape: Shape, lengths: &[usize]) {
    let Shape { heads, key_heads, dim, .. } = shape;
    let (count, group) = (lengths.len(), heads / key_heads);
    let parts = lengths.iter().max().unwrap().div_ceil(SPLIT);
    let case =
        Case::new(shape, &segments(&lengths.iter().map(|len| (*len, None)).collect::<Vec<_>>()), 9);
    let last: Vec<usize> = lengths
        .iter()
        .scan(0, |sum, len| {
            *sum += len;
            Some(*sum - 1)
        })
        .collect();
    // All sequences have their pages in the same two buffers.
    let (mut pools, mut table) = ([Vec::new(), Vec::new()], Vec::new());
    let most = lengths.iter().max().unwrap().div_ceil(PAGE);
    for (len, last) in lengths.iter().zip(&last) {
        let tokens: Vec<usize> = (last + 1 - len..=*last).collect();
        let (new, pages) = paged(emulator, &case, &tokens);
        let before = pools[0].len() / (PAGE * key_heads * dim);
        table.extend(pages.iter().map(|page| page + before as i32));
        table.resize(table.len() + most - pages.len(), -1);
        pools.iter_mut().zip(new).for_each(|(pool, new)| pool.extend(new));
    }
    let [q, ..] = columns(&case.rows, &shape);
    let q: Vec<f64> =
        last.iter().flat_map(|t| q[t * heads * dim..][..heads * dim].to_vec()).collect();
    let lengths: Vec<i32> = lengths.iter().map(|len| *len as i32).collect();
    let call = emulator.call("attention_decode", [count, key_heads, parts], 128).acts(&q);
    let call = call.acts(&pools[0]).acts(&pools[1]).out(count * heads * parts * dim, 4);
    let call = call.out(count * heads * parts * 2, 4).ints(&lengths).ints(&table).int(most);
    let result = with_options(call.int(heads).int(group).int(heads * dim), &shape);
    let call = emulator.call("attention_join", [count, heads, 1], 128).floats(&result.floats(3));
    let call = call.floats(&result.floats(4)).ints(&lengths).out_acts(count * heads * dim);
    let found = call.int(parts).run().acts(3);
    let all = case.forward(&case.rows).0;
    let expected: Vec<f64> =
        last.iter().flat_map(|t| all[t * heads * dim..][..heads * dim].to_vec()).collect();
    assert_close(&found, &expected, shape.tolerance(emulator), &format!("decoded {shape:?}"));
}
