//! Makes the function of each kind.

use std::sync::Arc;

use regex::Regex;
use serde_json::Value;

use hone_core::config::Problem;
use hone_core::metrics::Metrics;

use crate::code::CodeReward;
use crate::config::{CodeParams, Ensemble, Grade, JsonSchema, Language, RewardKind, Shaping};
use crate::grader::Grader as OpenAiGrader;
use crate::judge::Judge;
use crate::library::compose::{Ensemble as EnsembleFn, Shaped};
use crate::library::format::Tags;
use crate::library::json::{LastSchema, Schema};
use crate::library::{Each, answer, choice, format, json, language, length, style};
use crate::script::ScriptReward;
use crate::text::Metric;
use crate::webhook::Webhook;
use crate::{RewardFn, ScoreInput, Tools, config};

type Grader = Arc<dyn RewardFn>;
type Built = Result<Grader, Problem>;

/// Makes functions for one part.
pub(super) struct Builder<'a> {
    pub(super) tools: &'a Tools,
    pub(super) route: &'a str,
    pub(super) part: &'a str,
}

impl Builder<'_> {
    /// The shaped function of a kind that [`RewardKind::check`] has passed; `None` for feedback.
    ///
    /// # Errors
    /// What cannot be compiled or had, its key relative to the part.
    pub(super) fn grader(
        &self,
        kind: &RewardKind,
        shape: Shaping,
    ) -> Result<Option<Grader>, Problem> {
        let inner =
            match kind {
                RewardKind::Code(p) => self.code(p)?,
                RewardKind::Script(p) => Arc::new(ScriptReward::new(p).map_err(|error| {
                    Problem::new("source", format!(" does not compile: {error}"))
                })?),
                RewardKind::Grader(p) => self.openai(p)?,
                RewardKind::Webhook(p) => {
                    let made = Webhook::new(p, self.route, self.part, &self.metrics()?);
                    Arc::new(made.map_err(sentence)?)
                }
                RewardKind::Judge(p) => {
                    let own = self.tools.own_model.clone();
                    let made = Judge::new(p, self.route, self.part, &self.metrics()?, own);
                    Arc::new(made.map_err(sentence)?)
                }
                RewardKind::Ensemble(p) => self.ensemble(p)?,
                kind => match plain(kind)? {
                    Some(inner) => inner,
                    None => return Ok(None),
                },
            };
        let shaped = || Arc::new(Shaped { inner: Arc::clone(&inner), shape });
        Ok(Some(if shape.is_default() { inner } else { shaped() }))
    }

    fn metrics(&self) -> Result<Arc<Metrics>, Problem> {
        match &self.tools.metrics {
            Some(metrics) => Ok(Arc::clone(metrics)),
            // Checking a configuration counts nothing.
            None => Metrics::new().map(Arc::new).map_err(sentence),
        }
    }

    fn code(&self, p: &CodeParams) -> Built {
        let made = CodeReward::new(p.clone(), self.tools.sandbox.clone());
        Ok(Arc::new(made.map_err(|error| Problem::new("language", format!(": {error}")))?))
    }

    fn openai(&self, p: &Grade) -> Built {
        let wrong = |why: String| Problem::new("grader", format!(" is not a grader: {why}"));
        let json = match &p.grader {
            Value::String(text) => {
                serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?
            }
            table => table.clone(),
        };
        let made = OpenAiGrader::new("grader", &json, self.tools.backends());
        let made = made.map_err(|error| wrong(error.to_string()))?;
        if made.needs_code() && self.tools.sandbox.is_none() {
            return Err(wrong("it runs Python, and there is no sandbox".to_owned()));
        }
        for model in p.models() {
            self.tools.check_model(&model).map_err(wrong)?;
        }
        Ok(Arc::new(made))
    }

    fn ensemble(&self, p: &Ensemble) -> Built {
        let mut members = Vec::with_capacity(p.of.len());
        for (i, member) in p.of.iter().enumerate() {
            let built = self
                .grader(&member.kind, member.shape)
                .map_err(|problem| problem.prefixed(&format!("of[{i}].")))?;
            members.extend(built);
        }
        Ok(Arc::new(EnsembleFn { members, how: p.how }))
    }
}

