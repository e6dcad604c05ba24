//! `numeric_match`: compares answer and reference as numbers.

use crate::kinds::prelude::*;
use crate::math::parse_amount;

define_kind! {
    pub struct NumericMatch {
        /// Metadata key of the reference.
        pub reference: String = answer_key(),
        /// Largest absolute difference.
        pub tolerance: f64 = 1e-6,
        /// Largest difference as a share of the reference.
        pub relative_tolerance: f64 = 0.0,
        /// Regex whose first group is the answer; empty takes the whole completion.
        pub extract: String = answer_pattern(),
    }
    kind: "numeric_match",
    range: "0 or 1",
    typical_weight: "2.0",
    formula: "1 if |number in the extracted answer - number in metadata[reference]| <= \
              max(tolerance, relative_tolerance x |reference|), else 0; missing without a numeric \
              reference",
}

impl Kind for NumericMatch {
    fn extract(&self) -> Option<&str> {
        Some(&self.extract)
    }

    fn check(&self) -> Checked {
        at_least("tolerance", self.tolerance, 0.0)?;
        at_least("relative_tolerance", self.relative_tolerance, 0.0)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let (p, finder) = (self.clone(), AnswerFinder::new(&self.extract)?);
        per_sample(move |input| {
            let wanted = parse_amount(input.metadata.get(&p.reference)?)?;
            let answer = finder.find(&input.text).and_then(parse_amount);
            let allowed = p.tolerance.max(p.relative_tolerance * wanted.abs());
            Some(indicator(answer.is_some_and(|answer| (answer - wanted).abs() <= allowed)))
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
    fn numeric_match_compares_within_the_tolerance() {
        let tagged = |text: &str, answer: Option<&str>| {
            let p = NumericMatch { tolerance: 0.01, ..NumericMatch::default() };
            score(&p, &with_answer(text, answer))
        };
        assert_eq!(tagged("so <answer> 1,234 </answer>.", Some("1234")), Some(1.0));
        assert_eq!(tagged("<answer>0.995</answer>", Some("1")), Some(1.0));
        assert_eq!(tagged("<answer>0.98</answer>", Some("1")), Some(0.0));
        assert_eq!(
            tagged("<answer>1</answer><answer>2</answer>", Some("2")),
            Some(1.0),
            "the last one"
        );
        assert_eq!(
            tagged("<think><answer>1</answer></think><answer>2</answer>", Some("1")),
            Some(0.0)
        );
        assert_eq!(tagged("1234", Some("1234")), Some(1.0), "without tags all of it is the answer");
        assert_eq!(
            tagged("It is 1234", Some("1234")),
            Some(0.0),
            "no number is wrong, not missing"
        );
        for (answer, wanted) in [
            ("$12.50", "12.5"),
            ("18 dollars", "18"),
            ("-€3", "-3"),
            ("€ 1,234.5", "1234.5"),
            ("40%", "40"),
            ("12 cm.", "12"),
            ("3 £", "3"),
            ("60 km/h", "60"),
        ] {
            let text = format!("<answer>{answer}</answer>");
            assert_eq!(tagged(&text, Some(wanted)), Some(1.0), "{answer}");
            assert_eq!(tagged(&text, Some("7")), Some(0.0), "{answer}");
        }
        for other in ["5 million", "5 or 6", "from 5 to", "5 5"] {
            assert_eq!(
                tagged(&format!("<answer>{other}</answer>"), Some("5")),
                Some(0.0),
                "{other}"
            );
        }
        assert_eq!(tagged("<answer>many</answer>", Some("1234")), Some(0.0));
        assert_eq!(tagged("<answer>1</answer>", None), None, "no reference is missing, not wrong");
        assert_eq!(tagged("<answer>1</answer>", Some("one")), None);
        let p = NumericMatch {
            tolerance: 0.0,
            relative_tolerance: 0.01,
            extract: String::new(),
            ..NumericMatch::default()
        };
        let whole = |text: &str, answer| score(&p, &with_answer(text, Some(answer)));
        assert_eq!(whole(" 7\n", "7"), Some(1.0));
        assert_eq!(whole("It is 7", "7"), Some(0.0));
        assert_eq!((whole("1010", "1000"), whole("-1011", "-1000")), (Some(1.0), Some(0.0)));
    }
}
