//! Draws the prompts of the next groups.
//!
//! A pass visits the prompts in the order of their keys. A key is the place in the file, or a hash
//! of seed, pass and content. The position in a pass is the last drawn key, not a count, so that
//! adding or removing prompts does not move it. Random draws are hashes of the seed and the number
//! of the draw, so [`PromptSamplerState`] is enough to continue exactly.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::config::{DatasetConfig, SamplingStrategy};
use crate::curriculum::Curriculum;
use crate::error::{DatasetError, RowPlace};
use crate::prompt::{Prompt, PromptId, key};

/// Weighted draws exclude the prompts of this number of previous draws (at most an eighth of all
/// prompts), because the groups of one optimizer step should have different prompts.
const COOLDOWN: usize = 16;

/// Fraction of the weighted draws that go through all prompts in turn instead, so that every prompt is tried.
const FLOOR: f64 = 0.1;

/// Length of the exponential window, in groups, over which a prompt's success rate is averaged.
const WINDOW: f64 = 4.0;

/// Added to the weight `p (1 - p)` of a prompt with success rate `p`, so that no weight is 0.
const EPSILON: f64 = 0.02;

/// A prompt drawn for one group.
#[derive(Clone, Debug, PartialEq)]
pub struct Draw {
    /// The prompt.
    pub prompt: Arc<Prompt>,
    /// Index of the curriculum's stage.
    pub stage: usize,
    /// Number of earlier draws.
    pub number: u64,
}

/// The state that a resumed run needs in addition to the file and the configuration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PromptSamplerState {
    /// Seed of the order.
    pub seed: u64,
    /// Strategy of the order.
    pub strategy: SamplingStrategy,
    /// Number of draws so far.
    pub drawn: u64,
    /// Index of the stage of the last draw.
    pub stage: usize,
    /// Number of passes started before this one, in all stages. It seeds the order of this pass.
    pub pass: u64,
    /// Number of completed passes.
    pub finished: u64,
    /// Key and place of the last prompt that was drawn in this pass.
    pub cursor: Option<(u64, u64)>,
    /// State of the mix of live and dataset prompts.
    pub mix: Option<LiveMix>,
    /// Statistics of prompts that were drawn or reported.
    pub outcomes: BTreeMap<PromptId, PromptOutcome>,
    /// Prompts that are never drawn again.
    pub left_out: BTreeSet<PromptId>,
}

/// Draws prompts for groups, and records their rewards for the strategy `difficulty`.
#[derive(Clone, Debug)]
pub struct PromptSampler {
    prompts: Vec<Arc<Prompt>>,
    /// Index into `outcomes` by prompt; prompts of the same content share one.
    slot_of: Vec<usize>,
    /// Number of earlier prompts with the same content, by prompt.
    earlier: Vec<u64>,
    slots: HashMap<PromptId, usize>,
    outcomes: Vec<PromptOutcome>,
    curriculum: Curriculum,
    success_reward: f64,
    /// Key, place and index of the prompts of this pass, in order.
    order: Vec<(u64, u64, usize)>,
    mix: LiveMix,
    /// Without `outcomes` and `mix`, which [`Self::state`] adds.
    state: PromptSamplerState,
}

