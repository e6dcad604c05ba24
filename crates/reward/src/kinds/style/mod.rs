//! Kinds that score how a completion is written.

pub mod citations;
pub mod connectors;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::hash::Hash;
use std::sync::Arc;

use async_trait::async_trait;
use regex::{Regex, RegexBuilder};
use serde::{Deserialize, Serialize};
use whatlang::{Detector, Lang};

use hone_core::config::{Checked, Problem};

use crate::kinds::answer::reason;
use crate::kinds::prelude::*;
use crate::text::{is_unspaced, words_of_any_script};
use crate::{RewardFn, ScoreInput};

/// Checks a parameter that must be finite and at most 0.
fn at_most_zero(key: &str, value: f64) -> Checked {
    if value.is_finite() && value <= 0.0 {
        return Ok(());
    }
    Err(Problem::value(key, value, "a finite number, 0 or less"))
}

// `forbidden_phrases`: a penalty for phrases.

define_kind! {
    pub struct ForbiddenPhrases {
        /// The phrases.
        pub phrases: Vec<String>,
        /// The deduction for each occurrence; overlapping occurrences count once.
        pub penalty: f64 = 0.5,
        /// The least value.
        pub floor: f64 = -1.0,
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
    fn check(&self) -> Checked {
        texts("phrases", &self.phrases, 1000)?;
        at_least("penalty", self.penalty, 0.0)?;
        at_most_zero("floor", self.floor)
    }

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

// `repetition_penalty`: a penalty for repeated n-grams.

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
        pub ngram: usize = 3,
        /// The limit of the value for endless repetition; not above 0.
        pub max_penalty: f64 = -1.0,
        /// The items that n-grams consist of.
        pub unit: RepetitionUnit = RepetitionUnit::Words,
        /// If above 0: the value is `max_penalty` where the share of different n-grams is below
        /// this, and else 0.
        pub min_distinct: f64 = 0.0,
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
    fn check(&self) -> Checked {
        between("ngram", self.ngram, 1, 16)?;
        at_most_zero("max_penalty", self.max_penalty)?;
        between("min_distinct", self.min_distinct, 0.0, 1.0)
    }

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

// `diversity`: how much a completion differs from the others of its group.

define_kind! {
    pub struct Diversity {
        /// Items of an n-gram; a completion of fewer items is one n-gram.
        pub ngram: usize = 1,
        /// The items that n-grams consist of.
        pub unit: RepetitionUnit = RepetitionUnit::Words,
    }
    kind: "diversity",
    typical_weight: "0.1 to 0.5",
    formula: "1 - mean over the group's other completions of (n-grams in both / n-grams in either), \
              of words in lower case or of tokens; missing for a single completion",
}

impl Kind for Diversity {
    fn check(&self) -> Checked {
        between("ngram", self.ngram, 1, 16)
    }

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

// `language`: detects the completion's language.

/// Characters that the detector reads; more do not improve the verdict.
const CHARS: usize = 1000;

define_kind! {
    pub struct Language {
        /// ISO 639-3 code of the wanted language, such as `eng`.
        pub language: String,
        /// Least confidence of the detector, 0 to 1, for the wanted language to count.
        pub confidence: f64 = 0.0,
    }
    kind: "language",
    range: "0 or 1",
    typical_weight: "0.2 to 0.5",
    example: "language = \"eng\"",
    formula: "1 if the first 1,000 characters are in the language (ISO 639-3 code), at that \
              confidence or more, else 0; missing without letters; short texts are often misjudged",
}

impl Kind for Language {
    fn check(&self) -> Checked {
        between("confidence", self.confidence, 0.0, 1.0)
    }

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

// `reasoning_steps`: counts the markers of steps.

/// Words that order steps; the comma distinguishes them from adverbs within a sentence.
const ORDER: [&str; 7] = ["First,", "Second,", "Third,", "Next,", "Then,", "Lastly,", "Finally,"];

define_kind! {
    /// After Open R1's `reasoning_steps_reward`.
    pub struct ReasoningSteps {
        /// Markers that earn 1.
        pub target: u32 = 3,
    }
    kind: "reasoning_steps",
    typical_weight: "0.1 to 0.5",
    formula: "min(1, markers / target): \"Step 1:\", \"First,\", ..., and lines that begin with \
              \"1.\", \"1)\", \"- \" or \"* \"",
}

impl Kind for ReasoningSteps {
    fn check(&self) -> Checked {
        between("target", self.target, 1, 1000)
    }

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::tests::samples::{near, score_text};

    #[test]
    fn forbidden_phrases_cost_up_to_the_floor() {
        let p = ForbiddenPhrases {
            phrases: vec!["sorry".to_owned(), "as an AI".to_owned(), "!!".to_owned()],
            penalty: 0.25,
            floor: -0.6,
            ignore_case: true,
        };
        for (text, value) in [
            ("fine, sorrybox", 0.0),
            ("Sorry.", -0.25),
            ("Sorry, AS AN AI", -0.5),
            ("sorry!! sorry", -0.6),
        ] {
            assert!(near(score_text(&p, text), value), "{text}");
        }
        let phrases = vec!["抱歉".to_owned(), "извините".to_owned()];
        let other = ForbiddenPhrases { phrases, ..p.clone() };
        for (text, value) in [("很抱歉我不能", -0.25), ("Извините.", -0.25), ("извинитель", 0.0)]
        {
            assert!(near(score_text(&other, text), value), "{text}");
        }
        assert_eq!(score_text(&ForbiddenPhrases { ignore_case: false, ..p }, "SORRY"), 0.0);
    }

    mod repetition_penalty {
        use super::super::*;
        use crate::ScoreInput;
        use crate::kinds::tests::samples::{near, reference, sample, score, score_text};

        #[derive(Deserialize)]
        struct Cases {
            repetition: Vec<Case>,
        }

        #[derive(Deserialize)]
        struct Case {
            text: String,
            n: usize,
            value: f64,
        }

        #[test]
        fn values_equal_open_r1() {
            for Case { text, n, value } in reference::<Cases>().repetition {
                let p = RepetitionPenalty { ngram: n, max_penalty: -0.5, ..Default::default() };
                assert!(near(score_text(&p, &text), value), "{text:?} {n}");
            }
        }

        #[test]
        fn scripts_without_spaces_have_words() {
            let p = RepetitionPenalty { ngram: 2, ..Default::default() };
            assert!(near(score_text(&p, &"好的".repeat(7)), -11.0 / 13.0));
            assert_eq!(score_text(&p, "我今天很高兴"), 0.0);
            assert!(near(score_text(&p, "да нет да нет"), -1.0 / 3.0));
        }

        #[test]
        fn tokens_may_be_counted_instead_of_words() {
            let p =
                RepetitionPenalty { ngram: 2, unit: RepetitionUnit::Tokens, ..Default::default() };
            // The examples of TRL's documentation.
            for (ids, value) in [(vec![1, 2, 3, 4], 0.0), (vec![5; 5], -0.75), (vec![1], 0.0)] {
                let sample = ScoreInput { ids, ..sample("a a a a a", &[]) };
                assert!(near(score(&p, &sample).unwrap(), value));
            }
        }

        #[test]
        fn a_threshold_makes_the_penalty_full_or_0() {
            let p = RepetitionPenalty { ngram: 1, min_distinct: 0.75, ..Default::default() };
            for (text, value) in [("", 0.0), ("a b c C", 0.0), ("a b c c c", -1.0), ("a", 0.0)] {
                assert_eq!(score_text(&p, text), value, "{text}");
            }
        }
    }

    mod diversity {
        use futures::FutureExt;

        use super::super::*;
        use crate::kinds::tests::samples::{near, sample};

        fn values(p: &Diversity, texts: &[&str]) -> Vec<Option<f64>> {
            let samples: Vec<ScoreInput> = texts.iter().map(|text| sample(text, &[])).collect();
            p.score(&samples).now_or_never().unwrap()
        }

        #[test]
        fn equal_completions_earn_0_and_those_that_share_nothing_1() {
            let p = Diversity::default();
            assert_eq!(values(&p, &["a b", "A  b", "b a"]), [Some(0.0); 3]);
            assert_eq!(values(&p, &["a", "b", "c"]), [Some(1.0); 3]);
            assert_eq!(values(&p, &["", ""]), [Some(0.0); 2]);
            assert_eq!(values(&p, &["", "a"]), [Some(1.0); 2]);
            assert_eq!((values(&p, &["a"]), values(&p, &[])), (vec![None], vec![]));
            assert_eq!(values(&p, &["好的", "的好"]), [Some(0.0); 2]);
            for (value, wanted) in
                values(&p, &["a b c", "a b d", "x"]).iter().zip([0.75, 0.75, 1.0])
            {
                assert!(near(value.unwrap(), wanted));
            }
        }

        #[test]
        fn ngrams_and_tokens_may_be_compared() {
            let pairs = Diversity { ngram: 2, ..Diversity::default() };
            assert_eq!(values(&pairs, &["a b a", "b a b"]), [Some(0.0); 2]);
            assert_eq!(values(&pairs, &["a b", "b a"]), [Some(1.0); 2]);
            // A text of fewer words is one n-gram.
            assert_eq!(values(&pairs, &["a", "a"]), [Some(0.0); 2]);
            // The tokens of these samples are all 0.
            let tokens = Diversity { unit: RepetitionUnit::Tokens, ngram: 3 };
            assert_eq!(values(&tokens, &["a b c", "x y z u"]), [Some(0.0); 2]);
            assert_eq!(values(&tokens, &["a", "xy"]), [Some(1.0); 2]);
        }
    }

    mod language {
        use super::super::*;
        use crate::Tools;
        use crate::kinds::tests::samples::{sample, score};

        #[test]
        fn languages_are_detected() {
            let within = |text: &str, code: &str, confidence| {
                score(&Language { language: code.to_owned(), confidence }, &sample(text, &[]))
            };
            let text = "The quick brown fox jumps over the lazy dog and then it sleeps in the sun.";
            assert_eq!(within(text, "eng", 0.0), Some(1.0));
            let german =
                "Der schnelle braune Fuchs springt über den faulen Hund und schläft in der Sonne.";
            assert_eq!(within(german, "eng", 0.0), Some(0.0));
            assert_eq!(within(german, "deu", 0.0), Some(1.0));
            assert_eq!(within("今日はいい天気ですね。", "jpn", 0.9), Some(1.0));
            assert_eq!((within("", "eng", 0.0), within("123 ...", "eng", 0.0)), (None, None));
            let context = BuildContext { tools: &Tools::default(), route: "r", part: "p" };
            for code in ["en", "xxx"] {
                let unknown = Language { language: code.to_owned(), confidence: 0.0 };
                assert!(unknown.build(&context).is_err(), "{code}");
            }
        }
    }

    mod reasoning_steps {
        use super::super::*;
        use crate::kinds::tests::samples::{near, score_text};

        #[test]
        fn markers_are_counted() {
            for (text, markers) in [
                ("", 0),
                ("Step 1: a\nStep 2: b", 2),
                ("1. a\n 2) b\n10. c", 3),
                ("- a\n* b\n-c\n3.5 d", 2),
                ("First, a. Then, b. Finally, c", 3),
                ("Step one: a. Step : b", 0),
            ] {
                let value = score_text(&ReasoningSteps { target: 10 }, text);
                assert!(near(value, f64::from(markers) / 10.0), "{text}");
            }
            assert_eq!(score_text(&ReasoningSteps { target: 3 }, "- a\n- b\n- c\n- d"), 1.0);
        }
    }
}
