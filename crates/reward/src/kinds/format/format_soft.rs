//! `format_soft`: accepts the tags in order among other text.

use serde::{Deserialize, Serialize};

use super::tags::{Tags, check_tags, reasoning_and_answer};
use crate::kinds::answer::compile;
use crate::kinds::prelude::*;

/// What may be between two pairs of tags.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BetweenPairs {
    /// Any text.
    #[default]
    Any,
    /// White space, as in the guides to GRPO with TRL.
    Space,
}

define_kind! {
    pub struct FormatSoft {
        /// Names of the tags, without angle brackets.
        pub tags: Vec<String> = reasoning_and_answer(),
        /// What may be between two pairs of tags.
        pub between: BetweenPairs = BetweenPairs::Any,
    }
    kind: "format_soft",
    range: "0 or 1",
    typical_weight: "0.5",
    formula: "1 if the opening and closing tags occur in order, with any text around them and any \
              text (between = \"space\": white space) between the pairs, else 0",
}

impl Kind for FormatSoft {
    fn check(&self) -> Checked {
        check_tags(&self.tags)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let tags = Tags::new(&self.tags);
        if self.between == BetweenPairs::Any {
            return per_sample(move |input| Some(indicator(tags.are_in_order(&input.text))));
        }
        let pattern = compile("tags", &tags.adjacent())?;
        per_sample(move |input| Some(indicator(pattern.is_match(&input.text))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::tests::samples::score_text;

    #[test]
    fn the_soft_format_requires_the_order_and_may_require_adjacency() {
        let space = FormatSoft { between: BetweenPairs::Space, ..FormatSoft::default() };
        for (text, any, adjacent) in [
            ("Well, <reasoning>a</reasoning>\n\u{1c}<answer>5</answer> it is", 1.0, 1.0),
            ("Well, <reasoning>a</reasoning> so <answer>5</answer> it is", 1.0, 0.0),
            ("<reasoning>a<reasoning></reasoning><answer></answer></answer>", 1.0, 1.0),
            ("<reasoning>a</reasoning> x </reasoning><answer></answer>", 1.0, 1.0),
            ("<answer>5</answer><reasoning>a</reasoning>", 0.0, 0.0),
            ("<reasoning>a</reasoning><answer>5", 0.0, 0.0),
            ("", 0.0, 0.0),
        ] {
            assert_eq!(score_text(&FormatSoft::default(), text), any, "{text}");
            assert_eq!(score_text(&space, text), adjacent, "{text}");
        }
    }
}