impl PromptSampler {
    /// Creates a sampler without any draw.
    ///
    /// # Errors
    /// If a stage's filter does not parse or matches no prompt.
    pub fn new(prompts: &[Arc<Prompt>], config: &DatasetConfig) -> Result<Self, DatasetError> {
        let curriculum = Curriculum::new(&config.stages)?;
        for stage in curriculum.stages() {
            if !prompts.is_empty() && !prompts.iter().any(|p| stage.filter.matches(&p.metadata)) {
                let columns: BTreeSet<&str> =
                    prompts.iter().flat_map(|p| p.metadata.keys().map(String::as_str)).collect();
                let columns: Vec<&str> = columns.into_iter().collect();
                let known = columns.join(", ");
                let key = format!("dataset.stage[{}].filter", stage.index);
                let filter = &config.stages[stage.index].filter;
                let reason = format!("it matches no prompt; the columns are {known}");
                return Err(DatasetError::config(&key, filter, reason));
            }
        }
        let mut slots = HashMap::new();
        let (mut slot_of, mut earlier) = (Vec::new(), Vec::new());
        let mut counts: Vec<u64> = Vec::new();
        for prompt in prompts {
            let next = slots.len();
            let slot = *slots.entry(prompt.id).or_insert(next);
            counts.resize(slots.len(), 0);
            slot_of.push(slot);
            earlier.push(counts[slot]);
            counts[slot] += 1;
        }
        let (seed, strategy) = (config.seed, config.strategy.kind);
        let mut sampler = Self {
            prompts: prompts.to_vec(),
            slot_of,
            earlier,
            outcomes: vec![PromptOutcome::default(); slots.len()],
            slots,
            curriculum,
            success_reward: config.strategy.success_reward,
            order: Vec::new(),
            mix: LiveMix::new(config.mix.live_share),
            state: PromptSamplerState { seed, strategy, ..PromptSamplerState::default() },
        };
        sampler.sort_pass();
        Ok(sampler)
    }

    /// Creates a sampler that continues from `state`. Statistics of prompts that are no longer in
    /// the file are discarded; new prompts are drawn when their position comes.
    ///
    /// # Errors
    /// As [`Self::new`] and if the state has another seed or strategy, or
    /// a stage that does not exist.
    pub fn resume(
        prompts: &[Arc<Prompt>],
        config: &DatasetConfig,
        state: PromptSamplerState,
    ) -> Result<Self, DatasetError> {
        let mut sampler = Self::new(prompts, config)?;
        let refuse = |what: &str, saved: String, now: String| {
            Err(DatasetError::state(format!("its {what} is {saved}, the configuration's {now}")))
        };
        if state.seed != config.seed {
            return refuse("dataset.seed", state.seed.to_string(), config.seed.to_string());
        }
        if state.strategy != config.strategy.kind {
            let shown = |kind| <&str>::from(kind).to_owned();
            return refuse("dataset.strategy", shown(state.strategy), shown(config.strategy.kind));
        }
        if state.stage >= config.stages.len().max(1) {
            let (stage, count) = (state.stage + 1, config.stages.len().max(1));
            return Err(DatasetError::state(format!("it is in stage {stage} of {count}")));
        }
        for (id, outcome) in &state.outcomes {
            if let Some(slot) = sampler.slots.get(id) {
                sampler.outcomes[*slot] = *outcome;
            }
        }
        if let Some(saved) = state.mix {
            sampler.mix.resume(saved);
        }
        sampler.state = PromptSamplerState { outcomes: BTreeMap::new(), mix: None, ..state };
        sampler.sort_pass();
        Ok(sampler)
    }

    /// The state for [`Self::resume`].
    pub fn state(&self) -> PromptSamplerState {
        let known = self.slots.iter().map(|(id, slot)| (*id, self.outcomes[*slot]));
        let outcomes = known.filter(|(_, outcome)| *outcome != PromptOutcome::default()).collect();
        PromptSamplerState { outcomes, mix: Some(self.mix), ..self.state.clone() }
    }

    /// Draws the prompt of the next group, which optimizer step `step` (from 1) will train on.
    /// `None` if every prompt was left out.
    pub fn next(&mut self, step: u64) -> Option<Draw> {
        let (stage, limit) = {
            let stage = self.curriculum.at(step);
            (stage.index, stage.max_difficulty)
        };
        if stage != self.state.stage {
            (self.state.stage, self.state.cursor) = (stage, None);
            self.state.pass += 1;
            self.sort_pass();
        }
        let number = self.state.drawn;
        // Those at which `FLOOR * number` reaches an integer.
        let floor = |number: u64| (FLOOR * number as f64).floor();
        let in_turn = self.state.strategy != SamplingStrategy::Difficulty
            || floor(number + 1) > floor(number);
        let index = if in_turn {
            // If all prompts are too difficult, the limit does not apply.
            self.next_in_pass(limit).or_else(|| self.next_in_pass(None))
        } else {
            self.draw_by_weight(limit).or_else(|| self.next_in_pass(None))
        }?;
        self.outcomes[self.slot_of[index]].last_drawn = Some(number);
        self.state.drawn += 1;
        Some(Draw { prompt: Arc::clone(&self.prompts[index]), stage, number })
    }

