//! Validates posted feedback, and has the steps that every kind of it shares: lookup, commit, whether it will be trained
//! on, and the evidence of a canary.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value, json};

use hone_core::types::{
    Interaction, InteractionId, PolicyState, PromptSource, Reward, RewardSource, Sample, SampleId,
    SampleOrigin, UnixMillis, now_ms, rater_id,
};
use hone_reward::Route;
use hone_reward::feedback::{FeedbackType, read_value};
use hone_store::{Elsewhere, FeedbackEntry, FeedbackOutcome, Op, StoreError};
use hone_train::policy::VersionRating;

use crate::auth::{ApiKey, Caller};
use crate::body::{Field, FieldTable, Fields};
use crate::config::KeyScope;
use crate::error::{ApiError, ErrorCode};
use crate::generate::prompt::RecordedTurn;
use crate::state::AppState;

pub const NAME_CHARS: usize = 64;
pub const COMMENT_CHARS: usize = 4096;
pub const KEY_CHARS: usize = 255;
/// Longest session id, equal to the limit of a `metadata` value.
const SESSION_CHARS: usize = 512;
pub const USER_CHARS: usize = 256;
pub const MAX_CHOICE: i64 = u32::MAX as i64;
pub const FIELDS: FieldTable = &[&[
    Field::json("completion_id", id_schema, "The id of a completion; excludes `session_id`."),
    Field::integer("choice", 0, MAX_CHOICE, "The index of the choice; default 0."),
    Field::short_text("session_id", SESSION_CHARS, "The `metadata.session_id` of a conversation."),
    Field::short_text("end_user", USER_CHARS, "Who rates; default the `user` of the request."),
    Field::short_text("name", NAME_CHARS, "The name of a reward part."),
    Field::json("value", || json!({"type": ["number", "boolean"]}), "The rating."),
    Field::text("correction", "What the text should have been."),
    Field::short_text("comment", COMMENT_CHARS, "Text about the rating."),
    Field::short_text("idempotency_key", KEY_CHARS, "The same post with it changes nothing."),
]];
pub const NAME_FORM: &str = "the name of a reward part";
/// The form of a corrected text.
const CORRECTION_FORM: &str = "the text that the answer should have been, not blank";

/// The object of the feedback.
#[derive(Clone, Copy)]
pub enum Target<'a> {
    /// One choice of a completion.
    Completion(InteractionId, u32),
    /// Every turn of a conversation.
    Session(&'a str),
}

/// A posted body. [`Self::entry`] validates its value, because the allowed ones depend on the route.
pub struct PostedFeedback<'a> {
    pub fields: Fields<'a>,
    pub target: Target<'a>,
    /// The rated part; `None` for a correction without a rating.
    pub name: Option<&'a str>,
    /// The corrected text.
    pub correction: Option<&'a str>,
    pub comment: Option<&'a str>,
    /// Who rates, among the users of the API key.
    end_user: Option<&'a str>,
    pub idempotency_key: Option<&'a str>,
    pub caller: Caller,
    pub arrived: UnixMillis,
}

impl<'a> PostedFeedback<'a> {
    /// Validates every field except the value.
    pub fn read(body: &'a Map<String, Value>, caller: Caller) -> Result<Self, ApiError> {
        let fields = Fields::of(body, FIELDS)?;
        let target = target(&fields)?;
        let correction = fields.read("correction", CORRECTION_FORM, |value| {
            value.as_str().filter(|text| !text.trim().is_empty())
        })?;
        if correction.is_some() && matches!(target, Target::Session(_)) {
            return Err(fields.invalid("correction", "absent beside session_id"));
        }
        let name = fields.text("name")?;
        if name.is_some_and(str::is_empty) {
            return Err(fields.invalid("name", NAME_FORM));
        }
        if name.is_none() && fields.get("value").is_some() {
            return Err(fields.missing("name", NAME_FORM));
        }
        Ok(Self {
            target,
            name,
            correction,
            comment: fields.text("comment")?,
            end_user: end_user(&fields)?,
            idempotency_key: fields.text("idempotency_key")?,
            caller,
            arrived: now_ms(),
            fields,
        })
    }

