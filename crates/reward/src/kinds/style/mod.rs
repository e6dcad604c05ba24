//! Kinds that score how a completion is written.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::hash::Hash;
use std::sync::Arc;

use async_trait::async_trait;
use regex::{Regex, RegexBuilder};
use serde::{Deserialize, Serialize};
use whatlang::{Detector, Lang};

use crate::kinds::answer::{has_word, reason};
use crate::kinds::prelude::*;
use crate::text::{is_unspaced, words_of_any_script};
use crate::{RewardFn, ScoreInput};

define_kind! {
    pub struct ForbiddenPhrases {
        /// The phrases.
        pub phrases: Vec<String> => texts(1000),
        /// The deduction for each occurrence; overlapping occurrences count once.
        pub penalty: f64 = 0.5 => at_least(0.0),
        /// The least value.
        pub floor: f64 = -1.0 => at_most_zero(),
        /// Whether letter case is ignored.
        pub ignore_case: bool = true,
    }
    kind: "forbidden_phrases",
    range: "floor to 0",
    typical_weight: "0.2 to 1.0",
    example: "phrases = [\"as an AI\", \"sorry\"]",
    bounds: [-1.0, 0.0],
    formula: "max(floor, -penalty x occurrences of the phrases as whole words)",
}

impl Kind for ForbiddenPhrases {
    fn build(&self, _: &BuildContext<'_>) -> Built {
        let pattern = self.pattern().map_err(|error| {
            Problem::new("phrases", format!(" cannot be searched for: {}", reason(&error)))
        })?;
        let (penalty, floor) = (self.penalty, self.floor);
        per_sample(move |input| {
            let hits = pattern.find_iter(&input.text).count();
            Some(if hits == 0 { 0.0 } else { (-penalty * hits as f64).max(floor) })
        })
    }
}

impl ForbiddenPhrases {
    /// One pattern for all phrases. An end of a phrase that is a letter or a digit must be at the
    /// end of a word.
    fn pattern(&self) -> Result<Regex, regex::Error> {
        // Scripts without spaces have no borders of words.
        let is_word = |c: Option<char>| {
            c.is_some_and(|c| (c.is_alphanumeric() || c == '_') && !is_unspaced(c))
        };
        let one = |phrase: &String| {
            let phrase = phrase.trim();
            let before = if is_word(phrase.chars().next()) { r"\b" } else { "" };
            let after = if is_word(phrase.chars().next_back()) { r"\b" } else { "" };
            format!("{before}{}{after}", regex::escape(phrase))
        };
        let all: Vec<String> = self.phrases.iter().map(one).collect();
        RegexBuilder::new(&all.join("|")).case_insensitive(self.ignore_case).build()
    }
}

/// The items that n-grams consist of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RepetitionUnit {
    /// Words in lower case, as in Open R1; each character of a script without spaces is a word.
    #[default]
    Words,
    /// Token ids, as in TRL's `get_repetition_penalty_reward`.
    Tokens,
}

define_kind! {
    /// Yeo et al. 2025 (arXiv 2502.03373, C.2).
    pub struct RepetitionPenalty {
        /// Items of an n-gram; a completion of fewer items earns 0.
        pub ngram: usize = 3 => between(1, 16),
        /// The limit of the value for endless repetition; not above 0.
        pub max_penalty: f64 = -1.0 => at_most_zero(),
        /// The items that n-grams consist of.
        pub unit: RepetitionUnit = RepetitionUnit::Words,
        /// If above 0: the value is `max_penalty` where the share of different n-grams is below
        /// this, and else 0.
        pub min_distinct: f64 = 0.0 => between(0.0, 1.0),
    }
    kind: "repetition_penalty",
    range: "max_penalty to 0",
    typical_weight: "0.2 to 1.0",
    bounds: [-1.0, 0.0],
    formula: "(1 - different n-grams / all n-grams) x max_penalty, of words in lower case or of \
              tokens; with min_distinct above 0 max_penalty where (different / all) is below it, \
              else 0",
}