    /// Decides whether the next group uses a live prompt. Call it once for each group; if it
    /// returns false, the group uses [`Self::next`].
    pub fn takes_live(&mut self, live_waits: bool) -> bool {
        let any = self.order.iter().any(|(_, _, index)| self.may_draw(*index, None));
        self.mix.takes_live(live_waits, any)
    }

    /// Records the total reward of each member of a group; `None` if it is missing. Returns whether
    /// this dataset contains the prompt.
    pub fn report(&mut self, prompt: PromptId, rewards: &[Option<f64>]) -> bool {
        let slot = self.slots.get(&prompt);
        if let Some(slot) = slot {
            self.outcomes[*slot].add(rewards, self.success_reward);
        }
        slot.is_some()
    }

    /// Excludes a prompt that the model cannot process from all later draws.
    pub fn leave_out(&mut self, prompt: PromptId) {
        self.state.left_out.insert(prompt);
    }

    /// The curriculum.
    pub fn curriculum(&self) -> &Curriculum {
        &self.curriculum
    }

    fn sort_pass(&mut self) {
        let Self { prompts, earlier, state, curriculum, .. } = self;
        let stage = curriculum.stages().nth(state.stage);
        let selected = prompts
            .iter()
            .enumerate()
            .filter(|(_, prompt)| stage.is_none_or(|stage| stage.filter.matches(&prompt.metadata)));
        self.order = selected
            .map(|(index, prompt)| {
                let (RowPlace::Line(place) | RowPlace::Row(place)) = prompt.place;
                let key = match state.strategy {
                    SamplingStrategy::Sequential => place,
                    SamplingStrategy::Shuffle | SamplingStrategy::Difficulty => {
                        // The count distinguishes prompts of the same content.
                        key("order", &[state.seed, state.pass, earlier[index]], prompt.id)
                    }
                };
                (key, place, index)
            })
            .collect();
        self.order.sort_unstable();
    }

    /// The next prompt of this pass, or the first of the next pass.
    fn next_in_pass(&mut self, limit: Option<f64>) -> Option<usize> {
        for _ in 0..2 {
            let cursor = self.state.cursor;
            let begin = self.order.partition_point(|(k, p, _)| Some((*k, *p)) <= cursor);
            let rest = self.order.get(begin..).unwrap_or_default();
            let found = rest.iter().find(|(_, _, index)| self.may_draw(*index, limit)).copied();
            if let Some((key, place, index)) = found {
                self.state.cursor = Some((key, place));
                return Some(index);
            }
            // Another pass would not have a prompt either.
            if !self.order.iter().any(|(_, _, index)| self.may_draw(*index, limit)) {
                return None;
            }
            self.state.cursor = None;
            self.state.pass += 1;
            self.state.finished += 1;
            self.sort_pass();
        }
        None
    }

    fn may_draw(&self, index: usize, limit: Option<f64>) -> bool {
        if !self.state.left_out.is_empty() && self.state.left_out.contains(&self.prompts[index].id)
        {
            return false;
        }
        let difficulty = self.outcomes[self.slot_of[index]].difficulty();
        !matches!((difficulty, limit), (Some(difficulty), Some(limit)) if difficulty > limit)
    }

    /// Draws a random prompt with a probability proportional to its weight.
    fn draw_by_weight(&self, limit: Option<f64>) -> Option<usize> {
        let number = self.state.drawn;
        let cooldown = (self.order.len() / 8).min(COOLDOWN) as u64;
        let rested = |index: usize| {
            let last = self.outcomes[self.slot_of[index]].last_drawn;
            last.is_none_or(|last| number.saturating_sub(last) > cooldown)
        };
        let mut sum = 0.0;
        let mut sums: Vec<(f64, usize)> = Vec::with_capacity(self.order.len());
        // In the order of the file, because the order of the pass changes between draws.
        let mut indices: Vec<usize> = self.order.iter().map(|(_, _, index)| *index).collect();
        indices.sort_unstable();
        for index in indices {
            if rested(index) && self.may_draw(index, limit) {
                sum += self.outcomes[self.slot_of[index]].weight();
                sums.push((sum, index));
            }
        }
        // 53 bits are a uniform double in [0, 1).
        let bits = key("draw", &[self.state.seed, number], PromptId(0)) >> 11;
        let wanted = bits as f64 / (1_u64 << 53) as f64 * sum;
        let at = sums.partition_point(|(sum, _)| *sum <= wanted);
        sums.get(at).or(sums.last()).map(|(_, index)| *index)
    }
}

