//! The interface of a kind of reward.

use std::borrow::Cow;
use std::sync::Arc;

use async_trait::async_trait;

use hone_core::config::{Checked, Problem};
use hone_core::metrics::Metrics;

use super::answer::{AnswerFinder, texts_of};
use super::define::Documented;
use crate::sandbox::Sandbox;
use crate::tools::Tools;
use crate::{RewardFn, ScoreInput};

/// A kind of reward part: the implementing type holds the kind's parameters.
pub trait Kind: Documented {
    /// Checks the parameters. Patterns and schemas are compiled, and so checked, by
    /// [`Kind::build`].
    /// Errors: the first value that is out of range, its key relative to the part.
    fn check(&self) -> Checked {
        self.check_ranges()
    }

    /// Builds the part's function from parameters that [`Kind::check`] accepts.
    /// Errors: the parameter that does not compile or needs a missing tool, its key relative to the part.
    fn build(&self, context: &BuildContext<'_>) -> Built;

    /// Looks up the secrets that the parameters name.
    /// Errors: a sentence that begins with the key.
    fn resolve(&mut self, _lookup: &dyn Fn(&str) -> Option<String>) -> Result<(), String> {
        Ok(())
    }

    /// A parameter that is a text.
    fn text(&self, parameter: &str) -> Option<String> {
        Some(self.to_json().ok()?.get(parameter)?.as_str()?.to_owned())
    }

    /// The parameter `extract`, the pattern of the answer; `None` for a kind without it.
    fn extract(&self) -> Option<String> {
        self.text("extract")
    }

    /// The answer in a completion, `finder` being [`Kind::extract`].
    fn find_answer(&self, text: &str, finder: &AnswerFinder) -> Option<String> {
        finder.find(text).map(str::to_owned)
    }

    /// The answer that the kind finds in a completion, for `hone rewards test`: `None` for a kind
    /// that extracts nothing, `Some(None)` where it finds none. Each call compiles the pattern.
    fn answer(&self, text: &str) -> Option<Option<String>> {
        let finder = AnswerFinder::new(&self.extract()?).ok()?;
        Some(self.find_answer(text, &finder))
    }

    /// The metadata keys from which the part takes what it compares with: by default what the parameter
    /// `reference` names. Without all of them a completion of any text has no value. Empty if there is no such key.
    fn reads(&self) -> Vec<String> {
        self.text("reference").into_iter().collect()
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
    /// The sandbox, which this kind needs.
    pub(super) fn sandbox(&self, kind: &str) -> Result<Arc<Sandbox>, Problem> {
        let why = || format!(" is {kind:?}, which needs the sandbox, and it is not set up");
        self.tools.sandbox.clone().ok_or_else(|| Problem::new("kind", why()))
    }

    /// The metrics that calls are counted in. Without the tool, as when a configuration is only
    /// checked, they are counted in metrics that are dropped.
    pub(super) fn metrics(&self) -> Result<Arc<Metrics>, Problem> {
        match &self.tools.metrics {
            Some(metrics) => Ok(Arc::clone(metrics)),
            None => Metrics::new()
                .map(Arc::new)
                .map_err(|error| Problem::new("kind", format!(": {error}"))),
        }
    }
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

/// A function of each sample's answer, which `extract` finds, and of its reference in the metadata; missing without a
/// reference.
pub fn compared(
    extract: &str,
    reference: &str,
    score: impl Fn(Option<&str>, &str) -> Option<f64> + Send + Sync + 'static,
) -> Built {
    let (finder, reference) = (AnswerFinder::new(extract)?, reference.to_owned());
    per_sample(move |input| {
        let wanted = input.metadata.get(&reference)?;
        score(finder.find(&input.text), wanted)
    })
}

/// The texts that a part searches for: those of its parameter, else those of the metadata's value, which
/// [`texts_of`] reads; `None` if there is none.
pub fn listed_or_referenced<'t>(
    listed: &'t [String],
    input: &ScoreInput,
    reference: &str,
    otherwise: impl FnOnce(&str) -> Vec<String>,
) -> Option<Cow<'t, [String]>> {
    let texts = match listed {
        [] => Cow::Owned(texts_of(input.metadata.get(reference)?, otherwise)),
        listed => Cow::Borrowed(listed),
    };
    (!texts.is_empty()).then_some(texts)
}

/// `min(1, found / target)`.
pub fn share_of_target(found: usize, target: u32) -> f64 {
    (found as f64 / f64::from(target.max(1))).min(1.0)
}
