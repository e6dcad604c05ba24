//! Rotary positions of rows, and the norms over heads before them.

use hone_core::simd::{SimdTask, mul_add};

/// Cosines and sines by position.
pub(super) struct Rope {
    frequencies: Vec<f32>,
    factor: f64,
    /// Of each position: cosines, then sines.
    table: Vec<f32>,
}

/// Cosines and sines of one position.
pub(super) type Turn<'a> = (&'a [f32], &'a [f32]);

impl Rope {
    pub fn new(frequencies: Vec<f32>, factor: f64) -> Self {
        Self { frequencies, factor, table: Vec::new() }
    }

    /// Makes the table long enough. Angles are rounded to f32, as in training.
    pub fn reach(&mut self, positions: usize) {
        let row = 2 * self.frequencies.len();
        let have = self.table.len() / row.max(1);
        for position in have..positions {
            let angles = self.frequencies.iter().map(|f| f64::from(position as f32 * f));
            self.table.extend(angles.clone().map(|a| (a.cos() * self.factor) as f32));
            self.table.extend(angles.map(|a| (a.sin() * self.factor) as f32));
        }
    }

    /// Cosines and sines of a position within reach.
    pub fn at(&self, position: usize) -> Turn<'_> {
        let half = self.frequencies.len();
        self.table[2 * half * position..][..2 * half].split_at(half)
    }
}

/// Norms and turns all heads of one row.
pub(super) struct Heads<'a> {
    pub x: &'a mut [f32],
    pub dim: usize,
    /// Weight and epsilon.
    pub norm: Option<(&'a [f32], f32)>,
    pub turn: Option<Turn<'a>>,
}

impl SimdTask for Heads<'_> {
    type Output = ();
    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        for head in self.x.chunks_exact_mut(self.dim) {
            if let Some((weight, eps)) = self.norm {
                let mut sums = [0.0_f32; 8];
                for (i, x) in head.iter().enumerate() {
                    sums[i % 8] = mul_add::<FUSED>(*x, *x, sums[i % 8]);
                }
                let mean = sums.iter().sum::<f32>() / weight.len() as f32;
                let scale = 1.0 / (mean + eps).sqrt();
                head.iter_mut().zip(weight).for_each(|(x, w)| *x = *x * scale * w);
            }
            if let Some((cos, sin)) = self.turn {
                let (a, b) = head.split_at_mut(cos.len());
                for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
                    (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                }
            }
        }
    }
}
