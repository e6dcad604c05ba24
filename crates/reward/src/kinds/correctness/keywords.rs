//! `keywords`: counts the keywords in the completion.

use crate::kinds::answer::{has_word, texts_of};
use crate::kinds::prelude::*;

define_kind! {
    pub struct Keywords {
        /// The keywords; empty takes the reference.
        pub keywords: Vec<String> = Vec::new(),
        /// Metadata key of the reference for an empty list: a JSON list, or words separated by commas.
        pub reference: String = "keywords".to_owned(),
    }
    kind: "keywords",
    typical_weight: "0.5 to 1.0",
    formula: "share of the keywords, or of the list in metadata[reference] where none are given, \
              that occur as whole words, letter case ignored; missing without either",
}

impl Kind for Keywords {
    fn check(&self) -> Checked {
        if self.keywords.is_empty() { Ok(()) } else { texts("keywords", &self.keywords, 64) }
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let p = self.clone();
        per_sample(move |input| {
            let referenced;
            let words = if p.keywords.is_empty() {
                let commas = |value: &str| value.split(',').map(str::to_owned).collect();
                referenced = texts_of(input.metadata.get(&p.reference)?, commas);
                &referenced
            } else {
                &p.keywords
            };
            if words.is_empty() {
                return None;
            }
            let text = input.text.to_lowercase();
            let found = words.iter().filter(|word| has_word(&text, &word.to_lowercase())).count();
            Some(found as f64 / words.len() as f64)
        })
    }

    fn reads(&self) -> Vec<&str> {
        if self.keywords.is_empty() { vec![self.reference.as_str()] } else { Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::tests::samples::{near, sample, score};

    #[test]
    fn keywords_are_whole_words() {
        let in_text = |words: &str| {
            score(&Keywords::default(), &sample("The river Seine; É-coli.", &[("keywords", words)]))
        };
        assert_eq!(in_text("seine, RIVER, sein, é"), Some(0.75));
        assert_eq!(in_text("[\"river seine\"]"), Some(1.0));
        let chinese = sample("很抱歉我不能", &[("keywords", "抱歉,不能,能不")]);
        assert!(near(score(&Keywords::default(), &chinese).unwrap(), 2.0 / 3.0));
        assert_eq!((in_text(" , "), score(&Keywords::default(), &sample("a", &[]))), (None, None));
    }
}
