//! What the console reads of the ledger: steps, answers with their tokens and rewards, feedback, and groups. Lists have
//! the newest record first.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};
use uuid::Uuid;

use hone_core::text::shortened;
use hone_core::types::{
    Group, GroupId, GroupState, Interaction, InteractionId, Message, PromptSource, Reward,
    RewardSource, Role, Sample, SampleId, SampleOrigin, TokenSpan, UnixMillis, include_rater,
};
use hone_reward::Route;
use hone_store::{Store, StoreError};

use crate::body::{Field, FieldTable, Fields, List, PathText, QueryObject};
use crate::error::{ApiError, JsonResult};
use crate::state::AppState;
use crate::stored::ListPage;

type AppContext = State<Arc<AppState>>;

/// Records that one request reads at most, because filters may admit few.
const MAX_READ: usize = 2000;
const CHUNK: usize = 100;
/// Characters of a text in lists.
const SHORT: usize = 240;

// Pages of records whose keys are UUIDv7.

const MAX_LIMIT: usize = 1000;
const DEFAULT_LIMIT: usize = 50;
const PAGE: &[Field] = &[
    Field::text("after", "The page begins after the record with this `last_id`."),
    Field::json("limit", limit_schema, "Most entries; default 50."),
];

pub fn limit_schema() -> Value {
    json!({"type": "integer", "minimum": 1, "maximum": MAX_LIMIT})
}

fn number_schema() -> Value {
    json!({"type": "integer", "minimum": 0, "maximum": u64::MAX})
}

pub fn limit(fields: &Fields<'_>) -> Result<usize, ApiError> {
    let limit = fields.read("limit", format_args!("from 1 to {MAX_LIMIT}"), |value| {
        value.as_str()?.parse().ok().filter(|limit| (1..=MAX_LIMIT).contains(limit))
    })?;
    Ok(limit.unwrap_or(DEFAULT_LIMIT))
}

fn number(fields: &Fields<'_>, name: &str) -> Result<Option<u64>, ApiError> {
    fields.read(name, "a whole number of at least 0", |value| value.as_str()?.parse().ok())
}

/// Which page of a list.
struct NewestPage {
    before: Option<Uuid>,
    limit: usize,
}

impl NewestPage {
    fn read(fields: &Fields<'_>) -> Result<Self, ApiError> {
        let before = fields.read("after", "the `last_id` of a page", |value| {
            Uuid::try_parse(value.as_str()?).ok()
        })?;
        Ok(Self { before, limit: limit(fields)? })
    }

    /// The page of what `entry` makes of the records that `records` reads before an id.
    fn collect<R, T>(
        &self,
        records: impl Fn(Option<Uuid>, usize) -> Result<Vec<R>, StoreError>,
        id: impl Fn(&R) -> Uuid,
        mut entry: impl FnMut(R) -> Result<Option<T>, StoreError>,
    ) -> Result<ListPage<T>, StoreError> {
        let mut found = Vec::new();
        let (mut last, mut left) = (self.before, MAX_READ);
        loop {
            let chunk = records(last, CHUNK.min(left))?;
            if chunk.is_empty() {
                let cursor = last.filter(|_| left == 0).map(|id| id.simple().to_string());
                return Ok(ListPage::new(found, cursor, left == 0));
            }
            left -= chunk.len();
            for record in chunk {
                let id = id(&record);
                if let Some(entry) = entry(record)? {
                    if found.len() == self.limit {
                        return Ok(ListPage::new(found, None, true));
                    }
                    found.push((id.simple().to_string(), entry));
                }
                last = Some(id);
            }
        }
    }
}

// Steps.

pub const STEPS: FieldTable = &[&[
    Field::json(
        "first",
        number_schema,
        "The first step; default so that the last one is included.",
    ),
    Field::json("limit", limit_schema, "Most steps; default 50."),
]];

/// One step of the trainer.
#[derive(Serialize, JsonSchema)]
pub struct StepSummary {
    step: u64,
    created: UnixMillis,
    groups: usize,
    /// Measurements by name. One that is not finite is null.
    metrics: BTreeMap<String, Option<f64>>,
}