impl Kind for RepetitionPenalty {
    fn build(&self, _: &BuildContext<'_>) -> Built {
        let p = self.clone();
        per_sample(move |input| {
            let distinct = match p.unit {
                RepetitionUnit::Tokens => share_distinct(&input.ids, p.ngram),
                RepetitionUnit::Words => {
                    let lower = input.text.to_lowercase();
                    share_distinct(&words_of_any_script(&lower), p.ngram)
                }
            };
            let share = match p.min_distinct > 0.0 {
                true => indicator(distinct < p.min_distinct),
                false => 1.0 - distinct,
            };
            Some(share * p.max_penalty)
        })
    }
}

/// The share of n-grams that did not occur before; 1 without any.
fn share_distinct<T: Eq + Hash>(items: &[T], n: usize) -> f64 {
    let n = n.max(1);
    if items.len() < n {
        return 1.0;
    }
    let all = items.len() + 1 - n;
    let different = items.windows(n).collect::<HashSet<&[T]>>().len();
    different as f64 / all as f64
}

define_kind! {
    pub struct Diversity {
        /// Items of an n-gram; a completion of fewer items is one n-gram.
        pub ngram: usize = 1 => between(1, 16),
        /// The items that n-grams consist of.
        pub unit: RepetitionUnit = RepetitionUnit::Words,
    }
    kind: "diversity",
    typical_weight: "0.1 to 0.5",
    formula: "1 - mean over the group's other completions of (n-grams in both / n-grams in either), \
              of words in lower case or of tokens; missing for a single completion",
}

impl Kind for Diversity {
    fn build(&self, _: &BuildContext<'_>) -> Built {
        Ok(Some(Arc::new(self.clone())))
    }
}

#[async_trait]
impl RewardFn for Diversity {
    async fn score(&self, samples: &[ScoreInput]) -> Vec<Option<f64>> {
        match self.unit {
            RepetitionUnit::Tokens => {
                dissimilarities(samples.iter().map(|sample| sample.ids.as_slice()), self.ngram)
            }
            RepetitionUnit::Words => {
                let lower: Vec<String> = samples.iter().map(|s| s.text.to_lowercase()).collect();
                let split: Vec<Vec<&str>> =
                    lower.iter().map(|text| words_of_any_script(text)).collect();
                dissimilarities(split.iter().map(Vec::as_slice), self.ngram)
            }
        }
    }
}

/// For each list of items, 1 less its mean Jaccard similarity to the others; `None` for one list.
/// Two lists without items are equal.
fn dissimilarities<'i, T: Eq + Hash + 'i>(
    lists: impl Iterator<Item = &'i [T]>,
    n: usize,
) -> Vec<Option<f64>> {
    // Numbers make the comparison of every pair cheap.
    let mut numbers: HashMap<&[T], usize> = HashMap::new();
    let mut numbered = |gram: &'i [T]| {
        let next = numbers.len();
        *numbers.entry(gram).or_insert(next)
    };
    let sets: Vec<BTreeSet<usize>> = lists
        .map(|items| match items.len() {
            0 => BTreeSet::new(),
            length => items.windows(n.clamp(1, length)).map(&mut numbered).collect(),
        })
        .collect();
    let similarity = |a: &BTreeSet<usize>, b: &BTreeSet<usize>| {
        let shared = a.intersection(b).count();
        let all = a.len() + b.len() - shared;
        if all == 0 { 1.0 } else { shared as f64 / all as f64 }
    };
    let mut sums = vec![0.0; sets.len()];
    for (i, a) in sets.iter().enumerate() {
        for (j, b) in sets.iter().enumerate().skip(i + 1) {
            let similarity = similarity(a, b);
            sums[i] += similarity;
            sums[j] += similarity;
        }
    }
    let others = sets.len().saturating_sub(1) as f64;
    // Rounding may carry the mean of equal similarities above them.
    sums.into_iter().map(|sum| (others > 0.0).then(|| (1.0 - sum / others).max(0.0))).collect()
}

