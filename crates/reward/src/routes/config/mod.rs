//! Configuration of routes and of their reward parts.

use std::collections::BTreeMap;

use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};
use toml::Table;

use hone_core::config::{Checked, Problem, finite};

use crate::kinds::{FeedbackParams, RewardKind, Shaping, read, read_kind, split_off};
use crate::kinds::{take_kind, write_kind};
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
    /// Whether a request for `model` with this metadata belongs to the route, if no earlier route takes it.
    pub(super) fn matches(&self, model: &str, metadata: &BTreeMap<String, String>) -> bool {
        self.model.as_deref().is_none_or(|wanted| wanted == model)
            && self.metadata.iter().all(|(key, wanted)| {
                metadata.get(key).is_some_and(|value| wanted == "*" || wanted == value)
            })
    }

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
    pub fn parts(self) -> Vec<RewardConfig> {
        let text = match self {
            Self::Guides => GUIDES,
            Self::MathReasoning => MATH_REASONING,
            Self::CodeGeneration => CODE_GENERATION,
            Self::Summarization => SUMMARIZATION,
            Self::QuestionAnswering => QUESTION_ANSWERING,
        };
        // Cannot fail: a test reads all of them.
        toml::from_str::<PresetParts>(text).map(|preset| preset.reward).unwrap_or_default()
    }
}

#[derive(Deserialize)]
struct PresetParts {
    reward: Vec<RewardConfig>,
}

// The weight of `tags` halves its penalty: each trailing character costs 0.001.
const GUIDES: &str = r#"reward = [
    { name = "tags", weight = 0.5, kind = "format_incremental", trailing_penalty = 0.002, charge_repeated = true },
    { name = "format", weight = 0.5, kind = "format_soft", between = "space" },
    { name = "correct", weight = 2.0, kind = "exact_match" },
]"#;

const MATH_REASONING: &str = r#"reward = [
    { name = "correct", weight = 2.0, kind = "math_equal" },
    { name = "format", weight = 0.5, kind = "format_strict" },
    { name = "tags", weight = 0.5, kind = "format_incremental" },
    { name = "steps", weight = 0.2, kind = "reasoning_steps" },
    { name = "length", weight = 0.1, kind = "length_range", max = 512, fade = 256 },
    { name = "repetition", weight = 0.2, kind = "repetition_penalty" },
]"#;

const CODE_GENERATION: &str = r#"reward = [
    { name = "correct", weight = 2.0, kind = "code" },
    { name = "format", weight = 0.5, kind = "regex", pattern = '(?s)\A[^`]*```\w+\n[^`]*```[^`]*\z' },
    { name = "unfinished", weight = 0.5, kind = "forbidden_phrases", phrases = [
        "TODO", "FIXME", "NotImplementedError", "your code here",
    ] },
    { name = "length", weight = 0.1, kind = "length_range", max = 1024, fade = 512 },
]"#;

const SUMMARIZATION: &str = r#"reward = [
    { name = "similar", weight = 1.0, kind = "text_similarity", metric = "rouge_l", reference = "summary", extract = "" },
    { name = "keywords", weight = 1.0, kind = "keywords" },
    { name = "length", weight = 0.5, kind = "length_range", min = 20, max = 160, fade = 80 },
    { name = "repetition", weight = 0.5, kind = "repetition_penalty" },
    { name = "preamble", weight = 0.2, kind = "forbidden_phrases", phrases = [
        "here is a summary", "here's a summary", "this text is about", "in summary",
    ] },
]"#;

const QUESTION_ANSWERING: &str = r#"reward = [
    { name = "correct", weight = 1.0, kind = "exact_match", ignore_case = true },
    { name = "similar", weight = 1.0, kind = "fuzzy_match", ignore_case = true },
    { name = "format", weight = 0.5, kind = "format_soft" },
    { name = "citations", weight = 0.2, kind = "citations", target = 1 },
    { name = "length", weight = 0.1, kind = "length_range", max = 256, fade = 128 },
]"#;

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
        let is_users = matches!(self.kind, RewardKind::Feedback(_) | RewardKind::Learned(_));
        if is_users && !self.shape.is_default() {
            let name = self.kind.name();
            let keys =
                format!("clip, scale and offset shape what a grader computes: this part is {name}");
            return Err(Problem::new("kind", format!(" is {name:?}: {keys}")));
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
        let kind = take_kind(&mut table)?;
        let CommonKeys { name, weight, adaptive } =
            read(split_off(&mut table, &["name", "weight", "adaptive"]))?;
        let (shape, kind) = read_kind(&kind, table)?;
        Ok(Self { name, weight, kind, shape, adaptive })
    }
}

impl Serialize for RewardConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("name", &self.name)?;
        map.serialize_entry("weight", &self.weight)?;
        write_kind(&mut map, &self.shape, &self.kind)?;
        if let Some(adaptive) = &self.adaptive {
            map.serialize_entry("adaptive", adaptive)?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests;