pub async fn steps(
    State(state): AppContext,
    QueryObject(query): QueryObject,
) -> JsonResult<List<StepSummary>> {
    let fields = Fields::of(&query, STEPS)?;
    let (first, limit) = (number(&fields, "first")?, limit(&fields)?);
    let read = move |store: &Store| {
        let last = store.last_step()?.map_or(0, |record| record.step);
        let count = u64::try_from(limit).unwrap_or(u64::MAX);
        store.steps(first.unwrap_or_else(|| (last + 1).saturating_sub(count)), limit)
    };
    let steps = state.read_ledger(read).await?.into_iter().map(|record| StepSummary {
        step: record.step,
        created: record.created,
        groups: record.groups.len(),
        metrics: record
            .metrics
            .into_iter()
            .map(|(name, value)| (name, value.is_finite().then_some(value)))
            .collect(),
    });
    Ok(Json(List::new(steps)))
}

// Answers.

pub const ANSWERS: FieldTable = &[
    PAGE,
    &[
        Field::one_of(
            "source",
            &["live", "dataset"],
            "Only prompts of clients, or of the dataset.",
        ),
        Field::text("route", "Only prompts of this route."),
        Field::json("version", number_schema, "Only those with a completion of this version."),
        Field::one_of("rated", &["true", "false"], "Only those with feedback, or without."),
        Field::text(
            "contains",
            "Only those whose last message or a completion contains this text.",
        ),
    ],
];

/// A recorded prompt with its first completion.
#[derive(Serialize, JsonSchema)]
pub struct AnswerSummary {
    id: String,
    created: UnixMillis,
    #[schemars(extend("enum" = ["live", "dataset"]))]
    source: &'static str,
    route: String,
    /// The API key's id, with that of an end user.
    key_id: Option<String>,
    /// The beginning of the last message.
    prompt: String,
    /// The beginning of the first completion.
    text: String,
    version: Option<u64>,
    /// Completions, those of training included.
    samples: usize,
    /// The mean over the completions of the weighted sum of parts; null without a value.
    reward: Option<f64>,
    is_rated: bool,
    is_corrected: bool,
    held_out: bool,
}

fn source(source: PromptSource) -> &'static str {
    match source {
        PromptSource::Live => "live",
        PromptSource::Dataset => "dataset",
    }
}

fn last_message(interaction: &Interaction) -> &str {
    interaction.messages.last().map_or("", |message| &message.content)
}

fn short(text: &str) -> String {
    shortened(text, SHORT).into_owned()
}

/// The weighted sum of a completion's parts; `None` without a value.
fn weighted(route: Option<&Route>, rewards: &[Reward]) -> Option<f64> {
    let parts = rewards.iter().filter_map(|part| {
        let weight = route.and_then(|route| route.weight(&part.name)).unwrap_or(1.0);
        Some(weight * part.value?)
    });
    let values: Vec<f64> = parts.collect();
    (!values.is_empty()).then(|| values.iter().sum())
}

#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// Which answers a list has.
struct AnswerFilter {
    source: Option<String>,
    route: Option<String>,
    version: Option<u64>,
    rated: Option<bool>,
    contains: Option<String>,
}

impl AnswerFilter {
    fn read(fields: &Fields<'_>) -> Result<Self, ApiError> {
        Ok(Self {
            source: fields.owned("source")?,
            route: fields.owned("route")?,
            version: number(fields, "version")?,
            rated: fields.text("rated")?.map(|text| text == "true"),
            contains: fields.text("contains")?.map(str::to_lowercase),
        })
    }

