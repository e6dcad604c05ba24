//! `length`: a peak at an ideal length.

use super::MOST_TOKENS;
use crate::kinds::prelude::*;

define_kind! {
    pub struct Length {
        /// Tokens that earn 1.
        pub ideal: u32,
        /// Tokens from the peak to 0, on both sides.
        pub spread: u32,
    }
    kind: "length",
    typical_weight: "0.1 to 0.5",
    example: "ideal = 20\nspread = 20",
    formula: "max(0, 1 - |completion tokens - ideal| / spread), the stop token counted",
}

impl Kind for Length {
    fn check(&self) -> Checked {
        between("ideal", self.ideal, 0, MOST_TOKENS)?;
        between("spread", self.spread, 1, MOST_TOKENS)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let (ideal, spread) = (f64::from(self.ideal), f64::from(self.spread.max(1)));
        per_sample(move |input| {
            let distance = (input.ids.len() as f64 - ideal).abs();
            Some((1.0 - distance / spread).max(0.0))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::tests::samples::{near, of_length, score};

    #[test]
    fn length_falls_in_a_line_on_both_sides() {
        let p = Length { ideal: 100, spread: 50 };
        for (tokens, value) in
            [(100, 1.0), (75, 0.5), (125, 0.5), (50, 0.0), (150, 0.0), (999, 0.0)]
        {
            assert!(near(score(&p, &of_length(tokens)).unwrap(), value), "{tokens}");
        }
    }
}
