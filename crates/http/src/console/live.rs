//! What the console reads of the running parts: the stream of overviews, the canary, and rewards.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use futures::stream;
use schemars::JsonSchema;
use serde::Serialize;

use hone_core::types::{Lineage, Message, Role, UnixMillis, now_ms};
use hone_reward::ScoreInput;
use hone_train::TrainStatus;
use hone_train::monitoring::warnings::WarningKind;
use hone_train::policy::CanaryStatus;

use crate::body::{Field, FieldTable, Fields, JsonObject, List};
use crate::error::{ApiError, ErrorCode, JsonResult};
use crate::generate::{metadata, metadata_schema};
use crate::operator::unready;
use crate::state::AppState;

type AppContext = State<Arc<AppState>>;

/// Time between two overviews.
const TICK: Duration = Duration::from_secs(1);
/// Overviews of one stream: a client then asks again, with a key that may have been withdrawn since.
const MAX_TICKS: u32 = 600;

/// The state of the daemon at one moment.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ConsoleOverview")]
pub struct Overview {
    at: UnixMillis,
    /// When the daemon started.
    started: UnixMillis,
    release: &'static str,
    model: String,
    /// The version that is served.
    active: u64,
    /// The version that a share of the traffic gets.
    canary: Option<u64>,
    /// Why `/readyz` fails; empty if it does not.
    not_ready: Vec<String>,
    /// Conditions of the run that hold now.
    warnings: Vec<ActiveWarning>,
    train: TrainStatus,
    /// Requests of clients that are sampled and that wait, and shadow samples.
    running: usize,
    waiting: usize,
    shadow: usize,
    slots: usize,
}

/// A warning whose condition holds.
#[derive(Serialize, JsonSchema)]
pub struct ActiveWarning {
    kind: &'static str,
    advice: &'static str,
}

