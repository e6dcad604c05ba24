//! Which prompt comes next.
//!
//! A pass is walked in the order of each prompt's key: its place in the file, or a hash of seed,
//! pass and content. The position is the last key that was drawn, not a count, so that prompts that
//! are left out or added do not move it. Random draws are hashes of seed and draw number: nothing
//! but the numbers of [`PromptSamplerState`] has to be saved to go on exactly.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::curriculum::{Curriculum, Stage};
use super::error::{DatasetError, RowPlace};
use super::mix::LiveMix;
use super::outcome::PromptOutcome;
use super::prompt::{Prompt, PromptId};
use super::split::key;
use crate::{DatasetConfig, DifficultyConfig, SamplingStrategy};

/// Draws by weight leave out what came within this many draws, or an eighth of the prompts if
/// that is less: the groups of one optimiser step should differ.
const COOLDOWN: usize = 16;

/// What is drawn for one group.
#[derive(Clone, Debug, PartialEq)]
pub struct Draw {
    /// The prompt.
    pub prompt: Arc<Prompt>,
    /// Index of the stage that it is drawn for.
    pub stage: usize,
    /// [`PromptSampler::epoch`] before it.
    pub epoch: u64,
    /// Draws before it.
    pub number: u64,
}

/// Everything that a resumed run needs besides the file and the configuration.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PromptSamplerState {
    /// Seed of the order.
    pub seed: u64,
    /// Strategy of the order.
    pub strategy: SamplingStrategy,
    /// Draws so far.
    pub drawn: u64,
    /// Index of the stage of the last draw.
    pub stage: usize,
    /// Passes begun before this one, in all stages.
    pub pass: u64,
    /// Passes walked to their end.
    pub finished: u64,
    /// Key and place of the last prompt of this pass that was drawn.
    pub cursor: Option<(u64, u64)>,
    /// How contested groups were shared out.
    pub mix: Option<LiveMix>,
    /// Prompts that were drawn or reported.
    pub outcomes: BTreeMap<PromptId, PromptOutcome>,
    /// Prompts that are not drawn again.
    pub left_out: BTreeSet<PromptId>,
}

/// Draws prompts for groups, and learns which ones are worth it.
#[derive(Clone, Debug)]
pub struct PromptSampler {
    prompts: Vec<Arc<Prompt>>,
    /// Index into `outcomes` by prompt; prompts of the same content share one.
    slot_of: Vec<usize>,
    /// Prompts of the same content before each one, by prompt.
    earlier: Vec<u64>,
    slots: HashMap<PromptId, usize>,
    outcomes: Vec<PromptOutcome>,
    curriculum: Curriculum,
    difficulty: DifficultyConfig,
    /// This pass: key, place and index, in order.
    order: Vec<(u64, u64, usize)>,
    mix: LiveMix,
    /// Without `outcomes` and `mix`, which [`Self::state`] adds.
    state: PromptSamplerState,
}

