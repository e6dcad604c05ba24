//! `soft_overlong`: a penalty for lengths near the limit.

use super::LONGEST;
use crate::kinds::prelude::*;

define_kind! {
    /// DAPO (arXiv 2503.14476), eq. 13.
    pub struct SoftOverlong {
        /// Longest length that does not earn the full penalty.
        pub max_tokens: u32,
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
        between("max_tokens", self.max_tokens, 1, LONGEST)?;
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

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;
    use crate::kinds::tests::samples::{near, of_length, reference, score};

    #[derive(Deserialize)]
    struct Cases {
        overlong: Vec<Case>,
    }

    #[derive(Deserialize)]
    struct Case {
        max_tokens: u32,
        cache: u32,
        tokens: usize,
        value: f64,
    }

    #[test]
    fn values_equal_the_published_formula() {
        for Case { max_tokens, cache, tokens, value } in reference::<Cases>().overlong {
            let penalty = score(&SoftOverlong { max_tokens, cache }, &of_length(tokens)).unwrap();
            assert!(near(penalty, value), "{max_tokens} {cache} {tokens}");
        }
    }
}
