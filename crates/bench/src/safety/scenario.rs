//! What goes wrong in each run.

use std::fmt;

use clap::ValueEnum;
use serde::Serialize;

use hone_reward::kinds::{FormatStrict, Length, LengthUnit, NumericMatch, RewardKind};
use hone_reward::routes::RewardConfig;
use hone_train::config::{PeakRate, TrainConfig};

use super::crowd::RatingHabits;
use hone_demo::config::LEARNING_RATE;

/// A scenario of `hone-bench safety`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum SafetyScenario {
    /// Nothing goes wrong
    #[default]
    Honest,
    /// The learning rate is 100 times too large
    HighRate,
    /// 30 % of the users always post the contrary of their opinion
    InvertedRaters,
    /// A grader rewards length; users' thumbs are honest
    LengthGrader,
    /// Graders reward the form and brevity, whatever the answer is; users' thumbs are honest
    FormatGrader,
    /// Training starts from an adapter with damaged weights
    CorruptAdapter,
    /// No KL penalty, no limit of the gradient, many updates per step, a large learning rate
    KlExplosion,
    /// Half-way, users begin to prefer brief answers
    TasteChange,
    /// Thumbs alone, which arrive after hundreds of further answers
    LateFeedback,
    /// Thumbs alone, on 2 % of the answers
    SparseThumbs,
}

impl fmt::Display for SafetyScenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value();
        f.write_str(value.as_ref().map_or("", |value| value.get_name()))
    }
}

impl SafetyScenario {
    /// Whether learning can improve the answers, so that a canary must not keep it from that. The other
    /// scenarios are sabotage.
    pub(crate) fn is_honest(self) -> bool {
        matches!(self, Self::Honest | Self::TasteChange | Self::LateFeedback | Self::SparseThumbs)
    }

    /// The parts that graders score, each with its weight. Without any, only rated answers are trained on.
    pub(crate) fn graders(self) -> Vec<RewardConfig> {
        let part = |name: &str, weight, kind| RewardConfig::new(name, weight, kind);
        let format =
            |weight| part("format", weight, RewardKind::FormatStrict(FormatStrict::default()));
        let length = |weight, ideal, spread| {
            let shape =
                Length { ideal, spread, unit: LengthUnit::Tokens, shape: Default::default() };
            part("length", weight, RewardKind::Length(shape))
        };
        match self {
            Self::Honest | Self::HighRate | Self::CorruptAdapter | Self::KlExplosion => {
                vec![
                    part("answer", 1.0, RewardKind::NumericMatch(NumericMatch::default())),
                    format(0.5),
                ]
            }
            Self::LengthGrader => vec![length(1.0, 40, 40)],
            Self::FormatGrader => vec![format(1.0), length(2.0, 1, 24)],
            Self::TasteChange => {
                // The last number of any text, so that the grader does not prefer a form.
                let extract = r"(\d+)\D*$".to_owned();
                let sum = NumericMatch { extract, ..NumericMatch::default() };
                vec![part("answer", 1.0, RewardKind::NumericMatch(sum))]
            }
            Self::InvertedRaters | Self::LateFeedback | Self::SparseThumbs => Vec::new(),
        }
    }

    /// Weight of the users' thumbs.
    pub(crate) fn thumbs_weight(self) -> f64 {
        match self {
            Self::TasteChange => 1.0,
            _ if self.graders().is_empty() => 1.0,
            _ => 0.5,
        }
    }

    /// How users rate. `lag` is that of [`Self::LateFeedback`], in answers.
    pub(crate) fn habits(self, lag: usize) -> RatingHabits {
        let usual = RatingHabits::default();
        match self {
            Self::InvertedRaters => RatingHabits { inverted: 0.3, ..usual },
            Self::LateFeedback => RatingHabits { lag, ..usual },
            Self::SparseThumbs => RatingHabits { share: 0.02, ..usual },
            _ => usual,
        }
    }