    /// Who rates a completion.
    pub fn rater(&self, interaction: &Interaction) -> Option<String> {
        rater(&self.caller, self.end_user, interaction)
    }

    /// Which completions of other servers the caller may rate.
    pub fn elsewhere(&self) -> Elsewhere {
        let may = |key: &Arc<ApiKey>| key.has_one_of(&[KeyScope::Feedback]);
        if self.caller.key.as_ref().is_none_or(may) { Elsewhere::Any } else { Elsewhere::Own }
    }

    /// The ledger entry of one completion's rating for a part, if the completion's route accepts it.
    pub fn entry(
        &self,
        state: &AppState,
        route: Option<&Route>,
        name: &str,
        interaction: &Interaction,
        choice: u32,
    ) -> Result<FeedbackEntry, ApiError> {
        refuse_graded_part(state, route, name)?;
        let params = route.and_then(|route| route.feedback(name));
        let rule = params.map(|params| params.aggregate).unwrap_or_default();
        let value = match params {
            Some(params) => read_value(name, params, self.fields.get("value"), self.comment)
                .map_err(|(field, message)| {
                    let refused = ApiError::field(field, message);
                    let is_outside = self.fields.get("value").is_some_and(Value::is_number);
                    if is_outside { refused.unprocessable() } else { refused }
                })?,
            None => Some(value(&self.fields)?),
        };
        Ok(FeedbackEntry {
            interaction: interaction.id,
            choice,
            name: name.to_owned(),
            value,
            comment: self.comment.map(str::to_owned),
            idempotency_key: self.idempotency_key.map(str::to_owned),
            key_id: self.rater(interaction),
            created: self.arrived,
            aggregate: rule,
            elsewhere: None,
        })
    }
}

/// The end user that a post names.
pub fn end_user<'a>(fields: &Fields<'a>) -> Result<Option<&'a str>, ApiError> {
    match fields.text("end_user")? {
        Some("") => Err(fields.invalid("end_user", "the name of an end user")),
        other => Ok(other),
    }
}

/// Who rates: the end user that the post names, or else the one of the request if the API key is the same.
pub fn rater(caller: &Caller, end_user: Option<&str>, interaction: &Interaction) -> Option<String> {
    let key = caller.key_id.as_deref();
    if end_user.is_none() && interaction.api_key() == key {
        return interaction.key_id.clone();
    }
    rater_id(key, end_user)
}

fn target<'a>(fields: &Fields<'a>) -> Result<Target<'a>, ApiError> {
    let choice = fields.whole("choice");
    match (fields.text("completion_id")?, fields.text("session_id")?) {
        (Some(_), Some(_)) => Err(fields.invalid("session_id", "absent beside completion_id")),
        (None, None) => {
            let allowed =
                format!("{ID_FORM}; or session_id must be given for a whole conversation");
            Err(fields.missing("completion_id", allowed))
        }
        (None, Some("")) => {
            Err(fields.invalid("session_id", "the metadata.session_id of requests"))
        }
        (None, Some(_)) if choice.is_some() => {
            Err(fields.invalid("choice", "absent beside session_id"))
        }
        (None, Some(session)) => Ok(Target::Session(session)),
        (Some(_), None) => {
            let id = completion_id(fields, "completion_id")?;
            let choice = u32::try_from(choice.unwrap_or(0)).unwrap_or(u32::MAX);
            Ok(Target::Completion(id, choice))
        }
    }
}

/// Refuses a part that a grader of the route scores, or of any route if no route accepts feedback for that name.
fn refuse_graded_part(state: &AppState, own: Option<&Route>, name: &str) -> Result<(), ApiError> {
    let graded = |route: &&Route| route.weight(name).is_some() && !route.takes_feedback(name);
    let all = || state.routes.iter().map(Arc::as_ref);
    let accepted = all().any(|route| route.takes_feedback(name));
    let elsewhere = || if accepted { None } else { all().find(graded) };
    match own.filter(graded).or_else(elsewhere) {
        Some(route) => {
            let route = &route.name;
            let message =
                format!("name is {name:?}: a grader of the route {route:?} scores that part");
            Err(ApiError::field("name", message))
        }
        None => Ok(()),
    }
}

