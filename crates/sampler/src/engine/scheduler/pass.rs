//! A sequence from its admission to its end, and one pass of the decoder over sequences.

use std::ops::Range;
use std::sync::Arc;

use rayon::prelude::*;

use hone_core::threads::pause_point;
use hone_engine::run::{CancelFlag, GenerationRun};
use hone_engine::sampling::TokenSampler;
use hone_engine::{EngineError, Priority, SampleError, Token};
use hone_kernels::columns::COLUMN_BLOCK;
use hone_kernels::hot_team::for_each_chunk;

use crate::decoder::{Decoder, PassOutcome, PassSettings, PromptChunk, RowAdapter, Scratch};
use crate::engine::adapters::PolicyWeights;
use crate::engine::shared::EngineShared;
use crate::kv_cache::SequencePages;
use crate::weights::AdapterWeights;

/// A sequence that computes its prompt or decodes.
pub(super) struct EngineSequence {
    pub policy: PolicyWeights,
    pub pages: SequencePages,
    pub sampler: TokenSampler,
    pub run: GenerationRun,
    pub priority: Priority,
    pub cancel: Arc<CancelFlag>,
    /// Sequences that were admitted before it.
    pub order: u64,
    /// Whether it leaves the engine before the next step.
    pub finished: bool,
}

impl EngineSequence {
    pub fn is_live(&self) -> bool {
        self.priority == Priority::Live
    }

    pub fn is_over(&self) -> bool {
        self.finished || self.run.is_over()
    }

    pub fn same_weights(&self, other: &Self) -> bool {
        self.policy.id == other.policy.id
    }

    pub fn sample(&mut self, logits: &[f32]) {
        if self.run.is_over() {
            self.finished = true;
            return;
        }
        pause_point();
        let drawn = self.sampler.draw(logits);
        self.push(drawn);
    }

    /// Adds the token that was drawn.
    pub fn push(&mut self, drawn: std::result::Result<Token, SampleError>) {
        match drawn {
            Ok(drawn) => {
                self.pages.push(drawn.id);
                self.finished = self.run.push(drawn);
            }
            Err(error) => self.fail(error.into()),
        }
    }

    pub fn fail(&mut self, error: EngineError) {
        self.run.fail(error);
        self.finished = true;
    }
}

/// A sequence, and the number of tokens of its prompt that the next pass computes.
pub(super) struct PromptPart {
    pub sequence: EngineSequence,
    pub tokens: usize,
    pub outcome: PassOutcome,
}

/// A pass over sequences of any weights.
#[derive(Clone, Copy)]
pub(super) struct DecodingPass<'a> {
    pub decoder: &'a Decoder,
    pub shared: &'a EngineShared,
    pub threads: usize,
}

