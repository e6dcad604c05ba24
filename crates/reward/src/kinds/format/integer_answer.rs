//! `integer_answer`: accepts a whole number as the answer.

use crate::kinds::prelude::*;
use crate::math::is_integer;

define_kind! {
    pub struct IntegerAnswer {
        /// Regex whose first group is the answer; empty takes the whole completion.
        pub extract: String = answer_pattern(),
    }
    kind: "integer_answer",
    range: "0 or 1",
    typical_weight: "0.5",
    formula: "1 if the extracted answer is a whole number, sign and thousands separators allowed, \
              else 0",
}

impl Kind for IntegerAnswer {
    fn extract(&self) -> Option<&str> {
        Some(&self.extract)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let finder = AnswerFinder::new(&self.extract)?;
        per_sample(move |input| Some(indicator(finder.find(&input.text).is_some_and(is_integer))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::tests::samples::score_text;

    #[test]
    fn whole_numbers() {
        let p = IntegerAnswer::default();
        for text in ["7", "-7", "+7", "1,234", " 007 "] {
            assert!(is_integer(text), "{text}");
            assert_eq!(score_text(&p, &format!("<answer>{text}</answer>")), 1.0);
        }
        for text in ["", "7.0", "1e3", "seven", "1,23", "7 8"] {
            assert!(!is_integer(text), "{text}");
            assert_eq!(score_text(&p, &format!("<answer>{text}</answer>")), 0.0);
        }
        assert_eq!([score_text(&p, "7"), score_text(&p, "It is 7")], [1.0, 0.0]);
    }
}