/// A finite number, or a boolean as 1 or 0.
fn value(fields: &Fields<'_>) -> Result<f64, ApiError> {
    const ALLOWED: &str = "a finite number or a boolean";
    let convert = |value: &Value| match value {
        Value::Bool(yes) => Some(f64::from(u8::from(*yes))),
        other => other.as_f64().filter(|number| number.is_finite()),
    };
    let value = fields.read("value", ALLOWED, convert)?;
    value.ok_or_else(|| fields.missing("value", ALLOWED))
}

// The steps of recording.

/// The response to a piece of feedback.
#[derive(Serialize, JsonSchema)]
pub struct FeedbackResponse {
    #[schemars(extend("const" = "feedback"))]
    object: &'static str,
    /// `recorded`, or `duplicate` for an idempotency key that was recorded before.
    #[schemars(extend("enum" = ["recorded", "duplicate"]))]
    pub status: &'static str,
    /// Whether the value, the text, both completions of a preference or any turn of a conversation will be trained on,
    /// unless something later prevents it.
    trained: bool,
    /// Why it will not be, for a conversation its last turn: a label of `hone_feedback_ratings_total`, for a text of
    /// `hone_train_corrections_total`, or `disabled`.
    reason: Option<String>,
    #[serde(flatten)]
    judged: Judged,
}

impl FeedbackResponse {
    /// The response with the reason why the feedback will not be trained on.
    pub fn new(status: &'static str, reason: Option<String>, judged: Judged) -> Self {
        Self { object: "feedback", status, trained: reason.is_none(), reason, judged }
    }
}

/// What a piece of feedback is about.
#[derive(Serialize, JsonSchema)]
#[serde(untagged)]
pub enum Judged {
    Completion {
        /// The judged sample and the part's name: another post with the same id replaces the value.
        id: String,
        completion_id: String,
        choice: u32,
        name: String,
        /// The version that generated the completion.
        policy_version: Option<u64>,
        /// Weight of the part in the completion's route; null if the route has no such part.
        weight: Option<f64>,
    },
    Session {
        session_id: String,
        name: String,
        /// Number of credited turns.
        turns: usize,
    },
    Pair {
        chosen: String,
        rejected: String,
        chosen_choice: u32,
        rejected_choice: u32,
        name: String,
    },
    Correction {
        completion_id: String,
        choice: u32,
        /// The version that generated the completion.
        policy_version: u64,
        /// `train.correction_weight`.
        weight: f64,
        /// What becomes of the rating that was posted with it; null without one.
        rating: Option<RatingProspect>,
    },
}

/// What becomes of a rating that was posted with a correction.
#[derive(Serialize, JsonSchema)]
pub struct RatingProspect {
    pub name: String,
    /// Weight of the part in the completion's route; null if the route has no such part.
    pub weight: Option<f64>,
    pub trained: bool,
    pub reason: Option<String>,
}

pub const ID_FORM: &str =
    "a completion's id, such as \"chatcmpl-0190a2b3c4d57e6f8091a2b3c4d5e6f7\"";

/// The completion that a required field names.
pub fn completion_id(fields: &Fields<'_>, name: &str) -> Result<InteractionId, ApiError> {
    let text = fields.text(name)?.ok_or_else(|| fields.missing(name, ID_FORM))?;
    InteractionId::from_completion_id(text).ok_or_else(|| fields.invalid(name, ID_FORM))
}

pub fn id_schema() -> Value {
    json!({"type": "string", "pattern": "^(chatcmpl-|cmpl-|resp_|msg_)[0-9a-f]{32}$"})
}

