//! Whether a run can learn from its dataset: prompts that fit, and parts that can score them.
//!
//! Without these checks a run would sample without end: a group whose parts are all missing never
//! reaches the trainer, and neither does a prompt that the model cannot take.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};

use hone_core::metrics::Metrics;
use hone_core::text::shortened;
use hone_core::types::Role;
use hone_dataset::{Curriculum, Dataset, Prompt};
use hone_engine::{Codec, ModelDir};
use hone_reward::routes::{RewardConfig, RouteConfig};
use hone_reward::{MissingPart, PartCoverage, Route, Routes};
use hone_rollout::{RolloutError, RolloutProgress};

use crate::app;
use crate::config::Config;
use hone_http::{KeyRing, Tls};

/// Number of steps whose groups, all without a value, end a run.
const UNSCORED_STEPS: usize = 2;
/// Least number of such groups.
const MIN_UNSCORED: usize = 4;
/// Duration for which a service may fail at the start of a run.
const SERVICE_GRACE: Duration = Duration::from_secs(60);

/// Length to which a worked example is shortened in a warning.
const SHOWN: usize = 60;

/// The prompts of one stage, and the route that scores them.
struct StagePrompts<'a> {
    route: &'a Route,
    prompts: Vec<&'a Prompt>,
}

/// The stages of the curriculum with their prompts to train on.
fn stages<'a>(
    config: &Config,
    dataset: &'a Dataset,
    routes: &'a Routes,
) -> anyhow::Result<Vec<StagePrompts<'a>>> {
    let curriculum = Curriculum::new(&config.dataset.stages)?;
    let mut all = Vec::new();
    for stage in curriculum.stages() {
        let (key, name) = match &stage.route {
            Some(name) => ("dataset.stage.route", name),
            None => ("rollout.dataset_route", &config.rollout.dataset_route),
        };
        let route: &Route = routes.require(key, name)?;
        if !route.has_graders() {
            return Err(RolloutError::UnscoredRoute { key, route: name.clone() }.into());
        }
        let prompts = dataset.train.iter().map(|prompt| &**prompt);
        let prompts = prompts.filter(|prompt| stage.filter.matches(&prompt.metadata)).collect();
        all.push(StagePrompts { route, prompts });
    }
    Ok(all)
}

/// The lengths of prompts in tokens.
struct PromptLengths {
    sorted: Vec<usize>,
    /// Greatest length that is trained on.
    limit: usize,
    /// Continues "longer than".
    limit_name: String,
}

impl PromptLengths {
    /// The lengths of these prompts. The error names the place of a prompt that the model's template
    /// refuses.
    fn of(
        config: &Config,
        prompts: &[&Prompt],
        codec: &Codec,
        context: usize,
    ) -> anyhow::Result<Self> {
        let mut sorted = Vec::with_capacity(prompts.len());
        for prompt in prompts {
            let ids = codec.prompt(&prompt.messages).with_context(|| prompt.place.to_string())?;
            sorted.push(ids.len());
        }
        sorted.sort_unstable();
        // A completion needs at least one position.
        let most_of_model = context.saturating_sub(1);
        let configured = config.dataset.max_prompt_tokens;
        let (limit, limit_name) = if configured > 0 && configured < most_of_model {
            (configured, format!("dataset.max_prompt_tokens ({configured})"))
        } else {
            (most_of_model, format!("the model's context of {context} tokens allows"))
        };
        Ok(Self { sorted, limit, limit_name })
    }

    fn too_long(&self) -> usize {
        self.sorted.len() - self.sorted.partition_point(|length| *length <= self.limit)
    }

    fn ensure_any_fits(&self) -> anyhow::Result<()> {
        if let Some(least) = self.sorted.first()
            && self.too_long() == self.sorted.len()
        {
            let limit = &self.limit_name;
            bail!("every prompt is longer than {limit}: the shortest has {least} tokens");
        }
        Ok(())
    }

    fn text(&self) -> String {
        let at = |percent: usize| {
            let rank = (self.sorted.len() * percent).div_ceil(100).max(1);
            self.sorted.get(rank - 1).copied().unwrap_or_default()
        };
        let (least, median, usual, most) = (at(0), at(50), at(95), at(100));
        let text = format!("{least} to {most} tokens, median {median}, 95 % at most {usual}");
        match self.too_long() {
            0 => text,
            count => format!("{text}; {count} are longer than {}", self.limit_name),
        }
    }
}

/// What a part can score of the prompts of a stage.
struct StageCoverage {
    /// Whether the part can score no prompt, although there are some.
    is_empty: bool,
    text: String,
    /// That references earn nothing as completions: then right answers would not either.
    warning: Option<String>,
}