/// An error whose text begins with a key, or needs none.
fn sentence(error: impl std::fmt::Display) -> Problem {
    let text = error.to_string();
    let (key, says) = text.split_once([' ', ':']).unwrap_or(("kind", &text));
    Problem::new(key, format!(" {}", says.trim_start()))
}

/// The function of a kind that needs no more than its parameters; `None` for the others.
fn plain(kind: &RewardKind) -> Result<Option<Grader>, Problem> {
    use RewardKind as Kind;

    let built = match kind.clone() {
        Kind::Feedback(_)
        | Kind::Code(_)
        | Kind::Script(_)
        | Kind::Grader(_)
        | Kind::Webhook(_)
        | Kind::Judge(_)
        | Kind::Ensemble(_) => return Ok(None),
        Kind::TextSimilarity(p) => {
            let extract = extract(&p.extract)?;
            let metric = Metric::named(&p.metric)
                .ok_or_else(|| Problem::value("metric", format!("{:?}", p.metric), "a metric"))?;
            each(move |input| {
                let reference = input.metadata.get(&p.reference)?;
                let given = answer::answer(&input.text, extract.as_ref()).unwrap_or_default();
                Some(metric.score(given, reference))
            })
        }
        Kind::ExactMatch(p) => {
            let extract = extract(&p.extract)?;
            each(move |input| answer::exact_match(input, &p, extract.as_ref()))
        }
        Kind::FuzzyMatch(p) => {
            let extract = extract(&p.extract)?;
            each(move |input| answer::fuzzy_match(input, &p, extract.as_ref()))
        }
        Kind::NumericMatch(p) => {
            let extract = extract(&p.extract)?;
            each(move |input| answer::numeric_match(input, &p, extract.as_ref()))
        }
        Kind::MathEqual(p) => {
            let extract = extract(&p.extract)?;
            each(move |input| answer::math_equal(input, &p, extract.as_ref()))
        }
        Kind::ReasoningAccuracy(p) => {
            let extract = extract(&p.extract)?;
            each(move |input| answer::reasoning_accuracy(input, &p, extract.as_ref()))
        }
        Kind::MultipleChoice(p) => {
            let extract = extract(&p.extract)?;
            each(move |input| choice::multiple_choice(input, &p, extract.as_ref()))
        }
        Kind::Contains(p) => {
            let extract = extract(&p.extract)?;
            each(move |input| answer::contains(input, &p, extract.as_ref()))
        }
        Kind::Regex(p) => {
            let pattern = pattern(&p)?;
            each(move |input| Some(format::regex_match(&input.text, &pattern, p.count)))
        }
        Kind::FormatStrict(p) => {
            let tags = Tags::new(&p.tags);
            each(move |input| Some(format::format_strict(&input.text, &tags)))
        }
        Kind::FormatSoft(p) => {
            let tags = Tags::new(&p.tags);
            each(move |input| Some(format::format_soft(&input.text, &tags)))
        }
        Kind::FormatIncremental(p) => {
            let tags = Tags::new(&p.tags);
            let cost = p.trailing_penalty;
            each(move |input| Some(format::format_incremental(&input.text, &tags, cost)))
        }
        Kind::ThinkFormat(_) => each(|input| Some(format::think_format(&input.text))),
        Kind::ThinkAnswer(_) => {
            let tags = Tags::new(&["think", "answer"]);
            each(move |input| Some(format::think_answer(&input.text, &tags)))
        }
        Kind::JsonValid(p) => each(move |input| Some(json::json_valid(&input.text, p.fenced))),
        Kind::JsonSchema(p) => {
            let schema = schema(&p)?;
            each(move |input| json::json_schema(input, &schema, p.fenced))
        }
        Kind::IntegerAnswer(p) => {
            let extract = extract(&p.extract)?;
            each(move |input| Some(answer::integer_answer(&input.text, extract.as_ref())))
        }
        Kind::Length(p) => {
            each(move |input| Some(length::length(input.ids.len(), p.ideal, p.spread)))
        }
        Kind::LengthRange(p) => each(move |input| Some(length::length_range(input.ids.len(), &p))),
        Kind::CosineScaled(p) => cosine_scaled(p)?,
        Kind::SoftOverlong(p) => {
            each(move |input| Some(length::soft_overlong(input.ids.len(), &p)))
        }
        Kind::ReasoningSteps(p) => {
            each(move |input| Some(style::reasoning_steps(&input.text, p.target)))
        }
        Kind::Citations(p) => each(move |input| Some(style::citations(&input.text, p.target))),
        Kind::RepetitionPenalty(p) => each(move |input| Some(style::repetition_penalty(input, &p))),
        Kind::ForbiddenPhrases(p) => {
            let pattern = style::phrase_pattern(&p.phrases, p.ignore_case).map_err(|error| {
                Problem::new("phrases", format!(" cannot be searched for: {}", last_line(&error)))
            })?;
            each(move |input| Some(style::forbidden_phrases(&input.text, &p, &pattern)))
        }
        Kind::Language(p) => spoken(&p)?,
        Kind::Keywords(p) => each(move |input| answer::keywords(input, &p)),
    };
    Ok(Some(built))
}

