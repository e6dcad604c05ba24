//! What a grader gave, in the shape of `POST /v1/fine_tuning/alpha/graders/run`.

use std::collections::BTreeMap;

use serde::Serialize;

use super::backend::{ModelReply, TokenUsage};
use super::formula::FormulaFault;
use super::template::RenderFault;

/// OpenAI's `GraderRunResponse`, with one difference: `reward` and the sub-rewards are null where
/// there is no value, as nothing that could not be scored is a zero here.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GradeOutcome {
    /// The grade: finite, or missing with the reason among the errors.
    pub reward: Option<f64>,
    /// What it is and how it went.
    pub metadata: GradeMetadata,
    /// The grades of a `multi` grader's parts by name.
    pub sub_rewards: BTreeMap<String, Option<f64>>,
    /// What judges used, by model.
    pub model_grader_token_usage_per_model: BTreeMap<String, TokenUsage>,
}

/// About one run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct GradeMetadata {
    /// The grader's name.
    pub name: String,
    /// The grader's type.
    pub r#type: &'static str,
    /// What went wrong.
    pub errors: GradeErrors,
    /// Seconds.
    pub execution_time: f64,
    /// The same as `sub_rewards`.
    pub scores: BTreeMap<String, Option<f64>>,
    /// All tokens of all judges; null where none was asked.
    pub token_usage: Option<u64>,
    /// The judge's model as its server names it; null for a `multi` grader.
    pub sampled_model_name: Option<String>,
}

/// OpenAI's flags. Of the details, `formula_parse_error_details` is hone's own; OpenAI's server
/// sends the others, though its published types leave some out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GradeErrors {
    /// The formula gave no value: such as by a division by zero or a part without a grade.
    pub formula_parse_error: bool,
    /// Why.
    pub formula_parse_error_details: Option<String>,
    /// The sample has not what a template asks of it.
    pub sample_parse_error: bool,
    /// What.
    pub sample_parse_error_details: Option<String>,
    /// Never set here.
    pub truncated_observation_error: bool,
    /// Never set here.
    pub unresponsive_reward_error: bool,
    /// The item has not what a template asks of it.
    pub invalid_variable_error: bool,
    /// What.
    pub invalid_variable_error_details: Option<String>,
    /// Anything else: a text that would be too long.
    pub other_error: bool,
    /// The sandbox failed.
    pub python_grader_server_error: bool,
    /// How.
    pub python_grader_server_error_type: Option<String>,
    /// The code failed.
    pub python_grader_runtime_error: bool,
    /// How.
    pub python_grader_runtime_error_details: Option<String>,
    /// The judge could not be asked.
    pub model_grader_server_error: bool,
    /// The judge refused.
    pub model_grader_refusal_error: bool,
    /// In which words.
    pub model_grader_refusal_error_details: Option<String>,
    /// The judge's answer holds no score or label.
    pub model_grader_parse_error: bool,
    /// The answer, shortened.
    pub model_grader_parse_error_details: Option<String>,
    /// Why not.
    pub model_grader_server_error_details: Option<String>,
}

/// Longest detail that is reported, in characters.
const DETAIL_CHARS: usize = 2000;

/// Why a grader gave no value for one sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    Render(RenderFault),
    Formula(FormulaFault),
    CodeServer(String),
    CodeRuntime(String),
    ModelServer(String),
    ModelRefusal(String),
    ModelParse(String),
}

