//! Kinds that compare the completion with a reference.

pub mod multiple_choice;

use serde::{Deserialize, Serialize};

use hone_core::config::describe::one_of;
use hone_core::text::trim;

use crate::kinds::answer::has_word;
use crate::kinds::prelude::*;
use crate::math::{boxed, is_blank, parse_amount, same};
use crate::text::{Metric, character_ratio, matching_blocks};

define_kind! {
    pub struct ExactMatch {
        /// Metadata key of the reference.
        pub reference: String = answer_key(),
        /// Whether letter case is ignored.
        pub ignore_case: bool = false,
        /// Regex whose first group is the answer; empty takes the whole completion.
        pub extract: String = answer_pattern(),
    }
    kind: "exact_match",
    range: "0 or 1",
    typical_weight: "2.0",
    formula: "1 if the extracted answer equals metadata[reference], white space at both ends \
              trimmed, else 0; missing without a reference",
}

impl Kind for ExactMatch {
    fn build(&self, _: &BuildContext<'_>) -> Built {
        let ignore_case = self.ignore_case;
        compared(&self.extract, &self.reference, move |answer, wanted| {
            let wanted = trim(wanted);
            Some(indicator(answer.is_some_and(|answer| match ignore_case {
                true => answer.to_lowercase() == wanted.to_lowercase(),
                false => answer == wanted,
            })))
        })
    }
}

define_kind! {
    pub struct Keywords {
        /// The keywords; empty takes the reference.
        pub keywords: Vec<String> = Vec::new() => no_texts_or(64),
        /// Metadata key of the reference for an empty list: a JSON list, or words separated by commas.
        pub reference: String = "keywords".to_owned(),
    }
    kind: "keywords",
    typical_weight: "0.5 to 1.0",
    formula: "share of the keywords, or of the list in metadata[reference] where none are given, \
              that occur as whole words, letter case ignored; missing without either",
}

impl Kind for Keywords {
    fn build(&self, _: &BuildContext<'_>) -> Built {
        let p = self.clone();
        per_sample(move |input| {
            let commas = |value: &str| value.split(',').map(str::to_owned).collect();
            let words = listed_or_referenced(&p.keywords, input, &p.reference, commas)?;
            let text = input.text.to_lowercase();
            let found = words.iter().filter(|word| has_word(&text, &word.to_lowercase())).count();
            Some(found as f64 / words.len() as f64)
        })
    }

    fn reads(&self) -> Vec<String> {
        if self.keywords.is_empty() { vec![self.reference.clone()] } else { Vec::new() }
    }
}

/// How many of the phrases must occur.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ContainsMode {
    /// Every one.
    #[default]
    All,
    /// At least one.
    Any,
}

define_kind! {
    pub struct Contains {
        /// The phrases; empty takes the reference.
        pub phrases: Vec<String> = Vec::new() => no_texts_or(64),
        /// Metadata key of the reference for an empty list: one phrase, or a JSON list.
        pub reference: String = answer_key(),
        /// How many of the phrases must occur.
        pub mode: ContainsMode = ContainsMode::All,
        /// Whether letter case is ignored.
        pub ignore_case: bool = false,
        /// Regex whose first group is searched; empty takes the whole completion.
        pub extract: String = String::new(),
    }
    kind: "contains",
    range: "0 or 1",
    typical_weight: "1.0",
    formula: "1 if all (mode \"any\": one) of the phrases, or of metadata[reference] where none \
              are listed, occur, else 0; missing without either",
}

impl Kind for Contains {
    fn build(&self, _: &BuildContext<'_>) -> Built {
        let (p, finder) = (self.clone(), AnswerFinder::new(&self.extract)?);
        per_sample(move |input| {
            let whole = |value: &str| vec![value.to_owned()];
            let phrases = listed_or_referenced(&p.phrases, input, &p.reference, whole)?;
            let Some(text) = finder.find(&input.text) else { return Some(0.0) };
            let lower = p.ignore_case.then(|| text.to_lowercase());
            let occurs = |phrase: &String| match &lower {
                Some(text) => text.contains(&phrase.to_lowercase()),
                None => text.contains(phrase.as_str()),
            };
            Some(indicator(match p.mode {
                ContainsMode::All => phrases.iter().all(occurs),
                ContainsMode::Any => phrases.iter().any(occurs),
            }))
        })
    }

    fn reads(&self) -> Vec<String> {
        if self.phrases.is_empty() { vec![self.reference.clone()] } else { Vec::new() }
    }
}

/// Most characters of either text that are compared: the time is their product.
const MOST_CHARS: usize = 4096;

