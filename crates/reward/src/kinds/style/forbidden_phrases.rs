//! `forbidden_phrases`: a penalty for phrases.

use regex::{Regex, RegexBuilder};

use super::at_most_zero;
use crate::kinds::answer::reason;
use crate::kinds::prelude::*;
use crate::text::is_unspaced;

define_kind! {
    pub struct ForbiddenPhrases {
        /// The phrases.
        pub phrases: Vec<String>,
        /// The deduction for each occurrence; overlapping occurrences count once.
        pub penalty: f64 = 0.5,
        /// The least value.
        pub floor: f64 = -1.0,
        /// Whether letter case is ignored.
        pub ignore_case: bool = true,
    }
    kind: "forbidden_phrases",
    range: "floor to 0",
    typical_weight: "0.2 to 1.0",
    example: "phrases = [\"as an AI\", \"sorry\"]",
    bounds: [-1.0, 0.0],
    formula: "max(floor, -penalty x occurrences of the phrases as whole words)",
}

impl Kind for ForbiddenPhrases {
    fn check(&self) -> Checked {
        texts("phrases", &self.phrases, 1000)?;
        at_least("penalty", self.penalty, 0.0)?;
        at_most_zero("floor", self.floor)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let pattern = self.pattern().map_err(|error| {
            Problem::new("phrases", format!(" cannot be searched for: {}", reason(&error)))
        })?;
        let (penalty, floor) = (self.penalty, self.floor);
        per_sample(move |input| {
            let hits = pattern.find_iter(&input.text).count();
            Some(if hits == 0 { 0.0 } else { (-penalty * hits as f64).max(floor) })
        })
    }
}

impl ForbiddenPhrases {
    /// One pattern for all phrases. An end of a phrase that is a letter or a digit must be at the
    /// end of a word.
    fn pattern(&self) -> Result<Regex, regex::Error> {
        // Scripts without spaces have no borders of words.
        let is_word = |c: Option<char>| {
            c.is_some_and(|c| (c.is_alphanumeric() || c == '_') && !is_unspaced(c))
        };
        let one = |phrase: &String| {
            let phrase = phrase.trim();
            let before = if is_word(phrase.chars().next()) { r"\b" } else { "" };
            let after = if is_word(phrase.chars().next_back()) { r"\b" } else { "" };
            format!("{before}{}{after}", regex::escape(phrase))
        };
        let all: Vec<String> = self.phrases.iter().map(one).collect();
        RegexBuilder::new(&all.join("|")).case_insensitive(self.ignore_case).build()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::tests::samples::{near, score_text};

    #[test]
    fn forbidden_phrases_cost_up_to_the_floor() {
        let p = ForbiddenPhrases {
            phrases: vec!["sorry".to_owned(), "as an AI".to_owned(), "!!".to_owned()],
            penalty: 0.25,
            floor: -0.6,
            ignore_case: true,
        };
        for (text, value) in [
            ("fine, sorrybox", 0.0),
            ("Sorry.", -0.25),
            ("Sorry, AS AN AI", -0.5),
            ("sorry!! sorry", -0.6),
        ] {
            assert!(near(score_text(&p, text), value), "{text}");
        }
        let phrases = vec!["抱歉".to_owned(), "извините".to_owned()];
        let other = ForbiddenPhrases { phrases, ..p.clone() };
        for (text, value) in [("很抱歉我不能", -0.25), ("Извините.", -0.25), ("извинитель", 0.0)]
        {
            assert!(near(score_text(&other, text), value), "{text}");
        }
        assert_eq!(score_text(&ForbiddenPhrases { ignore_case: false, ..p }, "SORRY"), 0.0);
    }
}
