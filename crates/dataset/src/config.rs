//! Every key of the dataset: how it is read, split, drawn from and staged.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use hone_core::config::describe::Problem;
use hone_core::config::range::{Checked, above, at_least, between};
use hone_core::config::{label, quoted};

/// How a dataset's file is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DatasetFormat {
    /// By the file's name: `.csv`, `.tsv`, `.parquet` or `.pq`; anything else is `jsonl`.
    #[default]
    Auto,
    /// A JSON object a line.
    Jsonl,
    /// Comma-separated values (RFC 4180) under a line of column names.
    Csv,
    /// The same with tabs.
    Tsv,
    /// Apache Parquet.
    Parquet,
}

/// What a row that cannot be used does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnBadRow {
    /// Refuses the whole dataset.
    #[default]
    Refuse,
    /// Is left out, and counted.
    Skip,
}

/// In which order prompts are drawn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SamplingStrategy {
    /// The file's.
    Sequential,
    /// Another random one each epoch.
    #[default]
    Shuffle,
    /// At random, prompts of intermediate success more often.
    Difficulty,
}

/// The numbers of [`SamplingStrategy::Difficulty`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DifficultyConfig {
    /// A completion of at least this reward is a success.
    pub success_reward: f64,
    /// Groups of a prompt that its running success remembers (an exponential window).
    pub window: f64,
    /// Added to the weight `p (1 - p)` of a prompt whose rate of success is `p`.
    pub epsilon: f64,
    /// Share of the draws that walk through all prompts whatever their success.
    pub floor: f64,
}

impl Default for DifficultyConfig {
    fn default() -> Self {
        Self { success_reward: 1.0, window: 4.0, epsilon: 0.02, floor: 0.1 }
    }
}

/// Live prompts beside the dataset's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MixConfig {
    /// Share of the groups that live prompts get while both wait; 1 always takes the live prompt.
    pub live_share: f64,
}

impl Default for MixConfig {
    fn default() -> Self {
        Self { live_share: 1.0 }
    }
}

/// One worked example, put before every prompt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FewShot {
    /// What is asked.
    pub user: String,
    /// A good answer.
    pub assistant: String,
}

/// One stage of a curriculum.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StageConfig {
    /// Its name in logs; empty takes `stage 1` and so on.
    pub name: String,
    /// Optimiser steps; 0, in the last stage only, goes on to the end.
    pub steps: u64,
    /// Which prompts: `column operator value`, joined by `and`; empty takes all.
    pub filter: String,
    /// Leave out prompts whose running difficulty, 1 less their rate of success, is above this.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_difficulty: Option<f64>,
    /// The route whose rewards score it; empty keeps `rollout.dataset_route`.
    pub route: String,
    /// Its peak learning rate, in place of `train.learning_rate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f64>,
    /// Multiplies `train.learning_rate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub learning_rate_scale: Option<f64>,
}

/// The dataset.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DatasetConfig {
    /// The file; empty is none.
    pub path: PathBuf,
    /// How it is written.
    pub format: DatasetFormat,
    /// Column of the conversation, a list of `{role, content}`.
    pub messages_column: String,
    /// Column of the user's text, for rows without `messages_column`.
    pub prompt_column: String,
    /// Column that becomes `answer`; every row must have it. Empty: none is needed.
    pub answer_column: String,
    /// Put before conversations that have no system message of their own; empty is none.
    pub system_prompt: String,
    /// The user's text as a minijinja template over the row's columns; empty takes the columns.
    pub template: String,
    /// Worked examples, put before every prompt.
    pub few_shot: Vec<FewShot>,
    /// Good rows at the file's beginning that serve as examples and are not trained on.
    pub few_shot_rows: usize,
    /// The assistant's turn of such an example, a template over the row's columns.
    pub few_shot_answer: String,
    /// What a row that cannot be used does.
    pub on_bad_row: OnBadRow,
    /// Longest row in bytes.
    pub max_row_bytes: usize,
    /// Longest prompt in tokens; longer ones are left out. 0: as the model's context allows.
    pub max_prompt_tokens: usize,
    /// Prompts that are never trained on: a share below 1, else a number.
    pub held_out: f64,
    /// A file of such prompts instead, read as `path` is; empty is none.
    pub eval_path: PathBuf,
    /// Seed of the split and the order.
    pub seed: u64,
    /// In which order prompts are drawn.
    pub strategy: SamplingStrategy,
    /// The numbers of the strategy `difficulty`.
    pub difficulty: DifficultyConfig,
    /// Live prompts beside the dataset's.
    pub mix: MixConfig,
    /// The curriculum's stages, in order; none is one stage without end.
    #[serde(rename = "stage")]
    pub stages: Vec<StageConfig>,
}