/// The parts of a stage that need metadata.
async fn coverage(stage: &StagePrompts<'_>) -> Vec<StageCoverage> {
    let metadata: Vec<&BTreeMap<String, String>> =
        stage.prompts.iter().map(|prompt| &prompt.metadata).collect();
    let (route, all) = (&stage.route.name, stage.prompts.len());
    let place = |at: usize| {
        let prompt = stage.prompts.get(at);
        prompt.map_or_else(String::new, |prompt| prompt.place.to_string())
    };
    let described = |found: PartCoverage| {
        let PartCoverage { part, kind, usable, first_unusable, unearned, first_unearned, .. } =
            found;
        let name = format!("{part} ({kind}) of route `{route}`");
        let text = match first_unusable {
            None => format!("{name} can score every prompt"),
            Some((at, lacks)) => {
                let count =
                    if usable == 0 { "no prompt" } else { &format!("{usable} of {all} prompts") };
                format!("{name} can score {count}; {}: {lacks}", place(at))
            }
        };
        let warning = first_unearned.map(|(at, text)| {
            format!(
                "{name} gives 0 to the references of {unearned} of {all} prompts as completions; {}: {text:?}; \
                 change the part's parameters, such as `extract`, or the references",
                place(at)
            )
        });
        StageCoverage { is_empty: usable == 0 && all > 0, text, warning }
    };
    stage.route.coverage(&metadata).await.into_iter().map(described).collect()
}

/// Warnings about the worked examples before a stage's prompts in which a part finds no answer: completions that
/// follow them would earn nothing.
fn unanswered_examples(config: &Config, stage: &StagePrompts<'_>) -> Vec<String> {
    let examples = config.dataset.few_shot.len() + config.dataset.few_shot_rows;
    let messages = stage.prompts.first().map_or(&[][..], |prompt| &prompt.messages);
    let answers = messages.iter().filter(|message| message.role == Role::Assistant);
    let answers: Vec<&str> =
        answers.take(examples).map(|message| message.content.as_str()).collect();
    let name = &stage.route.name;
    let route = config.routes.0.iter().find(|route| route.name == *name);
    let parts = route.map(RouteConfig::parts).unwrap_or_default();
    let warning = |part: &RewardConfig| {
        let text = answers.iter().find(|text| part.kind.answer(text) == Some(None))?;
        let text = shortened(text, SHOWN);
        let part = &part.name;
        Some(format!(
            "{part} of route `{name}` finds no answer in the worked example {text:?}; change `extract` of the part, \
             or the example"
        ))
    };
    parts.iter().filter_map(warning).collect()
}

/// Checks a configuration, and, if `reads_data`, the dataset that it names, which is fetched if it is one
/// of the hub. Returns a report. No model is downloaded.
///
/// # Errors
/// The first thing that would stop a run, or keep it from learning.
pub async fn validate(config: &mut Config, reads_data: bool) -> anyhow::Result<String> {
    KeyRing::load(&config.server)?;
    Tls::load(&config.server.tls)?;
    let rewards = app::reward_tools(config, Arc::new(Metrics::new()?)).await?;
    let routes = rewards.routes(config).await?;
    let mut text = "the configuration is valid\n".to_owned();
    let Some(dataset) = config.dataset_in_use() else { return Ok(text) };
    hone_dataset::check(dataset)?;
    if reads_data {
        app::fetch_dataset(config).await?;
        let dataset = Dataset::open(&config.dataset)?;
        let codec = tokenizer(config)?;
        let codec = codec.as_ref().map(|(codec, context)| (codec, *context));
        text += &describe(config, &dataset, &routes, codec).await?;
    }
    Ok(text)
}

/// The model's tokenizer and context length; `None` if the model is not on this machine.
fn tokenizer(config: &Config) -> anyhow::Result<Option<(Codec, usize)>> {
    let temporary = tempfile::tempdir()?;
    let Some(path) = app::local_model(config, temporary.path())? else { return Ok(None) };
    let dir = ModelDir::open(&path)?;
    Ok(Some((Codec::load(&dir)?, dir.context())))
}

/// The lines of `hone validate` about a dataset. `codec` is the model's tokenizer and context length.
///
/// # Errors
/// If a stage has no prompt that fits, or a part can score no prompt.
async fn describe(
    config: &Config,
    dataset: &Dataset,
    routes: &Routes,
    codec: Option<(&Codec, usize)>,
) -> anyhow::Result<String> {
    let report = &dataset.report;
    let columns = report.columns.join(", ");
    let rows = report.rows;
    let mut text = format!("dataset   {report}, of {rows} rows; columns {columns}\n");
    let rule = &config.dataset.extract_answer;
    if !rule.is_empty() {
        let answers: Vec<String> = report.answers.iter().map(|a| format!("{a:?}")).collect();
        let missed = match report.unanswered {
            0 => "an answer in every row".to_owned(),
            missed => format!("no answer in {missed} rows"),
        };
        let answers = answers.join(", ");
        text += &format!(
            "answers   dataset.extract_answer = {rule:?} finds {missed}; the first are {answers}\n"
        );
    }
    let stages = stages(config, dataset, routes)?;
    match codec {
        None => text += "prompts   not measured: the model is not on this machine\n",
        Some((codec, context)) => {
            for stage in &stages {
                PromptLengths::of(config, &stage.prompts, codec, context)?.ensure_any_fits()?;
            }
            let all: Vec<&Prompt> = dataset.train.iter().map(|prompt| &**prompt).collect();
            let lengths = PromptLengths::of(config, &all, codec, context)?;
            text += &format!("prompts   {}\n", lengths.text());
        }
    }
    for stage in &stages {
        for part in coverage(stage).await {
            ensure!(!part.is_empty, "{}", part.text);
            text += &format!("rewards   {}\n", part.text);
            text.extend(part.warning.map(|warning| format!("warning   {warning}\n")));
        }
        for warning in unanswered_examples(config, stage) {
            text += &format!("warning   {warning}\n");
        }
    }
    Ok(text)
}

