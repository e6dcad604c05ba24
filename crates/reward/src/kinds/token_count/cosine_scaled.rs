//! `cosine_scaled`: correctness scaled by length.

use std::f64::consts::PI;

use hone_core::config::range::ordered;

use super::LONGEST;
use crate::kinds::correctness::math_equal::{find_math, is_equal};
use crate::kinds::prelude::*;

define_kind! {
    /// Yeo et al. 2025 (arXiv 2502.03373, C.1), as in TRL's `get_cosine_scaled_reward`.
    pub struct CosineScaled {
        /// Tokens at which the curve ends; longer completions keep its last value.
        pub max_tokens: u32,
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
        pub tolerance: f64 = 1e-6,
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
    fn extract(&self) -> Option<&str> {
        Some(&self.extract)
    }

    fn find_answer(&self, text: &str, finder: &AnswerFinder) -> Option<String> {
        find_math(text, finder).map(str::to_owned)
    }

    fn check(&self) -> Checked {
        between("max_tokens", self.max_tokens, 1, LONGEST)?;
        ordered(["min_correct", "max_correct"], self.min_correct, self.max_correct)?;
        ordered(["min_wrong", "max_wrong"], self.min_wrong, self.max_wrong)?;
        at_least("tolerance", self.tolerance, 0.0)
    }

    fn build(&self, _: &BuildContext<'_>) -> Built {
        let (p, finder) = (self.clone(), AnswerFinder::new(&self.extract)?);
        per_sample(move |input| {
            let reference = input.metadata.get(&p.reference)?;
            let correct = is_equal(&input.text, reference, p.tolerance, &finder)?;
            Some(p.value(input.ids.len(), correct))
        })
    }

    fn reads(&self) -> Vec<&str> {
        vec![self.reference.as_str()]
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
    use serde::Deserialize;

    use super::*;
    use crate::kinds::tests::samples::{near, reference};

    #[derive(Deserialize)]
    struct Cases {
        cosine: Vec<Case>,
    }

    #[derive(Deserialize)]
    struct Case {
        tokens: usize,
        correct: bool,
        value: f64,
    }

    #[test]
    fn values_equal_trl() {
        let p: CosineScaled = serde_json::from_str(r#"{"max_tokens": 100}"#).unwrap();
        for Case { tokens, correct, value } in reference::<Cases>().cosine {
            assert!(near(p.value(tokens, correct), value), "{tokens} {correct}");
        }
    }
}