    /// Changes the trainer's settings.
    pub(crate) fn set_train(self, train: &mut TrainConfig) {
        match self {
            Self::HighRate => scale_rate(train, 100.0),
            Self::KlExplosion => {
                scale_rate(train, 10.0);
                (train.beta, train.max_grad_norm) = (0.0, 0.0);
                train.num_iterations = 4;
            }
            // A step needs this many ratings.
            Self::InvertedRaters => train.samples_per_step = 32,
            Self::LateFeedback => {
                train.samples_per_step = 32;
                // The policy has moved on when a rating arrives, the more so with large steps.
                scale_rate(train, 0.5);
            }
            // All steps of a candidate use samples of its parent, which is farther away with large steps.
            Self::Honest => scale_rate(train, 0.5),
            Self::SparseThumbs => {
                // With fewer, each step follows the noise of a few thumbs.
                train.samples_per_step = 16;
                // A canary that large steps made much worse serves thousands of requests before enough of
                // them are rated.
                scale_rate(train, 0.5);
            }
            _ => {}
        }
    }

    /// Requests of a run with direct publication, where runs have `usual` requests. Enough ratings for the
    /// policy to stop improving, so that the ends of runs can be compared.
    pub(crate) fn requests(self, usual: u64, late: Option<u64>) -> u64 {
        match self {
            Self::SparseThumbs => 36 * usual,
            Self::InvertedRaters => 4 * usual,
            Self::Honest => 6 * usual,
            // More than twice the lag, because nothing is learned before the first ratings arrive.
            Self::LateFeedback => (12 * usual).max(late.unwrap_or(0).saturating_mul(5) / 2),
            _ => usual,
        }
    }

    /// Answers between an answer and its rating in [`Self::LateFeedback`].
    pub(crate) fn lag(usual: u64, late: Option<u64>) -> usize {
        usize::try_from(late.unwrap_or(usual / LATE_SHARE)).unwrap_or(usize::MAX)
    }

    /// Steps of a candidate, except in direct mode. No step is taken during a canary. So where a decision
    /// takes many requests, or the policy needs many steps, candidates have more of them.
    pub(crate) fn publish_every(self) -> u64 {
        match self {
            Self::Honest => 32,
            Self::LateFeedback | Self::InvertedRaters => 16,
            _ => 8,
        }
    }
}

/// Sets a multiple of the demo's learning rate.
fn scale_rate(train: &mut TrainConfig, factor: f64) {
    train.learning_rate = PeakRate::Fixed(factor * LEARNING_RATE);
}

/// By default, a late rating arrives after the answers of one of this many parts of the usual requests.
const LATE_SHARE: u64 = 6;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scenarios_have_the_names_of_the_command_line() {
        let names: Vec<String> =
            SafetyScenario::value_variants().iter().map(ToString::to_string).collect();
        assert_eq!(names.len(), 10);
        assert!(names.contains(&"late-feedback".to_owned()), "{names:?}");
        for scenario in SafetyScenario::value_variants() {
            let json = serde_json::to_value(scenario).unwrap();
            assert_eq!(json, scenario.to_string());
        }
    }

    #[test]
    fn late_ratings_arrive_within_the_run() {
        let late = SafetyScenario::LateFeedback;
        assert_eq!((late.requests(3000, None), SafetyScenario::lag(3000, None)), (36_000, 500));
        let most = Some(10_000);
        assert_eq!((late.requests(3000, most), SafetyScenario::lag(3000, most)), (36_000, 10_000));
        assert_eq!(SafetyScenario::HighRate.requests(3000, most), 3000);
    }

    #[test]
    fn scenarios_without_graders_learn_from_thumbs_alone() {
        for scenario in SafetyScenario::value_variants() {
            assert!(scenario.thumbs_weight() > 0.0);
            if scenario.graders().is_empty() {
                assert_eq!(scenario.thumbs_weight(), 1.0, "{scenario}");
            }
        }
    }
}
