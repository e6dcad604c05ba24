//! The stages of training: which prompts, rewards and learning rate apply at each optimizer step.

use crate::config::StageConfig;
use crate::error::DatasetError;
use crate::filter::Filter;

/// The peak learning rate of a stage.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum LearningRate {
    /// `train.learning_rate`.
    #[default]
    Configured,
    /// A rate of its own.
    Absolute(f64),
    /// A factor of `train.learning_rate`.
    Scaled(f64),
}

impl LearningRate {
    /// The rate; `configured` is `train.learning_rate`.
    pub fn resolve(self, configured: f64) -> f64 {
        match self {
            Self::Configured => configured,
            Self::Absolute(rate) => rate,
            Self::Scaled(scale) => scale * configured,
        }
    }
}

/// One stage.
#[derive(Clone, Debug, PartialEq)]
pub struct CurriculumStage {
    /// Index among the stages, from 0.
    pub index: usize,
    /// Name in logs.
    pub name: String,
    /// First optimizer step; steps count from 1.
    pub first_step: u64,
    /// Last optimizer step; `None` if the stage has no end.
    pub last_step: Option<u64>,
    /// Selects the prompts.
    pub filter: Filter,
    /// Skips prompts whose difficulty is above this. Prompts without a score have no difficulty and
    /// are kept.
    pub max_difficulty: Option<f64>,
    /// The route whose rewards apply; `None` means the dataset's route.
    pub route: Option<String>,
    /// The learning rate.
    pub learning_rate: LearningRate,
}

/// The stages, in order; at least one.
#[derive(Clone, Debug, PartialEq)]
pub struct Curriculum {
    first: CurriculumStage,
    rest: Vec<CurriculumStage>,
}

impl Curriculum {
    /// Reads the configured stages. Without any, one stage without end uses every prompt.
    ///
    /// # Errors
    /// [`DatasetError::Config`] if a filter does not parse.
    pub fn new(stages: &[StageConfig]) -> Result<Self, DatasetError> {
        let mut all = Vec::with_capacity(stages.len());
        let mut first_step = 1_u64;
        let default = [StageConfig::default()];
        let stages = if stages.is_empty() { &default[..] } else { stages };
        for (index, stage) in stages.iter().enumerate() {
            let filter = Filter::parse(&stage.filter).map_err(|reason| DatasetError::Config {
                key: format!("dataset.stage[{index}].filter"),
                value: stage.filter.clone(),
                reason,
            })?;
            let next = first_step.saturating_add(stage.steps);
            let name = if stage.name.is_empty() {
                format!("stage {}", index + 1)
            } else {
                stage.name.clone()
            };
            all.push(CurriculumStage {
                index,
                name,
                first_step,
                last_step: (stage.steps > 0).then(|| next - 1),
                filter,
                max_difficulty: stage.max_difficulty,
                route: (!stage.route.is_empty()).then(|| stage.route.clone()),
                learning_rate: match (stage.learning_rate, stage.learning_rate_scale) {
                    (Some(rate), _) => LearningRate::Absolute(rate),
                    (None, Some(scale)) => LearningRate::Scaled(scale),
                    (None, None) => LearningRate::Configured,
                },
            });
            first_step = next;
        }
        let first = all.remove(0);
        Ok(Self { first, rest: all })
    }

    /// The stage of an optimizer step, from 1; the last stage for steps after its end.
    pub fn at(&self, step: u64) -> &CurriculumStage {
        self.rest.iter().rev().find(|stage| stage.first_step <= step).unwrap_or(&self.first)
    }

    /// All stages, in order.
    pub fn stages(&self) -> impl Iterator<Item = &CurriculumStage> {
        std::iter::once(&self.first).chain(&self.rest)
    }

    /// Number of steps of all stages; `None` if the last stage has no end.
    pub fn total_steps(&self) -> Option<u64> {
        self.rest.last().unwrap_or(&self.first).last_step
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_belongs_to_one_stage() {
        let stage = |steps, filter: &str, rate, scale| StageConfig {
            steps,
            filter: filter.to_owned(),
            learning_rate: rate,
            learning_rate_scale: scale,
            ..StageConfig::default()
        };
        let stages = [
            StageConfig { name: "easy".into(), ..stage(10, "level = easy", Some(1e-3), None) },
            StageConfig { route: "poems".into(), ..stage(5, "", None, Some(0.5)) },
            stage(0, "", None, None),
        ];
        let curriculum = Curriculum::new(&stages).unwrap();
        let index = |step| curriculum.at(step).index;
        assert_eq!([0, 1, 10, 11, 15, 16, u64::MAX].map(index), [0, 0, 0, 1, 1, 2, 2]);
        let rates = [1, 11, 16].map(|step| curriculum.at(step).learning_rate.resolve(0.1));
        assert_eq!(rates, [1e-3, 0.05, 0.1]);
        assert_eq!(curriculum.at(1).name, "easy");
        assert_eq!((curriculum.at(11).name.as_str(), &curriculum.at(1).route), ("stage 2", &None));
        assert_eq!(curriculum.at(11).route.as_deref(), Some("poems"));
        assert_eq!((curriculum.at(11).first_step, curriculum.at(11).last_step), (11, Some(15)));
        assert_eq!(curriculum.total_steps(), None);
        assert_eq!(Curriculum::new(&stages[..2]).unwrap().total_steps(), Some(15));
        assert_eq!(Curriculum::new(&[]).unwrap().at(7).index, 0);
    }

    #[test]
    fn an_invalid_filter_is_an_error_that_names_the_stage() {
        let stage = StageConfig { filter: "level".into(), ..StageConfig::default() };
        let error = Curriculum::new(&[StageConfig::default(), stage]).unwrap_err();
        insta::assert_snapshot!(error, @r#"dataset.stage[1].filter = "level": after `level` one of = != < <= > >= is expected"#);
    }
}
