//! What one iteration may compute: how many tokens of which prompts, and which shadow sequences.
//!
//! The rules while live requests run, for an engine that serves clients:
//!
//! - All live sequences decode in every step. At most `busy_rows` shadow sequences join them, the
//!   oldest ones, unless the pass computes a part of a prompt too: such a pass already takes longest.
//! - Shadow prompts wait until no live prompt waits or is computed. Then half a page of them is computed in
//!   each iteration.
//! - While live prompts are always waiting, one page of a shadow prompt is computed in one of
//!   `4 / busy_share` iterations, and shadow sequences join as many passes with a part of a prompt. So
//!   rollouts continue under any live load. This delays tokens of so few steps that their 99th percentile
//!   does not show it.
//!
//! A pass computes parts of as many prompts as fit into its tokens, and its rows fill whole blocks of columns,
//! because the kernels compute whole blocks. If there are as many prompts as threads, each thread gets a part to
//! compute ([`PassShares`](super::shares::PassShares)). A prompt whose next page is that of a prompt in the same
//! pass waits, and then takes the page from the prefix cache.
//!
//! Live prompts are computed by the fewest remaining tokens, so that a short prompt does not wait for a
//! long one. Every fourth part is of the oldest prompt, so that a long one gets at least a quarter of
//! the time. Shadow prompts are computed in their order.

use hone_engine::Priority;
use hone_kernels::columns::COLUMN_BLOCK;

use super::pass::{EngineSequence, PromptPart};
use crate::config::SamplerConfig;
use crate::kv_cache::PAGE;

/// One part of a live prompt in so many is of the oldest prompt.
const OLDEST_TURN: u64 = 4;

/// `busy_share` is divided by this for pages of shadow prompts that need a pass of their own, and for passes
/// with a part of a prompt that shadow sequences join.
const RARE_TURN: u64 = 4;

/// Tokens of a shadow prompt in a pass with live sequences: so few that all rows together are one block of
/// columns, whose time is nearly that of the live ones alone.
const SHADOW_PART: usize = PAGE / 2;

/// The rules of one iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct IterationPlan {
    /// Whether live sequences restrict shadow sequences.
    pub busy: bool,
    /// Whether shadow prompts may be computed once no live prompt is left.
    pub shadow_prompts: bool,
    /// Whether a page of a shadow prompt is computed before live prompts.
    pub shadow_page: bool,
    /// Whether shadow sequences join a pass that computes a part of a prompt.
    pub shadow_joins_part: bool,
    /// The least number of tokens of prompts to compute, if there are so many.
    pub tokens: usize,
}

impl IterationPlan {
    pub fn new(
        config: &SamplerConfig,
        iteration: u64,
        live_waits: bool,
        prefilling: &[EngineSequence],
        running: &[EngineSequence],
    ) -> Self {
        let live_prompt = prefilling.iter().any(EngineSequence::is_live);
        let live_decodes = running.iter().any(EngineSequence::is_live);
        Self::of(config, iteration, live_waits, live_prompt, live_decodes)
    }

    fn of(
        config: &SamplerConfig,
        iteration: u64,
        live_waits: bool,
        live_prompt: bool,
        live_decodes: bool,
    ) -> Self {
        let busy = config.serves_clients && (live_prompt || live_decodes);
        let period = ((1.0 / config.busy_share).round() as u64).max(1).saturating_mul(RARE_TURN);
        let shadow_prompts = !(busy && (live_waits || live_prompt));
        let tokens = if live_decodes { config.busy_prefill_tokens } else { config.prefill_tokens };
        Self {
            busy,
            shadow_prompts,
            shadow_page: !shadow_prompts && iteration.is_multiple_of(period),
            shadow_joins_part: !busy || iteration % period == period / 2,
            tokens: tokens.max(PAGE),
        }
    }

    /// Tokens of prompts for a pass in which so many sequences decode.
    pub fn tokens_with(self, rows: usize) -> usize {
        (rows + self.tokens).next_multiple_of(COLUMN_BLOCK) - rows
    }

    /// The sequence to compute a part of the prompt of, by its index. `part` counts parts of live prompts, and
    /// `taken` are those that the same pass computes.
    pub fn next_prompt(
        self,
        prefilling: &[EngineSequence],
        part: u64,
        taken: &[PromptPart],
    ) -> Option<usize> {
        let first_by = |priority, key: &dyn Fn(&EngineSequence) -> (usize, u64)| {
            first_by(prefilling, priority, |sequence| {
                let pages = &sequence.pages;
                let waits = taken.iter().any(|part| part.sequence.pages.has_next_page_of(pages));
                (!waits).then(|| key(sequence))
            })
        };
        let live = if part.is_multiple_of(OLDEST_TURN) {
            first_by(Priority::Live, &|sequence| (0, sequence.order))
        } else {
            first_by(Priority::Live, &|sequence| (sequence.pages.remaining(), sequence.order))
        };
        let shadow = || first_by(Priority::Shadow, &|sequence| (0, sequence.order));
        live.or_else(|| if self.shadow_prompts { shadow() } else { None })
    }

