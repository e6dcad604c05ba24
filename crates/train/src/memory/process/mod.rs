//! The memory of the whole process. Parts of [`MemoryPhase::Start`] and [`MemoryPhase::Generation`] are held
//! at all times. A step of the usual shards may run while a version is staged. Where staging loads a copy of the
//! weights, one with a longer shard waits for the end of a publication, so that these two never overlap.

use std::fmt;

use serde::Serialize;
use strum::IntoStaticStr;

use hone_model::ModelSpec;

use super::{BaseMemory, F32, MemoryPlan, kept_limits, shard_tokens, widths};
use crate::config::{Recompute, TrainConfig};
use crate::error::{LearnError, Result};

/// Bytes of the program's code, threads and small allocations, measured after the start of `hone serve`.
const PROGRAM: usize = 96 << 20;

/// Bytes that a byte of `tokenizer.json` takes once it is loaded, measured with SmolLM2's tokenizer.
const TOKENIZER: usize = 12;

/// Positions by which the serving engine's cache of keys and values grows.
const CACHE_BLOCK: usize = 512;

/// Bytes of weight files up to which a publication loads the copies of all engines at once.
const SMALL: usize = 64 << 20;

/// What the process does, and its parts beside the trainer.
///
/// mistral.rs holds two versions of the weights in f32 for each replica. The native engine has no weights of
/// its own, only adapters: it reads the trainer's base.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessSetup {
    /// Whether it trains.
    pub trains: bool,
    /// mistral.rs's engines of one version. Two versions are loaded. 0 without mistral.rs.
    pub replicas: usize,
    /// The same for a judge that uses the base model.
    pub judge_replicas: usize,
    /// Sequences that native engines compute at once; 0 without one.
    pub sequences: usize,
    /// Bytes of the buffers with which native engines compute; 0 without one.
    pub sampler_buffers: usize,
    /// Positions of the caches of native engines; 0 without one.
    pub cache_positions: usize,
    /// Adapters that native engines hold for the versions that they answer with.
    pub versions: usize,
    /// Adapters that native engines keep in memory, usually with those of `versions`.
    pub kept_versions: usize,
    /// Bytes of the model's weight files, which are mapped while an engine loads them.
    pub weight_files: usize,
    /// Bytes of the model's `tokenizer.json`.
    pub tokenizer_file: usize,
    /// Bytes of the ledger's page cache.
    pub ledger_cache: usize,
}

/// When the process holds a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum MemoryPhase {
    /// From the start on.
    Start,
    /// While completions are generated, for clients or for the trainer.
    Generation,
    /// During a step with the longest sample.
    Step,
    /// While a version is loaded beside the ones that are served.
    Staging,
}

/// A part of the process's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryPart {
    /// Unique name.
    pub part: &'static str,
    /// When it is held.
    pub phase: MemoryPhase,
    /// Its size.
    pub bytes: usize,
}

/// Estimated bytes of the process, by part and by phase.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ProcessMemory {
    /// Tokens of the longest shard of a step.
    pub tokens: usize,
    /// Every part.
    pub parts: Vec<MemoryPart>,
    /// Sum of the parts that are held from the start on.
    pub start: usize,
    /// Sum of the parts that are held while completions are generated.
    pub generation: usize,
    /// Sum of the parts of a step with the longest sample.
    pub step: usize,
    /// The same for a step that may run while a version is staged: one of the usual shards with mistral.rs, else any.
    pub usual_step: usize,
    /// Sum of the parts of a publication.
    pub staging: usize,
    /// `start + generation + max(step, usual_step + staging)`.
    pub peak: usize,
}

