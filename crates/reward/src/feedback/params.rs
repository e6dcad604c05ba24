//! The parameters of `kind = "feedback"`.

use serde::{Deserialize, Serialize};

use hone_core::config::{Checked, Problem};

use crate::kinds::define::parameters;

/// The type of a feedback part's values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FeedbackType {
    /// A number, or a boolean as 1 or 0.
    #[default]
    Number,
    /// `true` or `false` (1 or 0).
    Boolean,
    /// A comment without a value, which trains nothing.
    Comment,
}

/// How the values of several raters of one sample become one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Aggregate {
    /// The newest value.
    #[default]
    Last,
    /// The arithmetic mean.
    Mean,
    /// The median; of an even number of values the mean of the middle two.
    Median,
    /// The most frequent value; missing where two are equally frequent.
    Majority,
}

/// How a key's feedback beyond its share is cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShareRule {
    /// All of the key's feedback is down-weighted.
    #[default]
    Weight,
    /// The key's oldest feedback is dropped.
    Drop,
}

parameters! {
    /// Parameters of `kind = "feedback"`. The defaults accept -1 to 1; the last value counts.
    pub struct FeedbackParams {
        /// The type of the values.
        #[serde(rename = "type")]
        pub kind: FeedbackType = FeedbackType::Number,
        /// Least and greatest number, both allowed; absent: -1 and 1.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub range: Option<[f64; 2]> = None,
        /// How the values of several raters of one sample become one.
        pub aggregate: Aggregate = Aggregate::Last,
        /// Largest share of a batch's feedback that one key may contribute; 1 is no cap.
        pub max_key_share: f64 = 1.0,
        /// How a key's feedback beyond its share is cut.
        pub share_rule: ShareRule = ShareRule::Weight,
    }
}

/// The range of numbers without a configured one. Every part has a range, because a single value far outside
/// of the others would make them equal in the running baseline.
const DEFAULT_RANGE: [f64; 2] = [-1.0, 1.0];

impl FeedbackParams {
    /// The least and the greatest value that clients may post; `None` for comments, which have no value.
    pub fn bounds(&self) -> Option<[f64; 2]> {
        match self.kind {
            FeedbackType::Boolean => Some([0.0, 1.0]),
            FeedbackType::Number => Some(self.range.unwrap_or(DEFAULT_RANGE)),
            FeedbackType::Comment => None,
        }
    }

    /// A value scaled so that 0 is the least and 1 the greatest that clients may post; `None` for comments.
    pub fn scaled(&self, value: f64) -> Option<f64> {
        let [low, high] = self.bounds()?;
        Some(((value - low) / (high - low)).clamp(0.0, 1.0))
    }

    /// Checks every range.
    ///
    /// # Errors
    /// The first value that is out of range.
    pub fn check(&self) -> Checked {
        if let Some([low, high]) = self.range {
            let wrong = |allowed| Err(Problem::value("range", format!("[{low}, {high}]"), allowed));
            if self.kind != FeedbackType::Number {
                return wrong("absent unless type = \"number\"");
            }
            if !(low.is_finite() && high.is_finite() && low < high) {
                return wrong("two finite numbers, the lesser first");
            }
        }
        if !(self.max_key_share > 0.0 && self.max_key_share <= 1.0) {
            let allowed = "greater than 0 and at most 1";
            return Err(Problem::value("max_key_share", self.max_key_share, allowed));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> FeedbackParams {
        toml::from_str(text).unwrap()
    }

    fn refusal(text: &str) -> String {
        read(text).check().unwrap_err().sentence()
    }

    #[test]
    fn keys_are_read_and_written() {
        assert_eq!(read(""), FeedbackParams::default());
        let stars = read("type = \"number\"\nrange = [1, 5]\naggregate = \"median\"");
        assert_eq!(stars.range, Some([1.0, 5.0]));
        assert_eq!(stars.check(), Ok(()));
        assert_eq!(read(&toml::to_string(&stars).unwrap()), stars);
        assert!(toml::from_str::<FeedbackParams>("ranges = [1, 5]").is_err());
    }

    #[test]
    fn values_are_scaled_to_their_range() {
        let stars = read("range = [1, 5]");
        assert_eq!([1.0, 4.0, 5.0].map(|v| stars.scaled(v)), [0.0, 0.75, 1.0].map(Some));
        assert_eq!(read("type = \"boolean\"").scaled(1.0), Some(1.0));
        assert_eq!([-1.0, 0.0, 1.0].map(|v| read("").scaled(v)), [0.0, 0.5, 1.0].map(Some));
        assert_eq!(read("type = \"comment\"").scaled(1.0), None);
    }

    #[test]
    fn ranges_are_named() {
        insta::assert_snapshot!(refusal("range = [5, 1]"), @"range is [5, 1]: it must be two finite numbers, the lesser first");
        insta::assert_snapshot!(refusal("type = \"boolean\"\nrange = [0, 1]"), @r#"range is [0, 1]: it must be absent unless type = "number""#);
        insta::assert_snapshot!(refusal("max_key_share = 0"), @"max_key_share is 0: it must be greater than 0 and at most 1");
    }
}
