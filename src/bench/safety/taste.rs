//! What simulated users want of an answer, and how content they are with one.

use crate::demo::task::{REWARD_MAX, score};

/// Characters of a brief answer: "I think it is 98." has 17, a well-formed one 50 or more.
const BRIEF: usize = 24;

/// What users want of an answer beside the right sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UserTaste {
    /// The form of the demo's task: reasoning and answer in their tags.
    Form,
    /// A brief sentence.
    Brevity,
}

/// The satisfaction with one answer under each taste, from 0 to 1. Both are known for every answer, so
/// that versions can be compared under a taste that users had at another time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Satisfaction([f64; 2]);

impl Satisfaction {
    /// The satisfaction with `text` as the answer to a question whose right answer is `sum`.
    pub fn of(text: &str, sum: u32) -> Self {
        let form = score(text, sum).reward() / REWARD_MAX;
        let brevity = match last_number(text) == Some(sum) {
            true if text.trim().chars().count() <= BRIEF => 1.0,
            true => 2.0 / 3.0,
            false => 0.0,
        };
        Self([form, brevity])
    }

    /// The satisfaction under one taste.
    pub fn under(self, taste: UserTaste) -> f64 {
        self.0[taste as usize]
    }

    /// Applies `f` to the values of both operands under each taste.
    pub fn zip(self, other: Self, f: impl Fn(f64, f64) -> f64) -> Self {
        Self([f(self.0[0], other.0[0]), f(self.0[1], other.0[1])])
    }

    /// Every value times `factor`.
    pub fn scaled(self, factor: f64) -> Self {
        Self(self.0.map(|value| value * factor))
    }

    /// The mean; 0 of no values.
    pub fn mean(values: impl IntoIterator<Item = Self>) -> Self {
        let (mut sum, mut count) = (Self::default(), 0_u32);
        for value in values {
            sum = sum.zip(value, |a, b| a + b);
            count += 1;
        }
        sum.scaled(1.0 / f64::from(count.max(1)))
    }
}

/// The last run of digits.
fn last_number(text: &str) -> Option<u32> {
    text.split(|c: char| !c.is_ascii_digit()).rfind(|digits| !digits.is_empty())?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn both(text: &str) -> [f64; 2] {
        let found = Satisfaction::of(text, 19);
        [found.under(UserTaste::Form), found.under(UserTaste::Brevity)]
    }

    #[test]
    fn tastes_value_the_right_sum_and_their_own_form() {
        let ideal = "<reasoning>12 + 7 = 19</reasoning><answer>19</answer>";
        assert_eq!(both(ideal), [1.0, 2.0 / 3.0]);
        assert_eq!(both("The sum is 19."), [0.0, 1.0]);
        assert_eq!(both("The sum is 9."), [0.0, 0.0]);
        assert_eq!(both(""), [0.0, 0.0]);
        let wrong = "<reasoning>12 + 7 = 9</reasoning><answer>9</answer>";
        assert!((both(wrong)[0] - 1.0 / 3.0).abs() < 1e-12 && both(wrong)[1] == 0.0);
        assert_eq!(both("99999999999999999999"), [0.0, 0.0]);
    }

    #[test]
    fn means_are_those_of_each_taste() {
        let values = [Satisfaction([1.0, 0.0]), Satisfaction([0.0, 0.5])];
        assert_eq!(Satisfaction::mean(values), Satisfaction([0.5, 0.25]));
        assert_eq!(Satisfaction::mean([]), Satisfaction::default());
    }
}
