//! The task of the embedded model: additions of two numbers.
//!
//! A fifth of the pairs is held out: neither pretraining (`examples/pretrain_embedded.rs`) nor the
//! simulated users use them, so an answer to one shows what the model computes, not what it remembers.
//! Users ask with operands below [`OPERANDS`] only. Larger operands are the harder kind, which shows
//! whether learning carries over to questions that are never trained on.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

/// Operands of the users' questions are the integers below this.
pub const OPERANDS: u32 = 50;

/// All operands are below this. The model is pretrained on all of them.
pub const LARGE_OPERANDS: u32 = 100;

/// The largest reward: [`Score::numeric`] has weight 1, [`Score::format`] 0.5.
pub const REWARD_MAX: f64 = 1.5;

/// A limit in tokens that every completion of the task fits in.
pub const MAX_TOKENS: u32 = 40;

/// The reward part of the users' feedback.
pub const THUMBS: &str = "thumbs";

/// Phrasings of a question: the text before, between and after the operands.
const PHRASINGS: [[&str; 3]; 6] = [
    ["What is ", " + ", "?"],
    ["", " + ", " = ?"],
    ["How much is ", " plus ", "?"],
    ["Add ", " and ", "."],
    ["Please calculate ", " + ", "."],
    ["Can you tell me ", " + ", "?"],
];

/// The number of phrasings.
pub const PHRASING_COUNT: usize = PHRASINGS.len();

/// One addition in one phrasing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Question {
    /// First operand, below [`LARGE_OPERANDS`].
    pub a: u32,
    /// Second operand, below [`LARGE_OPERANDS`].
    pub b: u32,
    /// Index of the phrasing, modulo [`PHRASING_COUNT`].
    pub phrasing: usize,
}

impl Question {
    /// The user's message.
    pub fn text(&self) -> String {
        let [before, between, after] = PHRASINGS[self.phrasing % PHRASING_COUNT];
        format!("{before}{}{between}{}{after}", self.a, self.b)
    }

    /// The right answer.
    pub fn answer(&self) -> u32 {
        self.a + self.b
    }

    /// A completion that earns [`REWARD_MAX`].
    pub fn ideal(&self) -> String {
        reasoned(self.a, self.b, self.answer())
    }

    /// Whether it is [`held_out`].
    pub fn is_held_out(&self) -> bool {
        held_out(self.a, self.b)
    }

    /// Whether users ask questions like it, or it is harder.
    pub fn kind(&self) -> QuestionKind {
        if self.a.max(self.b) < OPERANDS { QuestionKind::Asked } else { QuestionKind::Larger }
    }

    /// Whether the ones carry.
    pub fn carries(&self) -> bool {
        self.a % 10 + self.b % 10 >= 10
    }
}

/// The well-formed completion that claims `a + b = sum`, right or wrong.
pub fn reasoned(a: u32, b: u32, sum: u32) -> String {
    format!("<reasoning>{a} + {b} = {sum}</reasoning><answer>{sum}</answer>")
}

/// Whether a pair of operands is held out, in either order and every phrasing: a fixed fifth of the
/// pairs, chosen by a hash (the finalizer of SplitMix64, Steele et al. 2014).
pub fn held_out(a: u32, b: u32) -> bool {
    let mut z =
        (u64::from(a.min(b)) << 32 | u64::from(a.max(b))).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)) % 5 == 0
}

/// The difficulty of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum QuestionKind {
    /// Both operands are below [`OPERANDS`], as in the users' questions.
    Asked,
    /// An operand is not below [`OPERANDS`]; users never ask such a question.
    Larger,
}

/// Which questions a [`Questions`] draws from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuestionSplit {
    /// Those that simulated users may ask.
    Asked,
    /// The held-out ones of a kind.
    HeldOut(QuestionKind),
}

/// An endless stream of questions, the same for the same seed and split.
#[derive(Clone, Debug)]
pub struct Questions {
    rng: ChaCha8Rng,
    split: QuestionSplit,
}

impl Questions {
    /// Questions drawn uniformly, with repetition.
    pub fn new(seed: u64, split: QuestionSplit) -> Self {
        Self { rng: ChaCha8Rng::seed_from_u64(seed), split }
    }
}

impl Iterator for Questions {
    type Item = Question;

    fn next(&mut self) -> Option<Question> {
        let kind = match self.split {
            QuestionSplit::Asked => QuestionKind::Asked,
            QuestionSplit::HeldOut(kind) => kind,
        };
        let below = match kind {
            QuestionKind::Asked => OPERANDS,
            QuestionKind::Larger => LARGE_OPERANDS,
        };
        loop {
            let question = Question {
                a: self.rng.random_range(0..below),
                b: self.rng.random_range(0..below),
                phrasing: self.rng.random_range(0..PHRASING_COUNT as u32) as usize,
            };
            let asked = self.split == QuestionSplit::Asked;
            if question.is_held_out() != asked && question.kind() == kind {
                return Some(question);
            }
        }
    }
}