/// The interaction of a completion. One that was just served may be queued for the ledger, which is then flushed.
pub async fn find_interaction(
    state: &AppState,
    id: InteractionId,
) -> Result<Option<Interaction>, ApiError> {
    if id.is_unstored() {
        return Ok(None);
    }
    if let Some(found) = state.read_ledger(move |store| store.interaction(id)).await? {
        return Ok(Some(found));
    }
    state.store.flush().await?;
    state.read_ledger(move |store| store.interaction(id)).await
}

/// The completion that the field `name` has: one of the caller, or any if it has the scope `feedback`.
pub async fn judged(
    state: &AppState,
    caller: &Caller,
    fields: &Fields<'_>,
    (name, id): (&str, InteractionId),
) -> Result<Interaction, ApiError> {
    let interaction = find_interaction(state, id).await?;
    let interaction = interaction.ok_or_else(|| unknown_completion(fields, name))?;
    check_owner(caller, &interaction)?;
    Ok(interaction)
}

/// [`judged`] for a rating, and whether the completion is in the ledger. In a fleet, another server may have answered:
/// then it has no prompt and no key, only the route that its id names, and the trainer has the rest.
pub async fn rated(
    state: &AppState,
    posted: &PostedFeedback<'_>,
    id: InteractionId,
) -> Result<(Interaction, bool), ApiError> {
    if let Some(found) = find_interaction(state, id).await? {
        check_owner(&posted.caller, &found)?;
        return Ok((found, true));
    }
    let mut routes = state.routes.iter().map(|route| route.name.as_str()).chain([""]);
    let of_id = routes
        .find(|route| id.is_of_route(route))
        .filter(|_| state.fleet.is_some() && !id.is_unstored());
    let route = of_id.ok_or_else(|| unknown_completion(&posted.fields, "completion_id"))?;
    let elsewhere = Interaction::new(PromptSource::Live, route, Vec::new());
    Ok((Interaction { id, ..elsewhere }, false))
}

/// Refuses a completion of another key, unless the caller has the scope `feedback`.
fn check_owner(caller: &Caller, interaction: &Interaction) -> Result<(), ApiError> {
    let Some(key) = &caller.key else { return Ok(()) };
    let is_own = interaction.api_key() == Some(key.id.as_str());
    if is_own || key.has_one_of(&[KeyScope::Feedback]) {
        return Ok(());
    }
    let message = format!(
        "the key {:?} lacks the scope feedback, which rating another key's completion requires",
        key.entry.name
    );
    Err(ApiError::new(ErrorCode::MissingScope, message))
}

/// The error for a completion that is not in the ledger; the field `name` has its id.
pub fn unknown_completion(fields: &Fields<'_>, name: &str) -> ApiError {
    let text = fields.get(name).and_then(Value::as_str).unwrap_or_default();
    match InteractionId::from_completion_id(text).is_some_and(|id| id.is_unstored()) {
        true => ApiError::unstored_completion(name, text),
        false => ApiError::no_such_completion(name, text),
    }
}

/// The sample of a served choice, which the field `name` has.
pub async fn find_choice(
    state: &AppState,
    id: InteractionId,
    choice: u32,
    name: &str,
) -> Result<Sample, ApiError> {
    let is_named =
        |sample: &Sample| sample.origin == SampleOrigin::Served && sample.choice == choice;
    let look_up = || state.read_ledger(move |store| store.samples_of(id));
    let mut sample = look_up().await?.into_iter().find(is_named);
    if sample.is_none() {
        // Another choice of the completion may still be queued for the ledger.
        state.store.flush().await?;
        sample = look_up().await?.into_iter().find(is_named);
    }
    sample.ok_or_else(|| no_such_choice(name, choice))
}

/// The error for a choice that a known completion does not have.
pub fn no_such_choice(name: &str, choice: u32) -> ApiError {
    let message = format!("{name} is {choice}: the completion has no such choice");
    ApiError::field(name, message).unknown()
}

