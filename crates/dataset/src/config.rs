//! Configuration section `[dataset]`: how a dataset is read, split, sampled and staged.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use strum::{EnumString, IntoStaticStr, VariantNames};

use hone_core::config::choice::ConfigChoice;
use hone_core::config::section::Parameters;
use hone_core::config::{Checked, above, between, label, quoted, require};

/// The effect of an unusable row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnBadRow {
    /// The whole dataset is refused.
    #[default]
    Refuse,
    /// The row is skipped and counted.
    Skip,
}

/// Order in which prompts are drawn.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    EnumString,
    IntoStaticStr,
    VariantNames,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum SamplingStrategy {
    /// The order of the file.
    Sequential,
    /// A new random order in each epoch.
    #[default]
    Shuffle,
    /// Weighted random draws that prefer prompts of intermediate success rate.
    Difficulty,
}

hone_core::choice! {
    /// `dataset.strategy`.
    pub struct PromptOrder of SamplingStrategy {
        for Difficulty {
            /// A completion with at least this reward is a success.
            pub success_reward: f64 = 1.0 => finite(),
        }
    }
}

hone_core::parameters! {
    /// How live prompts and dataset prompts share the groups.
    pub struct MixConfig {
        /// Fraction of the groups for live prompts while both sources have one; at 1, live prompts
        /// always come first.
        pub live_share: f64 = 1.0 => between(0.0, 1.0),
    }
}

/// One worked example that precedes every prompt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FewShot {
    /// The user's message.
    pub user: String,
    /// The assistant's answer.
    pub assistant: String,
}

hone_core::parameters! {
    /// One stage of a curriculum.
    pub struct StageConfig {
        /// Name in logs; by default `stage 1` and so on.
        pub name: String = String::new(),
        /// Number of optimizer steps. 0 means no end, which only the last stage may have.
        pub steps: u64 = 0,
        /// Condition on the prompts: `column operator value`, joined by `and`; empty selects all.
        pub filter: String = String::new(),
        /// Skips prompts whose difficulty, 1 minus their success rate, is above this.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub max_difficulty: Option<f64> = None,
        /// The route whose rewards apply; by default `rollout.dataset_route`.
        pub route: String = String::new(),
        /// Peak learning rate, in place of `train.learning_rate`.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub learning_rate: Option<f64> = None,
        /// Factor of `train.learning_rate`.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub learning_rate_scale: Option<f64> = None,
    }
}

hone_core::parameters! {
    /// A dataset and how to use it.
    pub struct DatasetConfig {
        /// The file, or `hf://OWNER/NAME` for a dataset of the hub; empty means no dataset.
        pub path: PathBuf = PathBuf::new(),
        /// Configuration of the dataset of the hub; empty means its only one.
        pub config: String = String::new(),
        /// Split of the dataset of the hub.
        pub split: String = "train".to_owned(),
        /// Branch, tag or commit of the dataset of the hub; empty means its newest.
        pub revision: String = String::new(),
        /// The files of a dataset of the hub, which the caller has fetched as Parquet and which replace
        /// `path`. Rows are numbered through all of them.
        #[serde(skip)]
        pub files: Vec<PathBuf> = Vec::new(),
        /// Column of the conversation, a list of `{role, content}`.
        pub messages_column: String = "messages".to_owned(),
        /// Column of the user's message, for rows without `messages_column`.
        pub prompt_column: String = "prompt".to_owned(),
        /// Column that becomes the metadata `answer`. Every row must have it, unless this is empty.
        pub answer_column: String = "answer".to_owned(),
        /// Where the answer is within that column: a marker before it, `\boxed{}`, or a regular
        /// expression with a group. Empty takes the whole column.
        pub extract_answer: String = String::new(),
        /// System message for conversations without one; empty adds none.
        pub system_prompt: String = String::new(),
        /// The user's message as a minijinja template over the row's columns; empty uses the columns
        /// above.
        pub template: String = String::new(),
        /// Worked examples that precede every prompt.
        pub few_shot: Vec<FewShot> = Vec::new(),
        /// Number of usable rows at the start of the file that become worked examples instead of
        /// prompts.
        pub few_shot_rows: usize = 0 => between(0, 64),
        /// The assistant's answer in these examples, as a template over the row's columns.
        pub few_shot_answer: String = "{{ answer }}".to_owned(),
        /// The effect of an unusable row.
        pub on_bad_row: OnBadRow = OnBadRow::default(),
        /// Largest length of a prompt in tokens; longer prompts are skipped. 0 means the model's limit.
        pub max_prompt_tokens: usize = 0 => between(0, 1 << 24),
        /// Prompts that are held out for evaluation: a fraction if below 1, else a number.
        pub held_out: f64 = 0.0 => at_least(0.0),
        /// A separate file of held-out prompts, or `hf://OWNER/NAME`; empty means none.
        pub eval_path: PathBuf = PathBuf::new(),
        /// Split of `eval_path` if that is a dataset of the hub.
        pub eval_split: String = "test".to_owned(),
        /// As `files`, for `eval_path`.
        #[serde(skip)]
        pub eval_files: Vec<PathBuf> = Vec::new(),
        /// Seed of the split and of the order.
        pub seed: u64 = 0,
        /// Order in which prompts are drawn.
        pub strategy: PromptOrder = PromptOrder::default(),
        /// How live prompts and dataset prompts share the groups.
        pub mix: MixConfig = MixConfig::default(),
        /// The stages of the curriculum, in order. Without any, one stage without end uses all prompts.
        #[serde(rename = "stage")]
        pub stages: Vec<StageConfig> = Vec::new(),
    }
}