/// How similarity is measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FuzzyMethod {
    /// Rapidfuzz's `fuzz.ratio` divided by 100, with `threshold` as its `score_cutoff`.
    #[default]
    Indel,
    /// Python's `difflib`, as in the guides to GRPO: [`matching_blocks`].
    MatchingBlocks,
}

define_kind! {
    pub struct FuzzyMatch {
        /// Metadata key of the reference.
        pub reference: String = answer_key(),
        /// Whether letter case is ignored.
        pub ignore_case: bool = false,
        /// Similarities below this count as 0.
        pub threshold: f64 = 0.0 => between(0.0, 1.0),
        /// How similarity is measured.
        pub method: FuzzyMethod = FuzzyMethod::Indel,
        /// Regex whose first group is the answer; empty takes the whole completion.
        pub extract: String = answer_pattern(),
    }
    kind: "fuzzy_match",
    typical_weight: "1.0",
    formula: "1 - (insertions and deletions from answer to reference) / (characters of both), 0 \
              where that is below threshold (rapidfuzz's ratio / 100); the first 4,096 characters \
              count. With method = \"matching_blocks\" the ratio of Python's difflib, of the first \
              1,024 characters. Missing without a reference",
}

impl Kind for FuzzyMatch {
    fn build(&self, _: &BuildContext<'_>) -> Built {
        let p = self.clone();
        compared(&self.extract, &self.reference, move |answer, wanted| {
            let (Some(answer), wanted) = (answer, trim(wanted)) else { return Some(0.0) };
            let similarity = match p.method {
                FuzzyMethod::Indel => similarity,
                FuzzyMethod::MatchingBlocks => matching_blocks,
            };
            let ratio = match p.ignore_case {
                true => similarity(&answer.to_lowercase(), &wanted.to_lowercase()),
                false => similarity(answer, wanted),
            };
            Some(if ratio < p.threshold { 0.0 } else { ratio })
        })
    }
}

fn similarity(a: &str, b: &str) -> f64 {
    character_ratio(a, b, MOST_CHARS)
}

define_kind! {
    pub struct NumericMatch {
        /// Metadata key of the reference.
        pub reference: String = answer_key(),
        /// Largest absolute difference.
        pub tolerance: f64 = 1e-6 => at_least(0.0),
        /// Largest difference as a share of the reference.
        pub relative_tolerance: f64 = 0.0 => at_least(0.0),
        /// Regex whose first group is the answer; empty takes the whole completion.
        pub extract: String = answer_pattern(),
    }
    kind: "numeric_match",
    range: "0 or 1",
    typical_weight: "2.0",
    formula: "1 if |number in the extracted answer - number in metadata[reference]| <= \
              max(tolerance, relative_tolerance x |reference|), else 0; missing without a numeric \
              reference",
}

impl Kind for NumericMatch {
    fn build(&self, _: &BuildContext<'_>) -> Built {
        let (absolute, relative) = (self.tolerance, self.relative_tolerance);
        compared(&self.extract, &self.reference, move |answer, wanted| {
            let (answer, wanted) = (answer.and_then(parse_amount), parse_amount(wanted)?);
            let allowed = absolute.max(relative * wanted.abs());
            Some(indicator(answer.is_some_and(|answer| (answer - wanted).abs() <= allowed)))
        })
    }
}

define_kind! {
    pub struct TextSimilarity {
        /// The metric's name, one of [`Metric::ALL`].
        pub metric: String,
        /// Metadata key of the reference.
        pub reference: String = answer_key(),
        /// Regex whose first group is the answer; empty takes the whole completion.
        pub extract: String = answer_pattern(),
    }
    kind: "text_similarity",
    typical_weight: "1.0",
    example: "metric = \"rouge_l\"",
    formula: "similarity of the extracted answer and metadata[reference] by a metric: bleu \
              (sacrebleu), gleu and meteor (nltk, without synonyms), rouge_1 to rouge_5 and \
              rouge_l (rouge-score, F), cosine (of token counts), fuzzy_match (rapidfuzz ratio); \
              missing without a reference",
}

impl TextSimilarity {
    fn metric(&self) -> Result<Metric, Problem> {
        Metric::named(&self.metric).ok_or_else(|| {
            let allowed = one_of(&Metric::ALL.map(|(name, _)| quoted(name)));
            Problem::value("metric", quoted(&self.metric), &allowed)
        })
    }
}

impl Kind for TextSimilarity {
    fn check(&self) -> Checked {
        self.metric().map(drop)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let metric = self.metric()?;
        compared(&self.extract, &self.reference, move |answer, wanted| {
            Some(metric.score(answer.unwrap_or_default(), wanted))
        })
    }
}