impl Default for DatasetConfig {
    fn default() -> Self {
        Self {
            path: PathBuf::new(),
            format: DatasetFormat::default(),
            messages_column: "messages".to_owned(),
            prompt_column: "prompt".to_owned(),
            answer_column: "answer".to_owned(),
            system_prompt: String::new(),
            template: String::new(),
            few_shot: Vec::new(),
            few_shot_rows: 0,
            few_shot_answer: "{{ answer }}".to_owned(),
            on_bad_row: OnBadRow::default(),
            max_row_bytes: 4 << 20,
            max_prompt_tokens: 0,
            held_out: 0.0,
            eval_path: PathBuf::new(),
            seed: 0,
            strategy: SamplingStrategy::default(),
            difficulty: DifficultyConfig::default(),
            mix: MixConfig::default(),
            stages: Vec::new(),
        }
    }
}

impl DatasetConfig {
    /// The defaults with a path.
    pub fn at(path: &Path) -> Self {
        Self { path: path.to_owned(), ..Self::default() }
    }
}

impl DatasetConfig {
    /// Checks every range.
    ///
    /// # Errors
    /// The first value out of range, with its full key.
    pub fn check(&self) -> Checked {
        columns(self)?;
        between("dataset.few_shot_rows", self.few_shot_rows, 0, 64)?;
        between("dataset.max_row_bytes", self.max_row_bytes, 64, 1 << 30)?;
        between("dataset.max_prompt_tokens", self.max_prompt_tokens, 0, 1 << 24)?;
        at_least("dataset.held_out", self.held_out, 0.0)?;
        if self.held_out >= 1.0 && (self.held_out.fract() != 0.0 || self.held_out > 1e9) {
            let allowed = "a share less than 1 or a whole number of prompts";
            return Err(Problem::value("dataset.held_out", self.held_out, allowed));
        }
        if self.held_out > 0.0 && !self.eval_path.as_os_str().is_empty() {
            let allowed = "0 beside dataset.eval_path, which holds the prompts that are held out";
            return Err(Problem::value("dataset.held_out", self.held_out, allowed));
        }
        let d = &self.difficulty;
        if !d.success_reward.is_finite() {
            let key = "dataset.difficulty.success_reward";
            return Err(Problem::value(key, d.success_reward, "a finite number"));
        }
        at_least("dataset.difficulty.window", d.window, 1.0)?;
        above("dataset.difficulty.epsilon", d.epsilon, 0.0)?;
        if !(d.floor > 0.0 && d.floor <= 1.0) {
            let allowed = "greater than 0 and at most 1";
            return Err(Problem::value("dataset.difficulty.floor", d.floor, allowed));
        }
        between("dataset.mix.live_share", self.mix.live_share, 0.0, 1.0)?;
        self.stages()
    }

    fn stages(&self) -> Checked {
        for (i, stage) in self.stages.iter().enumerate() {
            let key = |name: &str| format!("dataset.stage[{i}].{name}");
            if !stage.name.is_empty() {
                label(&key("name"), &stage.name)?;
            }
            if stage.steps == 0 && i + 1 < self.stages.len() {
                let allowed = "1 or more: only the last stage may go on to the end";
                return Err(Problem::value(&key("steps"), 0, allowed));
            }
            if let Some(difficulty) = stage.max_difficulty {
                between(&key("max_difficulty"), difficulty, 0.0, 1.0)?;
            }
            if let Some(rate) = stage.learning_rate {
                above(&key("learning_rate"), rate, 0.0)?;
            }
            if let Some(scale) = stage.learning_rate_scale {
                above(&key("learning_rate_scale"), scale, 0.0)?;
                if stage.learning_rate.is_some() {
                    let allowed = "absent beside learning_rate";
                    return Err(Problem::value(&key("learning_rate_scale"), scale, allowed));
                }
            }
        }
        Ok(())
    }
}

/// A conversation and a prompt cannot be read from one column.
fn columns(c: &DatasetConfig) -> Checked {
    let names = [("messages_column", &c.messages_column), ("prompt_column", &c.prompt_column)];
    for (key, name) in names {
        if name.is_empty() {
            return Err(Problem::value(&format!("dataset.{key}"), "\"\"", "a column's name"));
        }
    }
    if c.messages_column == c.prompt_column {
        let allowed = "another column than dataset.messages_column";
        return Err(Problem::value("dataset.prompt_column", quoted(&c.prompt_column), allowed));
    }
    if c.answer_column == c.messages_column || c.answer_column == c.prompt_column {
        let allowed = "another column than those of the prompt";
        return Err(Problem::value("dataset.answer_column", quoted(&c.answer_column), allowed));
    }
    Ok(())
}
