//! Configuration of routes and of their reward parts.

use std::collections::BTreeMap;

use RewardConfig as Part;
use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};
use toml::Table;

use hone_core::config::{Checked, Problem, finite};

use crate::kinds::{
    BetweenPairs, Citations, CodeParams, ExactMatch, FeedbackParams, ForbiddenPhrases,
    FormatIncremental, FormatSoft, FormatStrict, FuzzyMatch, Keywords, LengthRange, LengthUnit,
    MathEqual, ReasoningSteps, RegexMatch, RepetitionPenalty, RewardKind, RewardKind as Kind,
    Shaping, TextSimilarity, flat,
};
use crate::routes::adaptive::AdaptiveConfig;

/// A route: which requests it matches, and the parts of their reward.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouteConfig {
    /// The route's name in metrics and the ledger.
    pub name: String,
    /// The model name that a request must have; absent: any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Parts before those in `reward`; a part in `reward` replaces the preset's of the same name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preset: Option<Preset>,
    /// `metadata` entries that a request must have; `"*"` matches any value.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    /// Whether requests of the route may be recorded and learned from; absent: yes. With `false` nothing
    /// of them is kept, whatever the request says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<bool>,
    /// The parts in the file; [`RouteConfig::parts`] includes the preset's.
    #[serde(default, rename = "reward")]
    pub rewards: Vec<RewardConfig>,
}

impl RouteConfig {
    /// Every part of the reward: the preset's, each replaced by the one in `reward` of the same
    /// name, then the rest of `reward`.
    pub fn parts(&self) -> Vec<RewardConfig> {
        let mut parts = self.preset.map_or_else(Vec::new, Preset::parts);
        let from_preset = parts.len();
        for own in &self.rewards {
            let (preset, _) = parts.split_at_mut(from_preset);
            match preset.iter_mut().find(|part| part.name == own.name) {
                Some(part) => *part = own.clone(),
                None => parts.push(own.clone()),
            }
        }
        parts
    }
}

/// Routes in order. The default is one route that matches every request and learns from the
/// feedback `thumbs`, from 0 to 1. Without bounds it would be no evidence of a canary.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RouteList(pub Vec<RouteConfig>);

impl Default for RouteList {
    fn default() -> Self {
        let range = Some([0.0, 1.0]);
        let thumbs = RewardKind::Feedback(FeedbackParams { range, ..FeedbackParams::default() });
        Self(vec![RouteConfig {
            name: "default".to_owned(),
            rewards: vec![RewardConfig::new("thumbs", 1.0, thumbs)],
            ..RouteConfig::default()
        }])
    }
}

// Lists of parts for common tasks.
//
// Weights follow the usual proportions: correctness 2, format 0.5 to 1, length 0.1 to 0.5, style up
// to 0.5. References are metadata (or columns of a dataset).

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

// One part of a route's reward.

/// One named, weighted part of a route's reward; in TOML one flat table
/// `name, kind, weight, clip, scale, offset, adaptive, <the kind's parameters>`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "Table")]
pub struct RewardConfig {
    /// The part's name, unique within the route; for `feedback` the name that clients post.
    pub name: String,
    /// The factor of the part's advantage.
    pub weight: f64,
    /// The kind with its parameters.
    pub kind: RewardKind,
    /// How the values are shaped.
    pub shape: Shaping,
    /// How the weight follows the success rate; absent: it is constant.
    pub adaptive: Option<AdaptiveConfig>,
}

impl RewardConfig {
    /// A part without shaping and with a constant weight.
    pub fn new(name: &str, weight: f64, kind: RewardKind) -> Self {
        Self { name: name.to_owned(), weight, kind, shape: Shaping::default(), adaptive: None }
    }

    /// Checks the ranges of everything but the name.
    ///
    /// # Errors
    /// The first value that is out of range, its key relative to the part.
    pub fn check(&self) -> Checked {
        finite("weight", self.weight)?;
        self.shape.check()?;
        if let (RewardKind::Feedback(_), false) = (&self.kind, self.shape.is_default()) {
            let keys = "clip, scale and offset shape what a grader computes: this part is feedback";
            return Err(Problem::new("kind", format!(" is \"feedback\": {keys}")));
        }
        if let Some(adaptive) = &self.adaptive {
            adaptive.check(self.weight)?;
        }
        self.kind.check()
    }
}

/// The keys of a part that do not depend on its kind.
#[derive(Deserialize)]
struct CommonKeys {
    name: String,
    #[serde(default = "one")]
    weight: f64,
    adaptive: Option<AdaptiveConfig>,
}

fn one() -> f64 {
    1.0
}

impl TryFrom<Table> for RewardConfig {
    type Error = String;

    fn try_from(mut table: Table) -> Result<Self, String> {
        let kind = flat::take_kind::<RewardKind>(&mut table)?;
        let CommonKeys { name, weight, adaptive } =
            flat::read(flat::split_off(&mut table, &["name", "weight", "adaptive"]))?;
        let (shape, kind) = flat::read_kind(&kind, table)?;
        Ok(Self { name, weight, kind, shape, adaptive })
    }
}

impl Serialize for RewardConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("name", &self.name)?;
        map.serialize_entry("weight", &self.weight)?;
        flat::write_kind(&mut map, &self.shape, &self.kind)?;
        if let Some(adaptive) = &self.adaptive {
            map.serialize_entry("adaptive", adaptive)?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests;