    /// The number of tokens of a prompt's next part, at most `tokens`.
    pub fn part(self, sequence: &EngineSequence, tokens: usize) -> usize {
        let shadow = if self.shadow_prompts { SHADOW_PART } else { PAGE };
        let tokens = if self.busy && !sequence.is_live() { tokens.min(shadow) } else { tokens };
        tokens.min(sequence.pages.remaining())
    }

    /// The order of the newest shadow sequence that takes part in the step, with a part of a prompt or
    /// without.
    pub fn newest_shadow(
        self,
        running: &[EngineSequence],
        rows: usize,
        with_part: bool,
    ) -> Option<u64> {
        if !self.busy {
            return Some(u64::MAX);
        }
        if with_part && !self.shadow_joins_part {
            return None;
        }
        let orders = running.iter().filter(|s| !s.is_live()).map(|sequence| sequence.order);
        // The n-th smallest, without a buffer.
        let mut newest = None;
        for _ in 0..rows.max(1) {
            let after = orders.clone().filter(|order| newest.is_none_or(|newest| *order > newest));
            newest = after.min().or(newest);
        }
        newest
    }

    pub fn takes_part(self, sequence: &EngineSequence, newest_shadow: Option<u64>) -> bool {
        sequence.is_live() || newest_shadow.is_some_and(|newest| sequence.order <= newest)
    }
}

pub(super) fn oldest_shadow(sequences: &[EngineSequence]) -> Option<usize> {
    first_by(sequences, Priority::Shadow, |sequence| Some((0, sequence.order)))
}

/// The sequence of a priority with the smallest key, of those that have a key and are not over.
fn first_by(
    sequences: &[EngineSequence],
    priority: Priority,
    key: impl Fn(&EngineSequence) -> Option<(usize, u64)>,
) -> Option<usize> {
    let found = sequences.iter().enumerate();
    let found = found.filter(|(_, sequence)| sequence.priority == priority && !sequence.finished);
    let keys = found.filter_map(|(index, sequence)| key(sequence).map(|key| (key, index)));
    keys.min().map(|(_, index)| index)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capacity::SamplerCapacity;

    #[test]
    fn tokens_fill_whole_blocks_of_columns() {
        let config = SamplerConfig { serves_clients: true, ..SamplerConfig::default() };
        let [idle, busy] =
            [false, true].map(|decodes| IterationPlan::of(&config, 1, false, true, decodes));
        assert_eq!([idle.tokens_with(0), busy.tokens_with(1)], [128, 79]);
        assert_eq!([15, 16, 17].map(|rows| busy.tokens_with(rows)), [65, 64, 79]);
    }

    #[test]
    fn the_buffers_have_room_for_sequences_that_join_after_parts_are_selected() {
        for (slots, prefill_tokens) in [(1, 16), (7, 40), (16, 16), (40, 128)] {
            let config = SamplerConfig { slots, prefill_tokens, ..SamplerConfig::default() };
            let rows = SamplerCapacity::new(&config).unwrap().batch_rows;
            for decodes in [false, true] {
                let plan = IterationPlan::of(&config, 1, false, true, decodes);
                assert!((0..=slots).all(|decoding| plan.tokens_with(decoding) + slots <= rows));
            }
        }
    }

    #[test]
    fn shadow_work_is_restricted_while_live_requests_run() {
        let config = SamplerConfig { serves_clients: true, ..SamplerConfig::default() };
        let plan = |iteration, waits, prompt, decodes| {
            IterationPlan::of(&config, iteration, waits, prompt, decodes)
        };
        let idle = plan(20, true, false, false);
        assert!(!idle.busy && !idle.shadow_page && idle.shadow_prompts);
        assert_eq!((idle.tokens, plan(1, false, true, false).tokens), (128, 128));
        let decoding = plan(20, false, false, true);
        assert!(decoding.busy && decoding.shadow_prompts && !decoding.shadow_page);
        assert_eq!(decoding.tokens, 64);
        assert!(!plan(1, true, false, true).shadow_prompts);
        assert!(!plan(1, false, true, true).shadow_prompts);
        let pages = (0..100).filter(|i| plan(*i, false, true, true).shadow_page).count();
        assert_eq!(pages, 5, "a quarter of busy_share, which is 0.2");
        let joined = (0..100).filter(|i| plan(*i, false, true, true).shadow_joins_part).count();
        assert_eq!(joined, 5, "other iterations, as many");
        assert!((0..100).all(|i| plan(i, false, false, false).shadow_joins_part));
        let other = SamplerConfig::default();
        assert!(!IterationPlan::of(&other, 20, true, true, true).busy);
    }
}
