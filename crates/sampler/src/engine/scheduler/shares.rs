//! Which thread computes which sequences of a pass with parts of several prompts.
//!
//! Threads that share the products of a pass exchange all its activations, and wait for each other several times
//! in each layer. Threads that compute different sequences do neither, but each reads all weights. That takes less
//! time if each thread has so many tokens that their products take longer than to read the weights.

use crate::decoder::Scratch;
use crate::matmul::COLUMN_BLOCK;

/// Tokens of a thread whose products take longer than to read the weights.
pub(super) const LEAST_TOKENS: usize = COLUMN_BLOCK;

/// The threads, by index, of the rows and of the parts of prompts of a pass.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PassShares {
    pub rows: Vec<usize>,
    pub parts: Vec<usize>,
    /// Tokens of each thread.
    tokens: Vec<usize>,
}

impl PassShares {
    /// Divides a pass of `rows` sequences that decode a token each, and of parts of prompts of so many tokens.
    /// Returns `None` if the threads should share its products: there are fewer parts than threads, less than
    /// [`LEAST_TOKENS`] for each thread, or a quarter more for one of them than on average.
    pub fn new(threads: usize, parts: &[usize], rows: usize) -> Option<Self> {
        let all = parts.iter().sum::<usize>() + rows;
        if threads < 2 || parts.len() < threads || all < threads * LEAST_TOKENS {
            return None;
        }
        let mut tokens = vec![0; threads];
        let mut give = |count: usize| {
            let (thread, sum) = tokens.iter_mut().enumerate().min_by_key(|(_, sum)| **sum)?;
            *sum += count;
            Some(thread)
        };
        // The largest first, which divides them most evenly.
        let mut order: Vec<usize> = (0..parts.len()).collect();
        order.sort_by_key(|part| std::cmp::Reverse(parts[*part]));
        let mut by_part = vec![0; parts.len()];
        for part in order {
            by_part[part] = give(parts[part])?;
        }
        let by_row = (0..rows).map(|_| give(1)).collect::<Option<_>>()?;
        let most = tokens.iter().max()?;
        (4 * most * threads <= 5 * all).then_some(Self { rows: by_row, parts: by_part, tokens })
    }

    /// Whether each thread's buffers have room for its share.
    pub fn fit(&self, scratch: &[Scratch]) -> bool {
        self.tokens.iter().zip(scratch).enumerate().all(|(thread, (tokens, scratch))| {
            let rows = self.rows.iter().filter(|row| **row == thread).count();
            *tokens <= scratch.rows() && rows <= scratch.most_logits()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_even() {
        let shares = PassShares::new(2, &[16, 16], 16).unwrap();
        assert_eq!((&shares.parts[..], &shares.tokens[..]), (&[0, 1][..], &[24, 24][..]));
        assert_eq!(shares.rows.iter().filter(|row| **row == 1).count(), 8);
        let shares = PassShares::new(2, &[10, 54, 64], 0).unwrap();
        assert_eq!((&shares.parts[..], &shares.tokens[..]), (&[1, 1, 0][..], &[64, 64][..]));
        // Rows make up for parts of different lengths.
        let shares = PassShares::new(3, &[9, 1, 16], 22).unwrap();
        assert_eq!(shares.tokens, [16, 16, 16]);
    }

    #[test]
    fn threads_share_what_cannot_be_divided() {
        for (threads, parts, rows) in [
            (1, &[16, 16][..], 16),
            (2, &[48][..], 16),
            (2, &[64, 10][..], 6),
            (2, &[8, 8][..], 15),
        ] {
            assert_eq!(PassShares::new(threads, parts, rows), None, "{threads} {parts:?} {rows}");
        }
    }
}