/// Characters that the detector reads; more do not improve the verdict.
const CHARS: usize = 1000;

define_kind! {
    pub struct Language {
        /// ISO 639-3 code of the wanted language, such as `eng`.
        pub language: String,
        /// Least confidence of the detector, 0 to 1, for the wanted language to count.
        pub confidence: f64 = 0.0 => between(0.0, 1.0),
    }
    kind: "language",
    range: "0 or 1",
    typical_weight: "0.2 to 0.5",
    example: "language = \"eng\"",
    formula: "1 if the first 1,000 characters are in the language (ISO 639-3 code), at that \
              confidence or more, else 0; missing without letters; short texts are often misjudged",
}

impl Kind for Language {
    fn build(&self, _: &BuildContext<'_>) -> Built {
        let wanted = Lang::from_code(&self.language).ok_or_else(|| {
            let allowed =
                "an ISO 639-3 code that can be detected, such as \"eng\", \"deu\" or \"cmn\"";
            Problem::value("language", quoted(&self.language), allowed)
        })?;
        let (detector, confidence) = (Detector::new(), self.confidence);
        per_sample(move |input| {
            let text = &input.text;
            let end = text.char_indices().nth(CHARS).map_or(text.len(), |(at, _)| at);
            let found = detector.detect(&text[..end])?;
            Some(indicator(found.lang() == wanted && found.confidence() >= confidence))
        })
    }
}

/// Words that order steps; the comma distinguishes them from adverbs within a sentence.
const ORDER: [&str; 7] = ["First,", "Second,", "Third,", "Next,", "Then,", "Lastly,", "Finally,"];

define_kind! {
    /// After Open R1's `reasoning_steps_reward`.
    pub struct ReasoningSteps {
        /// Markers that earn 1.
        pub target: u32 = 3 => between(1, 1000),
    }
    kind: "reasoning_steps",
    typical_weight: "0.1 to 0.5",
    formula: "min(1, markers / target): \"Step 1:\", \"First,\", ..., and lines that begin with \
              \"1.\", \"1)\", \"- \" or \"* \"",
}

impl Kind for ReasoningSteps {
    fn build(&self, _: &BuildContext<'_>) -> Built {
        let target = self.target;
        per_sample(move |input| Some(share_of_target(markers(&input.text), target)))
    }
}

fn markers(text: &str) -> usize {
    let lines = text.lines().filter(|line| begins_step(line)).count();
    let steps = text.match_indices("Step ").filter(|(at, word)| {
        let rest = &text[at + word.len()..];
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        digits > 0 && rest[digits..].starts_with(':')
    });
    let ordered = ORDER.iter().map(|word| text.matches(word).count()).sum::<usize>();
    lines + steps.count() + ordered
}

fn begins_step(line: &str) -> bool {
    let line = line.trim_start();
    let digits = line.bytes().take_while(u8::is_ascii_digit).count();
    let is_numbered = (1..=3).contains(&digits) && {
        // `3.5` is a number, not a step.
        let after = line[digits..].strip_prefix(['.', ')']);
        after.is_some_and(|after| after.is_empty() || after.starts_with(char::is_whitespace))
    };
    is_numbered || line.starts_with("- ") || line.starts_with("* ")
}

const WORDS: &str = "therefore thus because since consequently first second next finally however";

define_kind! {
    pub struct Connectors {
        /// The words or phrases.
        pub words: Vec<String> = WORDS.split(' ').map(str::to_owned).collect() => texts(64),
        /// Different words that earn 1.
        pub target: u32 = 6 => between(1, 64),
        /// Whether only whole words count. By default parts of words do, as in the guides to GRPO:
        /// "enthusiasm" contains "thus".
        pub whole_words: bool = false,
        /// Regex whose first group is the text to search; empty takes the whole completion.
        pub extract: String = r"(?s)<reasoning>(.*?)</reasoning>".to_owned(),
    }
    kind: "connectors",
    typical_weight: "0.1 to 0.3",
    formula: "min(1, different words that occur / target), letter case ignored, within the text \
              that extract finds; 0 where it finds none",
}

