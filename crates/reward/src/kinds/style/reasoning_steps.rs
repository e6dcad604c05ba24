//! `reasoning_steps`: counts the markers of steps.

use crate::kinds::prelude::*;

/// Words that order steps; the comma distinguishes them from adverbs within a sentence.
const ORDER: [&str; 7] = ["First,", "Second,", "Third,", "Next,", "Then,", "Lastly,", "Finally,"];

define_kind! {
    /// After Open R1's `reasoning_steps_reward`.
    pub struct ReasoningSteps {
        /// Markers that earn 1.
        pub target: u32 = 3,
    }
    kind: "reasoning_steps",
    typical_weight: "0.1 to 0.5",
    formula: "min(1, markers / target): \"Step 1:\", \"First,\", ..., and lines that begin with \
              \"1.\", \"1)\", \"- \" or \"* \"",
}

impl Kind for ReasoningSteps {
    fn check(&self) -> Checked {
        between("target", self.target, 1, 1000)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let target = self.target;
        per_sample(move |input| Some(share_of_target(markers(&input.text), target)))
    }
}

fn markers(text: &str) -> usize {
    let lines = text.lines().filter(|line| begins_step(line)).count();
    let steps = text.match_indices("Step ").filter(|(at, word)| {
        let rest = &text[at + word.len()..];
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        digits > 0 && rest[digits..].starts_with(':')
    });
    let ordered = ORDER.iter().map(|word| text.matches(word).count()).sum::<usize>();
    lines + steps.count() + ordered
}

fn begins_step(line: &str) -> bool {
    let line = line.trim_start();
    let digits = line.bytes().take_while(u8::is_ascii_digit).count();
    let is_numbered = (1..=3).contains(&digits) && {
        // `3.5` is a number, not a step.
        let after = line[digits..].strip_prefix(['.', ')']);
        after.is_some_and(|after| after.is_empty() || after.starts_with(char::is_whitespace))
    };
    is_numbered || line.starts_with("- ") || line.starts_with("* ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::tests::samples::{near, score_text};

    #[test]
    fn markers_are_counted() {
        for (text, markers) in [
            ("", 0),
            ("Step 1: a\nStep 2: b", 2),
            ("1. a\n 2) b\n10. c", 3),
            ("- a\n* b\n-c\n3.5 d", 2),
            ("First, a. Then, b. Finally, c", 3),
            ("Step one: a. Step : b", 0),
        ] {
            let value = score_text(&ReasoningSteps { target: 10 }, text);
            assert!(near(value, f64::from(markers) / 10.0), "{text}");
        }
        assert_eq!(score_text(&ReasoningSteps { target: 3 }, "- a\n- b\n- c\n- d"), 1.0);
    }
}
