//! Which language a completion is in.

use whatlang::{Detector, Lang};

use super::indicator;

/// Most characters that are looked at; more do not make the verdict better.
const CHARS: usize = 1000;

/// `language`: `[whatlang's verdict is the wanted language, at a confidence of at least
/// `confidence`]`, in {0, 1}; typical weight 0.2 to 0.5.
///
/// The first 1,000 characters count. Missing where no language can be told: no letters. Short
/// texts are often misjudged.
pub fn language(text: &str, wanted: Lang, confidence: f64) -> Option<f64> {
    let end = text.char_indices().nth(CHARS).map_or(text.len(), |(at, _)| at);
    let found = Detector::new().detect(&text[..end])?;
    Some(indicator(found.lang() == wanted && found.confidence() >= confidence))
}

/// The language of an ISO 639-3 code such as `eng`.
pub fn by_code(code: &str) -> Option<Lang> {
    Lang::from_code(code)
}
