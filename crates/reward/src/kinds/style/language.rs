//! `language`: detects the completion's language.

use whatlang::{Detector, Lang};

use crate::kinds::prelude::*;

/// Characters that the detector reads; more do not improve the verdict.
const CHARS: usize = 1000;

define_kind! {
    pub struct Language {
        /// ISO 639-3 code of the wanted language, such as `eng`.
        pub language: String,
        /// Least confidence of the detector, 0 to 1, for the wanted language to count.
        pub confidence: f64 = 0.0,
    }
    kind: "language",
    range: "0 or 1",
    typical_weight: "0.2 to 0.5",
    example: "language = \"eng\"",
    formula: "1 if the first 1,000 characters are in the language (ISO 639-3 code), at that \
              confidence or more, else 0; missing without letters; short texts are often misjudged",
}

impl Kind for Language {
    fn check(&self) -> Checked {
        between("confidence", self.confidence, 0.0, 1.0)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let wanted = Lang::from_code(&self.language).ok_or_else(|| {
            let allowed =
                "an ISO 639-3 code that can be detected, such as \"eng\", \"deu\" or \"cmn\"";
            Problem::value("language", quoted(&self.language), allowed)
        })?;
        let (detector, confidence) = (Detector::new(), self.confidence);
        per_sample(move |input| {
            let text = &input.text;
            let end = text.char_indices().nth(CHARS).map_or(text.len(), |(at, _)| at);
            let found = detector.detect(&text[..end])?;
            Some(indicator(found.lang() == wanted && found.confidence() >= confidence))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tools;
    use crate::kinds::tests::samples::{sample, score};

    #[test]
    fn languages_are_detected() {
        let within = |text: &str, code: &str, confidence| {
            score(&Language { language: code.to_owned(), confidence }, &sample(text, &[]))
        };
        let text = "The quick brown fox jumps over the lazy dog and then it sleeps in the sun.";
        assert_eq!(within(text, "eng", 0.0), Some(1.0));
        let german =
            "Der schnelle braune Fuchs springt über den faulen Hund und schläft in der Sonne.";
        assert_eq!(within(german, "eng", 0.0), Some(0.0));
        assert_eq!(within(german, "deu", 0.0), Some(1.0));
        assert_eq!(within("今日はいい天気ですね。", "jpn", 0.9), Some(1.0));
        assert_eq!((within("", "eng", 0.0), within("123 ...", "eng", 0.0)), (None, None));
        let context = BuildContext { tools: &Tools::default(), route: "r", part: "p" };
        for code in ["en", "xxx"] {
            let unknown = Language { language: code.to_owned(), confidence: 0.0 };
            assert!(unknown.build(&context).is_err(), "{code}");
        }
    }
}
