//! `fuzzy_match`: the similarity of answer and reference in characters.

use serde::{Deserialize, Serialize};

use hone_core::text::trim;

use crate::kinds::prelude::*;
use crate::text::{character_ratio, matching_blocks};

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
        pub threshold: f64 = 0.0,
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
    fn extract(&self) -> Option<&str> {
        Some(&self.extract)
    }

    fn check(&self) -> Checked {
        between("threshold", self.threshold, 0.0, 1.0)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let (p, finder) = (self.clone(), AnswerFinder::new(&self.extract)?);
        per_sample(move |input| {
            let wanted = trim(input.metadata.get(&p.reference)?);
            let Some(answer) = finder.find(&input.text) else { return Some(0.0) };
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

    fn reads(&self) -> Vec<&str> {
        vec![self.reference.as_str()]
    }
}

fn similarity(a: &str, b: &str) -> f64 {
    character_ratio(a, b, MOST_CHARS)
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;
    use crate::kinds::tests::samples::{near, reference, score, with_answer};

    #[derive(Deserialize)]
    struct Cases {
        fuzzy: Vec<Case>,
    }

    #[derive(Deserialize)]
    struct Case {
        a: String,
        b: String,
        ratio: f64,
    }

    #[test]
    fn rapidfuzz_of_python_finds_the_same_ratios() {
        for Case { a, b, ratio } in reference::<Cases>().fuzzy {
            assert!(near(similarity(&a, &b), ratio), "{a:?} {b:?}: {} {ratio}", similarity(&a, &b));
        }
    }

    #[test]
    fn similarities_below_the_threshold_are_0() {
        let whole = |threshold, ignore_case| {
            let extract = String::new();
            let p = FuzzyMatch { threshold, ignore_case, extract, ..FuzzyMatch::default() };
            score(&p, &with_answer(" Kitten", Some("kitten "))).unwrap()
        };
        assert!(near(whole(0.5, false), 10.0 / 12.0));
        assert_eq!((whole(0.9, false), whole(0.9, true)), (0.0, 1.0));
        let p = FuzzyMatch::default();
        assert_eq!(score(&p, &with_answer("a", Some("a"))), Some(1.0), "without tags");
        let p = FuzzyMatch { extract: String::new(), ..p };
        assert_eq!(score(&p, &with_answer("a", None)), None);
    }
}
