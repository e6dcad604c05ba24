//! Positions within a sequence of tokens.

use serde::{Deserialize, Serialize};

/// Consecutive positions of a sequence: `start` is the first one, `end` the one after the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenSpan {
    /// The first position.
    pub start: u32,
    /// The position after the last one.
    pub end: u32,
}

impl TokenSpan {
    /// Adds a position after all positions of ordered spans: to the last span if it is adjacent.
    pub fn append(spans: &mut Vec<Self>, position: usize) {
        let start = u32::try_from(position).unwrap_or(u32::MAX);
        let end = start.saturating_add(1);
        match spans.last_mut() {
            Some(last) if last.end == start => last.end = end,
            _ => spans.push(Self { start, end }),
        }
    }

    /// For each of `len` positions whether a span contains it.
    pub fn mask(spans: &[Self], len: usize) -> Vec<bool> {
        let mut mask = vec![false; len];
        for span in spans {
            let (start, end) = (span.start as usize, (span.end as usize).min(len));
            if let Some(positions) = mask.get_mut(start..end) {
                positions.fill(true);
            }
        }
        mask
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_and_masks_describe_the_same_positions() {
        let mut spans = Vec::new();
        for position in [0, 1, 4, 6, 7, 8] {
            TokenSpan::append(&mut spans, position);
        }
        let span = |start, end| TokenSpan { start, end };
        assert_eq!(spans, [span(0, 2), span(4, 5), span(6, 9)]);
        let mask = TokenSpan::mask(&spans, 8);
        assert_eq!(mask, [true, true, false, false, true, false, true, true]);
        assert_eq!(TokenSpan::mask(&[span(5, 9), span(3, 1)], 4), [false; 4]);
    }
}
