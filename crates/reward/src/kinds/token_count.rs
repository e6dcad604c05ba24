//! Kinds that score a completion's length: in tokens, the stop token included, or in another unit.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

use hone_core::config::{between, ordered};

use crate::ScoreInput;
use crate::kinds::correctness::{find_math, is_equal};
use crate::kinds::prelude::*;
use crate::text::words_of_any_script;

/// Greatest length that a parameter may name.
const LONGEST: u32 = 1 << 20;

/// The unit of a length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LengthUnit {
    /// Tokens, the stop token included.
    #[default]
    Tokens,
    /// Words, which white space separates; each character of a script without spaces is a word.
    Words,
    /// Unicode code points.
    Characters,
}

impl LengthUnit {
    fn of(self, input: &ScoreInput) -> f64 {
        let length = match self {
            Self::Tokens => input.ids.len(),
            Self::Words => words_of_any_script(&input.text).len(),
            Self::Characters => input.text.chars().count(),
        };
        length as f64
    }
}

define_kind! {
    /// DAPO (arXiv 2503.14476), eq. 13.
    pub struct SoftOverlong {
        /// Longest length that does not earn the full penalty.
        pub max_tokens: u32 => between(1, LONGEST),
        /// Tokens before `max_tokens` over which the penalty grows; with 0 it is full at once.
        pub cache: u32,
    }
    kind: "soft_overlong",
    range: "-1 to 0",
    typical_weight: "0.5 to 1.0",
    example: "max_tokens = 20\ncache = 10",
    bounds: [-1.0, 0.0],
    formula: "0 up to max_tokens - cache tokens, then (max_tokens - cache - tokens) / cache, -1 \
              beyond max_tokens (DAPO)",
}

impl Kind for SoftOverlong {
    fn check(&self) -> Checked {
        self.check_ranges()?;
        between("cache", self.cache, 0, self.max_tokens)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let [max_tokens, cache] = [self.max_tokens, self.cache].map(f64::from);
        per_sample(move |input| {
            let over = input.ids.len() as f64 - (max_tokens - cache);
            Some(match (over <= 0.0, cache == 0.0) {
                (true, _) => 0.0,
                (false, true) => -1.0,
                (false, false) => -(over / cache).min(1.0),
            })
        })
    }
}

define_kind! {
    pub struct LengthRange {
        /// Least length that earns 1.
        pub min: u32 = 0,
        /// Greatest length that earns 1.
        pub max: u32 => between(1, LONGEST),
        /// Distance from either end to 0, falling in a line; with 0 the value is 0 right outside.
        pub fade: u32 = 0 => between(0, LONGEST),
        /// The unit of the lengths.
        pub unit: LengthUnit = LengthUnit::Tokens,
    }
    kind: "length_range",
    typical_weight: "0.1 to 0.5",
    example: "min = 4\nmax = 20\nfade = 10",
    formula: "1 from min to max tokens (unit: words, characters); outside max(0, 1 - distance / \
              fade), with fade 0 at once 0",
}

impl Kind for LengthRange {
    fn check(&self) -> Checked {
        self.check_ranges()?;
        between("min", self.min, 0, self.max)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let ([min, max, fade], unit) = ([self.min, self.max, self.fade].map(f64::from), self.unit);
        per_sample(move |input| {
            let length = unit.of(input);
            let distance = (min - length).max(length - max).max(0.0);
            Some(match (distance == 0.0, fade == 0.0) {
                (true, _) => 1.0,
                (false, true) => 0.0,
                (false, false) => (1.0 - distance / fade).max(0.0),
            })
        })
    }
}

/// How the value falls with the distance from the ideal length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LengthShape {
    /// From 1 to 0, and not below.
    #[default]
    Peak,
    /// From 0, without a lower bound.
    Distance,
}

define_kind! {
    pub struct Length {
        /// The length of the greatest value.
        pub ideal: u32 => between(0, LONGEST),
        /// The distance over which the value falls by 1, on both sides.
        pub spread: u32 => between(1, LONGEST),
        /// The unit of `ideal` and `spread`.
        pub unit: LengthUnit = LengthUnit::Tokens,
        /// How the value falls with the distance.
        pub shape: LengthShape = LengthShape::Peak,
    }
    kind: "length",
    range: "0 to 1; with shape \"distance\" at most 0",
    typical_weight: "0.1 to 0.5",
    example: "ideal = 20\nspread = 20",
    formula: "max(0, 1 - |length - ideal| / spread), or with shape = \"distance\" -|length - ideal| \
              / spread; the length in tokens with the stop token, in words or in characters",
}

impl Kind for Length {
    fn build(&self, _: &BuildContext<'_>) -> Built {
        let p = self.clone();
        let (ideal, spread) = (f64::from(p.ideal), f64::from(p.spread.max(1)));
        per_sample(move |input| {
            let distance = (p.unit.of(input) - ideal).abs() / spread;
            Some(match p.shape {
                LengthShape::Peak => (1.0 - distance).max(0.0),
                LengthShape::Distance => -distance,
            })
        })
    }
}