    /// The entry of a prompt, if it belongs into the list.
    fn entry(
        &self,
        state: &AppState,
        interaction: Interaction,
    ) -> Result<Option<AnswerSummary>, StoreError> {
        let has = |wanted: &Option<String>, own: &str| wanted.as_ref().is_none_or(|w| w == own);
        if !has(&self.source, source(interaction.source)) || !has(&self.route, &interaction.route) {
            return Ok(None);
        }
        let mut samples = state.store.samples_of(interaction.id)?;
        samples.sort_by_key(|sample| (sample.origin != SampleOrigin::Served, sample.choice));
        let is_of = |version: u64| samples.iter().any(|sample| sample.version.0 == version);
        let contains = |part: &String| {
            let mut texts = samples.iter().map(|sample| sample.text.as_str());
            let said = last_message(&interaction);
            texts.any(|text| text.to_lowercase().contains(part))
                || said.to_lowercase().contains(part)
        };
        if !self.version.is_none_or(is_of) || !self.contains.as_ref().is_none_or(contains) {
            return Ok(None);
        }
        let is_correction = |sample: &Sample| sample.origin == SampleOrigin::Correction;
        let route = state.routes.get(&interaction.route);
        let (mut is_rated, mut values) = (false, Vec::new());
        for sample in samples.iter().filter(|sample| !is_correction(sample)) {
            let rewards = state.store.rewards_of(sample.id)?;
            is_rated |= rewards.iter().any(|reward| reward.source == RewardSource::Feedback);
            values.extend(weighted(route.map(AsRef::as_ref), &rewards));
        }
        let is_corrected = samples.iter().any(is_correction);
        if self.rated.is_some_and(|wanted| wanted != (is_rated || is_corrected)) {
            return Ok(None);
        }
        Ok(Some(AnswerSummary {
            id: interaction.completion_id(),
            created: interaction.created,
            source: source(interaction.source),
            prompt: short(last_message(&interaction)),
            text: samples.first().map_or_else(String::new, |sample| short(&sample.text)),
            version: samples.first().map(|sample| sample.version.0),
            samples: samples.iter().filter(|sample| !is_correction(sample)).count(),
            reward: mean(&values),
            is_rated,
            is_corrected,
            held_out: interaction.held_out,
            route: interaction.route,
            key_id: interaction.key_id,
        }))
    }
}

pub async fn answers(
    State(state): AppContext,
    QueryObject(query): QueryObject,
) -> JsonResult<ListPage<AnswerSummary>> {
    let fields = Fields::of(&query, ANSWERS)?;
    let (page, filter) = (NewestPage::read(&fields)?, AnswerFilter::read(&fields)?);
    // The last completions may still be queued for the ledger.
    state.store.flush().await?;
    let reader = state.clone();
    let read = move |store: &Store| {
        let records = |before, limit| store.newest_interactions(before, limit);
        page.collect(records, |row| row.id.0, |row| filter.entry(&reader, row))
    };
    state.read_ledger(read).await.map(Json)
}

/// A recorded prompt with everything that is known of its completions.
#[derive(Serialize, JsonSchema)]
pub struct AnswerDetail {
    id: String,
    created: UnixMillis,
    #[schemars(extend("enum" = ["live", "dataset"]))]
    source: &'static str,
    route: String,
    model: String,
    key_id: Option<String>,
    session_id: Option<String>,
    held_out: bool,
    metadata: BTreeMap<String, String>,
    messages: Vec<Message>,
    temperature: f32,
    prompt_tokens: usize,
    samples: Vec<AnswerSample>,
    groups: Vec<GroupSummary>,
}

/// A completion.
#[derive(Serialize, JsonSchema)]
pub struct AnswerSample {
    id: String,
    #[schemars(extend("enum" = ["served", "shadow", "correction"]))]
    origin: &'static str,
    choice: u32,
    version: u64,
    created: UnixMillis,
    text: String,
    finish: &'static str,
    tokens: Vec<AnswerToken>,
    rewards: Vec<PartReward>,
    /// The weighted sum of the parts with a value.
    reward: Option<f64>,
    /// `reward` without the mean over the completions of its group, before any scaling; null without siblings.
    advantage: Option<f64>,
    /// Why it is not trained on.
    untrainable: Option<String>,
}

/// A token of a completion.
#[derive(Serialize, JsonSchema)]
pub struct AnswerToken {
    text: String,
    /// The natural logarithm of its probability; null for a correction.
    logprob: Option<f32>,
    /// Whether a grammar permitted no other token.
    forced: bool,
}

/// A part of a completion's reward.
#[derive(Serialize, JsonSchema)]
pub struct PartReward {
    name: String,
    value: Option<f64>,
    weight: Option<f64>,
    is_feedback: bool,
    /// Who rated last.
    rater: Option<String>,
    comment: Option<String>,
}

