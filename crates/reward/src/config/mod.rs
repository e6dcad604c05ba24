//! Routes, their reward parts, and the parameters of every kind of part.
//!
//! To add a kind: its parameter struct (with `check`) in one of the files here, one line in
//! [`RewardKind`], one in [`KINDS`], one arm in [`RewardKind::check`], one in the registry, one
//! entry in the catalogue. Tests in `reward::catalogue` hold them equal.

mod code;
mod correctness;
mod ensemble;
mod feedback;
mod flat;
mod format;
mod grade;
mod judge;
mod length;
mod preset;
mod shape;
mod style;
mod webhook;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use hone_core::config::describe::Problem;

pub use code::{CodeLanguage, CodeParams, ScriptParams};
pub use correctness::{
    Contains, ContainsMode, ExactMatch, FuzzyMatch, MathEqual, MultipleChoice, NumericMatch,
    ReasoningAccuracy,
};
pub use ensemble::{Ensemble, EnsembleHow, EnsembleMember};
pub use feedback::{Aggregate, FeedbackParams, FeedbackType, ShareRule};
pub use format::{
    FormatIncremental, FormatSoft, FormatStrict, IntegerAnswer, JsonSchema, JsonValid, Regex,
    ThinkAnswer, ThinkFormat,
};
pub use grade::{Grade, METRICS, OWN_MODEL, TextSimilarity};
pub use judge::{JudgeMode, JudgeParams, Rubric, TokenLimitField};
pub use length::{CosineScaled, Length, LengthRange, SoftOverlong};
pub use preset::Preset;
pub use shape::{AdaptiveConfig, Shaping};
pub use style::{
    Citations, ForbiddenPhrases, Keywords, Language, ReasoningSteps, RepetitionPenalty,
    RepetitionUnit,
};
pub use webhook::{CallLimits, WebhookParams};
pub(crate) use webhook::{call_limits, check_url};

/// Which rewards apply to which requests.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouteConfig {
    /// The name in metrics and the ledger.
    pub name: String,
    /// The model name a request must have; any where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Parts that stand before the route's own; one of the route's own with the same name replaces
    /// the preset's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preset: Option<Preset>,
    /// `metadata` entries a request must have; `"*"` matches any value.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    /// The route's own parts, as written; [`RouteConfig::parts`] has the preset's too.
    #[serde(default, rename = "reward")]
    pub rewards: Vec<RewardConfig>,
}

impl RouteConfig {
    /// Every part of the reward: the preset's, each replaced by the route's own of the same name,
    /// then the rest of the route's own.
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

/// One named, weighted part of a route's reward; in TOML one flat table
/// `name, kind, weight, clip, scale, offset, adaptive, <the kind's parameters>`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "toml::Table")]
pub struct RewardConfig {
    /// The part's name, unique within the route; for `feedback` the name that clients post.
    pub name: String,
    /// What it adds to the advantage per unit.
    pub weight: f64,
    /// Which function, and its parameters.
    pub kind: RewardKind,
    /// What is done to its values.
    pub shape: Shaping,
    /// Whether its weight follows its success rate.
    pub adaptive: Option<AdaptiveConfig>,
}

impl RewardConfig {
    /// A part whose values are left as they are and whose weight stays.
    pub fn new(name: &str, weight: f64, kind: RewardKind) -> Self {
        Self { name: name.to_owned(), weight, kind, shape: Shaping::default(), adaptive: None }
    }