define_kind! {
    /// After TRL's `reasoning_accuracy_reward`, which compares answers by another library and
    /// scores 0 where reasoning without an end lacks a reference.
    pub struct ReasoningAccuracy {
        /// Metadata key of the reference.
        pub reference: String = answer_key(),
        /// Texts that end the reasoning; the first of the list that occurs counts, where it occurs
        /// last.
        pub delimiters: Vec<String> = vec!["</think>".to_owned()] => texts(16),
        /// As in `math_equal`.
        pub tolerance: f64 = 1e-6 => at_least(0.0),
        /// As in `math_equal`, within the text after the reasoning.
        pub extract: String = answer_pattern(),
    }
    kind: "reasoning_accuracy",
    range: "0 or 1",
    typical_weight: "2.0",
    formula: "math_equal of the text after the end of the reasoning, 0 where it never ends; \
              missing without a reference",
}

impl Kind for ReasoningAccuracy {
    fn find_answer(&self, text: &str, finder: &AnswerFinder) -> Option<String> {
        find_math(self.after_reasoning(text)?, finder).map(str::to_owned)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let (p, finder) = (self.clone(), AnswerFinder::new(&self.extract)?);
        per_sample(move |input| {
            let reference = input.metadata.get(&p.reference)?;
            let after = p.after_reasoning(&input.text);
            let equal = is_equal(after.unwrap_or_default(), reference, p.tolerance, &finder)?;
            Some(indicator(equal && after.is_some()))
        })
    }
}

impl ReasoningAccuracy {
    /// The text after the first delimiter that occurs, at its last occurrence.
    fn after_reasoning<'t>(&self, text: &'t str) -> Option<&'t str> {
        let ended = self.delimiters.iter().find_map(|d| text.rsplit_once(d.as_str()));
        ended.map(|(_, after)| after)
    }
}

define_kind! {
    pub struct MathEqual {
        /// Metadata key of the reference.
        pub reference: String = answer_key(),
        /// Largest difference of values that are not exact fractions (roots, pi), and of a decimal and a
        /// fraction, as a share of the greater value.
        pub tolerance: f64 = 1e-6 => at_least(0.0),
        /// Regex whose first group holds the answer; where it does not match, or is empty, the answer
        /// is the completion's last `\boxed{}`.
        pub extract: String = answer_pattern(),
    }
    kind: "math_equal",
    range: "0 or 1",
    typical_weight: "2.0",
    formula: "1 if answer and metadata[reference] are the same value, else 0: numbers, fractions, \
              percent, units, LaTeX (\\boxed, \\frac, \\sqrt, ...), + - * / ^, brackets, pi, variables, \
              tuples, sets and lists; exact for fractions, else within tolerance x the greater value; \
              the answer is what extract finds, else the last \\boxed{}; missing without a reference, \
              and where one of them cannot be read",
}

impl Kind for MathEqual {
    fn find_answer(&self, text: &str, finder: &AnswerFinder) -> Option<String> {
        find_math(text, finder).map(str::to_owned)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let (p, finder) = (self.clone(), AnswerFinder::new(&self.extract)?);
        per_sample(move |input| {
            let reference = input.metadata.get(&p.reference)?;
            is_equal(&input.text, reference, p.tolerance, &finder).map(indicator)
        })
    }
}

/// Whether the text's answer is the value of `reference`; `None` for a blank reference, and if the answer or the
/// reference cannot be read.
///
/// The answer is what `finder` extracts, of it the last `\boxed{}` alone if there is one; else the
/// text's last `\boxed{}`; else, if `finder` accepts that, the whole text. A text that is an answer only because
/// it has no mark is wrong if it cannot be read.
pub fn is_equal(
    text: &str,
    reference: &str,
    tolerance: f64,
    finder: &AnswerFinder,
) -> Option<bool> {
    let wanted = boxed(reference).unwrap_or(reference);
    if is_blank(wanted) {
        return None;
    }
    let Some(answer) = find_math(text, finder) else { return Some(false) };
    let is_marked = finder.is_empty() || finder.extracted(text).is_some() || boxed(text).is_some();
    same(answer, wanted, tolerance).or((!is_marked).then_some(false))
}

/// The answer that [`is_equal`] compares.
pub fn find_math<'t>(text: &'t str, finder: &AnswerFinder) -> Option<&'t str> {
    match finder.extracted(text) {
        Some(answer) => Some(boxed(answer).unwrap_or(answer)),
        None => boxed(text).or_else(|| finder.takes_all().then_some(text)),
    }
}

#[cfg(test)]
mod tests;
