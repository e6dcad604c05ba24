//! Makes the function of each kind.

use std::sync::Arc;

use regex::Regex;
use serde_json::Value;

use crate::config::reward::{Ensemble, JsonSchema, Language, RewardKind, Shape};
use crate::config::{Problem, reward};
use crate::reward::library::compose::{Ensemble as EnsembleFn, Shaped};
use crate::reward::library::format::{self, Tags};
use crate::reward::library::json::{self, LastSchema, Schema};
use crate::reward::library::{Each, answer, choice, language, length, style};
use crate::reward::{RewardFn, ScoreInput};

type Grader = Arc<dyn RewardFn>;
type Built = Result<Grader, Problem>;

/// The shaped function of a kind that [`RewardKind::check`] has passed; `None` for feedback.
///
/// # Errors
/// What cannot be compiled, its key relative to the part.
pub(super) fn grader(kind: &RewardKind, shape: Shape) -> Result<Option<Grader>, Problem> {
    let Some(inner) = plain(kind)? else { return Ok(None) };
    let shaped = || Arc::new(Shaped { inner: Arc::clone(&inner), shape });
    Ok(Some(if shape.is_default() { inner } else { shaped() }))
}

fn plain(kind: &RewardKind) -> Result<Option<Grader>, Problem> {
    use RewardKind as Kind;
    let built = match kind.clone() {
        Kind::Feedback(_) => return Ok(None),
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
        Kind::Ensemble(p) => ensemble(&p)?,
    };
    Ok(Some(built))
}

fn each(score: impl Fn(&ScoreInput) -> Option<f64> + Send + Sync + 'static) -> Grader {
    Arc::new(Each(score))
}

fn cosine_scaled(p: reward::CosineScaled) -> Built {
    let extract = extract(&p.extract)?;
    let equal = reward::MathEqual {
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

fn ensemble(p: &Ensemble) -> Built {
    let mut members = Vec::with_capacity(p.of.len());
    for (i, member) in p.of.iter().enumerate() {
        let built = grader(&member.kind, member.shape)
            .map_err(|inner| Problem::new(format!("of[{i}].{}", inner.key), inner.says))?;
        members.extend(built);
    }
    Ok(Arc::new(EnsembleFn { members, how: p.how }))
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

fn pattern(p: &reward::Regex) -> Result<Regex, Problem> {
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