impl DecodingPass<'_> {
    /// Computes a step of all rows, and parts of prompts with it. Rows of one adapter are adjacent, so that they
    /// have one product; those of the first part's weights are last, next to its own. Call it within
    /// [`Decoder::hot`].
    pub fn compute_all(
        self,
        mut rows: Vec<&mut EngineSequence>,
        parts: &mut [PromptPart],
        scratch: &mut [Scratch],
    ) {
        let first = parts.first().map(|part| part.sequence.policy.id);
        rows.sort_by_key(|s| (Some(s.policy.id) == first, s.policy.id));
        parts.sort_by_key(|part| {
            let id = part.sequence.policy.id;
            (Some(id) != first, id)
        });
        self.compute_split(&mut rows, parts, scratch);
    }

    /// [`Self::compute`] by threads that share its products, or that compute different sequences.
    fn compute_split(
        self,
        rows: &mut [&mut EngineSequence],
        prompts: &mut [PromptPart],
        scratch: &mut [Scratch],
    ) {
        let alone = Self { threads: 1, ..self };
        if self.decoder.is_small && prompts.is_empty() {
            let blocks = rows.len().div_ceil(COLUMN_BLOCK);
            let parts = self.threads.min(blocks).min(scratch.len()).max(1);
            let size = (blocks.div_ceil(parts) * COLUMN_BLOCK).max(1);
            let parts = rows.par_chunks_mut(size).zip(scratch.par_iter_mut());
            parts.for_each(|(rows, scratch)| alone.compute(rows, &mut [], scratch));
            return;
        }
        let mut prompts: Vec<_> = prompts.iter_mut().collect();
        let threads = self.threads.min(scratch.len());
        let tokens: Vec<usize> = prompts.iter().map(|part| part.tokens).collect();
        let shares =
            (!self.decoder.is_small).then(|| PassShares::new(threads, &tokens, rows.len()));
        let Some(shares) = shares.flatten().filter(|shares| shares.fit(scratch)) else {
            let Some(scratch) = scratch.first_mut() else { return };
            return self.compute(rows, &mut prompts, scratch);
        };
        let mut work: Vec<_> = scratch.iter_mut().map(|s| (Vec::new(), Vec::new(), s)).collect();
        for (row, share) in rows.iter_mut().zip(shares.rows) {
            work[share].0.push(&mut **row);
        }
        for (part, share) in prompts.into_iter().zip(shares.parts) {
            work[share].1.push(part);
        }
        for_each_chunk(&mut work[..threads], 1, |_, work| {
            work.iter_mut().for_each(|(rows, parts, scratch)| alone.compute(rows, parts, scratch));
        });
    }

    /// Decodes and samples one token of each row, and computes parts of prompts.
    fn compute(
        self,
        rows: &mut [&mut EngineSequence],
        parts: &mut [&mut PromptPart],
        scratch: &mut Scratch,
    ) {
        let Self { decoder, shared, threads } = self;
        let prompts = || parts.iter().map(|part| (&part.sequence, part.tokens));
        let all = || rows.iter().map(|sequence| (&**sequence, 1)).chain(prompts());
        // A live request that arrives need not wait for a pass of shadow sequences alone.
        let is_live = all().any(|(sequence, _)| sequence.is_live());
        let interruptible = shared.config.serves_clients && !is_live;
        let interrupt = interruptible.then_some(&shared.live_arrived);
        let held = row_adapters(all());
        let adapters: Vec<RowAdapter<'_>> =
            held.iter().map(|(adapter, rows)| RowAdapter { adapter, rows: rows.clone() }).collect();
        let settings = PassSettings { adapters: &adapters, threads, interrupt };
        let chunks = parts.iter_mut();
        let chunks = chunks
            .map(|part| PromptChunk { sequence: &mut part.sequence.pages, tokens: part.tokens });
        let mut pages: Vec<_> = rows.iter_mut().map(|sequence| &mut sequence.pages).collect();
        let mut chunks: Vec<_> = chunks.collect();
        let outcome = decoder.compute(&mut pages, &mut chunks, scratch, settings);
        match outcome {
            Ok(PassOutcome::Interrupted) => return,
            Ok(PassOutcome::Computed) => {}
            Err(error) => {
                tracing::error!(%error, "a pass failed");
                let error = EngineError::Internal(error.to_string());
                parts.iter_mut().for_each(|part| part.sequence.fail(error.clone()));
                return rows.iter_mut().for_each(|sequence| sequence.fail(error.clone()));
            }
        }
        parts.iter_mut().for_each(|part| part.outcome = PassOutcome::Computed);
        let scratch = &*scratch;
        if threads > 1 {
            for_each_chunk(rows, 1, |row, sequences| {
                sequences.iter_mut().for_each(|sequence| sequence.sample(scratch.logits(row)));
            });
        } else {
            for (row, sequence) in rows.iter_mut().enumerate() {
                sequence.sample(scratch.logits(row));
            }
        }
    }
}

/// The adapters of sequences with a number of rows each, in the order of the rows.
fn row_adapters<'a>(
    sequences: impl Iterator<Item = (&'a EngineSequence, usize)>,
) -> Vec<(Arc<AdapterWeights>, Range<usize>)> {
    let (mut adapters, mut row) = (Vec::<(Arc<AdapterWeights>, Range<usize>)>::new(), 0);
    for (sequence, count) in sequences {
        let rows = row..row + count;
        row = rows.end;
        let Some(adapter) = &sequence.policy.adapter else { continue };
        match adapters.last_mut() {
            Some((last, before)) if before.end == rows.start && Arc::ptr_eq(last, adapter) => {
                before.end = rows.end;
            }
            _ => adapters.push((Arc::clone(adapter), rows)),
        }
    }
    adapters
}

// Which thread computes which sequences of a pass with parts of several prompts.
//
// Threads that share the products of a pass exchange all its activations, and wait for each other several times
// in each layer. Threads that compute different sequences do neither, but each reads all weights. That takes less
// time if each thread has so many tokens that their products take longer than to read the weights.

/// Tokens of a thread whose products take longer than to read the weights.
pub(super) const LEAST_TOKENS: usize = COLUMN_BLOCK;

/// The threads, by index, of the rows and of the parts of prompts of a pass.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PassShares {
    pub rows: Vec<usize>,
    pub parts: Vec<usize>,
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