define_kind! {
    /// Yeo et al. 2025 (arXiv 2502.03373, C.1), as in TRL's `get_cosine_scaled_reward`.
    pub struct CosineScaled {
        /// Tokens at which the curve ends; longer completions keep its last value.
        pub max_tokens: u32 => between(1, LONGEST),
        /// Value of a right answer at `max_tokens`.
        pub min_correct: f64 = 0.5,
        /// Value of a right answer of no length.
        pub max_correct: f64 = 1.0,
        /// Value of a wrong answer of no length.
        pub min_wrong: f64 = -1.0,
        /// Value of a wrong answer at `max_tokens`.
        pub max_wrong: f64 = -0.5,
        /// Metadata key of the reference.
        pub reference: String = answer_key(),
        /// As in `math_equal`.
        pub tolerance: f64 = 1e-6 => at_least(0.0),
        /// As in `math_equal`.
        pub extract: String = answer_pattern(),
    }
    kind: "cosine_scaled",
    range: "min_wrong to max_correct",
    typical_weight: "1.0 to 2.0",
    example: "max_tokens = 100",
    bounds: [-1.0, 1.0],
    formula: "low + (high - low) (1 + cos(pi min(1, tokens / max_tokens))) / 2, where low, high \
              are min_correct, max_correct for an answer that math_equal accepts and max_wrong, \
              min_wrong for others; missing without a reference",
}

impl Kind for CosineScaled {
    fn find_answer(&self, text: &str, finder: &AnswerFinder) -> Option<String> {
        find_math(text, finder).map(str::to_owned)
    }

    fn check(&self) -> Checked {
        self.check_ranges()?;
        ordered(["min_correct", "max_correct"], self.min_correct, self.max_correct)?;
        ordered(["min_wrong", "max_wrong"], self.min_wrong, self.max_wrong)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let (p, finder) = (self.clone(), AnswerFinder::new(&self.extract)?);
        per_sample(move |input| {
            let reference = input.metadata.get(&p.reference)?;
            let correct = is_equal(&input.text, reference, p.tolerance, &finder)?;
            Some(p.value(input.ids.len(), correct))
        })
    }
}

impl CosineScaled {
    fn value(&self, tokens: usize, correct: bool) -> f64 {
        let progress = (tokens as f64 / f64::from(self.max_tokens.max(1))).min(1.0);
        let (low, high) = match correct {
            true => (self.min_correct, self.max_correct),
            false => (self.max_wrong, self.min_wrong),
        };
        low + 0.5 * (high - low) * (1.0 + (progress * PI).cos())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::tests::samples::{near, of_length, reference, sample, score, score_text};

    #[derive(Deserialize)]
    struct Overlong {
        max_tokens: u32,
        cache: u32,
        tokens: usize,
        value: f64,
    }

    #[test]
    fn values_equal_the_published_formula() {
        for Overlong { max_tokens, cache, tokens, value } in reference("overlong") {
            let penalty = score(&SoftOverlong { max_tokens, cache }, &of_length(tokens)).unwrap();
            assert!(near(penalty, value), "{max_tokens} {cache} {tokens}");
        }
    }

    #[test]
    fn lengths_outside_the_range_fade_to_0() {
        let p = LengthRange { min: 10, max: 20, fade: 4, unit: LengthUnit::Tokens };
        for (tokens, value) in
            [(10, 1.0), (20, 1.0), (9, 0.75), (22, 0.5), (24, 0.0), (0, 0.0), (999, 0.0)]
        {
            assert!(near(score(&p, &of_length(tokens)).unwrap(), value), "{tokens}");
            let hard = LengthRange { fade: 0, ..p.clone() };
            let wanted = f64::from(u8::from(value == 1.0));
            assert_eq!(score(&hard, &of_length(tokens)), Some(wanted), "{tokens}");
        }
        let words = LengthRange { unit: LengthUnit::Words, ..p };
        assert!(near(score_text(&words, "a b c d e f g h i"), 0.75));
    }

    const PEAK: Length =
        Length { ideal: 100, spread: 50, unit: LengthUnit::Tokens, shape: LengthShape::Peak };

    #[test]
    fn length_falls_in_a_line_on_both_sides() {
        let distance = Length { shape: LengthShape::Distance, ..PEAK };
        for (tokens, value, below) in [
            (100, 1.0, 0.0),
            (75, 0.5, -0.5),
            (125, 0.5, -0.5),
            (50, 0.0, -1.0),
            (150, 0.0, -1.0),
            (1000, 0.0, -18.0),
        ] {
            assert!(near(score(&PEAK, &of_length(tokens)).unwrap(), value), "{tokens}");
            assert!(near(score(&distance, &of_length(tokens)).unwrap(), below), "{tokens}");
        }
    }

    #[test]
    fn words_and_characters_may_be_counted() {
        let p = Length { ideal: 10, spread: 10, ..PEAK };
        let text = " éé\u{1c}日本語 😀\n";
        for (unit, value) in [(LengthUnit::Words, 0.5), (LengthUnit::Characters, 1.0)] {
            assert!(near(score_text(&Length { unit, ..p.clone() }, text), value), "{unit:?}");
        }
        let tokens = ScoreInput { ids: vec![0; 4], ..sample(text, &[]) };
        assert!(near(score(&p, &tokens).unwrap(), 0.4));
    }

    #[derive(Deserialize)]
    struct Cosine {
        tokens: usize,
        correct: bool,
        value: f64,
    }

    #[test]
    fn values_equal_trl() {
        let p: CosineScaled = serde_json::from_str(r#"{"max_tokens": 100}"#).unwrap();
        for Cosine { tokens, correct, value } in reference("cosine") {
            assert!(near(p.value(tokens, correct), value), "{tokens} {correct}");
        }
    }
}
