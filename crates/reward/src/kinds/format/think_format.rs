//! `think_format`: accepts a completion that begins with one block of reasoning.

use crate::kinds::prelude::*;

define_kind! {
    pub struct ThinkFormat {}
    kind: "think_format",
    range: "0 or 1",
    typical_weight: "0.5 to 1.0",
    formula: "1 if the completion begins with <think>, has no second one, and has </think> after \
              it, else 0 (as TRL's think_format_reward)",
}

impl Kind for ThinkFormat {
    fn build(&self, _: &BuildContext<'_>) -> Built {
        per_sample(|input| {
            let after = input.text.strip_prefix("<think>");
            let is_closed = |t: &str| !t.contains("<think>") && t.contains("</think>");
            Some(indicator(after.is_some_and(is_closed)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::format::think_answer::ThinkAnswer;
    use crate::kinds::tests::samples::score_text;

    #[test]
    fn thinking_formats() {
        for (text, format, answered) in [
            ("<think>\nThis is my reasoning.\n</think>\nThis is my answer.", 1.0, 0.0),
            ("<think>\nThis is my reasoning.\nThis is my answer.", 0.0, 0.0),
            ("<think>a</think><answer>b</answer>", 1.0, 1.0),
            ("<think>a</think>\n<answer> </answer>", 1.0, 0.0),
            ("<think>a<think>b</think>c", 0.0, 0.0),
            (" <think>a</think><answer>b</answer>", 0.0, 1.0),
            ("</think><think>", 0.0, 0.0),
            ("<think></think>", 1.0, 0.0),
        ] {
            let scores = (score_text(&ThinkFormat {}, text), score_text(&ThinkAnswer {}, text));
            assert_eq!(scores, (format, answered), "{text}");
        }
    }
}
