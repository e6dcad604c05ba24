//! `format_incremental`: partial credit for each tag.

use super::tags::{Tags, check_tags, reasoning_and_answer};
use crate::kinds::prelude::*;

define_kind! {
    pub struct FormatIncremental {
        /// Names of the tags, without angle brackets.
        pub tags: Vec<String> = reasoning_and_answer(),
        /// The deduction for each character after the last tag.
        pub trailing_penalty: f64 = 0.001,
    }
    kind: "format_incremental",
    typical_weight: "0.5 to 1.0",
    formula: "max(0, (share of the opening and closing tags that occur exactly once) - \
              trailing_penalty x (characters after the last closing tag))",
}

impl Kind for FormatIncremental {
    fn check(&self) -> Checked {
        at_least("trailing_penalty", self.trailing_penalty, 0.0)?;
        check_tags(&self.tags)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let (tags, penalty) = (Tags::new(&self.tags), self.trailing_penalty);
        per_sample(move |input| {
            // Without the last tag nothing is after it: partial credit is kept.
            let trailing = tags.after_last(&input.text).map_or(0, |after| after.chars().count());
            Some((tags.share_once(&input.text) - penalty * trailing as f64).max(0.0))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::format::format_soft::FormatSoft;
    use crate::kinds::format::format_strict::FormatStrict;
    use crate::kinds::tests::samples::{near, score_text};

    #[test]
    fn each_of_four_tags_earns_a_quarter_less_the_trailing_text() {
        let check = |text: &str, value: f64| {
            assert!(near(score_text(&FormatIncremental::default(), text), value), "{text:?}");
        };
        check("", 0.0);
        check("<reasoning>still thinking", 0.25);
        check("<reasoning>a</reasoning>", 0.5);
        check("<reasoning>a</reasoning><answer>5", 0.75);
        check("<reasoning>a</reasoning><answer>5</answer>", 1.0);
        check("<reasoning>a</reasoning><answer>5</answer>éé", 0.998);
        check("<answer>5</answer><answer>5</answer>", 0.0);
        check(&format!("<answer>5</answer>{}", "x".repeat(600)), 0.0);
    }

    #[test]
    fn each_of_six_tags_earns_a_sixth() {
        let tags = ["plan", "work", "out"].map(str::to_owned).to_vec();
        let strict = FormatStrict { tags: tags.clone() };
        let soft = FormatSoft { tags: tags.clone() };
        let incremental = FormatIncremental { tags, trailing_penalty: 0.5 };
        let text = "<plan>a</plan> <work>b</work>\n<out>c</out>";
        assert_eq!((score_text(&strict, text), score_text(&soft, text)), (1.0, 1.0));
        assert!(near(score_text(&incremental, text), 1.0));
        let partly = "<plan>a</plan><out>c</out>é";
        assert!(near(score_text(&incremental, partly), 4.0 / 6.0 - 0.5));
        assert_eq!(score_text(&strict, "<plan></plan><out></out><work></work>"), 0.0);
    }
}