// Shares groups between live prompts and dataset prompts.

/// Credit for one group. Credits are integers, so that rounding errors do not accumulate.
const WHOLE: u32 = 1_000_000;

/// Decides which prompt the next group uses while both kinds wait, without randomness: among any
/// `n` consecutive decisions, `floor(n share)` to `ceil(n share)` use a live prompt (the error term
/// of Bresenham's line algorithm).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveMix {
    share: u32,
    credit: u32,
}

impl LiveMix {
    /// `share` is the fraction of live prompts, from 0 to 1, rounded to a millionth.
    pub fn new(share: f64) -> Self {
        Self { share: (share.clamp(0.0, 1.0) * f64::from(WHOLE)).round() as u32, credit: 0 }
    }

    /// Decides one group; true for a live prompt. If only one kind has a prompt, that kind gets the
    /// group and the share of later groups does not change.
    pub fn takes_live(&mut self, live_waits: bool, dataset_has: bool) -> bool {
        if !(live_waits && dataset_has) {
            return live_waits;
        }
        self.credit += self.share;
        let live = self.credit >= WHOLE;
        if live {
            self.credit -= WHOLE;
        }
        live
    }

    /// Continues from the credit of a saved mix, with the configured share.
    pub(crate) fn resume(&mut self, saved: Self) {
        self.credit = saved.credit.min(WHOLE - 1);
    }
}

// The success rate of a prompt's groups.

/// The running success rate of one prompt. A group counts with weight `(1 - 1 / WINDOW)^age`, because the
/// policy that sampled it changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PromptOutcome {
    /// Number of the last draw of this prompt, from 0.
    pub last_drawn: Option<u64>,
    #[serde(with = "bits")]
    scored: f64,
    #[serde(with = "bits")]
    successes: f64,
}

/// Serializes a number as its bits in hexadecimal. A JSON reader may round a decimal number, and a
/// resumed run would then draw other prompts.
mod bits {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&format!("{:x}", value.to_bits()))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        let text = String::deserialize(deserializer)?;
        u64::from_str_radix(&text, 16).map(f64::from_bits).map_err(D::Error::custom)
    }
}

impl PromptOutcome {
    /// Adds a group. `None` and values that are not finite count as missing, not as 0.
    pub(crate) fn add(&mut self, rewards: &[Option<f64>], success_reward: f64) {
        let known: Vec<f64> = rewards.iter().flatten().copied().filter(|r| r.is_finite()).collect();
        if known.is_empty() {
            return;
        }
        let keep = 1.0 - 1.0 / WINDOW;
        let successes = known.iter().filter(|r| **r >= success_reward).count();
        self.scored = keep * self.scored + known.len() as f64;
        self.successes = keep * self.successes + successes as f64;
    }

    /// The success rate `p` among scored members, 0 to 1; `None` before the first.
    pub fn success(&self) -> Option<f64> {
        (self.scored > 0.0).then(|| (self.successes / self.scored).clamp(0.0, 1.0))
    }

    /// `1 - p`; `None` before the first scored member.
    pub fn difficulty(&self) -> Option<f64> {
        self.success().map(|p| 1.0 - p)
    }

    /// The sampling weight `p (1 - p) + EPSILON`. `p (1 - p)` is the variance of a success; without
    /// variance within a group all advantages are 0. A prompt without a score has the weight of
    /// `p = 1/2`, so that it is tried.
    pub fn weight(&self) -> f64 {
        let p = self.success().unwrap_or(0.5);
        p * (1.0 - p) + EPSILON
    }
}

#[cfg(test)]
mod tests;
