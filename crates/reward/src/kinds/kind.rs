//! The interface of a kind of reward, and its documentation.

use std::ops::DerefMut;
use std::sync::Arc;

use async_trait::async_trait;
use serde::Serialize;
use serde_json::Value;
use toml::Table;

use hone_core::config::{Checked, Problem};
use hone_core::metrics::Metrics;

use super::answer::AnswerFinder;
use crate::tools::Tools;
use crate::{RewardFn, ScoreInput};

/// The documentation of a kind, which `define_kind!` implements.
pub trait Documented {
    /// The kind's documentation.
    fn entry() -> KindEntry
    where
        Self: Sized;
}

/// A kind of reward part: the implementing type holds the kind's parameters.
pub trait Kind: Documented {
    /// Checks the ranges of the parameters. Patterns, schemas and scripts are compiled, and so
    /// checked, by [`Kind::build`].
    ///
    /// # Errors
    /// The first value that is out of range, its key relative to the part.
    fn check(&self) -> Checked {
        Ok(())
    }

    /// Builds the part's function from parameters that [`Kind::check`] accepts.
    ///
    /// # Errors
    /// The parameter that does not compile or needs a missing tool, its key relative to the part.
    fn build(&self, context: &BuildContext<'_>) -> Built;

    /// Looks up the secrets that the parameters name.
    ///
    /// # Errors
    /// A sentence that begins with the key.
    fn resolve(&mut self, _lookup: &dyn Fn(&str) -> Option<String>) -> Result<(), String> {
        Ok(())
    }

    /// The parameter `extract`, the pattern of the answer; `None` for a kind without it.
    fn extract(&self) -> Option<&str> {
        None
    }

    /// The answer in a completion, `finder` being [`Kind::extract`].
    fn find_answer(&self, text: &str, finder: &AnswerFinder) -> Option<String> {
        finder.find(text).map(str::to_owned)
    }

    /// The answer that the kind finds in a completion, for `hone rewards test`: `None` for a kind
    /// that extracts nothing, `Some(None)` where it finds none. Each call compiles the pattern.
    fn answer(&self, text: &str) -> Option<Option<String>> {
        let finder = AnswerFinder::new(self.extract()?).ok()?;
        Some(self.find_answer(text, &finder))
    }

    /// The metadata keys from which the part takes what it compares with. Without all of them a
    /// completion of any text has no value. Empty if there is no such key.
    fn reads(&self) -> Vec<&str> {
        Vec::new()
    }

    /// Whether scoring runs code in the sandbox.
    fn needs_sandbox(&self) -> bool {
        false
    }

    /// Whether scoring asks this server's own base model.
    fn needs_self_judge(&self) -> bool {
        false
    }

    /// The models that OpenAI graders ask.
    fn grader_models(&self) -> Vec<String> {
        Vec::new()
    }
}

/// A part's function; `None` for feedback, whose values clients post.
pub type Built = Result<Option<Arc<dyn RewardFn>>, Problem>;

/// The surroundings of a part that is being built.
#[derive(Clone, Copy)]
pub struct BuildContext<'a> {
    /// What some kinds need in addition to their parameters.
    pub tools: &'a Tools,
    /// The route's name, a label in metrics.
    pub route: &'a str,
    /// The part's name, a label in metrics.
    pub part: &'a str,
}

impl BuildContext<'_> {
    /// The metrics that calls are counted in. Without the tool, as when a configuration is only
    /// checked, they are counted in metrics that are dropped.
    pub(super) fn metrics(&self) -> Result<Arc<Metrics>, Problem> {
        match &self.tools.metrics {
            Some(metrics) => Ok(Arc::clone(metrics)),
            None => Metrics::new().map(Arc::new).map_err(keyed),
        }
    }
}

/// An error whose text may begin with a key, as a problem of that key.
pub fn keyed(error: impl std::fmt::Display) -> Problem {
    let text = error.to_string();
    let (key, rest) = text.split_once([' ', ':']).unwrap_or(("kind", &text));
    Problem::new(key, format!(" {}", rest.trim_start()))
}

/// Documentation of a kind, as `hone rewards list` prints it. The defaults suit a kind with values
/// from 0 to 1 and without required parameters.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KindEntry {
    /// The `kind` in a route's reward.
    pub kind: &'static str,
    /// How a value is computed.
    pub formula: &'static str,
    /// The least and the greatest value, in words.
    pub range: &'static str,
    /// The parameters with their defaults; one without a default is required or may be absent.
    pub parameters: String,
    /// A weight to start from.
    pub typical_weight: &'static str,
    /// TOML of the required parameters, for tests and benchmarks.
    pub example: &'static str,
    /// The least and the greatest value of the example; infinite where there is no bound.
    pub bounds: [f64; 2],
    /// Whether scoring starts processes or calls other services: benchmarks and tests of random
    /// completions leave such kinds out.
    #[serde(skip)]
    pub calls_out: bool,
}

impl Default for KindEntry {
    fn default() -> Self {
        Self {
            kind: "",
            formula: "",
            range: "0 to 1",
            parameters: String::new(),
            typical_weight: "",
            example: "",
            bounds: [0.0, 1.0],
            calls_out: false,
        }
    }
}

/// `key = default` in TOML; the key alone for an optional parameter.
pub fn with_default<T: Serialize>(key: &str, default: &T) -> String {
    match toml::Value::try_from(default) {
        Ok(default) => format!("{key} = {default}"),
        Err(_) => key.to_owned(),
    }
}

/// A list of parameters as the documentation shows it.
pub fn listed(parameters: &[String]) -> String {
    if parameters.is_empty() { "none".to_owned() } else { parameters.join(", ") }
}

/// Any one of the kinds, which it dereferences to. [`RewardKind`](super::RewardKind) is the only
/// implementation; ensembles and the flat TOML form reach the list of kinds through this trait, as
/// the list contains them.
pub trait AnyKind: DerefMut<Target = dyn Kind> + Sized {
    /// Every kind's documentation, in the order of the list.
    fn entries() -> Vec<KindEntry>;

    /// Reads the parameters of the kind named `kind`, which must be in the list. The error is a
    /// sentence that begins with the key.
    fn read(kind: &str, parameters: Table) -> Result<Self, String>;

    /// The parameters as JSON.
    fn parameters(&self) -> serde_json::Result<Value>;

    /// The kind's name in TOML.
    fn name(&self) -> &'static str;
}

struct PerSample<F>(F);

#[async_trait]
impl<F> RewardFn for PerSample<F>
where
    F: Fn(&ScoreInput) -> Option<f64> + Send + Sync,
{
    async fn score(&self, samples: &[ScoreInput]) -> Vec<Option<f64>> {
        samples.iter().map(&self.0).collect()
    }
}

/// A function that scores each sample by itself.
pub fn per_sample(score: impl Fn(&ScoreInput) -> Option<f64> + Send + Sync + 'static) -> Built {
    Ok(Some(Arc::new(PerSample(score))))
}

/// 1 for true, 0 for false.
pub fn indicator(holds: bool) -> f64 {
    f64::from(u8::from(holds))
}

/// `min(1, found / target)`.
pub fn share_of_target(found: usize, target: u32) -> f64 {
    (found as f64 / f64::from(target.max(1))).min(1.0)
}