impl fmt::Display for ProcessMemory {
    /// A table with a line per part that is not empty, in MiB, and the peak.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MIB: f64 = (1 << 20) as f64;
        let mut line = |phase: &str, part: &str, bytes: usize| {
            writeln!(f, "{phase:<11} {part:<22} {:>9.1} MiB", bytes as f64 / MIB)
        };
        for part in self.parts.iter().filter(|part| part.bytes > 0) {
            line(part.phase.into(), part.part, part.bytes)?;
        }
        line("usual step", "", self.usual_step)?;
        line("peak", "", self.peak)?;
        write!(
            f,
            "peak = start {:.1} + generation {:.1} + the larger of step {:.1} and usual step + staging \
             {:.1}; shards of up to {} tokens",
            self.start as f64 / MIB,
            self.generation as f64 / MIB,
            self.step as f64 / MIB,
            (self.usual_step + self.staging) as f64 / MIB,
            self.tokens
        )
    }
}

/// Computes the memory of a process for samples of any length.
#[derive(Clone, Copy, Debug)]
pub struct MemoryPlanner<'a> {
    /// The model's shape.
    pub spec: &'a ModelSpec,
    /// The memory of the trainer's weights, which native engines share.
    pub base: BaseMemory,
    /// The keys of `[train]`.
    pub config: &'a TrainConfig,
    /// Threads of the trainer's pool.
    pub threads: usize,
    /// The model's context length in tokens.
    pub context: usize,
    /// The other parts of the process.
    pub setup: ProcessSetup,
}

