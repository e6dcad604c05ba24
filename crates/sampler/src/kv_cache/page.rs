//! The pages of the cache: their layout.

use std::ops::Range;

use hone_core::simd::dispatch;
use hone_kernels::processor::{CACHE_LINE, prefetch};
use pulp::bytemuck::{cast_slice, cast_slice_mut};

use crate::simd_ops::RoundToIntegers;

/// Positions of a page.
pub(crate) const PAGE: usize = 16;

/// The type of the keys and values in a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheType {
    /// Floats of 32 bits, as they were computed.
    F32,
    /// Integers of 16 bits, with a scale for the key and one for the value of each position and head. The
    /// greatest of its values is 32767 times the scale, so a value changes by at most about 1 / 65534 of it.
    I16,
}

/// The dimensions of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheShape {
    /// Decoder layers.
    pub layers: usize,
    /// Heads of keys and values.
    pub heads: usize,
    /// Values of a head.
    pub dim: usize,
    /// The type of the keys and values.
    pub stored: CacheType,
}

impl CacheShape {
    /// Words of 32 bits that one head takes in one layer: keys and values.
    fn head_len(self) -> usize {
        match self.stored {
            CacheType::F32 => 2 * self.part_len(),
            CacheType::I16 => 2 * (PAGE + self.part_len() / 2),
        }
    }

    /// Words of 32 bits in a page.
    pub(crate) fn page_len(self) -> usize {
        self.layers * self.heads * self.head_len()
    }

    /// The range of a head within a page: its keys, then its values.
    fn head(self, layer: usize, head: usize) -> Range<usize> {
        let start = (layer * self.heads + head) * self.head_len();
        start..start + self.head_len()
    }

    /// Keys, or values, of a head in a page.
    pub(crate) fn part_len(self) -> usize {
        self.dim * PAGE
    }

    /// The keys `[dim, PAGE]` and the values `[PAGE, dim]` that a page holds of a head.
    #[inline(always)]
    pub(crate) fn read(
        self,
        page: &[f32],
        layer: usize,
        head: usize,
    ) -> (HeadPart<'_>, HeadPart<'_>) {
        let words = &page[self.head(layer, head)];
        let (keys, values) = words.split_at(words.len() / 2);
        (HeadPart::new(keys, self.stored), HeadPart::new(values, self.stored))
    }

    /// Writes the key and the value `[dim]` of one position of a head.
    pub(crate) fn write(
        self,
        page: &mut [f32],
        (layer, head, slot): (usize, usize, usize),
        key: &[f32],
        value: &[f32],
    ) {
        let words = &mut page[self.head(layer, head)];
        let (keys, values) = words.split_at_mut(words.len() / 2);
        match self.stored {
            CacheType::F32 => {
                for (stored, key) in keys[slot..].iter_mut().step_by(PAGE).zip(key) {
                    *stored = *key;
                }
                values[slot * self.dim..][..self.dim].copy_from_slice(value);
            }
            CacheType::I16 => {
                let write = |part: &mut [f32], x: &[f32], first: usize, step: usize| {
                    let (scales, integers) = part.split_at_mut(PAGE);
                    let out = &mut cast_slice_mut::<f32, i16>(integers)[first..];
                    scales[slot] = dispatch(RoundToIntegers { x, out, step });
                };
                write(keys, key, slot, PAGE);
                write(values, value, slot * self.dim, 1);
            }
        }
    }
}

/// The keys or the values of a head in a page.
#[derive(Clone, Copy)]
pub(crate) struct HeadPart<'a> {
    /// The scale of each position, if they are integers.
    scales: Option<&'a [f32; PAGE]>,
    /// What is stored for the positions.
    words: &'a [f32],
}

impl<'a> HeadPart<'a> {
    #[inline(always)]
    fn new(words: &'a [f32], stored: CacheType) -> Self {
        match (stored, words.split_first_chunk()) {
            (CacheType::I16, Some((scales, words))) => Self { scales: Some(scales), words },
            _ => Self { scales: None, words },
        }
    }

