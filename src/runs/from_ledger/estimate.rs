//! Off-policy evaluation: what a policy's reward would be, from records of other policies.
//!
//! Every record has the importance weight of its whole completion,
//! `w = min(exp(sum over tokens of new - recorded), sqrt(n))`, where `n` is the number of records
//! (truncated importance sampling, Ionides 2008, with a bound that grows with the sample). The reward is
//! estimated by `sum w r / sum w` (self-normalized importance sampling).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// An estimate from a smaller share of effective records is unreliable.
pub const RELIABLE_SHARE: f64 = 0.1;

/// A held-out record, scored by a policy.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoredRecord {
    /// The route, whose mean reward the record is compared with.
    pub route: String,
    /// The recorded reward: the weighted sum of its parts.
    pub reward: f64,
    /// Log-probability of the completion under the policy, minus the recorded one, in nats.
    pub log_ratio: f64,
    /// Sum over tokens of the k3 estimate of KL(behavior policy || policy), in nats.
    pub k3: f64,
    pub tokens: usize,
}

impl ScoredRecord {
    /// A record from the log-probabilities of its tokens, as recorded and under the policy.
    pub fn new(route: &str, reward: f64, recorded: &[f32], scored: &[f32]) -> Self {
        let differences =
            || scored.iter().zip(recorded).map(|(s, r)| f64::from(*s) - f64::from(*r));
        Self {
            route: route.to_owned(),
            reward,
            log_ratio: differences().sum(),
            k3: differences().map(k3).sum(),
            tokens: recorded.len(),
        }
    }
}

/// Schulman's k3 estimate of KL(q || p) from a token drawn from q: `exp(d) - 1 - d` with
/// `d = ln p - ln q`. It is never negative, and its mean is the divergence.
fn k3(difference: f64) -> f64 {
    difference.exp_m1() - difference
}

/// What the held-out records say about a policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PolicyEstimate {
    /// The estimated mean reward; `None` if every weight is 0.
    pub reward: Option<f64>,
    /// Effective number of records, `(sum w)^2 / sum w^2` (Kong 1992).
    pub effective_records: f64,
    /// Whether that is at least [`RELIABLE_SHARE`] of the records.
    pub reliable: bool,
    /// Mean log-ratio of the records with a reward above the mean of their route; `None` without one.
    pub log_ratio_above: Option<f64>,
    /// The same below the mean.
    pub log_ratio_below: Option<f64>,
    /// KL(behavior policy || policy), mean over tokens, in nats; `None` without a token.
    pub behavior_kl: Option<f64>,
}

impl PolicyEstimate {
    pub fn of(records: &[ScoredRecord]) -> Self {
        // Each weight is at most the square root of the number of records.
        let most = (records.len() as f64).sqrt();
        let (mut sum, mut squares, mut weighted) = (0.0, 0.0, 0.0);
        for record in records {
            let weight = record.log_ratio.exp().min(most);
            sum += weight;
            squares += weight * weight;
            weighted += weight * record.reward;
        }
        let effective_records = if squares > 0.0 { sum * sum / squares } else { 0.0 };
        let means = route_means(records);
        let mean_ratio = |selects: &dyn Fn(&ScoredRecord, f64) -> bool| {
            let chosen = records.iter().filter(|r| selects(r, means[r.route.as_str()]));
            mean(chosen.map(|record| record.log_ratio))
        };
        let tokens: usize = records.iter().map(|record| record.tokens).sum();
        let k3: f64 = records.iter().map(|record| record.k3).sum();
        Self {
            reward: (sum > 0.0).then(|| weighted / sum),
            effective_records,
            reliable: effective_records >= RELIABLE_SHARE * records.len() as f64,
            log_ratio_above: mean_ratio(&|record, mean| record.reward > mean),
            log_ratio_below: mean_ratio(&|record, mean| record.reward < mean),
            behavior_kl: (tokens > 0).then(|| k3 / tokens as f64),
        }
    }

    /// The metric, the label in the report and the value of each measurement.
    pub fn values(&self) -> [(&'static str, &'static str, Option<f64>); 5] {
        [
            ("estimated_reward", "estimated reward", self.reward),
            ("effective_records", "effective records", Some(self.effective_records)),
            ("log_ratio_above", "log-ratio, reward above the mean", self.log_ratio_above),
            ("log_ratio_below", "log-ratio, reward below the mean", self.log_ratio_below),
            ("behavior_kl", "KL to the behavior policy", self.behavior_kl),
        ]
    }

    /// The values by the name of their metric; those that could not be computed are absent.
    pub fn metrics(&self) -> BTreeMap<String, f64> {
        let known = |(name, _, value): (&str, &str, Option<f64>)| Some((name.to_owned(), value?));
        self.values().into_iter().filter_map(known).collect()
    }
}

