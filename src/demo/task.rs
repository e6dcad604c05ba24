//! The task that the embedded model was made for: small additions.
//!
//! Everything here is plain data and arithmetic: which questions exist, which of them simulated
//! users may ask, what the right answer is and how a completion is judged. Pretraining
//! (`examples/pretrain_embedded.rs`) sees every question; the held-out ones are those that no
//! simulated user asks, so that they measure what the loop has taught.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Operands are the whole numbers below this.
pub const OPERANDS: u32 = 50;

/// The largest reward: [`Score::numeric`] weighs 1, [`Score::format`] a half.
pub const REWARD_MAX: f64 = 1.5;

/// Tokens that any completion of the task fits in.
pub const MAX_TOKENS: u32 = 40;

/// Ways to ask, as the text before, between and after the operands.
const PHRASINGS: [[&str; 3]; 6] = [
    ["What is ", " + ", "?"],
    ["", " + ", " = ?"],
    ["How much is ", " plus ", "?"],
    ["Add ", " and ", "."],
    ["Please calculate ", " + ", "."],
    ["Can you tell me ", " + ", "?"],
];

/// How many ways there are to ask for one sum.
pub const PHRASING_COUNT: usize = PHRASINGS.len();

/// One addition, asked in one way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Question {
    /// First operand, below [`OPERANDS`].
    pub a: u32,
    /// Second operand, below [`OPERANDS`].
    pub b: u32,
    /// Which way of asking; taken modulo [`PHRASING_COUNT`].
    pub phrasing: usize,
}

impl Question {
    /// What the user writes.
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

    /// Whether no simulated user may ask it: see [`held_out`].
    pub fn is_held_out(&self) -> bool {
        held_out(self.a, self.b)
    }
}

/// The well-formed completion that claims `a + b = sum`, right or wrong.
pub fn reasoned(a: u32, b: u32, sum: u32) -> String {
    format!("<reasoning>{a} + {b} = {sum}</reasoning><answer>{sum}</answer>")
}

/// Whether a pair of operands is held out, in either order and however it is asked: a fixed fifth
/// of the pairs, chosen by a hash (the finaliser of SplitMix64, Steele et al. 2014).
pub fn held_out(a: u32, b: u32) -> bool {
    let mut z =
        (u64::from(a.min(b)) << 32 | u64::from(a.max(b))).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)) % 5 == 0
}

/// Which questions a [`Questions`] draws from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuestionSplit {
    /// Those that simulated users ask.
    Asked,
    /// Those that they never ask.
    HeldOut,
    /// All of them.
    All,
}

/// An endless stream of questions, the same for the same seed and split.
#[derive(Clone, Debug)]
pub struct Questions {
    rng: ChaCha8Rng,
    split: QuestionSplit,
}

impl Questions {
    /// Questions drawn uniformly, with repetition, from one side of the split.
    pub fn new(seed: u64, split: QuestionSplit) -> Self {
        Self { rng: ChaCha8Rng::seed_from_u64(seed), split }
    }
}

impl Iterator for Questions {
    type Item = Question;

    fn next(&mut self) -> Option<Question> {
        loop {
            let question = Question {
                a: self.rng.random_range(0..OPERANDS),
                b: self.rng.random_range(0..OPERANDS),
                phrasing: self.rng.random_range(0..PHRASING_COUNT as u32) as usize,
            };
            match self.split {
                QuestionSplit::Asked if question.is_held_out() => {}
                QuestionSplit::HeldOut if !question.is_held_out() => {}
                _ => return Some(question),
            }
        }
    }
}

/// How a completion is judged, part by part as the built-in rewards `numeric_match` and
/// `format_strict` do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score {
    /// 1 when the first `<answer>…</answer>` holds the right number, else 0.
    pub numeric: f64,
    /// 1 when the text is exactly one reasoning and one answer in their tags, else 0.
    pub format: f64,
}

impl Score {
    /// The weighted sum, at most [`REWARD_MAX`].
    pub fn reward(&self) -> f64 {
        self.numeric + 0.5 * self.format
    }

    /// A simulated user's judgement: right and well formed.
    pub fn thumbs_up(&self) -> bool {
        self.numeric > 0.0 && self.format > 0.0
    }
}

/// Judges a completion against the right answer.
pub fn score(text: &str, answer: u32) -> Score {
    let right = answer_in(text)
        .and_then(|found| found.trim().parse::<f64>().ok())
        .is_some_and(|found| (found - f64::from(answer)).abs() <= 1e-6);
    Score {
        numeric: if right { 1.0 } else { 0.0 },
        format: if is_well_formed(text) { 1.0 } else { 0.0 },
    }
}

/// What stands in the first `<answer>…</answer>`.
fn answer_in(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once("<answer>")?;
    rest.split_once("</answer>").map(|(inside, _)| inside)
}

/// Whether the text is `<reasoning>…</reasoning><answer>…</answer>` and nothing else but white
/// space around the two, and neither holds another of these tags.
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
    fn the_ideal_completion_earns_the_maximum_and_slips_cost() {
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
        let mut held = 0;
        for a in 0..OPERANDS {
            for b in 0..OPERANDS {
                assert_eq!(held_out(a, b), held_out(b, a));
                held += u32::from(held_out(a, b));
            }
        }
        let share = f64::from(held) / f64::from(OPERANDS * OPERANDS);
        assert!((0.17..0.23).contains(&share), "{share}");
    }

    #[test]
    fn questions_repeat_with_their_seed_and_stay_on_their_side() {
        let draw = |seed, split| Questions::new(seed, split).take(500).collect::<Vec<_>>();
        assert_eq!(draw(1, QuestionSplit::Asked), draw(1, QuestionSplit::Asked));
        assert_ne!(draw(1, QuestionSplit::Asked), draw(2, QuestionSplit::Asked));
        assert!(draw(1, QuestionSplit::Asked).iter().all(|q| !q.is_held_out()));
        assert!(draw(1, QuestionSplit::HeldOut).iter().all(Question::is_held_out));
        assert!(draw(1, QuestionSplit::All).iter().any(Question::is_held_out));
    }
}