impl DatasetConfig {
    /// The default configuration for a file.
    pub fn at(path: &Path) -> Self {
        Self { path: path.to_owned(), ..Self::default() }
    }

    /// Checks every range.
    ///
    /// # Errors
    /// The first value out of range, with its full key.
    pub fn check(&self) -> Checked {
        self.check_in("dataset.")?;
        self.strategy.check("dataset.strategy")?;
        self.mix.check_in("dataset.mix.")?;
        self.check_columns()?;
        let (key, held_out) = ("dataset.held_out", self.held_out);
        let is_number = held_out.fract() == 0.0 && held_out <= 1e9;
        let allowed = "a share less than 1 or a whole number of prompts";
        require(held_out < 1.0 || is_number, key, held_out, allowed)?;
        let is_alone = held_out == 0.0 || self.eval_path.as_os_str().is_empty();
        let allowed = "0 beside dataset.eval_path, which holds the prompts that are held out";
        require(is_alone, key, held_out, allowed)?;
        self.check_stages()
    }

    fn check_stages(&self) -> Checked {
        for (i, stage) in self.stages.iter().enumerate() {
            let key = |name: &str| format!("dataset.stage[{i}].{name}");
            if !stage.name.is_empty() {
                label(&key("name"), &stage.name)?;
            }
            let may_end = stage.steps > 0 || i + 1 == self.stages.len();
            let allowed = "1 or more: only the last stage may have no end";
            require(may_end, &key("steps"), 0, allowed)?;
            if let Some(difficulty) = stage.max_difficulty {
                between(&key("max_difficulty"), difficulty, 0.0, 1.0)?;
            }
            if let Some(rate) = stage.learning_rate {
                above(&key("learning_rate"), rate, 0.0)?;
            }
            if let Some(scale) = stage.learning_rate_scale {
                above(&key("learning_rate_scale"), scale, 0.0)?;
                let (is_alone, allowed) =
                    (stage.learning_rate.is_none(), "absent beside learning_rate");
                require(is_alone, &key("learning_rate_scale"), scale, allowed)?;
            }
        }
        Ok(())
    }

    fn check_columns(&self) -> Checked {
        let (messages, prompt) = (&self.messages_column, &self.prompt_column);
        let (answer, extract) = (&self.answer_column, &self.extract_answer);
        for (key, name) in [("messages_column", messages), ("prompt_column", prompt)] {
            require(!name.is_empty(), &format!("dataset.{key}"), quoted(name), "a column's name")?;
        }
        let allowed = "another column than dataset.messages_column";
        require(messages != prompt, "dataset.prompt_column", quoted(prompt), allowed)?;
        let (is_own, allowed) =
            (answer != messages && answer != prompt, "another column than those of the prompt");
        require(is_own, "dataset.answer_column", quoted(answer), allowed)?;
        let fits = !answer.is_empty() || extract.is_empty();
        let allowed = "empty without dataset.answer_column, the column that it reads";
        require(fits, "dataset.extract_answer", quoted(extract), allowed)
    }
}