impl GradeErrors {
    /// Sets the fault's flag and detail.
    pub(super) fn record(&mut self, fault: Fault) {
        let detail = |text: String| Some(text.chars().take(DETAIL_CHARS).collect());
        match fault {
            Fault::Render(RenderFault::Item(path)) => {
                self.invalid_variable_error = true;
                self.invalid_variable_error_details = detail(format!("{path} is missing"));
            }
            Fault::Render(RenderFault::Sample(path)) => {
                self.sample_parse_error = true;
                self.sample_parse_error_details = detail(format!("{path} is missing"));
            }
            Fault::Render(RenderFault::TooLong) => self.other_error = true,
            Fault::Formula(fault) => {
                self.formula_parse_error = true;
                self.formula_parse_error_details = detail(fault.to_string());
            }
            Fault::CodeServer(kind) => {
                self.python_grader_server_error = true;
                self.python_grader_server_error_type = detail(kind);
            }
            Fault::CodeRuntime(text) => {
                self.python_grader_runtime_error = true;
                self.python_grader_runtime_error_details = detail(text);
            }
            Fault::ModelServer(text) => {
                self.model_grader_server_error = true;
                self.model_grader_server_error_details = detail(text);
            }
            Fault::ModelRefusal(text) => {
                self.model_grader_refusal_error = true;
                self.model_grader_refusal_error_details = detail(text);
            }
            Fault::ModelParse(text) => {
                self.model_grader_parse_error = true;
                self.model_grader_parse_error_details = detail(text);
            }
        }
    }

    /// Takes over another run's flags, and its details where there are none yet.
    fn merge(&mut self, other: Self) {
        macro_rules! merge {
            ($($flag:ident $(: $detail:ident)?;)*) => {$(
                self.$flag |= other.$flag;
                $(if self.$detail.is_none() { self.$detail = other.$detail; })?
            )*};
        }
        merge! {
            formula_parse_error: formula_parse_error_details;
            sample_parse_error: sample_parse_error_details;
            truncated_observation_error;
            unresponsive_reward_error;
            invalid_variable_error: invalid_variable_error_details;
            other_error;
            python_grader_server_error: python_grader_server_error_type;
            python_grader_runtime_error: python_grader_runtime_error_details;
            model_grader_server_error: model_grader_server_error_details;
            model_grader_refusal_error: model_grader_refusal_error_details;
            model_grader_parse_error: model_grader_parse_error_details;
        }
    }

    /// Whether anything went wrong.
    pub fn any(&self) -> bool {
        *self != Self::default()
    }
}

impl GradeOutcome {
    pub(super) fn new(name: &str, kind: &'static str) -> Self {
        let metadata =
            GradeMetadata { name: name.to_owned(), r#type: kind, ..GradeMetadata::default() };
        Self {
            reward: None,
            metadata,
            sub_rewards: BTreeMap::new(),
            model_grader_token_usage_per_model: BTreeMap::new(),
        }
    }

    /// Sets the grade. A grade that could not be computed is missing, unless the completion is to
    /// blame, lacking what the grader looks for (as with `output_json` of what is no JSON): then it
    /// is 0, as a wrong answer is, or never writing JSON would pay.
    pub(super) fn settle(&mut self, grade: Result<f64, Fault>) {
        match grade {
            Ok(value) => self.reward = Some(value),
            Err(fault) => {
                let blamed = matches!(fault, Fault::Render(RenderFault::Sample(_)));
                self.reward = blamed.then_some(0.0);
                self.metadata.errors.record(fault);
            }
        }
    }

    /// Counts what a judge used.
    pub(super) fn count(&mut self, reply: &ModelReply) {
        self.metadata.sampled_model_name = Some(reply.model.clone());
        self.add_usage(reply.model.clone(), reply.usage);
    }

    /// Takes over a part's grade, errors and usage.
    pub(super) fn absorb(&mut self, part: &str, run: Self) {
        self.sub_rewards.insert(part.to_owned(), run.reward);
        self.metadata.scores.insert(part.to_owned(), run.reward);
        self.metadata.errors.merge(run.metadata.errors);
        for (model, usage) in run.model_grader_token_usage_per_model {
            self.add_usage(model, usage);
        }
    }

    fn add_usage(&mut self, model: String, usage: TokenUsage) {
        let all = self.metadata.token_usage.get_or_insert(0);
        *all = all.saturating_add(usage.total_tokens);
        self.model_grader_token_usage_per_model.entry(model).or_default().add(usage);
    }
}
