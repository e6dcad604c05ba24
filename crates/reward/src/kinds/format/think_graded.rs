//! `think_graded`: a graded value for reasoning in tags, then an answer in tags.

use hone_core::text::trim;

use super::tags::PYTHON_SPACES;
use crate::kinds::answer::compile;
use crate::kinds::prelude::*;

define_kind! {
    /// After `format_reward` of the Hugging Face course's chapter on GRPO in TRL.
    pub struct ThinkGraded {
        /// Fewest characters of reasoning that earn 1.
        pub min_reasoning: u32 = 21,
        /// The value of the format with shorter reasoning or a blank answer.
        pub partial: f64 = 0.5,
    }
    kind: "think_graded",
    typical_weight: "0.5 to 1.0",
    formula: "0 unless <think>...</think>, white space, <answer>...</answer> occurs; 1 if the first \
              such reasoning has min_reasoning characters and its answer is not blank, both \
              trimmed; else partial",
}

impl Kind for ThinkGraded {
    fn check(&self) -> Checked {
        between("partial", self.partial, 0.0, 1.0)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let (partial, fewest) = (self.partial, usize::try_from(self.min_reasoning));
        let fewest = fewest.unwrap_or(usize::MAX);
        // The first boundary ends the first reasoning for which a match exists. A pattern of the whole
        // text, with captures, would take longer than in proportion to the text.
        let boundary = compile("kind", &format!("</think>{PYTHON_SPACES}<answer>"))?;
        per_sample(move |input| {
            let parts = |text| {
                let (_, rest) = str::split_once(text, "<think>")?;
                let between = boundary.find(rest)?;
                let (answer, _) = rest[between.end()..].split_once("</answer>")?;
                Some((trim(&rest[..between.start()]), trim(answer)))
            };
            let Some((reasoning, answer)) = parts(&input.text) else { return Some(0.0) };
            let is_full = reasoning.chars().count() >= fewest && !answer.is_empty();
            Some(if is_full { 1.0 } else { partial })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::tests::samples::score_text;

    #[test]
    fn short_reasoning_and_blank_answers_earn_a_part() {
        let p = ThinkGraded { min_reasoning: 3, partial: 0.25 };
        for (text, value) in [
            ("", 0.0),
            ("<answer>5</answer>", 0.0),
            ("<think>abc</think> so <answer>5</answer>", 0.0),
            ("<think> éé\u{1f}</think>\n<answer>5</answer>", 0.25),
            ("<think>ééé</think>\n<answer>5</answer>", 1.0),
            ("Well: <think>abc</think><answer> </answer>.", 0.25),
            ("<think>a</think>b</think><answer>5</answer>", 1.0),
            ("<think>a</think><answer>5</answer><think>abc</think><answer>5</answer>", 0.25),
        ] {
            assert_eq!(score_text(&p, text), value, "{text}");
        }
    }
}