pub async fn answer(State(state): AppContext, PathText(id): PathText) -> JsonResult<AnswerDetail> {
    let unknown = || ApiError::no_such_completion("id", &id);
    let interaction = InteractionId::from_completion_id(&id).ok_or_else(unknown)?;
    state.store.flush().await?;
    let reader = state.clone();
    let found = state.read_ledger(move |_| detail(&reader, interaction)).await?;
    found.map(Json).ok_or_else(unknown)
}

fn detail(state: &AppState, id: InteractionId) -> Result<Option<AnswerDetail>, StoreError> {
    let store = &state.store;
    let Some(interaction) = store.interaction(id)? else { return Ok(None) };
    let groups = store.groups_of(id)?;
    let mut samples = store.samples_of(id)?;
    // A group of feedback has completions of further requests with the same prompt.
    for member in groups.iter().flat_map(|group| &group.members) {
        if !samples.iter().any(|sample| sample.id == *member) {
            samples.extend(store.sample(*member)?);
        }
    }
    samples.sort_by_key(|sample| (sample.origin != SampleOrigin::Served, sample.choice));
    let route = state.routes.get(&interaction.route).map(AsRef::as_ref);
    let mut rewards = BTreeMap::new();
    for sample in &samples {
        rewards.insert(sample.id, store.rewards_of(sample.id)?);
    }
    let value_of = |id: &SampleId| weighted(route, rewards.get(id)?);
    let advantage = |id: SampleId| {
        let own = groups.iter().find(|group| group.members.contains(&id))?;
        let values: Vec<f64> = own.members.iter().filter_map(value_of).collect();
        Some(value_of(&id)? - mean(&values).filter(|_| values.len() > 1)?)
    };
    let samples = samples.into_iter().map(|sample| AnswerSample {
        reward: value_of(&sample.id),
        advantage: advantage(sample.id),
        tokens: tokens(state, &sample),
        rewards: rewards
            .get(&sample.id)
            .into_iter()
            .flatten()
            .map(|part| shown(route, part))
            .collect(),
        id: sample.id.to_string(),
        origin: match sample.origin {
            SampleOrigin::Served => "served",
            SampleOrigin::Shadow => "shadow",
            SampleOrigin::Correction => "correction",
        },
        choice: sample.choice,
        version: sample.version.0,
        created: sample.created,
        text: sample.text,
        finish: sample.finish.as_str(),
        untrainable: sample.untrainable,
    });
    Ok(Some(AnswerDetail {
        samples: samples.collect(),
        id: interaction.completion_id(),
        created: interaction.created,
        source: source(interaction.source),
        session_id: interaction.session().map(str::to_owned),
        route: interaction.route,
        model: interaction.model,
        key_id: interaction.key_id,
        held_out: interaction.held_out,
        metadata: interaction.metadata,
        messages: interaction.messages,
        temperature: interaction.params.temperature,
        prompt_tokens: interaction.prompt_ids.len(),
        groups: groups.into_iter().map(GroupSummary::new).collect(),
    }))
}

fn shown(route: Option<&Route>, part: &Reward) -> PartReward {
    PartReward {
        name: part.name.clone(),
        value: part.value,
        weight: route.and_then(|route| route.weight(&part.name)),
        is_feedback: part.source == RewardSource::Feedback,
        rater: part.key_id.clone(),
        comment: part.comment.clone(),
    }
}

/// The tokens of a completion. A token that ends within a character has its text with the next one.
fn tokens(state: &AppState, sample: &Sample) -> Vec<AnswerToken> {
    let codec = state.engine.codec();
    let forced = TokenSpan::mask(&sample.forced, sample.ids.len());
    let mut bytes = Vec::new();
    let each = sample.ids.iter().zip(forced).enumerate().map(|(at, (id, forced))| {
        bytes.extend(codec.token_bytes(*id));
        let is_last = at + 1 == sample.ids.len();
        let text = match std::str::from_utf8(&bytes) {
            Err(error) if error.error_len().is_none() && !is_last => String::new(),
            _ => String::from_utf8_lossy(&std::mem::take(&mut bytes)).into_owned(),
        };
        AnswerToken { text, logprob: sample.logprobs.get(at).copied(), forced }
    });
    each.collect()
}

