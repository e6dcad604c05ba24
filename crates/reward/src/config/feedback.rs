//! The keys of `kind = "feedback"`: what clients may post, and how several of them count.

use serde::{Deserialize, Serialize};

use hone_core::config::describe::Problem;

/// What a feedback name takes for a value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FeedbackType {
    /// A number, or a boolean as 1 or 0.
    #[default]
    Number,
    /// `true` or `false` (1 or 0).
    Boolean,
    /// A remark alone; it has no value and trains nothing.
    Comment,
}

/// One value from what several raters said of one sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Aggregate {
    /// The newest.
    #[default]
    Last,
    /// The arithmetic mean.
    Mean,
    /// The middle one, or the mean of the middle two.
    Median,
    /// The most frequent; missing where two are equally frequent.
    Majority,
}

/// What happens to what a key posts beyond its share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShareRule {
    /// All of it counts less.
    #[default]
    Weight,
    /// The oldest of it does not count.
    Drop,
}

/// Feedback as a part of the reward. The defaults take any finite number, and the last wins.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FeedbackParams {
    /// What a value is.
    #[serde(rename = "type")]
    pub kind: FeedbackType,
    /// Least and greatest number, both allowed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub range: Option<[f64; 2]>,
    /// How several raters of one sample are joined.
    pub aggregate: Aggregate,
    /// Largest share of a batch's feedback that one key may contribute; 1 is no cap.
    pub max_key_share: f64,
    /// What happens beyond the share.
    pub share_rule: ShareRule,
}

impl Default for FeedbackParams {
    fn default() -> Self {
        Self {
            kind: FeedbackType::Number,
            range: None,
            aggregate: Aggregate::Last,
            max_key_share: 1.0,
            share_rule: ShareRule::Weight,
        }
    }
}

impl FeedbackParams {
    /// Checks every range; `key` is the part's, as in `route[0].reward[1]`.
    ///
    /// # Errors
    /// The first value that is out of range, as a sentence.
    pub fn check(&self, key: &str) -> Result<(), Problem> {
        let of = |name: &str| format!("{key}.{name}");
        if let Some([low, high]) = self.range {
            let shown = format!("[{low}, {high}]");
            if self.kind != FeedbackType::Number {
                let allowed = "absent unless type = \"number\"";
                return Err(Problem::value(&of("range"), shown, allowed));
            }
            if !(low.is_finite() && high.is_finite() && low < high) {
                let allowed = "two finite numbers, the lesser first";
                return Err(Problem::value(&of("range"), shown, allowed));
            }
        }
        if !(self.max_key_share > 0.0 && self.max_key_share <= 1.0) {
            let allowed = "greater than 0 and at most 1";
            return Err(Problem::value(&of("max_key_share"), self.max_key_share, allowed));
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
        read(text).check("reward[0]").unwrap_err().sentence()
    }

    #[test]
    fn keys_are_read_and_written() {
        assert_eq!(read(""), FeedbackParams::default());
        let stars = read("type = \"number\"\nrange = [1, 5]\naggregate = \"median\"");
        assert_eq!(stars.range, Some([1.0, 5.0]));
        assert_eq!(stars.check("r"), Ok(()));
        assert_eq!(read(&toml::to_string(&stars).unwrap()), stars);
        assert!(toml::from_str::<FeedbackParams>("ranges = [1, 5]").is_err());
    }

    #[test]
    fn ranges_are_named() {
        insta::assert_snapshot!(refusal("range = [5, 1]"), @"reward[0].range is [5, 1]: it must be two finite numbers, the lesser first");
        insta::assert_snapshot!(refusal("type = \"boolean\"\nrange = [0, 1]"), @r#"reward[0].range is [0, 1]: it must be absent unless type = "number""#);
        insta::assert_snapshot!(refusal("max_key_share = 0"), @"reward[0].max_key_share is 0: it must be greater than 0 and at most 1");
    }
}
