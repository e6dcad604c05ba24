//! `format_strict`: accepts the tags in order and nothing else.

use super::tags::{Tags, check_tags, reasoning_and_answer};
use crate::kinds::prelude::*;

define_kind! {
    pub struct FormatStrict {
        /// Names of the tags, without angle brackets.
        pub tags: Vec<String> = reasoning_and_answer(),
    }
    kind: "format_strict",
    range: "0 or 1",
    typical_weight: "0.5 to 1.0",
    formula: "1 if the completion is <reasoning>...</reasoning><answer>...</answer> and nothing \
              else but white space, each tag exactly once, else 0",
}

impl Kind for FormatStrict {
    fn check(&self) -> Checked {
        check_tags(&self.tags)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let tags = Tags::new(&self.tags);
        per_sample(move |input| Some(indicator(tags.strict_content(&input.text).is_some())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::format::format_incremental::FormatIncremental;
    use crate::kinds::tests::samples::score_text;

    #[test]
    fn only_the_complete_format_is_accepted() {
        let (strict, incremental) = (FormatStrict::default(), FormatIncremental::default());
        for good in [
            "<reasoning>a</reasoning><answer>b</answer>",
            "\n<reasoning>\na\n</reasoning>\n\t<answer>\nb\n</answer>\n",
            "<reasoning></reasoning><answer></answer>",
            "\u{a0}<reasoning>é</reasoning>\u{2003}<answer>ü</answer>",
        ] {
            assert_eq!(score_text(&strict, good), 1.0, "{good:?}");
            assert!(score_text(&incremental, good) >= 0.998, "{good:?}");
        }
        for bad in [
            "",
            "<reasoning>a</reasoning><answer>b",
            "<answer>b</answer><reasoning>a</reasoning>",
            "x<reasoning>a</reasoning><answer>b</answer>",
            "<reasoning>a</reasoning>x<answer>b</answer>",
            "<reasoning>a</reasoning><answer>b</answer>x",
            "<reasoning>a<reasoning></reasoning><answer>b</answer>",
            "<reasoning>a</reasoning><answer>b</answer></answer>",
            "<reasoning><answer>a</reasoning>b</answer>",
            "</reasoning><reasoning><answer></answer>",
            "<Reasoning>a</Reasoning><answer>b</answer>",
        ] {
            assert_eq!(score_text(&strict, bad), 0.0, "{bad:?}");
        }
    }
}