impl MemoryPlanner<'_> {
    /// The plan for samples of up to `tokens` tokens, but at least for the usual shards.
    pub fn plan(&self, tokens: usize) -> ProcessMemory {
        use MemoryPhase::{Generation, Staging, Start, Step};
        let setup = &self.setup;
        let tokens = tokens.max(self.usual_tokens());
        let step = self.step(tokens);
        let is_native = setup.sequences > 0;
        let replicas = setup.replicas + setup.judge_replicas;
        let weights = self.spec.parameters() * F32;
        let tokenizer = TOKENIZER * setup.tokenizer_file;
        let adapter = step.part("gradients") / (1 + step.in_flight);
        let kept = setup.kept_versions.saturating_sub(setup.versions);
        let base = if setup.trains || is_native { step.part("base weights") } else { 0 };
        let own_adapter = self.if_training(step.part("adapter"));
        let position = self.spec.cache_position_bytes(self.base.is_quantized);
        let part = |phase, part, bytes| MemoryPart { part, phase, bytes };
        let mut parts = vec![
            part(Start, "program", PROGRAM),
            // The codec's own, and one for each of mistral.rs's engines.
            part(Start, "tokenizers", (1 + 2 * replicas) * tokenizer),
            part(Start, "ledger cache", setup.ledger_cache),
            part(Start, "serving weights", 2 * setup.replicas * weights),
            part(Start, "judge weights", 2 * setup.judge_replicas * weights),
            part(Start, "base weights", base),
            part(Start, "adapter", own_adapter + setup.versions * adapter),
            part(Start, "kept adapters", kept * adapter),
            part(Start, "optimizer moments", self.if_training(step.part("optimizer moments"))),
            part(Start, "sampler buffers", setup.sampler_buffers),
            part(Generation, "sampler cache", setup.cache_positions * position),
            part(Generation, "conversations", replicas * self.conversation(tokens)),
        ];
        let during = step.step_parts();
        parts.extend(during.map(|(name, bytes)| part(Step, name, self.if_training(bytes))));
        // Copies of the model that a publication loads at once.
        let is_small = setup.weight_files <= SMALL;
        let copies = if is_small { setup.replicas } else { setup.replicas.min(1) };
        // The native engine reads the adapter and copies it.
        let adapters = copies.min(1) + if is_native { 2 } else { 0 };
        parts.extend([
            part(Staging, "staged weights", copies * weights),
            part(Staging, "mapped files", copies.min(1) * setup.weight_files),
            part(Staging, "staged adapter", adapters * adapter),
            part(Staging, "staged tokenizers", copies * tokenizer),
        ]);
        let sum = |phase: MemoryPhase| -> usize {
            parts.iter().filter(|part| part.phase == phase).map(|part| part.bytes).sum()
        };
        let [start, generation, step, staging] = [Start, Generation, Step, Staging].map(sum);
        let usual_step = match setup.replicas {
            0 => step,
            _ => self.if_training(self.step(self.usual_tokens()).step()),
        };
        let peak = start + generation + step.max(usual_step + staging);
        ProcessMemory { tokens, parts, start, generation, step, usual_step, staging, peak }
    }

    /// The longest sample, in tokens, that a step can compute within `limit` bytes for the process:
    /// `train.max_tokens`, or what fits, at most the context. Without a limit everything fits.
    ///
    /// # Errors
    /// [`LearnError::Memory`] if the usual shards or samples of `train.max_tokens` do not fit.
    pub fn longest_sample(&self, limit: Option<usize>) -> Result<usize> {
        let wanted = self.config.max_tokens;
        let most = if wanted > 0 { wanted } else { self.context };
        let Some(limit) = limit else { return Ok(most) };
        let fits = |tokens: usize| self.plan(tokens).peak <= limit;
        let mib = |bytes: usize| bytes.div_ceil(1 << 20);
        let usual = self.usual_tokens();
        if !fits(usual) {
            let config = TrainConfig { recompute: Recompute::Always, ..self.config.clone() };
            return Err(LearnError::Memory(format!(
                "the process needs about {} MiB to train, but {} MiB are available; with \
                 `train.recompute` \"always\" it needs about {} MiB",
                mib(self.plan(usual).peak),
                limit >> 20,
                mib(MemoryPlanner { config: &config, ..*self }.plan(usual).peak)
            )));
        }
        if fits(most) {
            return Ok(most);
        }
        // The plan grows with the tokens.
        let (mut low, mut high) = (usual, most);
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if fits(middle) { low = middle } else { high = middle - 1 }
        }
        if wanted == 0 {
            return Ok(low);
        }
        Err(LearnError::Memory(format!(
            "`train.max_tokens` is {wanted}, for which the process needs about {} MiB, but {} MiB are \
             available: set it to at most {low}, or to 0 for what fits",
            mib(self.plan(wanted).peak),
            limit >> 20
        )))
    }

    /// The plan of the step that takes most, of up to `tokens` tokens: a longer shard may keep fewer layers.
    fn step(&self, tokens: usize) -> MemoryPlan {
        let of = |tokens| MemoryPlan::new(self.spec, self.base, self.config, self.threads, tokens);
        let longest = of(tokens);
        let limits = kept_limits(self.config, self.spec, longest.in_flight);
        let shorter = limits.filter(|limit| (1..tokens).contains(limit)).map(of);
        shorter.fold(longest, |most, plan| if plan.step() > most.step() { plan } else { most })
    }

    fn if_training(&self, bytes: usize) -> usize {
        if self.setup.trains { bytes } else { 0 }
    }

    /// Tokens of the usual shards, which hold several samples.
    fn usual_tokens(&self) -> usize {
        shard_tokens(self.spec)
    }

    /// Bytes that a serving engine takes for a conversation. mistral.rs computes the whole prompt with a mask of
    /// `tokens` x `tokens`, up to its sliding window, copies keys and values, and the allocator keeps what it freed of the activations.
    fn conversation(&self, tokens: usize) -> usize {
        let window = self.spec.layers.iter().filter_map(|layer| layer.window).min();
        let tokens = tokens.min(self.context).min(window.unwrap_or(usize::MAX));
        let (hidden, inner, q, kv) = widths(self.spec);
        let mask = tokens * tokens * F32;
        let cache = tokens.next_multiple_of(CACHE_BLOCK) * self.spec.cache_position_bytes(false);
        // The residual stream, its norm and an output; and the larger of attention's values, before and
        // after the rotation, and the MLP's.
        let layer = (3 * hidden + (2 * (q + 2 * kv)).max(3 * inner)) * tokens * F32;
        mask + 2 * cache + layer
    }
}

#[cfg(test)]
mod tests;
