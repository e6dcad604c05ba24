//! `reasoning_accuracy`: `math_equal` of the text after the reasoning.

use super::math_equal::is_equal;
use crate::kinds::prelude::*;

define_kind! {
    /// After TRL's `reasoning_accuracy_reward`, which compares answers by another library and
    /// scores 0 where reasoning without an end lacks a reference.
    pub struct ReasoningAccuracy {
        /// Metadata key of the reference.
        pub reference: String = answer_key(),
        /// Texts that end the reasoning; the first of the list that occurs counts, where it occurs
        /// last.
        pub delimiters: Vec<String> = vec!["</think>".to_owned()],
        /// As in `math_equal`.
        pub tolerance: f64 = 1e-6,
        /// As in `math_equal`, within the text after the reasoning.
        pub extract: String = answer_pattern(),
    }
    kind: "reasoning_accuracy",
    range: "0 or 1",
    typical_weight: "2.0",
    formula: "math_equal of the text after the end of the reasoning, 0 where it never ends; \
              missing without a reference",
}

impl Kind for ReasoningAccuracy {
    fn check(&self) -> Checked {
        texts("delimiters", &self.delimiters, 16)?;
        at_least("tolerance", self.tolerance, 0.0)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let (p, finder) = (self.clone(), AnswerFinder::new(&self.extract)?);
        per_sample(move |input| {
            let reference = input.metadata.get(&p.reference)?;
            let ended = p.delimiters.iter().find_map(|d| input.text.rsplit_once(d.as_str()));
            let after = ended.map_or("", |(_, after)| after);
            let equal = is_equal(after, reference, p.tolerance, &finder)?;
            Some(indicator(equal && ended.is_some()))
        })
    }

    fn reads(&self) -> Vec<&str> {
        vec![self.reference.as_str()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::tests::samples::{score, with_answer};

    #[test]
    fn reasoning_must_end_before_the_answer_counts() {
        let p = ReasoningAccuracy {
            delimiters: vec!["</think>".to_owned(), "</reasoning>".to_owned()],
            extract: String::new(),
            ..ReasoningAccuracy::default()
        };
        let third = |text: &str| score(&p, &with_answer(text, Some("1/3")));
        // The examples of TRL's documentation.
        assert_eq!(third("<think> x </think> The answer is \\boxed{\\frac{1}{3}}"), Some(1.0));
        assert_eq!(third("<think> x </think> The answer is \\boxed{\\frac{1}{2}}"), Some(0.0));
        assert_eq!(third("<think> partly \\boxed{\\frac{1}{3}} but no end"), Some(0.0));
        assert_eq!(third("\\boxed{1/3}</reasoning> \\boxed{1/2}"), Some(0.0));
        assert_eq!(third("a</think>\\boxed{1/2}</think>1/3"), Some(1.0), "after the last");
        assert_eq!(score(&p, &with_answer("no end", Some(""))), None);
    }
}