/// Records feedback, unless its idempotency key was used for something else.
pub async fn commit(
    state: &AppState,
    op: Op,
    key: Option<&str>,
) -> Result<FeedbackOutcome, ApiError> {
    let outcome = state.store.commit_in_time(vec![op]).await?.feedback.into_iter().next();
    if outcome == Some(FeedbackOutcome::Reused) {
        let key = key.unwrap_or_default();
        let message = format!(
            "idempotency_key is {key:?}: it was used for another target or another content"
        );
        let reused = ApiError::new(ErrorCode::IdempotencyKeyReused, message);
        return Err(reused.param("idempotency_key"));
    }
    // The ledger has an outcome for each operation of feedback.
    outcome.ok_or_else(ApiError::internal)
}

/// Does what follows a commit on a thread that may wait for the disk.
pub async fn after_commit<T: Send + 'static>(
    state: &Arc<AppState>,
    work: impl FnOnce(&AppState) -> T + Send + 'static,
) -> Result<T, ApiError> {
    let own = Arc::clone(state);
    state.read_ledger(move |_| Ok(work(&own))).await
}

/// Why recorded feedback is not trained on. A ledger that cannot be read is no reason to refuse the feedback.
pub fn prospect(
    state: &AppState,
    name: &str,
    rater: Option<&str>,
    turn: &RecordedTurn,
) -> Option<String> {
    let rewards = state.store.rewards_of(turn.sample.id).unwrap_or_default();
    let value = rewards.into_iter().find(|reward| reward.name == name).and_then(|r| r.value);
    untrained_reason(state, turn, name, value, rater).unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot determine whether feedback will be trained on");
        None
    })
}

/// Why feedback on a completion is not trained on, as the ledger and `hone_feedback_ratings_total` name it; `None`
/// if it is, unless the completion becomes too old or another version is activated. `value` combines all raters.
fn untrained_reason(
    state: &AppState,
    RecordedTurn { interaction, sample }: &RecordedTurn,
    name: &str,
    value: Option<f64>,
    rater: Option<&str>,
) -> Result<Option<String>, StoreError> {
    let route = state.routes.get(&interaction.route);
    let params = route.and_then(|route| route.feedback(name));
    let label = if interaction.route.is_empty() {
        "no_route"
    } else if route.is_none() {
        "unknown_route"
    } else if interaction.held_out {
        "held_out"
    } else if let Some(reason) = &sample.untrainable {
        reason.as_str()
    } else if !route.is_some_and(|route| route.takes_feedback(name)) {
        "unknown_part"
    } else if params.is_some_and(|params| params.r#type == FeedbackType::Comment) {
        "comment"
    } else if value.is_none() {
        "tied"
    } else if !state.learning.enabled {
        "disabled"
    } else if let Some(reason) = age_problem(state, sample)? {
        reason
    } else if state.store.is_quarantined(rater)? {
        "quarantined"
    } else {
        return Ok(None);
    };
    Ok(Some(label.to_owned()))
}

/// Why the version of a completion is too far from the active one.
fn age_problem(state: &AppState, sample: &Sample) -> Result<Option<&'static str>, StoreError> {
    match state.store.lineage().distance(state.policies.active(), sample.version) {
        Some(age) if age > state.learning.max_staleness => Ok(Some("stale")),
        Some(_) => Ok(None),
        None => {
            // A canary becomes the active version, or is undone later.
            let record = state.store.policy(sample.version)?;
            let is_canary = record.is_some_and(|record| record.state == PolicyState::Canary);
            Ok((!is_canary).then_some("abandoned"))
        }
    }
}

/// Adds a rating of a completion to the evidence of a canary, also one that another server of the fleet recorded. If the
/// ledger cannot tell what it is of, it is left out.
pub fn rate(state: &AppState, entry: &FeedbackEntry, sample: SampleId) {
    if !state.policies.counts_ratings() {
        return;
    }
    let rating = Reward {
        value: entry.value,
        source: RewardSource::Feedback,
        created: entry.created,
        key_id: entry.key_id.clone(),
        ..Reward::graded(sample, &entry.name, None)
    };
    let found = VersionRating::of(&state.store, &state.routes, state.keys.raters(), &rating);
    if let Ok(Some(rating)) = found {
        state.policies.rate(&rating);
    }
}