fn each(score: impl Fn(&ScoreInput) -> Option<f64> + Send + Sync + 'static) -> Grader {
    Arc::new(Each(score))
}

fn cosine_scaled(p: config::CosineScaled) -> Built {
    let extract = extract(&p.extract)?;
    let equal = config::MathEqual {
        reference: p.reference.clone(),
        tolerance: p.tolerance,
        extract: p.extract.clone(),
    };
    Ok(each(move |input| {
        let correct = answer::math_equal(input, &equal, extract.as_ref())? == 1.0;
        Some(length::cosine_scaled(input.ids.len(), correct, &p))
    }))
}

fn spoken(p: &Language) -> Built {
    let allowed = "an ISO 639-3 code that can be told apart, such as \"eng\", \"deu\" or \"cmn\"";
    let wanted = language::by_code(&p.language)
        .ok_or_else(|| Problem::value("language", format!("{:?}", p.language), allowed))?;
    let confidence = p.confidence;
    Ok(each(move |input| language::language(&input.text, wanted, confidence)))
}

fn schema(p: &JsonSchema) -> Result<Schema, Problem> {
    if let Some(key) = &p.schema_from {
        return Ok(Schema::Metadata(key.clone(), LastSchema::default()));
    }
    let unsound = |why: String| Problem::new("schema", format!(" is not a JSON schema: {why}"));
    let parsed = match &p.schema {
        Some(Value::String(text)) => {
            serde_json::from_str(text).map_err(|error| unsound(error.to_string()))?
        }
        other => other.clone().unwrap_or_default(),
    };
    json::compile(&parsed).map(Schema::Fixed).map_err(unsound)
}

fn pattern(p: &config::Regex) -> Result<Regex, Problem> {
    let plain = compiled("pattern", &p.pattern)?;
    if !p.full {
        return Ok(plain);
    }
    compiled("pattern", &format!(r"\A\s*(?:{})\s*\z", p.pattern))
}

fn extract(pattern: &str) -> Result<Option<Regex>, Problem> {
    if pattern.is_empty() {
        return Ok(None);
    }
    let regex = compiled("extract", pattern)?;
    if regex.captures_len() < 2 {
        let allowed = "a pattern with a group, in parentheses, around the answer";
        return Err(Problem::value("extract", format!("`{pattern}`"), allowed));
    }
    Ok(Some(regex))
}

fn compiled(key: &str, pattern: &str) -> Result<Regex, Problem> {
    Regex::new(pattern).map_err(|error| {
        let allowed = format!("a regular expression ({})", last_line(&error));
        Problem::value(key, format!("`{pattern}`"), &allowed)
    })
}

/// Syntax errors are drawn over several lines; the last one says what is wrong.
fn last_line(error: &regex::Error) -> String {
    let text = error.to_string();
    let last = text.lines().last().unwrap_or_default().trim();
    last.strip_prefix("error: ").unwrap_or(last).to_owned()
}
