//! `format_soft`: accepts the tags in order among any other text.

use super::tags::{Tags, check_tags, reasoning_and_answer};
use crate::kinds::prelude::*;

define_kind! {
    pub struct FormatSoft {
        /// Names of the tags, without angle brackets.
        pub tags: Vec<String> = reasoning_and_answer(),
    }
    kind: "format_soft",
    range: "0 or 1",
    typical_weight: "0.5",
    formula: "1 if the opening and closing tags occur in order, with any text around and between \
              them, else 0",
}

impl Kind for FormatSoft {
    fn check(&self) -> Checked {
        check_tags(&self.tags)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let tags = Tags::new(&self.tags);
        per_sample(move |input| Some(indicator(tags.are_in_order(&input.text))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::tests::samples::score_text;

    #[test]
    fn the_soft_format_requires_the_order_alone() {
        for (text, value) in [
            ("Well, <reasoning>a</reasoning> so <answer>5</answer> it is", 1.0),
            ("<reasoning>a<reasoning></reasoning><answer></answer></answer>", 1.0),
            ("<answer>5</answer><reasoning>a</reasoning>", 0.0),
            ("<reasoning>a</reasoning><answer>5", 0.0),
            ("", 0.0),
        ] {
            assert_eq!(score_text(&FormatSoft::default(), text), value, "{text}");
        }
    }
}
