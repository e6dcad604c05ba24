//! `json_valid`: accepts JSON.

use serde::de::IgnoredAny;

use crate::kinds::prelude::*;
use crate::text::fenced_blocks;

define_kind! {
    pub struct JsonValid {
        /// Whether the content of the first fenced block counts, where there is one.
        pub fenced: bool = false,
    }
    kind: "json_valid",
    range: "0 or 1",
    typical_weight: "0.5 to 1.0",
    formula: "1 if the completion (or, with fenced, its first fenced block) is one JSON value, \
              else 0",
}

impl Kind for JsonValid {
    fn build(&self, _: &BuildContext<'_>) -> Built {
        let fenced = self.fenced;
        per_sample(move |input| {
            let read = serde_json::from_str::<IgnoredAny>(json_text(&input.text, fenced));
            Some(indicator(read.is_ok()))
        })
    }
}

/// The completion, or its first fenced block if `fenced` is true and there is one. The closing fence may be at the
/// end of the last line, where models put it.
pub fn json_text(text: &str, fenced: bool) -> &str {
    let block = || Some(fenced_blocks(text).first()?.content.trim_end().trim_end_matches("```"));
    if fenced { block().unwrap_or(text) } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::tests::samples::score_text;

    #[test]
    fn json_is_the_whole_completion_or_in_a_fence() {
        for (text, plain, fenced) in [
            ("{\"a\": [1, 2.5, null]}\n", 1.0, 1.0),
            ("Here:\n```json\n{\"a\": 1}\n```\nDone", 0.0, 1.0),
            ("```\n[]```", 0.0, 1.0),
            ("```json\n{a}\n```", 0.0, 0.0),
            ("```json\n{\"code\": \"use ``` here\"}\n```", 0.0, 1.0),
            ("````json\n{\"a\": \"\\n```\\n\"}\n````", 0.0, 1.0),
            ("~~~\n[1]\n~~~\n```json\n[}\n```", 0.0, 1.0),
            ("{\"a\": 1} {\"b\": 2}", 0.0, 0.0),
            ("{\"a\": 1,}", 0.0, 0.0),
            ("", 0.0, 0.0),
        ] {
            let [without, with] =
                [false, true].map(|fenced| score_text(&JsonValid { fenced }, text));
            assert_eq!((without, with), (plain, fenced), "{text}");
        }
        // Any depth is read, as no level takes memory on the stack.
        let deep = ["[", "]"].map(|bracket| bracket.repeat(100_000));
        for (text, value) in [(deep.concat(), 1.0), (deep[0].clone(), 0.0)] {
            assert_eq!(score_text(&JsonValid { fenced: false }, &text), value);
        }
    }
}
