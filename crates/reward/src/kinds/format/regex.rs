//! `regex`: matches the completion with a pattern.

use crate::kinds::answer::compile;
use crate::kinds::prelude::*;

define_kind! {
    pub struct RegexMatch {
        /// The pattern.
        pub pattern: String,
        /// Whether it must match the whole completion, white space at both ends excepted.
        pub full: bool = false,
        /// Matches that earn 1.
        pub count: u32 = 1,
    }
    kind: "regex",
    typical_weight: "0.5",
    example: "pattern = '\\d+'",
    formula: "min(1, matches / count): with count 1 whether the pattern matches anywhere; with \
              full whether it matches all of it, white space at both ends excepted",
}

impl Kind for RegexMatch {
    fn check(&self) -> Checked {
        between("count", self.count, 1, if self.full { 1 } else { 1000 })
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let mut pattern = compile("pattern", &self.pattern)?;
        if self.full {
            pattern = compile("pattern", &format!(r"\A\s*(?:{})\s*\z", self.pattern))?;
        }
        let count = self.count;
        let most = usize::try_from(count.max(1)).unwrap_or(usize::MAX);
        per_sample(move |input| {
            let found = pattern.find_iter(&input.text).take(most).count();
            Some(share_of_target(found, count))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::tests::samples::{near, score_text};

    #[test]
    fn patterns_may_be_counted() {
        let digits = |count| RegexMatch { pattern: r"\d".to_owned(), full: false, count };
        for (text, once, thrice) in [("", 0.0, 0.0), ("a1", 1.0, 1.0 / 3.0), ("1234", 1.0, 1.0)] {
            assert_eq!(score_text(&digits(1), text), once);
            assert!(near(score_text(&digits(3), text), thrice));
        }
    }
}
