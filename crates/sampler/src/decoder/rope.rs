//! Rotary position embeddings, and the norms over heads that precede them.

use hone_core::simd::{SimdTask, mul_add};

/// Cosines and sines for each position.
pub(crate) struct RotaryTable {
    frequencies: Vec<f32>,
    /// Multiplies all cosines and sines (YaRN, longrope).
    attention_factor: f64,
    /// `[position][cosines | sines]`
    table: Vec<f32>,
}

/// The cosines and sines of one position, `[dim / 2]` each.
pub(crate) type CosSin<'a> = (&'a [f32], &'a [f32]);

impl RotaryTable {
    pub fn new(frequencies: Vec<f32>, attention_factor: f64) -> Self {
        Self { frequencies, attention_factor, table: Vec::new() }
    }

    /// Extends the table to `positions`. Angles are rounded to f32, as in training.
    pub fn extend(&mut self, positions: usize) {
        let row = 2 * self.frequencies.len();
        for position in self.table.len() / row.max(1)..positions {
            let angles = self.frequencies.iter().map(|f| f64::from(position as f32 * f));
            let factor = self.attention_factor;
            self.table.extend(angles.clone().map(|a| (a.cos() * factor) as f32));
            self.table.extend(angles.map(|a| (a.sin() * factor) as f32));
        }
    }

    /// Looks up a position that the table contains.
    pub fn get(&self, position: usize) -> CosSin<'_> {
        let half = self.frequencies.len();
        self.table[2 * half * position..][..2 * half].split_at(half)
    }
}

/// Normalizes and rotates all heads of one token.
pub(crate) struct NormAndRotate<'a> {
    /// `[heads * dim]`
    pub x: &'a mut [f32],
    pub dim: usize,
    /// The norm's weight `[dim]` and its epsilon.
    pub norm: Option<(&'a [f32], f32)>,
    pub rotation: Option<CosSin<'a>>,
}

impl SimdTask for NormAndRotate<'_> {
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
            if let Some((cos, sin)) = self.rotation {
                let (a, b) = head.split_at_mut(cos.len());
                for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
                    (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use hone_core::testing::assert_same_bits_if_fused;
    use hone_model::testing::waves;

    use super::*;

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