/// Refuses a run in which a stage has no prompt that fits, or no part that can score one. Returns a
/// note for each part that can score no prompt beside others that can.
///
/// # Errors
/// Names the limit, or each part and what it lacks.
pub async fn before_training(
    config: &Config,
    dataset: &Dataset,
    routes: &Routes,
    codec: &Codec,
    context: usize,
) -> anyhow::Result<Vec<String>> {
    let mut notes = Vec::new();
    for stage in stages(config, dataset, routes)? {
        // Usually the first prompt fits, and the others need not be encoded. Rollout leaves out a
        // prompt that the template refuses.
        let fits = |prompt: &&Prompt| {
            let lengths = PromptLengths::of(config, &[*prompt], codec, context);
            lengths.is_ok_and(|lengths| lengths.too_long() == 0)
        };
        if !stage.prompts.iter().any(fits) {
            PromptLengths::of(config, &stage.prompts, codec, context)?.ensure_any_fits()?;
        }
        let mut covered = coverage(&stage).await;
        notes.extend(covered.iter_mut().filter_map(|part| part.warning.take()));
        let empty = covered.into_iter().filter(|part| part.is_empty);
        let empty: Vec<String> = empty.map(|part| part.text).collect();
        let graders = stage.route.parts.iter().filter(|part| part.grader.is_some()).count();
        ensure!(empty.len() < graders, "no completion could be scored: {}", empty.join("; "));
        notes.extend(empty);
    }
    Ok(notes)
}

/// Ends a run whose first groups had no value at all. Later, when a service may fail, other groups
/// have been trained on, and the run continues.
///
/// # Errors
/// Names each part and what it lacks.
pub fn ensure_scored(progress: &RolloutProgress, config: &Config) -> anyhow::Result<()> {
    let step = config.train.samples_per_step.div_ceil(config.rollout.group_size.max(1));
    let enough = MIN_UNSCORED.max(UNSCORED_STEPS.saturating_mul(step));
    let unscored = progress.unscored;
    if progress.ready > 0 || usize::try_from(unscored).is_ok_and(|groups| groups < enough) {
        return Ok(());
    }
    let may_recover = progress.missing.iter().any(|part| part.calls_out && part.lacks.is_none());
    let waited = progress.unscored_since.is_some_and(|since| since.elapsed() >= SERVICE_GRACE);
    if may_recover && !waited {
        return Ok(());
    }
    let parts: Vec<String> = progress.missing.iter().map(missing_text).collect();
    bail!(
        "no completion could be scored: every part was missing in each of {unscored} groups: {}",
        parts.join("; ")
    )
}

fn missing_text(missing: &MissingPart) -> String {
    let MissingPart { part, kind, lacks, calls_out } = missing;
    let reason = match lacks {
        Some(lacks) => lacks.as_str(),
        None if *calls_out => "no value came from the process or service that computes it",
        None => "it returned no value",
    };
    format!("{part} ({kind}): {reason}")
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use insta::assert_snapshot;

    use super::*;

    fn part(calls_out: bool, lacks: Option<&str>) -> MissingPart {
        let lacks = lacks.map(str::to_owned);
        MissingPart { part: "p".to_owned(), kind: "webhook", lacks, calls_out }
    }

    #[test]
    fn a_run_ends_only_if_no_group_was_ever_scored() {
        let config = Config::default();
        let many = 1_000_000;
        let of = |ready, unscored, part| {
            let missing = vec![part];
            let progress =
                RolloutProgress { ready, unscored, unscored_since: Some(Instant::now()), missing };
            ensure_scored(&progress, &config).map_err(|error| error.to_string())
        };
        assert_eq!(of(1, many, part(false, None)), Ok(()), "one group was scored");
        assert_eq!(of(0, 3, part(false, None)), Ok(()), "the first groups may be exceptions");
        assert_eq!(of(0, many, part(true, None)), Ok(()), "the service may start later");
        assert_snapshot!(of(0, many, part(false, None)).unwrap_err(), @"no completion could be scored: every part was missing in each of 1000000 groups: p (webhook): it returned no value");
        assert_snapshot!(of(0, many, part(true, Some("there is no metadata `x`"))).unwrap_err(), @"no completion could be scored: every part was missing in each of 1000000 groups: p (webhook): there is no metadata `x`");
    }
}
