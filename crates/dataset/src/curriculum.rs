//! The stages of training: which prompts, rewards and learning rate apply at each optimizer step.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use crate::config::StageConfig;
use crate::error::DatasetError;

/// One stage.
#[derive(Clone, Debug)]
pub struct CurriculumStage {
    /// Index among the stages, from 0.
    pub index: usize,
    /// Name in logs.
    pub name: String,
    /// First optimizer step; steps count from 1.
    pub first_step: u64,
    /// Selects the prompts.
    pub filter: Filter,
    /// Skips prompts whose difficulty is above this. Prompts without a score have no difficulty and
    /// are kept.
    pub max_difficulty: Option<f64>,
    /// The route whose rewards apply; `None` means the dataset's route.
    pub route: Option<String>,
    learning_rate: Option<f64>,
    /// Factor of `train.learning_rate`, in place of a rate of its own.
    learning_rate_scale: f64,
}

impl CurriculumStage {
    /// The peak learning rate; `configured` is `train.learning_rate`.
    pub fn learning_rate(&self, configured: f64) -> f64 {
        self.learning_rate.unwrap_or(self.learning_rate_scale * configured)
    }
}

/// The stages, in order; at least one.
#[derive(Clone, Debug)]
pub struct Curriculum(Vec<CurriculumStage>);

impl Curriculum {
    /// Reads the configured stages. Without any, one stage without end uses every prompt.
    /// Errors: if a filter does not parse.
    pub fn new(stages: &[StageConfig]) -> Result<Self, DatasetError> {
        let mut all = Vec::with_capacity(stages.len());
        let mut first_step = 1_u64;
        let default = [StageConfig::default()];
        let stages = if stages.is_empty() { &default[..] } else { stages };
        for (index, stage) in stages.iter().enumerate() {
            let filter = Filter::parse(&stage.filter).map_err(|reason| {
                let key = format!("dataset.stage[{index}].filter");
                DatasetError::config(&key, &stage.filter, reason)
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
                filter,
                max_difficulty: stage.max_difficulty,
                route: (!stage.route.is_empty()).then(|| stage.route.clone()),
                learning_rate: stage.learning_rate,
                learning_rate_scale: stage.learning_rate_scale.unwrap_or(1.0),
            });
            first_step = next;
        }
        Ok(Self(all))
    }

    /// The stage of an optimizer step, from 1; the last stage for steps after its end.
    pub fn at(&self, step: u64) -> &CurriculumStage {
        let begun = self.0.partition_point(|stage| stage.first_step <= step);
        &self.0[begun.saturating_sub(1)]
    }

    /// All stages, in order.
    pub fn stages(&self) -> impl Iterator<Item = &CurriculumStage> {
        self.0.iter()
    }
}

// Filters that select prompts by their metadata, such as `level = "easy" and sum <= 20`.
//
// A filter is a list of clauses `column operator value`, joined by `and`. The operators are `=`
// (or `==`), `!=`, `<`, `<=`, `>` and `>=`. A value is a number, a bare word, or a text in `"` or
// `'`. A column name with other characters than letters, digits, `_`, `-`, `+` and `.` is written
// in backticks. A number is compared with the column's text parsed as a number; a text supports
// only `=` and `!=`. A clause does not match a prompt that lacks the column, or whose column is
// not a number where the clause has one.

type Holds = fn(Ordering) -> bool;

/// The signs of comparisons; a sign that begins another comes after it.
const OPERATORS: [(&str, Holds); 7] = [
    ("==", Ordering::is_eq),
    ("=", Ordering::is_eq),
    ("!=", Ordering::is_ne),
    ("<=", Ordering::is_le),
    ("<", Ordering::is_lt),
    (">=", Ordering::is_ge),
    (">", Ordering::is_gt),
];

#[derive(Clone, Debug)]
enum Operand {
    Number(f64),
    Text(String),
}

#[derive(Clone, Debug)]
struct Clause {
    column: String,
    holds: Holds,
    operand: Operand,
}

/// A predicate over a prompt's metadata. Without clauses it matches every prompt.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    clauses: Vec<Clause>,
}

impl Filter {
    /// Parses a filter. White space alone is a filter without clauses.
    /// Errors: a sentence about the first unexpected part.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut rest = text.trim_start();
        let mut clauses = Vec::new();
        while !rest.is_empty() {
            if !clauses.is_empty() {
                rest = match split_word(rest) {
                    Some(("and", after)) => after.trim_start(),
                    _ => return Err(format!("`and` is expected before `{rest}`")),
                };
            }
            let (clause, after) = parse_clause(rest)?;
            clauses.push(clause);
            rest = after.trim_start();
        }
        Ok(Self { clauses })
    }

    /// Whether a prompt with this metadata matches every clause.
    pub fn matches(&self, metadata: &BTreeMap<String, String>) -> bool {
        self.clauses
            .iter()
            .all(|clause| metadata.get(&clause.column).is_some_and(|value| clause.matches(value)))
    }
}

impl Clause {
    fn matches(&self, value: &str) -> bool {
        let ordering = match &self.operand {
            Operand::Number(wanted) => {
                value.trim().parse::<f64>().ok().and_then(|found| found.partial_cmp(wanted))
            }
            Operand::Text(wanted) => Some(value.cmp(wanted.as_str())),
        };
        ordering.is_some_and(self.holds)
    }
}