/// `GET /admin/events`: an event `overview` each second, and `changed` when a version or its state has changed.
pub async fn events(State(state): AppContext) -> impl IntoResponse {
    let lineage = state.store.lineage();
    let next = |(state, lineage, ticks): (Arc<AppState>, Arc<Lineage>, u32)| async move {
        if ticks > 0 {
            tokio::time::sleep(TICK).await;
        }
        if ticks == MAX_TICKS || !state.ready.load(Ordering::Acquire) {
            return None;
        }
        // A commit of a version replaces the shared lineage.
        let current = state.store.lineage();
        let changed =
            if Arc::ptr_eq(&lineage, &current) { "" } else { "event: changed\ndata: {}\n\n" };
        // Numbers and strings always serialize.
        let data = serde_json::to_string(&overview(&state)).unwrap_or_default();
        let text = format!("{changed}event: overview\ndata: {data}\n\n");
        Some((Ok::<Bytes, Infallible>(text.into()), (state, current, ticks + 1)))
    };
    let body = Body::from_stream(stream::unfold((state, lineage, 0), next));
    (
        [
            (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
            (header::CACHE_CONTROL, "no-cache"),
        ],
        body,
    )
}

fn overview(state: &AppState) -> Overview {
    let active = &state.metrics.train.warning_active;
    let holds = |kind: &&WarningKind| active.with_label_values(&[kind.as_str()]).get() > 0;
    let warnings = WarningKind::ALL.iter().filter(holds);
    let (load, info) = (state.engine.load(), state.engine.info());
    Overview {
        at: now_ms(),
        started: state.started,
        release: env!("CARGO_PKG_VERSION"),
        model: info.name.clone(),
        active: state.policies.active().0,
        canary: state.store.lineage().canary().map(|version| version.0),
        not_ready: unready(state),
        warnings: warnings
            .map(|kind| ActiveWarning { kind: kind.as_str(), advice: kind.advice() })
            .collect(),
        train: state.train.status(),
        running: load.live_running,
        waiting: load.live_waiting,
        shadow: load.shadow_running,
        slots: info.slots,
    }
}

/// Response of `GET /admin/canary`.
#[derive(Serialize, JsonSchema)]
pub struct CanaryReport {
    #[schemars(extend("const" = "canary"))]
    object: &'static str,
    /// Null without a canary.
    running: Option<CanaryStatus>,
}

pub async fn canary(State(state): AppContext) -> Json<CanaryReport> {
    Json(CanaryReport { object: "canary", running: state.policies.canary_status() })
}

// Rewards.

/// A route with the parts of its reward.
#[derive(Serialize, JsonSchema)]
pub struct RouteRewards {
    route: String,
    parts: Vec<PartSummary>,
}

/// One part of a reward.
#[derive(Serialize, JsonSchema)]
pub struct PartSummary {
    name: String,
    kind: &'static str,
    weight: f64,
    /// Whether clients post its value.
    is_feedback: bool,
    /// Metadata keys of which it needs at least one.
    reads: Vec<String>,
}

pub async fn rewards(State(state): AppContext) -> Json<List<RouteRewards>> {
    let routes = state.routes.iter().map(|route| {
        let parts = route.parts.iter().map(|part| PartSummary {
            name: part.name.clone(),
            kind: part.kind,
            weight: part.weight,
            is_feedback: part.grader.is_none(),
            reads: part.reads.clone(),
        });
        RouteRewards { route: route.name.clone(), parts: parts.collect() }
    });
    Json(List::new(routes))
}

/// Longest text to score, in characters.
const TEXT_CHARS: usize = 100_000;

pub const TEST_FIELDS: FieldTable = &[&[
    Field::text("route", "The route whose graders score the text.").required(),
    Field::short_text("completion", TEXT_CHARS, "The text to score.").required(),
    Field::short_text("prompt", TEXT_CHARS, "What a user asked; default empty."),
    Field::json("metadata", metadata_schema, "References of the graders, such as `answer`."),
]];

/// Response of `POST /admin/rewards/test`.
#[derive(Serialize, JsonSchema)]
pub struct RewardTestResult {
    route: String,
    /// The weighted sum of the parts with a value; null without one.
    reward: Option<f64>,
    parts: Vec<PartValue>,
}

/// The value of one part.
#[derive(Serialize, JsonSchema)]
pub struct PartValue {
    name: String,
    kind: &'static str,
    weight: f64,
    /// Null if the text could not be scored.
    value: Option<f64>,
}

pub async fn test_reward(
    State(state): AppContext,
    JsonObject(body): JsonObject,
) -> JsonResult<RewardTestResult> {
    let fields = Fields::of(&body, TEST_FIELDS)?;
    let name = fields.required("route", "the name of a route")?;
    let text = fields.string("completion")?;
    let prompt = fields.owned("prompt")?.unwrap_or_default();
    let metadata = metadata(&fields)?;
    let route = state.routes.get(name).cloned().ok_or_else(|| {
        let message = format!("route is {name:?}: there is no such route");
        ApiError::new(ErrorCode::NotFound, message).param("route")
    })?;
    let ids = state.engine.codec().encode(&text)?;
    let input = ScoreInput {
        messages: Arc::new(vec![Message::new(Role::User, prompt)]),
        metadata: Arc::new(metadata),
        text,
        ids,
    };
    let graded = route.grade(&[input]).await;
    let parts: Vec<PartValue> = route
        .parts
        .iter()
        .filter_map(|part| {
            let (name, values) = graded.iter().find(|(name, _)| *name == part.name)?;
            let value = values.first().copied().flatten();
            Some(PartValue { name: name.clone(), kind: part.kind, weight: part.weight, value })
        })
        .collect();
    let weighted = |part: &PartValue| Some(part.weight * part.value?);
    let values: Vec<f64> = parts.iter().filter_map(weighted).collect();
    let reward = (!values.is_empty()).then(|| values.iter().sum());
    Ok(Json(RewardTestResult { route: route.name.clone(), reward, parts }))
}
