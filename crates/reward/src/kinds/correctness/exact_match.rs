//! `exact_match`: compares answer and reference as texts.

use hone_core::text::trim;

use crate::kinds::prelude::*;

define_kind! {
    pub struct ExactMatch {
        /// Metadata key of the reference.
        pub reference: String = answer_key(),
        /// Whether letter case is ignored.
        pub ignore_case: bool = false,
        /// Regex whose first group is the answer; empty takes the whole completion.
        pub extract: String = answer_pattern(),
    }
    kind: "exact_match",
    range: "0 or 1",
    typical_weight: "2.0",
    formula: "1 if the extracted answer equals metadata[reference], white space at both ends \
              trimmed, else 0; missing without a reference",
}

impl Kind for ExactMatch {
    fn extract(&self) -> Option<&str> {
        Some(&self.extract)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let (p, finder) = (self.clone(), AnswerFinder::new(&self.extract)?);
        per_sample(move |input| {
            let wanted = trim(input.metadata.get(&p.reference)?);
            let Some(answer) = finder.find(&input.text) else { return Some(0.0) };
            Some(indicator(match p.ignore_case {
                true => answer.to_lowercase() == wanted.to_lowercase(),
                false => answer == wanted,
            }))
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
    fn exact_match_trims_and_may_ignore_case() {
        let tagged = |text: &str, answer: Option<&str>, ignore_case: bool| {
            score(&ExactMatch { ignore_case, ..ExactMatch::default() }, &with_answer(text, answer))
        };
        assert_eq!(tagged("<answer>\n Paris </answer>", Some(" Paris"), false), Some(1.0));
        assert_eq!(tagged("<answer>paris</answer>", Some("Paris"), false), Some(0.0));
        assert_eq!(tagged("<answer>ÉCOLE</answer>", Some("école"), true), Some(1.0));
        assert_eq!(tagged("Paris", Some("Paris"), false), Some(1.0), "without tags");
        assert_eq!(tagged("It is Paris", Some("Paris"), false), Some(0.0));
        assert_eq!(tagged("<answer>Paris</answer>", None, false), None);
        let whole = |reference: &str| {
            let p = ExactMatch {
                reference: reference.to_owned(),
                extract: String::new(),
                ..ExactMatch::default()
            };
            score(&p, &with_answer("Paris\n", Some("Paris")))
        };
        assert_eq!((whole("city"), whole("answer")), (None, Some(1.0)));
    }
}