/// The parts of a completion's reward, computed as by the built-in rewards `numeric_match` and
/// `format_strict`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score {
    /// 1 if the first `<answer>…</answer>` contains the right number, else 0.
    pub numeric: f64,
    /// 1 if the text is exactly one reasoning and one answer in their tags, else 0.
    pub format: f64,
}

impl Score {
    /// The weighted sum, at most [`REWARD_MAX`].
    pub fn reward(&self) -> f64 {
        self.numeric + 0.5 * self.format
    }

    /// A simulated user's feedback: whether the completion is right and well formed.
    pub fn thumbs_up(&self) -> bool {
        self.numeric > 0.0 && self.format > 0.0
    }
}

/// Scores a completion.
pub fn score(text: &str, answer: u32) -> Score {
    let right = answer_in(text)
        .and_then(|found| found.trim().parse::<f64>().ok())
        .is_some_and(|found| (found - f64::from(answer)).abs() <= 1e-6);
    Score {
        numeric: if right { 1.0 } else { 0.0 },
        format: if is_well_formed(text) { 1.0 } else { 0.0 },
    }
}

/// The content of the first `<answer>…</answer>`.
fn answer_in(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once("<answer>")?;
    rest.split_once("</answer>").map(|(inside, _)| inside)
}

/// Whether the text is `<reasoning>…</reasoning><answer>…</answer>` with optional white space around
/// the two, and neither contains another of these tags.
fn is_well_formed(text: &str) -> bool {
    let parts = || {
        let rest = text.trim().strip_prefix("<reasoning>")?;
        let (reasoning, rest) = rest.split_once("</reasoning>")?;
        let answer = rest.trim_start().strip_prefix("<answer>")?.strip_suffix("</answer>")?;
        Some([reasoning, answer])
    };
    let tags = ["<reasoning>", "</reasoning>", "<answer>", "</answer>"];
    parts().is_some_and(|parts| {
        parts.iter().all(|inside| tags.iter().all(|tag| !inside.contains(tag)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_ideal_completion_earns_the_maximum() {
        let question = Question { a: 12, b: 7, phrasing: 0 };
        assert_eq!(question.text(), "What is 12 + 7?");
        assert_eq!(score(&question.ideal(), 19).reward(), REWARD_MAX);
        assert!(score(&question.ideal(), 19).thumbs_up());
        for (text, numeric, format) in [
            ("<reasoning>12 + 7 = 18</reasoning><answer>18</answer>", 0.0, 1.0),
            (" <reasoning>x\ny</reasoning>\n<answer> 19.0 </answer>\n", 1.0, 1.0),
            ("Sure! <reasoning>12 + 7 = 19</reasoning><answer>19</answer>", 1.0, 0.0),
            ("<reasoning>12 + 7 = 19</reasoning><answer>19</answer> Right?", 1.0, 0.0),
            ("<reasoning>a</reasoning><answer>19</answer><answer>1</answer>", 1.0, 0.0),
            ("<reasoning>a<reasoning></reasoning><answer>19</answer>", 1.0, 0.0),
            ("<reasoning>12 + 7 = 19</reasoning>So it is 19.", 0.0, 0.0),
            ("<answer>nineteen</answer>", 0.0, 0.0),
            ("<answer>19", 0.0, 0.0),
            ("The sum is 19.", 0.0, 0.0),
            ("", 0.0, 0.0),
        ] {
            assert_eq!(score(text, 19), Score { numeric, format }, "{text:?}");
        }
    }

    #[test]
    fn a_fifth_of_the_pairs_is_held_out_in_both_orders() {
        for below in [OPERANDS, LARGE_OPERANDS] {
            let mut held = 0;
            for a in 0..below {
                for b in 0..below {
                    assert_eq!(held_out(a, b), held_out(b, a));
                    held += u32::from(held_out(a, b));
                }
            }
            let share = f64::from(held) / f64::from(below * below);
            assert!((0.17..0.23).contains(&share), "{share}");
        }
    }

    #[test]
    fn questions_depend_on_the_seed_and_belong_to_their_split() {
        let draw = |seed, split| Questions::new(seed, split).take(500).collect::<Vec<_>>();
        let asked = QuestionSplit::Asked;
        assert_eq!(draw(1, asked), draw(1, asked));
        assert_ne!(draw(1, asked), draw(2, asked));
        assert!(draw(1, asked).iter().all(|q| !q.is_held_out() && q.kind() == QuestionKind::Asked));
        for kind in [QuestionKind::Asked, QuestionKind::Larger] {
            let held_out = draw(1, QuestionSplit::HeldOut(kind));
            assert!(held_out.iter().all(|q| q.is_held_out() && q.kind() == kind));
        }
    }
}
