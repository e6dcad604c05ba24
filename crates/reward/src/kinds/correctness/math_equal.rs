//! `math_equal`: compares answer and reference as mathematical values.

use crate::kinds::prelude::*;
use crate::math::{boxed, is_blank, same};

define_kind! {
    pub struct MathEqual {
        /// Metadata key of the reference.
        pub reference: String = answer_key(),
        /// Largest difference of values that are not exact fractions (roots, pi), and of a decimal and a
        /// fraction, as a share of the greater value.
        pub tolerance: f64 = 1e-6,
        /// Regex whose first group holds the answer; where it does not match, or is empty, the answer
        /// is the completion's last `\boxed{}`.
        pub extract: String = answer_pattern(),
    }
    kind: "math_equal",
    range: "0 or 1",
    typical_weight: "2.0",
    formula: "1 if answer and metadata[reference] are the same value, else 0: numbers, fractions, \
              percent, units, LaTeX (\\boxed, \\frac, \\sqrt, ...), + - * / ^, brackets, pi, variables, \
              tuples, sets and lists; exact for fractions, else within tolerance x the greater value; \
              the answer is what extract finds, else the last \\boxed{}; missing without a reference, \
              and where one of them cannot be read",
}

impl Kind for MathEqual {
    fn extract(&self) -> Option<&str> {
        Some(&self.extract)
    }

    fn find_answer(&self, text: &str, finder: &AnswerFinder) -> Option<String> {
        find_math(text, finder).map(str::to_owned)
    }

    fn check(&self) -> Checked {
        at_least("tolerance", self.tolerance, 0.0)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let (p, finder) = (self.clone(), AnswerFinder::new(&self.extract)?);
        per_sample(move |input| {
            let reference = input.metadata.get(&p.reference)?;
            is_equal(&input.text, reference, p.tolerance, &finder).map(indicator)
        })
    }

    fn reads(&self) -> Vec<&str> {
        vec![self.reference.as_str()]
    }
}

/// Whether the text's answer is the value of `reference`; `None` for a blank reference, and if the answer or the
/// reference cannot be read.
///
/// The answer is what `finder` extracts, of it the last `\boxed{}` alone if there is one; else the
/// text's last `\boxed{}`; else, if `finder` accepts that, the whole text. A text that is an answer only because
/// it has no mark is wrong if it cannot be read.
pub fn is_equal(
    text: &str,
    reference: &str,
    tolerance: f64,
    finder: &AnswerFinder,
) -> Option<bool> {
    let wanted = boxed(reference).unwrap_or(reference);
    if is_blank(wanted) {
        return None;
    }
    let Some(answer) = find_math(text, finder) else { return Some(false) };
    let is_marked = finder.is_empty() || finder.extracted(text).is_some() || boxed(text).is_some();
    same(answer, wanted, tolerance).or((!is_marked).then_some(false))
}

/// The answer that [`is_equal`] compares.
pub fn find_math<'t>(text: &'t str, finder: &AnswerFinder) -> Option<&'t str> {
    match finder.extracted(text) {
        Some(answer) => Some(boxed(answer).unwrap_or(answer)),
        None => boxed(text).or_else(|| finder.takes_all().then_some(text)),
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;
    use crate::kinds::tests::samples::reference;

    #[derive(Deserialize)]
    struct Same {
        value: f64,
        texts: Vec<String>,
    }

    #[derive(Deserialize)]
    struct Cases {
        same: Vec<Same>,
    }

    fn finder(pattern: &str) -> AnswerFinder {
        AnswerFinder::new(pattern).unwrap()
    }

    #[test]
    fn texts_that_sympy_reads_as_one_value_are_equal() {
        for Same { value, texts } in reference::<Cases>().same {
            for text in &texts {
                for other in &texts {
                    assert_eq!(
                        is_equal(text, other, 1e-9, &finder("")),
                        Some(true),
                        "{text} {other}"
                    );
                }
                let wrong = format!("2*({value}) + 1");
                assert_eq!(is_equal(text, &wrong, 1e-9, &finder("")), Some(false), "{text}");
            }
        }
    }

    #[test]
    fn the_answer_is_in_the_tags_or_else_the_last_box() {
        let tags = finder("(?s)<answer>(.*?)</answer>");
        let equal = |text: &str| is_equal(text, "\\frac12", 1e-6, &tags);
        assert_eq!(equal("so <answer> 0.5 </answer>"), Some(true));
        assert_eq!(equal("\\boxed{3} <answer>\\boxed{\\frac{1}{2}}</answer>"), Some(true));
        assert_eq!(equal("\\boxed{0.5} <answer>3</answer>"), Some(false), "the tags decide");
        assert_eq!(equal("\\boxed{3} and \\boxed {\\frac{1}{2}}."), Some(true), "the last box");
        assert_eq!(equal("\\boxed{0.5} and \\boxed{0.5"), Some(false), "never closed");
        assert_eq!(equal("0.5"), Some(false), "neither tags nor box");
        let default = finder(&answer_pattern());
        let whole = |text: &str| is_equal(text, "\\frac12", 1e-6, &default);
        assert_eq!((whole("0.5"), whole("so it is 0.5")), (Some(true), Some(false)));
        assert_eq!(whole("<answer>1 \\oplus 2</answer>"), None, "cannot be read");
        assert_eq!(is_equal("0.5", "1/2", 0.0, &finder("")), Some(true));
        assert_eq!(is_equal("0.5", " $ ", 0.0, &finder("")), None, "a blank reference is missing");
    }
}
