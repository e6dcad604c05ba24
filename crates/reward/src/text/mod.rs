//! Similarity of two texts: the metrics of OpenAI's `text_similarity` graders.
//!
//! Each metric is a pure function of a candidate and a reference. It returns a number in 0..1, never
//! NaN, and equals the metric of a Python library (`tests/reference/rewards/text_metrics.py` writes the
//! cases). BLEU, GLEU, METEOR and cosine split text by sacrebleu's 13a rules, ROUGE by
//! rouge-score's, extended to every script; fuzzy matching compares characters. The time is linear in the texts' lengths,
//! except for [`rouge_l`], [`fuzzy_match`] and [`matching_blocks`], which read a bounded beginning of
//! each text.

mod bleu;
mod cosine;
mod difflib;
mod fences;
mod fuzzy;
mod meteor;
mod ngrams;
mod porter;
mod rouge;
mod tokens;

pub use bleu::{bleu, gleu};
pub use cosine::cosine;
pub use difflib::{DIFFLIB_CHARS, matching_blocks};
pub use fences::{FencedBlock, fenced_blocks};
pub use fuzzy::{FUZZY_CHARS, character_ratio, fuzzy_match};
pub use meteor::meteor;
pub use rouge::{ROUGE_L_WORDS, rouge_l, rouge_n};
pub use tokens::{is_unspaced, words_of_any_script};

/// A metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// [`cosine`].
    Cosine,
    /// [`fuzzy_match`].
    FuzzyMatch,
    /// [`bleu`].
    Bleu,
    /// [`gleu`].
    Gleu,
    /// [`meteor`].
    Meteor,
    /// [`rouge_n`] with this n, 1 to 5.
    Rouge(u8),
    /// [`rouge_l`].
    RougeL,
}

impl Metric {
    /// Every metric with OpenAI's name for it (`evaluation_metric`).
    pub const ALL: [(&str, Self); 11] = [
        ("cosine", Self::Cosine),
        ("fuzzy_match", Self::FuzzyMatch),
        ("bleu", Self::Bleu),
        ("gleu", Self::Gleu),
        ("meteor", Self::Meteor),
        ("rouge_1", Self::Rouge(1)),
        ("rouge_2", Self::Rouge(2)),
        ("rouge_3", Self::Rouge(3)),
        ("rouge_4", Self::Rouge(4)),
        ("rouge_5", Self::Rouge(5)),
        ("rouge_l", Self::RougeL),
    ];

    /// The metric of that name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|(known, _)| *known == name).map(|(_, metric)| metric)
    }

    /// The similarity of the texts, in 0..1.
    pub fn score(self, candidate: &str, reference: &str) -> f64 {
        match self {
            Self::Cosine => cosine(candidate, reference),
            Self::FuzzyMatch => fuzzy_match(candidate, reference),
            Self::Bleu => bleu(candidate, reference),
            Self::Gleu => gleu(candidate, reference),
            Self::Meteor => meteor(candidate, reference),
            Self::Rouge(n) => rouge_n(candidate, reference, usize::from(n)),
            Self::RougeL => rouge_l(candidate, reference),
        }
    }
}

#[cfg(test)]
mod tests;