fn parse_clause(text: &str) -> Result<(Clause, &str), String> {
    let (column, rest) = match text.strip_prefix('`') {
        Some(rest) => rest.split_once('`').ok_or("a backtick is left open")?,
        None if text.is_empty() => return Err("a column is expected at the end".to_owned()),
        None => split_word(text).ok_or_else(|| format!("a column is expected before `{text}`"))?,
    };
    let rest = rest.trim_start();
    let found =
        OPERATORS.iter().find_map(|(sign, holds)| Some((sign, holds, rest.strip_prefix(*sign)?)));
    let Some((sign, holds, rest)) = found else {
        return Err(format!("after `{column}` one of = != < <= > >= is expected"));
    };
    let (operand, rest) = parse_operand(column, rest.trim_start())?;
    if matches!(operand, Operand::Text(_)) && !["==", "=", "!="].contains(sign) {
        return Err(format!("`{column}` can be ordered by a number only; a text takes = or !="));
    }
    Ok((Clause { column: column.to_owned(), holds: *holds, operand }, rest))
}

fn parse_operand<'a>(column: &str, text: &'a str) -> Result<(Operand, &'a str), String> {
    for quote in ['"', '\''] {
        if let Some(rest) = text.strip_prefix(quote) {
            let (inside, rest) = rest.split_once(quote).ok_or("a quotation mark is left open")?;
            return Ok((Operand::Text(inside.to_owned()), rest));
        }
    }
    let (bare, rest) =
        split_word(text).ok_or_else(|| format!("`{column}` is compared with nothing"))?;
    let number = bare.parse::<f64>().ok().filter(|number| number.is_finite());
    Ok((number.map_or_else(|| Operand::Text(bare.to_owned()), Operand::Number), rest))
}

/// Splits off the letters, digits, `_`, `-`, `+` and `.` at the start of `text`.
fn split_word(text: &str) -> Option<(&str, &str)> {
    let end =
        text.find(|c: char| !c.is_alphanumeric() && !"_-+.".contains(c)).unwrap_or(text.len());
    (end > 0).then(|| text.split_at(end))
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
        let rates = [1, 11, 16].map(|step| curriculum.at(step).learning_rate(0.1));
        assert_eq!(rates, [1e-3, 0.05, 0.1]);
        assert_eq!(curriculum.at(1).name, "easy");
        assert_eq!((curriculum.at(11).name.as_str(), &curriculum.at(1).route), ("stage 2", &None));
        assert_eq!(curriculum.at(11).route.as_deref(), Some("poems"));
        assert_eq!(curriculum.at(11).first_step, 11);
        assert_eq!(Curriculum::new(&[]).unwrap().at(7).index, 0);
    }

    #[test]
    fn an_invalid_filter_is_an_error_that_names_the_stage() {
        let stage = StageConfig { filter: "level".into(), ..StageConfig::default() };
        let error = Curriculum::new(&[StageConfig::default(), stage]).unwrap_err();
        insta::assert_snapshot!(error, @r#"dataset.stage[1].filter = "level": after `level` one of = != < <= > >= is expected"#);
    }

    mod filter {
        use insta::assert_snapshot;

        use super::super::*;

        fn matches(filter: &str) -> bool {
            let metadata = [("level", "easy"), ("sum", "7"), ("a b", "x"), ("half", "0.50")];
            let metadata = metadata.map(|(k, v)| (k.to_owned(), v.to_owned()));
            Filter::parse(filter).unwrap().matches(&BTreeMap::from(metadata))
        }

        #[test]
        fn clauses_compare_numbers_and_texts() {
            for yes in [
                "",
                "  ",
                "level = \"easy\"",
                "level='easy'",
                "level == easy and sum <= 7 and sum>6",
                "level != 'hard'",
                "sum >= 7.0",
                "sum = 7",
                "half = 0.5",
                "`a b` = x",
                "sum = '7'",
            ] {
                assert!(matches(yes), "{yes}");
            }
            for no in [
                "level = hard",
                "sum < 7",
                "sum != 7",
                "level > 3",
                "level != 3",
                "nowhere = 1",
                "nowhere != 1",
                "half = '0.5'",
                "level = easy and sum > 7",
            ] {
                assert!(!matches(no), "{no}");
            }
        }

        #[test]
        fn errors_name_the_unexpected_part() {
            let error = |text| Filter::parse(text).unwrap_err();
            assert_snapshot!(error("level"), @"after `level` one of = != < <= > >= is expected");
            assert_snapshot!(error("= 3"), @"a column is expected before `= 3`");
            assert_snapshot!(error("level ="), @"`level` is compared with nothing");
            assert_snapshot!(error("level = 'easy"), @"a quotation mark is left open");
            assert_snapshot!(error("level = easy or sum < 3"), @"`and` is expected before `or sum < 3`");
            assert_snapshot!(error("level = easy and"), @"a column is expected at the end");
            assert_snapshot!(error("level < 'easy'"), @"`level` can be ordered by a number only; a text takes = or !=");
            assert_snapshot!(error("`level = 3"), @"a backtick is left open");
        }

        proptest::proptest! {
            #[test]
            fn parsing_never_panics(text in "[a-z0-9 =<>!`'\"é.-]{0,40}") {
                let _ = Filter::parse(&text);
            }
        }
    }
}
