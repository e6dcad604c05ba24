//! `length`: a peak at an ideal length, or the distance from it.

use serde::{Deserialize, Serialize};

use super::{LONGEST, LengthUnit};
use crate::kinds::prelude::*;

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
        pub ideal: u32,
        /// The distance over which the value falls by 1, on both sides.
        pub spread: u32,
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
    fn check(&self) -> Checked {
        between("ideal", self.ideal, 0, LONGEST)?;
        between("spread", self.spread, 1, LONGEST)
    }

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ScoreInput;
    use crate::kinds::tests::samples::{near, of_length, sample, score, score_text};

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
}