    /// Ranges of everything but the name.
    ///
    /// # Errors
    /// The first value that is out of range, its key relative to the part.
    pub fn check(&self) -> Result<(), Problem> {
        hone_core::config::range::finite("weight", self.weight)?;
        self.shape.check("")?;
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

/// Every reward function with its parameters.
///
/// Unless said otherwise the text is the whole completion, and a missing reference makes the part
/// missing, not zero.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RewardKind {
    /// What clients post to `/v1/feedback` under this part's name.
    Feedback(FeedbackParams),
    /// Whether the answer equals the reference, letter for letter.
    ExactMatch(ExactMatch),
    /// How alike answer and reference are.
    FuzzyMatch(FuzzyMatch),
    /// Whether the answer is the reference's number.
    NumericMatch(NumericMatch),
    /// Whether answer and reference are the same mathematical value.
    MathEqual(MathEqual),
    /// `math_equal`, counted only after the reasoning has ended.
    ReasoningAccuracy(ReasoningAccuracy),
    /// Whether the chosen letter is the reference's.
    MultipleChoice(MultipleChoice),
    /// Whether texts occur in the completion.
    Contains(Contains),
    /// Whether a regex matches.
    Regex(Regex),
    /// Whether the completion is its tags and nothing else.
    FormatStrict(FormatStrict),
    /// Whether the tags stand in order.
    FormatSoft(FormatSoft),
    /// Partial credit for each tag.
    FormatIncremental(FormatIncremental),
    /// Whether the completion thinks once, then speaks.
    ThinkFormat(ThinkFormat),
    /// Whether the completion is `<think>…</think><answer>…</answer>`.
    ThinkAnswer(ThinkAnswer),
    /// Whether the completion is JSON.
    JsonValid(JsonValid),
    /// Whether the completion is JSON of a schema.
    JsonSchema(JsonSchema),
    /// Whether the answer is a whole number.
    IntegerAnswer(IntegerAnswer),
    /// A peak at an ideal length.
    Length(Length),
    /// A range of lengths.
    LengthRange(LengthRange),
    /// Correctness scaled by length.
    CosineScaled(CosineScaled),
    /// A penalty for lengths near the limit.
    SoftOverlong(SoftOverlong),
    /// Markers of steps.
    ReasoningSteps(ReasoningSteps),
    /// Sources named.
    Citations(Citations),
    /// A penalty for saying things again.
    RepetitionPenalty(RepetitionPenalty),
    /// A penalty for phrases.
    ForbiddenPhrases(ForbiddenPhrases),
    /// Whether the completion is in a language.
    Language(Language),
    /// The share of keywords present.
    Keywords(Keywords),
    /// Several kinds as one part.
    Ensemble(Ensemble),
    /// How alike answer and reference are, by a metric of texts.
    TextSimilarity(TextSimilarity),
    /// The share of a program's tests that pass.
    Code(CodeParams),
    /// A script's value.
    Script(ScriptParams),
    /// An OpenAI grader.
    Grader(Grade),
    /// What a service answers.
    Webhook(WebhookParams),
    /// What a language model thinks.
    Judge(JudgeParams),
}

/// The `kind`s in TOML, in the order of [`RewardKind`].
pub const KINDS: [&str; 34] = [
    "feedback",
    "exact_match",
    "fuzzy_match",
    "numeric_match",
    "math_equal",
    "reasoning_accuracy",
    "multiple_choice",
    "contains",
    "regex",
    "format_strict",
    "format_soft",
    "format_incremental",
    "think_format",
    "think_answer",
    "json_valid",
    "json_schema",
    "integer_answer",
    "length",
    "length_range",
    "cosine_scaled",
    "soft_overlong",
    "reasoning_steps",
    "citations",
    "repetition_penalty",
    "forbidden_phrases",
    "language",
    "keywords",
    "ensemble",
    "text_similarity",
    "code",
    "script",
    "grader",
    "webhook",
    "judge",
];

impl RewardKind {
    /// Ranges of the parameters. What needs compiling (patterns, schemas) is checked by
    /// `reward::Routes::new`.
    ///
    /// # Errors
    /// The first value that is out of range, its key relative to the part.
    pub fn check(&self) -> Result<(), Problem> {
        match self {
            Self::ExactMatch(_)
            | Self::ThinkFormat(_)
            | Self::ThinkAnswer(_)
            | Self::JsonValid(_)
            | Self::IntegerAnswer(_) => Ok(()),
            Self::Feedback(p) => p.check(""),
            Self::FuzzyMatch(p) => p.check(),
            Self::NumericMatch(p) => p.check(),
            Self::MathEqual(p) => p.check(),
            Self::ReasoningAccuracy(p) => p.check(),
            Self::MultipleChoice(p) => p.check(),
            Self::Contains(p) => p.check(),
            Self::Regex(p) => p.check(),
            Self::FormatStrict(p) => format::check_tags(&p.tags),
            Self::FormatSoft(p) => format::check_tags(&p.tags),
            Self::FormatIncremental(p) => p.check(),
            Self::JsonSchema(p) => p.check(),
            Self::Length(p) => p.check(),
            Self::LengthRange(p) => p.check(),
            Self::CosineScaled(p) => p.check(),
            Self::SoftOverlong(p) => p.check(),
            Self::ReasoningSteps(p) => p.check(),
            Self::Citations(p) => p.check(),
            Self::RepetitionPenalty(p) => p.check(),
            Self::ForbiddenPhrases(p) => p.check(),
            Self::Language(p) => p.check(),
            Self::Keywords(p) => p.check(),
            Self::TextSimilarity(p) => p.check(),
            Self::Code(p) => p.check(),
            Self::Script(p) => p.check(),
            Self::Grader(_) => Ok(()),
            Self::Webhook(p) => p.check(""),
            Self::Judge(p) => p.check(""),
            Self::Ensemble(p) => p.check(),
        }
        .map_err(|problem| Problem {
            key: problem.key.trim_start_matches('.').to_owned(),
            ..problem
        })
    }

