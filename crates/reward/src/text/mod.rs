//! How alike two texts are: the metrics of OpenAI's `text_similarity` graders.
//!
//! Each is a pure function of a candidate and a reference that gives a number in 0..1, never NaN,
//! and equals a named Python library's (`tests/reference/text_metrics.py` makes the cases). BLEU,
//! GLEU, METEOR and cosine split text by sacrebleu's 13a rules, ROUGE by rouge-score's, `fuzzy`
//! compares characters. All are linear in the texts' lengths except [`rouge_l`] and [`fuzzy_match`],
//! which look at bounded beginnings.

mod bleu;
mod cosine;
mod fuzzy;
mod meteor;
mod ngrams;
mod porter;
mod rouge;
mod tokens;

pub use bleu::{bleu, gleu};
pub use cosine::cosine;
pub use fuzzy::{FUZZY_CHARS, fuzzy_match};
pub use meteor::meteor;
pub use rouge::{ROUGE_L_WORDS, rouge_l, rouge_n};

/// A metric under OpenAI's name for it.
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
    /// Every metric with its name in `evaluation_metric`.
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

    /// How alike the texts are, in 0..1.
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
