//! Similarity by matching blocks, as Python's `difflib`.

use std::collections::HashMap;
use std::ops::Range;

/// Characters of each text that [`matching_blocks`] compares: the time may be cubic.
pub const DIFFLIB_CHARS: usize = 1_024;

/// `SequenceMatcher(None, a, b).ratio()` of the first [`DIFFLIB_CHARS`] characters of each text: 2 M /
/// (|a| + |b|), where M is the length of the longest common block and, recursively, of those on its
/// left and right; 1 for two empty texts. It is not symmetric. As in Python, where `b` has 200
/// characters or more, no block begins with a character that makes up over 1 % of it (`autojunk`).
pub fn matching_blocks(a: &str, b: &str) -> f64 {
    let first = |text: &str| text.chars().take(DIFFLIB_CHARS).collect::<Vec<char>>();
    let (a, b) = (first(a), first(b));
    let all = a.len() + b.len();
    if all == 0 {
        return 1.0;
    }
    2.0 * Blocks::new(&a, &b).matched() as f64 / all as f64
}

/// The search for common blocks.
struct Blocks<'t> {
    a: &'t [char],
    b: &'t [char],
    /// The places of each character in `b`, but for the frequent ones of a long text.
    places: HashMap<char, Vec<usize>>,
    /// At `j + 1` the length of the common block that ends at `b[j]` and at the current or the
    /// previous character of `a`. All are 0 between two searches.
    lengths: [Vec<usize>; 2],
}

impl<'t> Blocks<'t> {
    fn new(a: &'t [char], b: &'t [char]) -> Self {
        let mut places: HashMap<char, Vec<usize>> = HashMap::new();
        for (j, c) in b.iter().enumerate() {
            places.entry(*c).or_default().push(j);
        }
        if b.len() >= 200 {
            places.retain(|_, at| at.len() <= b.len() / 100 + 1);
        }
        Self { a, b, places, lengths: [vec![0; b.len() + 1], vec![0; b.len() + 1]] }
    }

    /// The characters in all blocks.
    fn matched(&mut self) -> usize {
        let mut left = vec![(0..self.a.len(), 0..self.b.len())];
        let mut matched = 0;
        while let Some((in_a, in_b)) = left.pop() {
            let (i, j, size) = self.longest(in_a.clone(), in_b.clone());
            if size > 0 {
                matched += size;
                left.push((in_a.start..i, in_b.start..j));
                left.push((i + size..in_a.end, j + size..in_b.end));
            }
        }
        matched
    }

    /// The first longest common block of two ranges: its starts and its size.
    fn longest(&mut self, in_a: Range<usize>, in_b: Range<usize>) -> (usize, usize, usize) {
        let (mut i, mut j, mut size) = (in_a.start, in_b.start, 0);
        let [mut previous, mut current] = std::mem::take(&mut self.lengths);
        let none = Vec::new();
        let mut touched = &none;
        for at in in_a.clone() {
            let places = self.places.get(&self.a[at]).unwrap_or(&none);
            let inside = places.iter().copied().filter(|place| in_b.contains(place));
            for place in inside {
                let length = previous[place] + 1;
                current[place + 1] = length;
                if length > size {
                    (i, j, size) = (at + 1 - length, place + 1 - length, length);
                }
            }
            touched.iter().for_each(|place| previous[place + 1] = 0);
            std::mem::swap(&mut previous, &mut current);
            touched = places;
        }
        touched.iter().for_each(|place| previous[place + 1] = 0);
        self.lengths = [previous, current];
        // Characters that start no block extend one.
        while i > in_a.start && j > in_b.start && self.a[i - 1] == self.b[j - 1] {
            (i, j, size) = (i - 1, j - 1, size + 1);
        }
        while i + size < in_a.end && j + size < in_b.end && self.a[i + size] == self.b[j + size] {
            size += 1;
        }
        (i, j, size)
    }
}