    /// Its name in TOML.
    pub fn name(&self) -> &'static str {
        // serde knows the names; one of them is the only key that it writes.
        let written = serde_json::to_value(self).ok();
        let key = written.as_ref().and_then(|v| v.as_object()?.keys().next().cloned());
        KINDS.into_iter().find(|kind| Some(*kind) == key.as_deref()).unwrap_or_default()
    }

    /// Looks up the secrets that the parameters name.
    ///
    /// # Errors
    /// A sentence that begins with the key.
    pub fn resolve(&mut self, lookup: &dyn Fn(&str) -> Option<String>) -> Result<(), String> {
        match self {
            Self::Webhook(p) => p.resolve(lookup).map_err(|error| format!("secret_env{error}")),
            Self::Judge(p) => p.resolve(lookup).map_err(|error| format!("api_key_env{error}")),
            Self::Ensemble(p) => p.of.iter_mut().try_for_each(|member| member.kind.resolve(lookup)),
            _ => Ok(()),
        }
    }

    /// Whether running it takes the sandbox.
    pub fn needs_sandbox(&self) -> bool {
        match self {
            Self::Code(p) => p.language == CodeLanguage::Python,
            Self::Grader(p) => p.runs_python(),
            Self::Ensemble(p) => p.of.iter().any(|member| member.kind.needs_sandbox()),
            _ => false,
        }
    }

    /// Whether it asks this server's own base model.
    pub fn needs_own_model(&self) -> bool {
        match self {
            Self::Judge(p) => p.base_url == "self",
            Self::Grader(p) => p.models().iter().any(|model| model == OWN_MODEL),
            Self::Ensemble(p) => p.of.iter().any(|member| member.kind.needs_own_model()),
            _ => false,
        }
    }
}

/// Default metadata key of a reference.
fn answer_key() -> String {
    "answer".to_owned()
}

/// Default pattern that finds the answer.
fn answer_pattern() -> String {
    r"(?s)<answer>(.*?)</answer>".to_owned()
}

/// Routes in order; the default is one that matches everything and learns from `thumbs`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RouteList(pub Vec<RouteConfig>);

impl Default for RouteList {
    fn default() -> Self {
        let thumbs =
            RewardConfig::new("thumbs", 1.0, RewardKind::Feedback(FeedbackParams::default()));
        let name = "default".to_owned();
        Self(vec![RouteConfig { name, rewards: vec![thumbs], ..RouteConfig::default() }])
    }
}

#[cfg(test)]
mod tests;
