//! One pass of the decoder over sequences of the same weights, and what follows from it.

use rayon::prelude::*;

use hone_engine::EngineError;

use super::sequence::EngineSequence;
use crate::decoder::{Decoder, PassOutcome, PassSettings, PromptChunk, Scratch};
use crate::engine::shared::EngineShared;

/// A sequence, and the number of tokens of its prompt that the next pass computes.
pub(super) struct PromptPart {
    pub sequence: EngineSequence,
    pub tokens: usize,
    pub outcome: PassOutcome,
}

/// A pass over sequences of the same weights.
#[derive(Clone, Copy)]
pub(super) struct DecodingPass<'a> {
    pub decoder: &'a Decoder,
    pub shared: &'a EngineShared,
    pub threads: usize,
}

impl DecodingPass<'_> {
    /// Decodes and samples one token of each row, and computes a part of a prompt.
    pub fn compute(
        self,
        rows: &mut [EngineSequence],
        part: Option<&mut PromptPart>,
        scratch: &mut Scratch,
    ) {
        let Self { decoder, shared, threads } = self;
        let mut part = part;
        let all = || rows.iter().chain(part.as_ref().map(|part| &part.sequence));
        let adapter = all().next().and_then(|sequence| sequence.policy.adapter.clone());
        // A live request that arrives need not wait for a pass of shadow sequences alone.
        let interruptible = shared.config.serves_clients && !all().any(EngineSequence::is_live);
        let interrupt = interruptible.then_some(&shared.live_arrived);
        let settings = PassSettings { adapter: adapter.as_deref(), threads, interrupt };
        let chunk = part
            .as_mut()
            .map(|part| PromptChunk { tokens: part.tokens, sequence: &mut part.sequence.pages });
        match decoder.compute(rows, chunk, scratch, settings) {
            Ok(PassOutcome::Interrupted) => return,
            Ok(PassOutcome::Computed) => {}
            Err(error) => {
                tracing::error!(%error, "a pass failed");
                let error = EngineError::Internal(error.to_string());
                let part = part.map(|part| &mut part.sequence);
                return rows.iter_mut().chain(part).for_each(|s| s.fail(error.clone()));
            }
        }
        if let Some(part) = part {
            part.outcome = PassOutcome::Computed;
        }
        let scratch = &*scratch;
        if threads > 1 {
            let rows = rows.par_iter_mut().enumerate();
            rows.for_each(|(row, sequence)| sequence.sample(scratch.logits(row)));
        } else {
            for (row, sequence) in rows.iter_mut().enumerate() {
                sequence.sample(scratch.logits(row));
            }
        }
    }
}
