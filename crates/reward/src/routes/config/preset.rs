//! Lists of parts for common tasks.
//!
//! Weights follow the usual proportions: correctness 2, format 0.5 to 1, length 0.1 to 0.5, style up
//! to 0.5. References are metadata (or columns of a dataset).

use serde::{Deserialize, Serialize};

use super::reward::RewardConfig as Part;
use crate::kinds::{
    BetweenPairs, Citations, CodeParams, ExactMatch, ForbiddenPhrases, FormatIncremental,
    FormatSoft, FormatStrict, FuzzyMatch, Keywords, LengthRange, LengthUnit, MathEqual,
    ReasoningSteps, RegexMatch, RepetitionPenalty, RewardKind as Kind, TextSimilarity,
};

/// A list of parts for a task; `docs/rewards.md` describes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Preset {
    /// The three rewards that guides to GRPO with TRL begin with, for
    /// `<reasoning>…</reasoning><answer>…</answer>`; the reference is `answer`.
    Guides,
    /// Answers to mathematical questions as `<reasoning>…</reasoning><answer>…</answer>`; the
    /// reference is `answer`.
    MathReasoning,
    /// Programs in a fenced block, tested by `tests` and `cases`.
    CodeGeneration,
    /// Summaries, compared with `summary` and searched for `keywords`.
    Summarization,
    /// Short answers to questions as `<reasoning>…</reasoning><answer>…</answer>`; the reference is
    /// `answer`.
    QuestionAnswering,
}

impl Preset {
    /// Every preset.
    pub const ALL: [Self; 5] = [
        Self::Guides,
        Self::MathReasoning,
        Self::CodeGeneration,
        Self::Summarization,
        Self::QuestionAnswering,
    ];

    /// Its parts.
    pub fn parts(self) -> Vec<Part> {
        match self {
            Self::Guides => guides(),
            Self::MathReasoning => math_reasoning(),
            Self::CodeGeneration => code_generation(),
            Self::Summarization => summarization(),
            Self::QuestionAnswering => question_answering(),
        }
    }
}

fn guides() -> Vec<Part> {
    let tags = FormatIncremental {
        // The weight halves it: each trailing character costs 0.001.
        trailing_penalty: 0.002,
        charge_repeated: true,
        ..FormatIncremental::default()
    };
    let format = FormatSoft { between: BetweenPairs::Space, ..FormatSoft::default() };
    vec![
        Part::new("tags", 0.5, Kind::FormatIncremental(tags)),
        Part::new("format", 0.5, Kind::FormatSoft(format)),
        Part::new("correct", 2.0, Kind::ExactMatch(ExactMatch::default())),
    ]
}

fn math_reasoning() -> Vec<Part> {
    vec![
        Part::new("correct", 2.0, Kind::MathEqual(MathEqual::default())),
        Part::new("format", 0.5, Kind::FormatStrict(FormatStrict::default())),
        Part::new("tags", 0.5, Kind::FormatIncremental(FormatIncremental::default())),
        Part::new("steps", 0.2, Kind::ReasoningSteps(ReasoningSteps::default())),
        length(0.1, 0, 512, 256),
        repetition(0.2),
    ]
}

fn code_generation() -> Vec<Part> {
    let block = RegexMatch {
        pattern: r"(?s)\A[^`]*```\w+\n[^`]*```[^`]*\z".to_owned(),
        full: false,
        count: 1,
    };
    let phrases = ["TODO", "FIXME", "NotImplementedError", "your code here"];
    vec![
        Part::new("correct", 2.0, Kind::Code(CodeParams::default())),
        Part::new("format", 0.5, Kind::Regex(block)),
        forbidden("unfinished", 0.5, &phrases),
        length(0.1, 0, 1024, 512),
    ]
}

fn summarization() -> Vec<Part> {
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

fn question_answering() -> Vec<Part> {
    let exact = ExactMatch { ignore_case: true, ..ExactMatch::default() };
    let similar = FuzzyMatch { ignore_case: true, ..FuzzyMatch::default() };
    let citations = Citations { target: 1, ..Citations::default() };
    vec![
        Part::new("correct", 1.0, Kind::ExactMatch(exact)),
        Part::new("similar", 1.0, Kind::FuzzyMatch(similar)),
        Part::new("format", 0.5, Kind::FormatSoft(FormatSoft::default())),
        Part::new("citations", 0.2, Kind::Citations(citations)),
        length(0.1, 0, 256, 128),
    ]
}

fn length(weight: f64, min: u32, max: u32, fade: u32) -> Part {
    Part::new(
        "length",
        weight,
        Kind::LengthRange(LengthRange { min, max, fade, unit: LengthUnit::Tokens }),
    )
}

fn repetition(weight: f64) -> Part {
    Part::new("repetition", weight, Kind::RepetitionPenalty(RepetitionPenalty::default()))
}

fn forbidden(name: &str, weight: f64, phrases: &[&str]) -> Part {
    let phrases = phrases.iter().map(|phrase| (*phrase).to_owned()).collect();
    let kind = ForbiddenPhrases { phrases, penalty: 0.5, floor: -1.0, ignore_case: true };
    Part::new(name, weight, Kind::ForbiddenPhrases(kind))
}
