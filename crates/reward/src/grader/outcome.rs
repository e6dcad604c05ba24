//! A grader's result, in the shape of `POST /v1/fine_tuning/alpha/graders/run`.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;

use super::backend::{CodeFailure, ModelFailure, ModelReply, TokenUsage};
use super::template::RenderFault;

/// OpenAI's `GraderRunResponse`, except that `reward` and the sub-rewards are null instead of 0 for a
/// sample that could not be graded.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct GradeOutcome {
    /// The grade: finite, or `None` with the reason among the errors.
    pub reward: Option<f64>,
    /// The grader, and the errors and costs of the run.
    pub metadata: GradeMetadata,
    /// The grades of a `multi` grader's parts by name.
    pub sub_rewards: BTreeMap<String, Option<f64>>,
    /// Tokens used by judges, by model.
    pub model_grader_token_usage_per_model: BTreeMap<String, TokenUsage>,
    /// Why there is no grade.
    #[serde(skip)]
    fault: Option<GradeFault>,
}

/// The grader, and the errors and costs of one run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct GradeMetadata {
    /// The grader's name.
    pub name: String,
    /// The grader's type.
    pub r#type: &'static str,
    /// The errors of the run.
    pub errors: GradeErrors,
    /// Duration of the run in seconds.
    pub execution_time: f64,
    /// The same as `sub_rewards`.
    pub scores: BTreeMap<String, Option<f64>>,
    /// Tokens of all judges; null if the grader has no judge.
    pub token_usage: Option<u64>,
    /// The judge's model as its server reports it; null for a `multi` grader.
    pub sampled_model_name: Option<String>,
}

/// OpenAI's error flags, each with its details. `formula_parse_error_details` is Hone's addition;
/// OpenAI's server sends the others, though its published types omit some.
#[expect(missing_docs, reason = "a flag's details describe its error")]
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct GradeErrors {
    /// The formula has no value, for example because of a division by zero or a part without a grade.
    pub formula_parse_error: bool,
    pub formula_parse_error_details: Option<String>,
    /// The sample lacks a value that a template uses.
    pub sample_parse_error: bool,
    pub sample_parse_error_details: Option<String>,
    /// Never set.
    pub truncated_observation_error: bool,
    /// Never set.
    pub unresponsive_reward_error: bool,
    /// The item lacks a value that a template uses.
    pub invalid_variable_error: bool,
    pub invalid_variable_error_details: Option<String>,
    /// A rendered text would be too long.
    pub other_error: bool,
    /// The sandbox failed.
    pub python_grader_server_error: bool,
    pub python_grader_server_error_type: Option<String>,
    /// The code failed.
    pub python_grader_runtime_error: bool,
    pub python_grader_runtime_error_details: Option<String>,
    /// The judge did not answer.
    pub model_grader_server_error: bool,
    /// The judge refused.
    pub model_grader_refusal_error: bool,
    pub model_grader_refusal_error_details: Option<String>,
    /// The judge's answer, which the details contain, has no score or label.
    pub model_grader_parse_error: bool,
    pub model_grader_parse_error_details: Option<String>,
    pub model_grader_server_error_details: Option<String>,
}

/// Longest detail that is reported, in characters.
const DETAIL_CHARS: usize = 2000;

/// Why a grader has no value for one sample.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum GradeFault {
    #[error(transparent)]
    Render(#[from] RenderFault),
    #[error("{0}")]
    Formula(String),
    #[error(transparent)]
    Code(#[from] CodeFailure),
    #[error(transparent)]
    Model(#[from] ModelFailure),
    #[error("{0}")]
    ModelParse(String),
}

impl GradeErrors {
    /// Sets the fault's flag, and its detail unless the flag has one.
    pub(super) fn record(&mut self, fault: &GradeFault) {
        let (flag, detail) = match fault {
            GradeFault::Render(RenderFault::TooLong) => {
                self.other_error = true;
                return;
            }
            GradeFault::Render(RenderFault::Item(_)) => {
                (&mut self.invalid_variable_error, &mut self.invalid_variable_error_details)
            }
            GradeFault::Render(RenderFault::Sample(_)) => {
                (&mut self.sample_parse_error, &mut self.sample_parse_error_details)
            }
            GradeFault::Formula(_) => {
                (&mut self.formula_parse_error, &mut self.formula_parse_error_details)
            }
            GradeFault::Code(CodeFailure::Server(_)) => {
                (&mut self.python_grader_server_error, &mut self.python_grader_server_error_type)
            }
            GradeFault::Code(CodeFailure::Runtime(_)) => (
                &mut self.python_grader_runtime_error,
                &mut self.python_grader_runtime_error_details,
            ),
            GradeFault::Model(ModelFailure::Server(_)) => {
                (&mut self.model_grader_server_error, &mut self.model_grader_server_error_details)
            }
            GradeFault::Model(ModelFailure::Refusal(_)) => {
                (&mut self.model_grader_refusal_error, &mut self.model_grader_refusal_error_details)
            }
            GradeFault::ModelParse(_) => {
                (&mut self.model_grader_parse_error, &mut self.model_grader_parse_error_details)
            }
        };
        *flag = true;
        detail.get_or_insert_with(|| fault.to_string().chars().take(DETAIL_CHARS).collect());
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
        Self { metadata, ..Self::default() }
    }

    /// Sets the grade, or records why there is none. A completion that lacks a value of a template
    /// (such as `output_json` of a text that is not JSON) gets 0, like a wrong answer; otherwise
    /// avoiding JSON would avoid bad grades. Any other fault makes the grade missing.
    pub(super) fn set_grade(&mut self, grade: Result<f64, GradeFault>) {
        match grade {
            Ok(value) => self.reward = Some(value),
            Err(fault) => {
                let of_sample = matches!(fault, GradeFault::Render(RenderFault::Sample(_)));
                self.reward = of_sample.then_some(0.0);
                self.metadata.errors.record(&fault);
                self.fault = Some(fault);
            }
        }
    }

    /// Adds a judge's model and token usage.
    pub(super) fn add_reply(&mut self, reply: &ModelReply) {
        self.metadata.sampled_model_name = Some(reply.model.clone());
        self.add_usage(reply.model.clone(), reply.usage);
    }

    /// Adds a part's grade, errors and usage.
    pub(super) fn add_part(&mut self, part: &str, run: Self) {
        self.sub_rewards.insert(part.to_owned(), run.reward);
        self.metadata.scores.insert(part.to_owned(), run.reward);
        if let Some(fault) = &run.fault {
            self.metadata.errors.record(fault);
        }
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
