//! `format_incremental`: partial credit for each tag.

use hone_core::text::trim;

use super::tags::{Tags, check_tags, reasoning_and_answer};
use crate::kinds::prelude::*;

define_kind! {
    /// The defaults are the rule of the guides to GRPO with TRL.
    pub struct FormatIncremental {
        /// Names of the tags, without angle brackets.
        pub tags: Vec<String> = reasoning_and_answer(),
        /// The deduction for each character after the last closing tag, white space at both ends of
        /// that text not counted.
        pub trailing_penalty: f64 = 0.001,
        /// Whether text after a repeated last closing tag costs too, from its last occurrence. By
        /// default it is free, so a completion that repeats the tag evades the penalty.
        pub charge_repeated: bool = false,
        /// Whether a tag must occur exactly once to count.
        pub once: bool = false,
    }
    kind: "format_incremental",
    range: "at most 1",
    typical_weight: "0.5 to 1.0",
    bounds: [f64::NEG_INFINITY, 1.0],
    formula: "(share of the opening and closing tags that occur; with once, exactly once) - \
              trailing_penalty x (characters after the last closing tag, white space around them \
              not counted; 0 where that tag is repeated, unless charge_repeated)",
}

impl Kind for FormatIncremental {
    fn check(&self) -> Checked {
        at_least("trailing_penalty", self.trailing_penalty, 0.0)?;
        check_tags(&self.tags)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let (tags, p) = (Tags::new(&self.tags), self.clone());
        per_sample(move |input| {
            // Without the last tag nothing is after it: partial credit is kept.
            let trailing = tags.after_last(&input.text, p.charge_repeated).map_or("", trim);
            let penalty = p.trailing_penalty * trailing.chars().count() as f64;
            Some(tags.share(&input.text, p.once) - penalty)
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
        check("<reasoning>a</reasoning><answer>5</answer>\n\u{1c} ", 1.0);
        check("<reasoning>a</reasoning><answer>5</answer>\n é é\n", 0.997);
        check(&format!("<answer>5</answer>{}", "x".repeat(600)), -0.1);
        check("<answer>5</answer><answer>5</answer>more", 0.5);
    }

    #[test]
    fn repeated_tags_may_be_charged_and_may_not_count() {
        let text = "<answer>5</answer><answer>6</answer> more";
        let charged = FormatIncremental { charge_repeated: true, ..FormatIncremental::default() };
        assert!(near(score_text(&charged, text), 0.496));
        let once = FormatIncremental { once: true, ..charged };
        assert!(near(score_text(&once, text), -0.004));
        assert!(near(score_text(&once, "<reasoning></reasoning><answer></answer>"), 1.0));
    }

    #[test]
    fn each_of_six_tags_earns_a_sixth() {
        let tags = ["plan", "work", "out"].map(str::to_owned).to_vec();
        let strict = FormatStrict { tags: tags.clone() };
        let soft = FormatSoft { tags: tags.clone(), ..FormatSoft::default() };
        let incremental =
            FormatIncremental { tags, trailing_penalty: 0.5, ..FormatIncremental::default() };
        let text = "<plan>a</plan> <work>b</work>\n<out>c</out>";
        assert_eq!((score_text(&strict, text), score_text(&soft, text)), (1.0, 1.0));
        assert!(near(score_text(&incremental, text), 1.0));
        let partly = "<plan>a</plan><out>c</out>é";
        assert!(near(score_text(&incremental, partly), 4.0 / 6.0 - 0.5));
        assert_eq!(score_text(&strict, "<plan></plan><out></out><work></work>"), 0.0);
    }
}
