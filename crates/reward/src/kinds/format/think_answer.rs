//! `think_answer`: accepts reasoning in tags, then an answer in tags, and nothing else.

use super::tags::Tags;
use crate::kinds::prelude::*;

define_kind! {
    pub struct ThinkAnswer {}
    kind: "think_answer",
    range: "0 or 1",
    typical_weight: "0.5 to 1.0",
    formula: "1 if the completion is <think>...</think><answer>...</answer>, each tag exactly once \
              and the answer not blank, else 0",
}

impl Kind for ThinkAnswer {
    fn build(&self, _: &BuildContext<'_>) -> Built {
        let tags = Tags::new(&["think", "answer"]);
        per_sample(move |input| {
            let answer = tags.strict_content(&input.text);
            Some(indicator(answer.is_some_and(|answer| !answer.trim().is_empty())))
        })
    }
}
