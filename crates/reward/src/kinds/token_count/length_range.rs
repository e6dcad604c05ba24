//! `length_range`: a range of lengths.

use super::{LONGEST, LengthUnit};
use crate::kinds::prelude::*;

define_kind! {
    pub struct LengthRange {
        /// Least length that earns 1.
        pub min: u32 = 0,
        /// Greatest length that earns 1.
        pub max: u32,
        /// Distance from either end to 0, falling in a line; with 0 the value is 0 right outside.
        pub fade: u32 = 0,
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
        between("max", self.max, 1, LONGEST)?;
        between("min", self.min, 0, self.max)?;
        between("fade", self.fade, 0, LONGEST)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::tests::samples::{near, of_length, score, score_text};

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
}