impl Kind for Connectors {
    fn build(&self, _: &BuildContext<'_>) -> Built {
        let (p, finder) = (self.clone(), AnswerFinder::new(&self.extract)?);
        let words: Vec<String> = p.words.iter().map(|word| word.to_lowercase()).collect();
        per_sample(move |input| {
            let text = finder.find(&input.text).unwrap_or_default().to_lowercase();
            let occurs = |word: &&String| match p.whole_words {
                true => has_word(&text, word),
                false => text.contains(word.as_str()),
            };
            Some(share_of_target(words.iter().filter(occurs).count(), p.target))
        })
    }
}

define_kind! {
    pub struct Citations {
        /// Different citations that earn 1.
        pub target: u32 = 3 => between(1, 1000),
        /// Phrases such as "according to"; each that occurs counts as one citation, letter case
        /// ignored.
        pub phrases: Vec<String> = Vec::new() => no_texts_or(64),
    }
    kind: "citations",
    typical_weight: "0.1 to 0.5",
    formula: "min(1, different citations / target): [1], (Smith, 2020), (Smith et al., 2020a; \
              Jones, 1999), addresses that begin with http:// or https://, and those of the phrases \
              that occur",
}

impl Kind for Citations {
    fn build(&self, _: &BuildContext<'_>) -> Built {
        let target = self.target;
        let phrases: Vec<String> = self.phrases.iter().map(|p| p.to_lowercase()).collect();
        per_sample(move |input| {
            let text = if phrases.is_empty() { String::new() } else { input.text.to_lowercase() };
            let named = phrases.iter().filter(|phrase| text.contains(*phrase)).count();
            Some(share_of_target(citations(&input.text).len() + named, target))
        })
    }
}

fn citations(text: &str) -> BTreeSet<&str> {
    let numbered = text.match_indices('[').filter_map(|(at, _)| number(&text[at + 1..]));
    let named = text.match_indices('(').filter_map(|(at, _)| in_brackets(&text[at + 1..]));
    let named = named.flat_map(|inside| inside.split(';').map(str::trim)).filter(|c| is_named(c));
    let ends = |c: char| c.is_whitespace() || matches!(c, '(' | ')' | '[' | ']' | '<' | '>' | '"');
    let links = text.split(ends).filter_map(address);
    numbered.chain(named).chain(links).collect()
}

/// The digits of `12]`.
fn number(rest: &str) -> Option<&str> {
    let digits = rest.bytes().take_while(u8::is_ascii_digit).take(4).count();
    let fits = (1..=3).contains(&digits) && rest[digits..].starts_with(']');
    fits.then(|| &rest[..digits])
}

/// The text before the next bracket, if that is a closing one.
fn in_brackets(rest: &str) -> Option<&str> {
    let end = rest.find(['(', ')'])?;
    rest[end..].starts_with(')').then(|| &rest[..end])
}

/// Whether a text is a capitalized name, then `, ` and a year.
fn is_named(inside: &str) -> bool {
    let Some((name, year)) = inside.rsplit_once(", ") else { return false };
    let digits = year.bytes().take_while(u8::is_ascii_digit).count();
    let letter = &year[digits..];
    let is_year = digits == 4 && (letter.is_empty() || matches!(letter.as_bytes(), [b'a'..=b'z']));
    is_year && name.starts_with(char::is_uppercase)
}

/// The address in a word, without the punctuation that ends its sentence.
fn address(word: &str) -> Option<&str> {
    let found = &word[word.find("http")?..];
    let host = found.strip_prefix("http://").or_else(|| found.strip_prefix("https://"))?;
    let is_host = host.starts_with(char::is_alphanumeric);
    is_host.then(|| found.trim_end_matches(['.', ',', ';', ':']))
}

#[cfg(test)]
mod tests;
