//! The pages of the cache: their layout.

use std::ops::Range;

/// Positions of a page.
pub(crate) const PAGE: usize = 16;

/// The dimensions of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheShape {
    /// Decoder layers.
    pub layers: usize,
    /// Heads of keys and values.
    pub heads: usize,
    /// Values of a head.
    pub dim: usize,
}

impl CacheShape {
    /// Values of one head in one layer: keys and values.
    fn head_len(self) -> usize {
        2 * self.dim * PAGE
    }

    /// Values of a page.
    pub(crate) fn page_len(self) -> usize {
        self.layers * self.heads * self.head_len()
    }

    /// The range of a head within a page: its keys, then its values.
    pub(crate) fn head(self, layer: usize, head: usize) -> Range<usize> {
        let start = (layer * self.heads + head) * self.head_len();
        start..start + self.head_len()
    }

    /// Writes the key and the value `[dim]` of one position of a head.
    pub(crate) fn write(
        self,
        page: &mut [f32],
        (layer, head, slot): (usize, usize, usize),
        key: &[f32],
        value: &[f32],
    ) {
        let (keys, values) = page[self.head(layer, head)].split_at_mut(self.dim * PAGE);
        for (stored, key) in keys[slot..].iter_mut().step_by(PAGE).zip(key) {
            *stored = *key;
        }
        values[slot * self.dim..][..self.dim].copy_from_slice(value);
    }
}

/// The number of pages for a number of positions.
pub(crate) fn pages(positions: usize) -> usize {
    positions.div_ceil(PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_stored_in_a_column_and_a_value_in_a_row() {
        let shape = CacheShape { layers: 2, heads: 3, dim: 4 };
        let mut page = vec![0.0; shape.page_len()];
        shape.write(&mut page, (1, 2, 5), &[1.0, 2.0, 3.0, 4.0], &[5.0, 6.0, 7.0, 8.0]);
        let part = &page[shape.head(1, 2)];
        assert_eq!((part[5], part[PAGE + 5], part[3 * PAGE + 5]), (1.0, 2.0, 4.0));
        assert_eq!(part[4 * PAGE + 5 * 4..][..4], [5.0, 6.0, 7.0, 8.0]);
        assert_eq!(page.iter().filter(|x| **x != 0.0).count(), 8);
    }
}