fn route_means(records: &[ScoredRecord]) -> BTreeMap<&str, f64> {
    let mut rewards: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for record in records {
        rewards.entry(&record.route).or_default().push(record.reward);
    }
    let mean_of = |(route, rewards): (_, Vec<f64>)| Some((route, mean(rewards)?));
    rewards.into_iter().filter_map(mean_of).collect()
}

fn mean(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let (sum, count) =
        values.into_iter().fold((0.0, 0.0), |(sum, n), value| (sum + value, n + 1.0));
    (count > 0.0).then(|| sum / count)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record(route: &str, reward: f64, log_ratio: f64) -> ScoredRecord {
        ScoredRecord { route: route.to_owned(), reward, log_ratio, k3: 0.5, tokens: 2 }
    }

    #[test]
    fn a_record_sums_the_log_ratios_of_its_tokens() {
        let found = ScoredRecord::new("a", 1.0, &[-1.0, -2.0], &[-0.5, -2.25]);
        assert_eq!((found.log_ratio, found.tokens), (0.25, 2));
        // exp(0.5) - 1 - 0.5 and exp(-0.25) - 1 + 0.25.
        assert!((found.k3 - (0.148_721_270_7 + 0.028_800_783_1)).abs() < 1e-9, "{}", found.k3);
        let same = ScoredRecord::new("a", 1.0, &[-1.0], &[-1.0]);
        assert_eq!((same.log_ratio, same.k3), (0.0, 0.0));
    }

    #[test]
    fn the_policy_that_sampled_the_records_has_their_mean_reward() {
        let records = [record("a", 1.0, 0.0), record("a", 0.0, 0.0), record("a", 0.5, 0.0)];
        let found = PolicyEstimate::of(&records);
        assert!((found.reward.unwrap() - 0.5).abs() < 1e-12);
        assert!((found.effective_records - 3.0).abs() < 1e-12 && found.reliable);
        assert_eq!((found.log_ratio_above, found.log_ratio_below), (Some(0.0), Some(0.0)));
        // 3 times 0.5 nats over 6 tokens.
        assert_eq!(found.behavior_kl, Some(0.25));
    }

    #[test]
    fn weights_move_the_estimate_and_are_truncated() {
        let records =
            [record("a", 1.0, 3.0_f64.ln()), record("a", 0.0, 0.0), record("a", 0.0, 0.5_f64.ln())];
        let found = PolicyEstimate::of(&records);
        // The first weight is the square root of 3 instead of 3.
        let bound = 3.0_f64.sqrt();
        assert!((found.reward.unwrap() - bound / (bound + 1.5)).abs() < 1e-12);
        let effective = (bound + 1.5).powi(2) / (3.0 + 1.0 + 0.25);
        assert!((found.effective_records - effective).abs() < 1e-12);
        assert_eq!(found.log_ratio_above, Some(3.0_f64.ln()));
        assert!((found.log_ratio_below.unwrap() - 0.5 * 0.5_f64.ln()).abs() < 1e-12);
    }

    #[test]
    fn few_effective_records_are_unreliable() {
        let mut records = vec![record("a", 0.0, -30.0); 40];
        records[0].log_ratio = 5.0;
        let found = PolicyEstimate::of(&records);
        assert!((found.effective_records - 1.0).abs() < 1e-6 && !found.reliable);
        let lost = PolicyEstimate::of(&[record("a", 1.0, -1e6)]);
        assert_eq!((lost.reward, lost.effective_records, lost.reliable), (None, 0.0, false));
    }

    #[test]
    fn a_reward_is_compared_with_the_mean_of_its_route() {
        let records = [
            record("stars", 5.0, 0.5),
            record("stars", 3.0, -0.5),
            record("graded", 0.2, 1.5),
            record("graded", 0.0, -1.5),
        ];
        let found = PolicyEstimate::of(&records);
        assert_eq!((found.log_ratio_above, found.log_ratio_below), (Some(1.0), Some(-1.0)));
        let equal = PolicyEstimate::of(&[record("a", 1.0, 0.3), record("a", 1.0, 0.1)]);
        assert_eq!((equal.log_ratio_above, equal.log_ratio_below), (None, None));
        assert_eq!(equal.metrics().len(), 3);
    }

    proptest! {
        #[test]
        fn the_effective_number_is_at_most_the_number_of_records(
            log_ratios in prop::collection::vec(-20.0_f64..20.0, 1..60),
        ) {
            let records: Vec<_> = log_ratios.iter().map(|ratio| record("a", 1.0, *ratio)).collect();
            let effective = PolicyEstimate::of(&records).effective_records;
            prop_assert!(effective >= 1.0 - 1e-9 && effective <= log_ratios.len() as f64 + 1e-9);
        }
    }
}