// Feedback of all keys.

pub const RATINGS: FieldTable = &[PAGE];

/// A piece of feedback, with what it judges.
#[derive(Serialize, JsonSchema)]
pub struct RaterPost {
    id: String,
    created: UnixMillis,
    completion_id: String,
    choice: u32,
    version: u64,
    /// The rated part; null for a correction.
    name: Option<String>,
    value: Option<f64>,
    comment: Option<String>,
    /// The text of a correction.
    correction: Option<String>,
    /// The API key's id, with that of an end user; null without a key.
    rater: Option<String>,
    is_quarantined: bool,
    /// The beginning of the last message.
    prompt: String,
    /// The beginning of the judged text.
    text: String,
}

pub async fn ratings(
    State(state): AppContext,
    QueryObject(query): QueryObject,
) -> JsonResult<ListPage<RaterPost>> {
    let page = NewestPage::read(&Fields::of(&query, RATINGS)?)?;
    state.store.flush().await?;
    let read = move |store: &Store| {
        let flagged: BTreeSet<String> =
            store.quarantined()?.into_iter().map(|row| row.key_id).collect();
        let records = |before, limit| store.newest_feedback(before, limit);
        page.collect(records, |row| row.id.0, |row| posted(store, &flagged, row))
    };
    state.read_ledger(read).await.map(Json)
}

/// A piece of feedback; `None` if what it judges was erased.
fn posted(
    store: &Store,
    flagged: &BTreeSet<String>,
    row: Reward,
) -> Result<Option<RaterPost>, StoreError> {
    // A correction is a sample with the id of its feedback.
    let own = store.sample(SampleId(row.id.0))?;
    let correction = own.filter(|sample| sample.origin == SampleOrigin::Correction);
    let sample = match &correction {
        Some(correction) => Some(correction.clone()),
        None => store.sample(row.sample)?,
    };
    let Some(sample) = sample else { return Ok(None) };
    let Some(interaction) = store.interaction(sample.interaction)? else { return Ok(None) };
    let judged = match &correction {
        Some(correction) => {
            let samples = store.samples_of(interaction.id)?;
            let is_judged = |sample: &&Sample| {
                sample.origin == SampleOrigin::Served && sample.choice == correction.choice
            };
            samples.iter().find(is_judged).map_or_else(String::new, |sample| short(&sample.text))
        }
        None => short(&sample.text),
    };
    Ok(Some(RaterPost {
        id: row.id.to_string(),
        created: row.created,
        completion_id: interaction.completion_id(),
        choice: sample.choice,
        version: sample.version.0,
        name: correction.is_none().then_some(row.name),
        value: row.value,
        comment: row.comment,
        correction: correction.map(|sample| short(&sample.text)),
        is_quarantined: row.key_id.as_deref().is_some_and(|rater| include_rater(flagged, rater)),
        rater: row.key_id,
        prompt: short(last_message(&interaction)),
        text: judged,
    }))
}

// Groups.

const STATES: [&str; 3] = ["ready", "trained", "dropped"];
pub const GROUPS: FieldTable =
    &[PAGE, &[Field::one_of("state", &STATES, "Only groups in this state.")]];

/// Completions that are trained on together.
#[derive(Serialize, JsonSchema)]
pub struct GroupSummary {
    id: String,
    created: UnixMillis,
    completion_id: String,
    route: String,
    members: usize,
    /// The reward parts to train on; empty for a correction.
    parts: Vec<String>,
    oldest_version: u64,
    #[schemars(extend("enum" = STATES))]
    state: &'static str,
    /// The step that trained on it.
    step: Option<u64>,
    /// Why it was dropped.
    reason: Option<String>,
}

