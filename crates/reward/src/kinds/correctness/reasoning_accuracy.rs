//! `reasoning_accuracy`: `math_equal` of the text after the reasoning.

use super::math_equal::{find_math, is_equal};
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
    fn extract(&self) -> Option<&str> {
        Some(&self.extract)
    }

    fn find_answer(&self, text: &str, finder: &AnswerFinder) -> Option<String> {
        find_math(self.after_reasoning(text)?, finder).map(str::to_owned)
    }

    fn check(&self) -> Checked {
        texts("delimiters", &self.delimiters, 16)?;
        at_least("tolerance", self.tolerance, 0.0)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let (p, finder) = (self.clone(), AnswerFinder::new(&self.extract)?);
        per_sample(move |input| {
            let reference = input.metadata.get(&p.reference)?;
            let after = p.after_reasoning(&input.text);
            let equal = is_equal(after.unwrap_or_default(), reference, p.tolerance, &finder)?;
            Some(indicator(equal && after.is_some()))
        })
    }

    fn reads(&self) -> Vec<&str> {
        vec![self.reference.as_str()]
    }
}

impl ReasoningAccuracy {
    /// The text after the first delimiter that occurs, at its last occurrence.
    fn after_reasoning<'t>(&self, text: &'t str) -> Option<&'t str> {
        let ended = self.delimiters.iter().find_map(|d| text.rsplit_once(d.as_str()));
        ended.map(|(_, after)| after)
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
