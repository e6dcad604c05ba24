//! Ready-made lists of parts for common tasks.
//!
//! Weights follow the usual proportions: correctness 2, format 0.5 to 1, length 0.1 to 0.5,
//! style up to 0.5. References are metadata (or columns of a dataset) named as each preset says.

use serde::{Deserialize, Serialize};

use super::{
    Citations, CodeParams, ExactMatch, ForbiddenPhrases, FormatIncremental, FormatSoft,
    FormatStrict, FuzzyMatch, Keywords, LengthRange, MathEqual, ReasoningSteps, Regex,
    RepetitionPenalty, RewardConfig, RewardKind, TextSimilarity,
};

/// A list of parts for a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Preset {
    /// Answers to mathematical questions as `<reasoning>…</reasoning><answer>…</answer>`.
    ///
    /// `correct` (math_equal with `answer`, 2.0), `format` (format_strict, 0.5), `tags`
    /// (format_incremental, 0.5), `steps` (reasoning_steps, 0.2), `length` (length_range up to 512
    /// tokens, 0.1), `repetition` (repetition_penalty, 0.2).
    MathReasoning,
    /// Programs in a fenced block.
    ///
    /// `correct` (code: the share of the tests in `tests` and `cases` that pass, 2.0), `format` (one fenced block with a named
    /// language, 0.5), `unfinished` (a penalty for TODO, FIXME and the like, 0.5), `length`
    /// (length_range up to 1,024 tokens, 0.1).
    CodeGeneration,
    /// Summaries.
    ///
    /// `similar` (text_similarity, rouge_l with `summary`, 1.0), `keywords` (the share of `keywords`, 1.0),
    /// `length` (length_range of 20 to 160 tokens, 0.5), `repetition` (repetition_penalty, 0.5),
    /// `preamble` (a penalty for "Here is a summary" and the like, 0.2).
    Summarization,
    /// Short answers to questions as `<reasoning>…</reasoning><answer>…</answer>`.
    ///
    /// `correct` (exact_match with `answer`, letter case ignored, 1.0), `similar` (fuzzy_match
    /// with `answer`, 1.0), `format` (format_soft, 0.5), `citations` (citations, target 1, 0.2),
    /// `length` (length_range up to 256 tokens, 0.1).
    QuestionAnswering,
}

impl Preset {
    /// Every preset.
    pub const ALL: [Self; 4] =
        [Self::MathReasoning, Self::CodeGeneration, Self::Summarization, Self::QuestionAnswering];

    /// Its parts.
    pub fn parts(self) -> Vec<RewardConfig> {
        match self {
            Self::MathReasoning => math_reasoning(),
            Self::CodeGeneration => code_generation(),
            Self::Summarization => summarization(),
            Self::QuestionAnswering => question_answering(),
        }
    }
}

use RewardConfig as Part;
use RewardKind as Kind;

fn math_reasoning() -> Vec<RewardConfig> {
    vec![
        Part::new("correct", 2.0, Kind::MathEqual(MathEqual::default())),
        Part::new("format", 0.5, Kind::FormatStrict(FormatStrict::default())),
        Part::new("tags", 0.5, Kind::FormatIncremental(FormatIncremental::default())),
        Part::new("steps", 0.2, Kind::ReasoningSteps(ReasoningSteps::default())),
        length(0.1, 0, 512, 256),
        repetition(0.2),
    ]
}

fn code_generation() -> Vec<RewardConfig> {
    let block =
        Regex { pattern: r"(?s)\A[^`]*```\w+\n[^`]*```[^`]*\z".to_owned(), full: false, count: 1 };
    let phrases = ["TODO", "FIXME", "NotImplementedError", "your code here"];
    vec![
        Part::new("correct", 2.0, Kind::Code(CodeParams::default())),
        Part::new("format", 0.5, Kind::Regex(block)),
        forbidden("unfinished", 0.5, &phrases),
        length(0.1, 0, 1024, 512),
    ]
}

fn summarization() -> Vec<RewardConfig> {
    let similar = TextSimilarity {
        metric: "rouge_l".to_owned(),
        reference: "summary".to_owned(),
        extract: String::new(),
    };
    let phrases = ["here is a summary", "here's a summary", "this text is about", "in summary"];
    vec![
        Part::new("similar", 1.0, Kind::TextSimilarity(similar)),
        Part::new("keywords", 1.0, Kind::Keywords(Keywords::default())),
        length(0.5, 20, 160, 80),
        repetition(0.5),
        forbidden("preamble", 0.2, &phrases),
    ]
}

fn question_answering() -> Vec<RewardConfig> {
    let exact = ExactMatch { ignore_case: true, ..ExactMatch::default() };
    let similar = FuzzyMatch { ignore_case: true, ..FuzzyMatch::default() };
    vec![
        Part::new("correct", 1.0, Kind::ExactMatch(exact)),
        Part::new("similar", 1.0, Kind::FuzzyMatch(similar)),
        Part::new("format", 0.5, Kind::FormatSoft(FormatSoft::default())),
        Part::new("citations", 0.2, Kind::Citations(Citations { target: 1 })),
        length(0.1, 0, 256, 128),
    ]
}

fn length(weight: f64, min: u32, max: u32, fade: u32) -> RewardConfig {
    Part::new("length", weight, Kind::LengthRange(LengthRange { min, max, fade }))
}

fn repetition(weight: f64) -> RewardConfig {
    Part::new("repetition", weight, Kind::RepetitionPenalty(RepetitionPenalty::default()))
}

fn forbidden(name: &str, weight: f64, phrases: &[&str]) -> RewardConfig {
    let phrases = phrases.iter().map(|phrase| (*phrase).to_owned()).collect();
    let kind = ForbiddenPhrases { phrases, penalty: 0.5, floor: -1.0, ignore_case: true };
    Part::new(name, weight, Kind::ForbiddenPhrases(kind))
}
