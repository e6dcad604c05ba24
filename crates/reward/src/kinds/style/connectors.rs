//! `connectors`: counts the words that connect steps of reasoning.

use crate::kinds::answer::has_word;
use crate::kinds::prelude::*;

/// The default words.
const WORDS: [&str; 10] = [
    "therefore",
    "thus",
    "because",
    "since",
    "consequently",
    "first",
    "second",
    "next",
    "finally",
    "however",
];

define_kind! {
    pub struct Connectors {
        /// The words or phrases.
        pub words: Vec<String> = WORDS.map(str::to_owned).to_vec(),
        /// Different words that earn 1.
        pub target: u32 = 6,
        /// Whether only whole words count. By default parts of words do, as in the guides to GRPO:
        /// "enthusiasm" contains "thus".
        pub whole_words: bool = false,
        /// Regex whose first group is the text to search; empty takes the whole completion.
        pub extract: String = r"(?s)<reasoning>(.*?)</reasoning>".to_owned(),
    }
    kind: "connectors",
    typical_weight: "0.1 to 0.3",
    formula: "min(1, different words that occur / target), letter case ignored, within the text \
              that extract finds; 0 where it finds none",
}

impl Kind for Connectors {
    fn extract(&self) -> Option<&str> {
        Some(&self.extract)
    }

    fn check(&self) -> Checked {
        texts("words", &self.words, 64)?;
        between("target", self.target, 1, 64)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let (p, finder) = (self.clone(), AnswerFinder::new(&self.extract)?);
        let words: Vec<String> = p.words.iter().map(|word| word.to_lowercase()).collect();
        per_sample(move |input| {
            let text = finder.find(&input.text).unwrap_or_default().to_lowercase();
            let occurs = |word: &&String| match p.whole_words {
                true => has_word(&text, word),
                false => text.contains(word.as_str()),
            };
            Some(share_of_target(words.iter().filter(occurs).count(), p.target))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::tests::samples::{near, score_text};

    #[test]
    fn each_connector_counts_once() {
        let parts = Connectors { target: 4, ..Connectors::default() };
        let whole = Connectors { whole_words: true, extract: String::new(), ..parts.clone() };
        for (text, by_parts, by_words) in [
            ("because", 0.0, 0.25),
            ("<reasoning>Because a, THUS b, thus c.</reasoning> Finally", 0.5, 0.75),
            ("<reasoning>sincere enthusiasm</reasoning>", 0.5, 0.0),
            ("<reasoning>first second next finally however</reasoning>", 1.0, 1.0),
        ] {
            assert!(near(score_text(&parts, text), by_parts), "{text}");
            assert!(near(score_text(&whole, text), by_words), "{text}");
        }
    }
}
