//! `contains`: searches the completion for phrases.

use serde::{Deserialize, Serialize};

use crate::kinds::answer::texts_of;
use crate::kinds::prelude::*;

/// How many of the phrases must occur.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ContainsMode {
    /// Every one.
    #[default]
    All,
    /// At least one.
    Any,
}

define_kind! {
    pub struct Contains {
        /// The phrases; empty takes the reference.
        pub phrases: Vec<String> = Vec::new(),
        /// Metadata key of the reference for an empty list: one phrase, or a JSON list.
        pub reference: String = answer_key(),
        /// How many of the phrases must occur.
        pub mode: ContainsMode = ContainsMode::All,
        /// Whether letter case is ignored.
        pub ignore_case: bool = false,
        /// Regex whose first group is searched; empty takes the whole completion.
        pub extract: String = String::new(),
    }
    kind: "contains",
    range: "0 or 1",
    typical_weight: "1.0",
    formula: "1 if all (mode \"any\": one) of the phrases, or of metadata[reference] where none \
              are listed, occur, else 0; missing without either",
}

impl Kind for Contains {
    fn extract(&self) -> Option<&str> {
        Some(&self.extract)
    }

    fn check(&self) -> Checked {
        if self.phrases.is_empty() { Ok(()) } else { texts("phrases", &self.phrases, 64) }
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let (p, finder) = (self.clone(), AnswerFinder::new(&self.extract)?);
        per_sample(move |input| {
            let referenced;
            let phrases = if p.phrases.is_empty() {
                let value = input.metadata.get(&p.reference)?;
                referenced = texts_of(value, |value| vec![value.to_owned()]);
                &referenced
            } else {
                &p.phrases
            };
            if phrases.is_empty() {
                return None;
            }
            let Some(text) = finder.find(&input.text) else { return Some(0.0) };
            let lower = p.ignore_case.then(|| text.to_lowercase());
            let text = lower.as_deref().unwrap_or(text);
            let occurs = |phrase: &String| match p.ignore_case {
                true => text.contains(&phrase.to_lowercase()),
                false => text.contains(phrase.as_str()),
            };
            Some(indicator(match p.mode {
                ContainsMode::All => phrases.iter().all(occurs),
                ContainsMode::Any => phrases.iter().any(occurs),
            }))
        })
    }

    fn reads(&self) -> Vec<&str> {
        if self.phrases.is_empty() { vec![self.reference.as_str()] } else { Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::answer::answer_pattern;
    use crate::kinds::tests::samples::{sample, score, with_answer};

    #[test]
    fn phrases_come_from_the_configuration_or_the_reference() {
        let listed = |mode, ignore_case| Contains {
            phrases: vec!["Paris".to_owned(), "Seine".to_owned()],
            mode,
            ignore_case,
            ..Contains::default()
        };
        let text = sample("paris is on the Seine", &[]);
        for (mode, ignore_case, value) in [
            (ContainsMode::All, false, 0.0),
            (ContainsMode::All, true, 1.0),
            (ContainsMode::Any, false, 1.0),
        ] {
            assert_eq!(score(&listed(mode, ignore_case), &text), Some(value));
        }
        let referred =
            |answer: &str| score(&Contains::default(), &with_answer("a, b and c", Some(answer)));
        assert_eq!(referred("a, b"), Some(1.0), "one phrase");
        assert_eq!(
            (referred("[\"a\", \"c\"]"), referred("[\"a\", \"z\"]")),
            (Some(1.0), Some(0.0))
        );
        assert_eq!((referred(" "), referred("[]")), (None, None));
        assert_eq!(score(&Contains::default(), &sample("a", &[])), None);
        let tagged = Contains { extract: answer_pattern(), ..listed(ContainsMode::All, false) };
        assert_eq!(score(&tagged, &sample("Paris Seine", &[])), Some(1.0), "without tags");
    }
}
