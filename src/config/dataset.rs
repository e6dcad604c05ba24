//! Every key of the dataset: how it is read, split, drawn from and staged.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::Config;
use super::describe::Problem;
use super::range::{Checked, above, at_least, between};
use super::validate::{label, quoted};

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

impl Config {
    /// The dataset to use: `[dataset]`, its path from `dataset.path` or else `rollout.dataset`
    /// (validation refuses two different ones); `None` where neither names a file.
    pub fn dataset_in_use(&self) -> Option<DatasetConfig> {
        let path = match &self.rollout.dataset {
            _ if !self.dataset.path.as_os_str().is_empty() => &self.dataset.path,
            Some(path) => path,
            None => return None,
        };
        Some(DatasetConfig { path: path.clone(), ..self.dataset.clone() })
    }
}

pub(super) fn check(config: &Config) -> Checked {
    let c = &config.dataset;
    let own = &c.path;
    if let Some(other) = config.rollout.dataset.as_ref().filter(|p| *p != own)
        && !own.as_os_str().is_empty()
    {
        let allowed = format!("absent, or the same as dataset.path ({own:?})");
        return Err(Problem::value("rollout.dataset", format!("{other:?}"), &allowed));
    }
    columns(c)?;
    between("dataset.few_shot_rows", c.few_shot_rows, 0, 64)?;
    between("dataset.max_row_bytes", c.max_row_bytes, 64, 1 << 30)?;
    between("dataset.max_prompt_tokens", c.max_prompt_tokens, 0, 1 << 24)?;
    at_least("dataset.held_out", c.held_out, 0.0)?;
    if c.held_out >= 1.0 && (c.held_out.fract() != 0.0 || c.held_out > 1e9) {
        let allowed = "a share less than 1 or a whole number of prompts";
        return Err(Problem::value("dataset.held_out", c.held_out, allowed));
    }
    if c.held_out > 0.0 && !c.eval_path.as_os_str().is_empty() {
        let allowed = "0 beside dataset.eval_path, which holds the prompts that are held out";
        return Err(Problem::value("dataset.held_out", c.held_out, allowed));
    }
    let d = &c.difficulty;
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
    between("dataset.mix.live_share", c.mix.live_share, 0.0, 1.0)?;
    stages(config)
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

fn stages(config: &Config) -> Checked {
    let stages = &config.dataset.stages;
    for (i, stage) in stages.iter().enumerate() {
        let key = |name: &str| format!("dataset.stage[{i}].{name}");
        if !stage.name.is_empty() {
            label(&key("name"), &stage.name)?;
        }
        if stage.steps == 0 && i + 1 < stages.len() {
            let allowed = "1 or more: only the last stage may go on to the end";
            return Err(Problem::value(&key("steps"), 0, allowed));
        }
        if let Some(difficulty) = stage.max_difficulty {
            between(&key("max_difficulty"), difficulty, 0.0, 1.0)?;
        }
        if !stage.route.is_empty() && !config.routes.0.iter().any(|r| r.name == stage.route) {
            return Err(Problem::value(&key("route"), quoted(&stage.route), "the name of a route"));
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

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;
    use crate::config::parse;

    fn error(text: &str) -> String {
        parse(text).unwrap_err().to_string()
    }

    #[test]
    fn the_path_is_one_wherever_it_stands() {
        let used = |text| parse(text).unwrap().dataset_in_use();
        assert_eq!(used(""), None);
        let plain = DatasetConfig::at(Path::new("a.csv"));
        assert_eq!(used("[dataset]\npath = 'a.csv'").unwrap(), plain);
        assert_eq!(used("[rollout]\ndataset = 'a.csv'").unwrap(), plain);
        let both = "[rollout]\ndataset = 'a.csv'\n[dataset]\nseed = 3\npath = 'a.csv'";
        assert_eq!(used(both).unwrap(), DatasetConfig { seed: 3, ..plain });
        assert_snapshot!(error("[rollout]\ndataset = 'a'\n[dataset]\npath = 'b'"), @r#"rollout.dataset is "a": it must be absent, or the same as dataset.path ("b")"#);
    }

    #[test]
    fn a_full_table_round_trips() {
        let text = "[dataset]\nfew_shot = [{ user = '1+1', assistant = '2' }]\n\
            [[dataset.stage]]\nsteps = 5\nfilter = 'level = \"easy\"'\nlearning_rate_scale = 2\n\
            [[dataset.stage]]\nmax_difficulty = 0.5\nroute = 'default'\nlearning_rate = 1e-5";
        let config = parse(text).unwrap();
        assert_eq!(config.dataset.stages.len(), 2);
        assert_eq!(parse(&toml::to_string(&config).unwrap()).unwrap(), config);
    }

    #[test]
    fn mistakes_are_named() {
        let dataset = |line: &str| error(&format!("[dataset]\n{line}"));
        assert_snapshot!(dataset("paht = 'a'"), @"dataset.paht is not a key: did you mean dataset.path?");
        assert_snapshot!(dataset("format = 'xml'"), @r#"dataset.format is "xml": it must be "auto", "jsonl", "csv", "tsv" or "parquet""#);
        assert_snapshot!(dataset("held_out = 2.5"), @"dataset.held_out is 2.5: it must be a share less than 1 or a whole number of prompts");
        assert_snapshot!(dataset("held_out = -0.1"), @"dataset.held_out is -0.1: it must be a finite number, 0 or more");
        assert_snapshot!(dataset("held_out = 0.1\neval_path = 'b'"), @"dataset.held_out is 0.1: it must be 0 beside dataset.eval_path, which holds the prompts that are held out");
        assert_snapshot!(dataset("prompt_column = ''"), @r#"dataset.prompt_column is "": it must be a column's name"#);
        assert_snapshot!(dataset("prompt_column = 'messages'"), @r#"dataset.prompt_column is "messages": it must be another column than dataset.messages_column"#);
        assert_snapshot!(dataset("answer_column = 'prompt'"), @r#"dataset.answer_column is "prompt": it must be another column than those of the prompt"#);
        assert_snapshot!(dataset("max_row_bytes = 3"), @"dataset.max_row_bytes is 3: it must be from 64 to 1073741824");
        assert_snapshot!(dataset("difficulty.floor = 0"), @"dataset.difficulty.floor is 0: it must be greater than 0 and at most 1");
        assert_snapshot!(dataset("difficulty.window = 0.5"), @"dataset.difficulty.window is 0.5: it must be a finite number, 1 or more");
        assert_snapshot!(dataset("mix.live_share = 1.5"), @"dataset.mix.live_share is 1.5: it must be from 0 to 1");
        assert_snapshot!(dataset("few_shot = [{ user = 'a' }]"), @"dataset.few_shot[0].assistant is missing");
        let stage = |line: &str| error(&format!("[[dataset.stage]]\n{line}"));
        assert_snapshot!(stage("[[dataset.stage]]"), @"dataset.stage[0].steps is 0: it must be 1 or more: only the last stage may go on to the end");
        assert_snapshot!(stage("route = 'x'"), @r#"dataset.stage[0].route is "x": it must be the name of a route"#);
        assert_snapshot!(stage("max_difficulty = 2"), @"dataset.stage[0].max_difficulty is 2: it must be from 0 to 1");
        assert_snapshot!(stage("learning_rate = 0"), @"dataset.stage[0].learning_rate is 0: it must be greater than 0");
        assert_snapshot!(stage("learning_rate = 1e-5\nlearning_rate_scale = 2"), @"dataset.stage[0].learning_rate_scale is 2: it must be absent beside learning_rate");
        assert_snapshot!(stage("fliter = ''"), @"dataset.stage[0].fliter is not a key: did you mean dataset.stage[0].filter?");
    }
}