impl PromptSampler {
    /// A sampler at its beginning.
    ///
    /// # Errors
    /// [`DatasetError::Config`] if a stage's filter does not parse or takes no prompt.
    pub fn new(prompts: &[Arc<Prompt>], config: &DatasetConfig) -> Result<Self, DatasetError> {
        let curriculum = Curriculum::new(&config.stages)?;
        for stage in curriculum.stages() {
            if !prompts.is_empty() && !prompts.iter().any(|p| stage.filter.matches(&p.metadata)) {
                let columns: BTreeSet<&str> =
                    prompts.iter().flat_map(|p| p.metadata.keys().map(String::as_str)).collect();
                let columns: Vec<&str> = columns.into_iter().collect();
                let known = columns.join(", ");
                return Err(DatasetError::Config {
                    key: format!("dataset.stage[{}].filter", stage.index),
                    value: config.stages[stage.index].filter.clone(),
                    reason: format!("it takes no prompt; the columns are {known}"),
                });
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
        let (seed, strategy) = (config.seed, config.strategy);
        let mut sampler = Self {
            prompts: prompts.to_vec(),
            slot_of,
            earlier,
            outcomes: vec![PromptOutcome::default(); slots.len()],
            slots,
            curriculum,
            difficulty: config.difficulty.clone(),
            order: Vec::new(),
            mix: LiveMix::new(config.mix.live_share),
            state: PromptSamplerState { seed, strategy, ..PromptSamplerState::default() },
        };
        sampler.arrange();
        Ok(sampler)
    }

    /// A sampler that goes on where `state` was taken. Prompts that the file has lost are
    /// forgotten; new ones are drawn when their turn comes.
    ///
    /// # Errors
    /// As [`Self::new`], and [`DatasetError::State`] if the seed, the strategy or the number of
    /// stages does not go with the state.
    pub fn resume(
        prompts: &[Arc<Prompt>],
        config: &DatasetConfig,
        state: PromptSamplerState,
    ) -> Result<Self, DatasetError> {
        let mut sampler = Self::new(prompts, config)?;
        let refuse = |what: &str, saved: String, now: String| {
            Err(DatasetError::State(format!("its {what} is {saved}, the configuration's {now}")))
        };
        if state.seed != config.seed {
            return refuse("dataset.seed", state.seed.to_string(), config.seed.to_string());
        }
        if state.strategy != config.strategy {
            let shown = |s: SamplingStrategy| format!("{s:?}").to_lowercase();
            return refuse("dataset.strategy", shown(state.strategy), shown(config.strategy));
        }
        if state.stage >= config.stages.len().max(1) {
            let (stage, count) = (state.stage + 1, config.stages.len().max(1));
            return Err(DatasetError::State(format!("it is in stage {stage} of {count}")));
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
        sampler.arrange();
        Ok(sampler)
    }

    /// Everything that [`Self::resume`] needs.
    pub fn state(&self) -> PromptSamplerState {
        let known = self.slots.iter().map(|(id, slot)| (*id, self.outcomes[*slot]));
        let outcomes = known.filter(|(_, outcome)| *outcome != PromptOutcome::default()).collect();
        PromptSamplerState { outcomes, mix: Some(self.mix), ..self.state.clone() }
    }

    /// The prompt of the next group, which optimiser step `step`, from 1, will train on; `None`
    /// when every prompt was left out.
    pub fn next(&mut self, step: u64) -> Option<Draw> {
        let (stage, limit) = {
            let stage = self.curriculum.at(step);
            (stage.index, stage.max_difficulty)
        };
        if stage != self.state.stage {
            (self.state.stage, self.state.cursor) = (stage, None);
            self.state.pass += 1;
            self.arrange();
        }
        let (number, epoch) = (self.state.drawn, self.epoch());
        // The draws at which floor (number + 1) reaches a whole number walk on.
        let floor = |number: u64| (self.difficulty.floor * number as f64).floor();
        let walks = self.state.strategy != SamplingStrategy::Difficulty
            || floor(number + 1) > floor(number);
        let index = if walks {
            // Where all prompts are too difficult, the stage takes them as they come.
            self.walk(limit).or_else(|| self.walk(None))
        } else {
            self.by_weight(limit).or_else(|| self.walk(None))
        }?;
        self.outcomes[self.slot_of[index]].last_drawn = Some(number);
        self.state.drawn += 1;
        Some(Draw { prompt: Arc::clone(&self.prompts[index]), stage, epoch, number })
    }

    /// Whether the next group takes a live prompt. Call it once for each group, and [`Self::next`]
    /// if it says no.
    pub fn takes_live(&mut self, live_waits: bool) -> bool {
        let any = self.order.iter().any(|(_, _, index)| self.is_drawn(*index, None));
        self.mix.takes_live(live_waits, any)
    }

    /// Reports a group's total rewards, one for each member; a missing one is `None`. Returns
    /// whether the prompt is one of this dataset's.
    pub fn report(&mut self, prompt: PromptId, rewards: &[Option<f64>]) -> bool {
        let slot = self.slots.get(&prompt);
        if let Some(slot) = slot {
            self.outcomes[*slot].add(rewards, &self.difficulty);
        }
        slot.is_some()
    }

    /// Never draws a prompt again: the model cannot take it.
    pub fn leave_out(&mut self, prompt: PromptId) {
        self.state.left_out.insert(prompt);
    }

    /// Times round: passes walked to their end, or for `difficulty` the draws over the prompts.
    pub fn epoch(&self) -> u64 {
        match self.state.strategy {
            SamplingStrategy::Difficulty => self.state.drawn / self.prompts.len().max(1) as u64,
            SamplingStrategy::Sequential | SamplingStrategy::Shuffle => self.state.finished,
        }
    }

    /// Draws so far.
    pub fn drawn(&self) -> u64 {
        self.state.drawn
    }

    /// Prompts that may be drawn, in all stages.
    pub fn len(&self) -> usize {
        self.prompts.iter().filter(|prompt| !self.state.left_out.contains(&prompt.id)).count()
    }

    /// Whether none is left.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The stage of an optimiser step, from 1: its route and learning rate.
    pub fn stage_at(&self, step: u64) -> &Stage {
        self.curriculum.at(step)
    }

    /// All stages.
    pub fn curriculum(&self) -> &Curriculum {
        &self.curriculum
    }

    /// What is known of a prompt; `None` if it is not one of this dataset's.
    pub fn outcome(&self, prompt: PromptId) -> Option<&PromptOutcome> {
        self.slots.get(&prompt).map(|slot| &self.outcomes[*slot])
    }

    /// Puts this pass in order.
    fn arrange(&mut self) {
        let Self { prompts, earlier, state, curriculum, .. } = self;
        let stage = curriculum.stages().nth(state.stage);
        let taken = prompts
            .iter()
            .enumerate()
            .filter(|(_, prompt)| stage.is_none_or(|stage| stage.filter.matches(&prompt.metadata)));
        self.order = taken
            .map(|(index, prompt)| {
                let (RowPlace::Line(place) | RowPlace::Row(place)) = prompt.place;
                let key = match state.strategy {
                    SamplingStrategy::Sequential => place,
                    SamplingStrategy::Shuffle | SamplingStrategy::Difficulty => {
                        // The count keeps prompts of the same content apart.
                        key("order", &[state.seed, state.pass, earlier[index]], prompt.id)
                    }
                };
                (key, place, index)
            })
            .collect();
        self.order.sort_unstable();
    }

    /// The next prompt of this pass or else of the following one.
    fn walk(&mut self, limit: Option<f64>) -> Option<usize> {
        for _ in 0..2 {
            let cursor = self.state.cursor;
            let begin = self.order.partition_point(|(k, p, _)| Some((*k, *p)) <= cursor);
            let rest = self.order.get(begin..).unwrap_or_default();
            let found = rest.iter().find(|(_, _, index)| self.is_drawn(*index, limit)).copied();
            if let Some((key, place, index)) = found {
                self.state.cursor = Some((key, place));
                return Some(index);
            }
            // Nothing to draw in a whole pass: going round again would not help.
            if !self.order.iter().any(|(_, _, index)| self.is_drawn(*index, limit)) {
                return None;
            }
            self.state.cursor = None;
            self.state.pass += 1;
            self.state.finished += 1;
            self.arrange();
        }
        None
    }

    fn is_drawn(&self, index: usize, limit: Option<f64>) -> bool {
        if !self.state.left_out.is_empty() && self.state.left_out.contains(&self.prompts[index].id)
        {
            return false;
        }
        let difficulty = self.outcomes[self.slot_of[index]].difficulty();
        !matches!((difficulty, limit), (Some(difficulty), Some(limit)) if difficulty > limit)
    }

    /// A prompt at random with probability in proportion to its weight.
    fn by_weight(&self, limit: Option<f64>) -> Option<usize> {
        let number = self.state.drawn;
        let cooldown = (self.order.len() / 8).min(COOLDOWN) as u64;
        let rested = |index: usize| {
            let last = self.outcomes[self.slot_of[index]].last_drawn;
            last.is_none_or(|last| number.saturating_sub(last) > cooldown)
        };
        let mut reached = 0.0;
        let mut sums: Vec<(f64, usize)> = Vec::with_capacity(self.order.len());
        // In the file's order: the pass's order changes between draws.
        let mut indices: Vec<usize> = self.order.iter().map(|(_, _, index)| *index).collect();
        indices.sort_unstable();
        for index in indices {
            if rested(index) && self.is_drawn(index, limit) {
                reached += self.outcomes[self.slot_of[index]].weight(self.difficulty.epsilon);
                sums.push((reached, index));
            }
        }
        // 53 bits make every value of [0, 1) that a double of this spacing has.
        let bits = key("draw", &[self.state.seed, number], PromptId(0)) >> 11;
        let wanted = bits as f64 / (1_u64 << 53) as f64 * reached;
        let at = sums.partition_point(|(sum, _)| *sum <= wanted);
        sums.get(at).or(sums.last()).map(|(_, index)| *index)
    }
}

#[cfg(test)]
mod tests;