impl GroupSummary {
    fn new(group: Group) -> Self {
        let (state, step, reason) = match group.state {
            GroupState::Ready => ("ready", None, None),
            GroupState::Trained(step) => ("trained", Some(step), None),
            GroupState::Dropped(reason) => ("dropped", None, Some(reason)),
        };
        Self {
            id: group.id.to_string(),
            created: group.created,
            completion_id: group.interaction.completion_id(),
            route: group.route,
            members: group.members.len(),
            parts: group.parts,
            oldest_version: group.oldest_version.0,
            state,
            step,
            reason,
        }
    }
}

pub async fn groups(
    State(state): AppContext,
    QueryObject(query): QueryObject,
) -> JsonResult<ListPage<GroupSummary>> {
    let fields = Fields::of(&query, GROUPS)?;
    let (page, wanted) = (NewestPage::read(&fields)?, fields.owned("state")?);
    let read = move |store: &Store| {
        let records = |before, limit| store.newest_groups(before, limit);
        let id = |row: &Group| {
            let GroupId(id) = row.id;
            id
        };
        page.collect(records, id, |row| {
            let entry = GroupSummary::new(row);
            Ok(wanted.as_ref().is_none_or(|state| state == entry.state).then_some(entry))
        })
    };
    state.read_ledger(read).await.map(Json)
}

// Two versions side by side.

pub const COMPARE: FieldTable = &[&[
    Field::json("left", number_schema, "A policy version.").required(),
    Field::json("right", number_schema, "Another one.").required(),
    Field::json("limit", limit_schema, "Most prompts; default 50."),
]];

/// A prompt that both versions answered.
#[derive(Serialize, JsonSchema)]
pub struct PromptPair {
    /// The last message of a user.
    prompt: String,
    left: ComparedAnswer,
    right: ComparedAnswer,
}

/// The first recorded completion of a version.
#[derive(Clone, Serialize, JsonSchema)]
pub struct ComparedAnswer {
    completion_id: String,
    text: String,
    reward: Option<f64>,
}

pub async fn compare(
    State(state): AppContext,
    QueryObject(query): QueryObject,
) -> JsonResult<List<PromptPair>> {
    let fields = Fields::of(&query, COMPARE)?;
    let version = |name| -> Result<u64, ApiError> {
        number(&fields, name)?.ok_or_else(|| fields.missing(name, "a policy version"))
    };
    let (versions, limit) = ([version("left")?, version("right")?], limit(&fields)?);
    state.store.flush().await?;
    let reader = state.clone();
    let found = state.read_ledger(move |_| compared(&reader, versions, limit)).await?;
    Ok(Json(List::new(found.into_iter())))
}

/// The newest prompts that both versions answered, of the newest [`MAX_READ`] ones.
fn compared(
    state: &AppState,
    versions: [u64; 2],
    limit: usize,
) -> Result<Vec<PromptPair>, StoreError> {
    let mut answers: BTreeMap<[u8; 16], [Option<ComparedAnswer>; 2]> = BTreeMap::new();
    let mut found = Vec::new();
    let mut last = None;
    for _ in 0..MAX_READ / CHUNK {
        for interaction in state.store.newest_interactions(last, CHUNK)? {
            last = Some(interaction.id.0);
            let own = answers.entry(interaction.prompt_digest()).or_default();
            let was_complete = own.iter().all(Option::is_some);
            let samples = state.store.samples_of(interaction.id)?;
            for (place, version) in
                own.iter_mut().zip(versions).filter(|(place, _)| place.is_none())
            {
                let is_own = |sample: &&Sample| {
                    sample.version.0 == version && sample.origin != SampleOrigin::Correction
                };
                let Some(sample) = samples.iter().find(is_own) else { continue };
                let route = state.routes.get(&interaction.route).map(AsRef::as_ref);
                *place = Some(ComparedAnswer {
                    completion_id: interaction.completion_id(),
                    text: sample.text.clone(),
                    reward: weighted(route, &state.store.rewards_of(sample.id)?),
                });
            }
            if let ([Some(left), Some(right)], false) = (&*own, was_complete) {
                let user = interaction.messages.iter().rfind(|message| message.role == Role::User);
                let prompt = user.map_or_else(String::new, |message| message.content.clone());
                found.push(PromptPair { prompt, left: left.clone(), right: right.clone() });
            }
            if found.len() == limit {
                return Ok(found);
            }
        }
    }
    Ok(found)
}
