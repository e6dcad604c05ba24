//! `repetition_penalty`: a penalty for repeated n-grams.

use std::collections::HashSet;
use std::hash::Hash;

use serde::{Deserialize, Serialize};

use super::at_most_zero;
use crate::kinds::prelude::*;
use crate::text::words_of_any_script;

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

#[cfg(test)]
mod tests {
    use super::*;
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
        let p = RepetitionPenalty { ngram: 2, unit: RepetitionUnit::Tokens, ..Default::default() };
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
