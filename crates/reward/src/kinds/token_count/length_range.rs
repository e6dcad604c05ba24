//! `length_range`: a range of lengths.

use super::MOST_TOKENS;
use crate::kinds::prelude::*;

define_kind! {
    pub struct LengthRange {
        /// Fewest tokens that earn 1.
        pub min: u32 = 0,
        /// Most tokens that earn 1.
        pub max: u32,
        /// Tokens from either end to 0, falling in a line; with 0 the value is 0 right outside.
        pub fade: u32 = 0,
    }
    kind: "length_range",
    typical_weight: "0.1 to 0.5",
    example: "min = 4\nmax = 20\nfade = 10",
    formula: "1 from min to max tokens; outside max(0, 1 - distance / fade), with fade 0 at once 0",
}

impl Kind for LengthRange {
    fn check(&self) -> Checked {
        between("max", self.max, 1, MOST_TOKENS)?;
        between("min", self.min, 0, self.max)?;
        between("fade", self.fade, 0, MOST_TOKENS)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let [min, max, fade] = [self.min, self.max, self.fade].map(f64::from);
        per_sample(move |input| {
            let tokens = input.ids.len() as f64;
            let distance = (min - tokens).max(tokens - max).max(0.0);
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
    use crate::kinds::tests::samples::{near, of_length, score};

    #[test]
    fn lengths_outside_the_range_fade_to_0() {
        let p = LengthRange { min: 10, max: 20, fade: 4 };
        for (tokens, value) in
            [(10, 1.0), (20, 1.0), (9, 0.75), (22, 0.5), (24, 0.0), (0, 0.0), (999, 0.0)]
        {
            assert!(near(score(&p, &of_length(tokens)).unwrap(), value), "{tokens}");
            let hard = LengthRange { fade: 0, ..p.clone() };
            let wanted = f64::from(u8::from(value == 1.0));
            assert_eq!(score(&hard, &of_length(tokens)), Some(wanted), "{tokens}");
        }
    }
}