    /// The values as floats, which have to be multiplied by [`Self::scale`]. Integers are converted in `buffer`,
    /// which has [`CacheShape::part_len`] values.
    #[inline(always)]
    pub fn unscaled<'b>(self, buffer: &'b mut [f32]) -> &'b [f32]
    where
        'a: 'b,
    {
        if self.scales.is_none() {
            return self.words;
        }
        for (value, integer) in buffer.iter_mut().zip(cast_slice::<f32, i16>(self.words)) {
            *value = f32::from(*integer);
        }
        buffer
    }

    /// Multiplies a number for each position by the position's scale.
    #[inline(always)]
    pub fn scale(self, row: &mut [f32; PAGE]) {
        if let Some(scales) = self.scales {
            row.iter_mut().zip(scales).for_each(|(x, scale)| *x *= scale);
        }
    }

    #[inline(always)]
    pub fn prefetch(self) {
        if let Some(scales) = self.scales {
            prefetch(scales.as_ptr());
        }
        self.words.chunks(CACHE_LINE).for_each(|line| prefetch(line.as_ptr()));
    }
}

pub(crate) fn pages(positions: usize) -> usize {
    positions.div_ceil(PAGE)
}

#[cfg(test)]
mod tests {
    use hone_model::testing::{tiny_spec, waves};

    use super::*;

    #[test]
    fn a_key_is_stored_in_a_column_and_a_value_in_a_row() {
        for stored in [CacheType::F32, CacheType::I16] {
            let shape = CacheShape { layers: 2, heads: 3, dim: 4, stored };
            let mut page = vec![0.0; shape.page_len()];
            let (key, value) = ([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, -7.0, 8.0]);
            shape.write(&mut page, (1, 2, 5), &key, &value);
            for (layer, head) in [(0, 0), (1, 1), (1, 2)] {
                let (keys, values) = shape.read(&page, layer, head);
                let [keys, values] = [keys, values].map(|part| {
                    let (mut scales, mut buffer) = ([1.0; PAGE], vec![0.0; shape.part_len()]);
                    part.scale(&mut scales);
                    (part.unscaled(&mut buffer).to_vec(), scales)
                });
                for slot in 0..PAGE {
                    for d in 0..shape.dim {
                        let written = (layer, head, slot) == (1, 2, 5);
                        let [key, value] =
                            [key[d], value[d]].map(|x| if written { x } else { 0.0 });
                        let found = [
                            keys.0[d * PAGE + slot] * keys.1[slot],
                            values.0[slot * shape.dim + d] * values.1[slot],
                        ];
                        assert!((found[0] - key).abs() <= 4.0 / 65000.0, "{stored:?}");
                        assert!((found[1] - value).abs() <= 8.0 / 65000.0, "{stored:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_page_takes_the_planned_bytes() {
        let spec = tiny_spec();
        let (layers, heads, dim) = (spec.num_layers, spec.num_kv_heads, spec.head_dim);
        for (stored, is_quantized) in [(CacheType::F32, false), (CacheType::I16, true)] {
            let shape = CacheShape { layers, heads, dim, stored };
            let planned = PAGE * spec.cache_position_bytes(is_quantized);
            assert_eq!(shape.page_len() * size_of::<f32>(), planned);
        }
    }

    #[test]
    fn a_written_head_is_read_with_an_error_of_a_65534th_of_its_greatest_value() {
        let shape = CacheShape { layers: 1, heads: 1, dim: 80, stored: CacheType::I16 };
        let mut page = vec![0.0; shape.page_len()];
        let key: Vec<f32> = waves(80, 0.4).iter().map(|x| 300.0 * x).collect();
        let value = waves(80, 1.9);
        shape.write(&mut page, (0, 0, 7), &key, &value);
        let (keys, values) = shape.read(&page, 0, 0);
        for (part, x, place) in [(keys, &key, (7, PAGE)), (values, &value, (7 * 80, 1))] {
            let (mut scales, mut buffer) = ([1.0; PAGE], vec![0.0; shape.part_len()]);
            part.scale(&mut scales);
            let found = part.unscaled(&mut buffer).iter().skip(place.0).step_by(place.1);
            let greatest = x.iter().fold(0.0, |greatest: f32, x| greatest.max(x.abs()));
            for (found, x) in found.zip(x) {
                assert!((found * scales[7] - x).abs() <= greatest / 65_000.0);
            }
        }
    }

    #[test]
    fn values_that_are_not_finite_are_not_finite_when_read() {
        let shape = CacheShape { layers: 1, heads: 1, dim: 4, stored: CacheType::I16 };
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut page = vec![0.0; shape.page_len()];
            shape.write(&mut page, (0, 0, 0), &[1.0, bad, 0.0, 2.0], &[bad, 0.0, 1.0, 1.0]);
            let (keys, values) = shape.read(&page, 0, 0);
            for part in [keys, values] {
                let mut scales = [1.0; PAGE];
                part.scale(&mut scales);
                assert!(!scales[0].is_finite() && scales[1] == 0.0, "{bad} {scales:?}");
            }
        }
    }
}
