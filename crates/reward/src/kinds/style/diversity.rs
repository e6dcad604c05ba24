//! `diversity`: how much a completion differs from the others of its group.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::sync::Arc;

use async_trait::async_trait;

use super::repetition_penalty::RepetitionUnit;
use crate::kinds::prelude::*;
use crate::text::words_of_any_script;
use crate::{RewardFn, ScoreInput};

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

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;
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
        for (value, wanted) in values(&p, &["a b c", "a b d", "x"]).iter().zip([0.75, 0.75, 1.0]) {
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
