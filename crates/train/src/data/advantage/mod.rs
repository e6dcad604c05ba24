//! Advantages, computed part by part, each against a baseline that is independent of the sample.
//!
//! A reward is a set of named, weighted parts. A part may be missing, which is not zero. The advantage
//! of member i of a group is `A_i = g_i + sum over the other parts p of weight_p * a_ip`, where
//!
//! - *group baseline* (GRPO, Shao et al. 2024): if the group has two or more members with a reward,
//!   `x_i` is the weighted sum of the parts that all of them have, and
//!   `g_i = (x_i - mean) / (s + 1e-4)`. `s` is the standard deviation with Bessel's correction
//!   (n - 1), as in TRL, either of the group or of the route's sums of this batch; without scaling
//!   (Dr. GRPO, Liu et al. 2025) the division is left out. Equal sums have advantage 0.
//! - *leave-one-out running baseline* (not GRPO): every other value `a_ip` is compared with the mean
//!   and deviation of that part on that route, over an exponential window of past batches joined with
//!   the *other* values of this batch, those of other turns of the same conversation excluded. Without anything to compare with it is 0. The divisor is at
//!   least half the range of the values, since the deviation of equal values is 0; so the advantage
//!   is at most 2.
//!
//! The parts are summed before they are compared, as in TRL (`sum_then_normalize`): their weights and
//! units decide their influence. Compared one by one, a difference of 0.005 in one member would count as
//! much as a right answer. `g_i` is multiplied by the member's smallest cap weight among the parts.
//!
//! A member without any value has no advantage and does not enter any statistic.
//!
//! `train.advantage_baseline`, `train.reward_aggregation` and `train.zero_variance_groups` change the
//! comparison within a group, for the parts that all its members have:
//!
//! - *leave-one-out* (RLOO, Ahmadian et al. 2024): `mean_p` is that of the other members, which
//!   multiplies every advantage by `n / (n - 1)`
//! - *normalize, then sum*: each of those parts is compared and scaled by itself, and the results are
//!   summed by weight
//! - *GDPO* (Liu et al. 2026; TRL's `normalize_then_sum`): these sums are then standardized over all
//!   members of the batch
//! - groups without any difference may be dropped, as in DAPO's dynamic sampling: they then
//!   contribute no KL and no bonus, and do not count in the loss's normalizer
//!
//! `Baselines::advantages` is the entry point. It collects all values of a batch by route and part
//! (`values`), sums the complete parts of each group (`sums`), compares them (`compare`), and adds
//! metrics (`statistics`).

mod baselines;
mod compare;
mod moments;
mod rewards;
mod statistics;
mod sums;
mod values;

pub(crate) use baselines::Baselines;
pub(crate) use rewards::{GroupRewards, PartRewards};
pub(crate) use statistics::Advantages;

#[cfg(test)]
mod tests;
