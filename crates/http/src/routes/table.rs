//! Every route, in one table: its handler, and what the OpenAPI document contains about it; and the document.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use axum::Extension;
use axum::body::Bytes;
use axum::extract::DefaultBodyLimit;
use axum::handler::Handler;
use axum::http::{Method, header};
use axum::middleware::from_fn_with_state;
use axum::response::IntoResponse;
use axum::routing::{MethodFilter, MethodRouter, on};
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value, json};

use hone_core::types::PolicyRecord;
use hone_reward::grader::GradeOutcome;
use hone_store::Backup;
use hone_train::TrainStatus;

use crate::auth::{Access, ListedKey, access};
use crate::body::{Field, FieldTable, List, check_length, fields_of, object_schema};
use crate::chat::{self, ChatChunk, ChatCompletion};
use crate::config::ServerConfig;
use crate::console;
use crate::console::ledger::{
    self, AnswerDetail, AnswerSummary, GroupSummary, PromptPair, RaterPost, StepSummary,
};
use crate::console::live::{self, CanaryReport, Overview, RewardTestResult, RouteRewards};
use crate::data::{self, AuditList, DataStatus, ErasureReport};
use crate::error::ApiError;
use crate::feedback::{self, FeedbackRecord, FeedbackResponse, ListedResponse};
use crate::generate::model::{self, DetokenizedText, ModelObject, TokenizedText};
use crate::graders::{self, GraderQueue, ValidGrader};
use crate::messages::{self, MessageError, MessageEvent, MessageObject, TokenCount};
use crate::operator::{self, PolicyList, ProbeStatus, QuarantineEntry, ReleasedKey};
use crate::responses;
use crate::responses::wire::{DeletedResponse, ResponseEvent, ResponseObject};
use crate::state::AppState;
use crate::stored::{
    self, DeletedCompletion, ListPage, ListedItem, StoredCompletion, StoredMessage,
};
use crate::text::{self, TextCompletion};

const GET: Method = Method::GET;
const POST: Method = Method::POST;
const DELETE: Method = Method::DELETE;

/// Makes a schema, and adds those to which it refers to the generator.
pub type SchemaOf = fn(&mut SchemaGenerator) -> Schema;

/// A route, with one method of a path.
pub struct ApiRoute {
    pub method: Method,
    /// In axum's syntax.
    pub path: &'static str,
    pub handler: MethodRouter<Arc<AppState>>,
    /// Unique in the document.
    pub id: &'static str,
    pub summary: &'static str,
    pub query: FieldTable,
    /// The shapes of the body, each with the name of its schema.
    pub bodies: Vec<(&'static str, RequestShape)>,
    pub example: Option<Value>,
    /// The content types of a response with the status 200, each with a schema.
    pub answers: Vec<(&'static str, SchemaOf)>,
    /// Whether a response names the policy version.
    pub has_version: bool,
    /// Statuses of errors that follow from the purpose of the route.
    pub errors: &'static [u16],
}

/// What a body may be.
#[derive(Clone, Copy)]
pub enum RequestShape {
    /// An object with these fields.
    Fields(FieldTable),
    /// What a JSON schema describes.
    Json(fn() -> Value),
}

/// A route, without what the document contains about it.
fn route<H, T>(method: Method, path: &'static str, handler: H) -> ApiRoute
where
    H: Handler<T, Arc<AppState>>,
    T: 'static,
{
    let filter = match method {
        POST => MethodFilter::POST,
        DELETE => MethodFilter::DELETE,
        _ => MethodFilter::GET,
    };
    ApiRoute {
        method,
        path,
        handler: on(filter, handler),
        id: "",
        summary: "",
        query: &[],
        bodies: Vec::new(),
        example: None,
        answers: Vec::new(),
        has_version: false,
        errors: &[],
    }
}

impl ApiRoute {
    /// The group to which the route belongs.
    pub fn tag(&self) -> &'static str {
        let tag = TAGS.iter().find(|(prefix, _)| self.path.starts_with(prefix));
        tag.map_or("", |(_, tag)| tag)
    }

    pub fn named(self, id: &'static str, summary: &'static str) -> Self {
        Self { id, summary, ..self }
    }

    pub fn query(self, query: FieldTable) -> Self {
        Self { query, ..self }
    }

    /// An object that the body may be.
    pub fn takes(self, name: &'static str, fields: FieldTable) -> Self {
        self.takes_shape(name, RequestShape::Fields(fields))
    }

    /// Another shape that the body may have.
    pub fn takes_json(self, name: &'static str, schema: fn() -> Value) -> Self {
        self.takes_shape(name, RequestShape::Json(schema))
    }

    fn takes_shape(mut self, name: &'static str, shape: RequestShape) -> Self {
        self.bodies.push((name, shape));
        self
    }

    /// A body that is answered with the status 200.
    pub fn example(self, example: Value) -> Self {
        Self { example: Some(example), ..self }
    }

    /// The response is a `T`, or one of several types.
    pub fn answers<T: JsonSchema>(mut self) -> Self {
        self.answers.push(("application/json", SchemaGenerator::subschema_for::<T>));
        self
    }

    /// The response, with the policy version, is a stream of `T` if the request asks for one.
    pub fn streams<T: JsonSchema>(mut self) -> Self {
        self.has_version = true;
        self.answers.push(("text/event-stream", events_of::<T>));
        self
    }

    /// The response is a stream of `T`.
    pub fn sends<T: JsonSchema>(mut self) -> Self {
        self.answers.push(("text/event-stream", events_of::<T>));
        self
    }

    pub fn answers_text(self) -> Self {
        self.answers_in(&["text/plain"])
    }

    /// The response is a text of one of these types.
    pub fn answers_in(mut self, types: &[&'static str]) -> Self {
        let schema: SchemaOf = SchemaGenerator::subschema_for::<str>;
        self.answers.extend(types.iter().map(|name| (*name, schema)));
        self
    }

    pub fn errors(self, errors: &'static [u16]) -> Self {
        Self { errors, ..self }
    }
}

fn events_of<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    let event = generator.subschema_for::<T>();
    json_schema!({
        "type": "string",
        "description": "Server-sent events. The data of each is JSON, except for a last `[DONE]`.",
        "contentMediaType": "application/json",
        "contentSchema": event,
    })
}

/// The groups of routes, by the beginning of their paths.
const TAGS: [(&str, &str); 31] = [
    ("/v1/chat/completions", "Chat completions"),
    ("/v1/completions", "Text completions"),
    ("/v1/responses", "Responses"),
    ("/v1/messages", "Messages"),
    ("/tokenize", "Tokens"),
    ("/detokenize", "Tokens"),
    ("/v1/models", "Models"),
    ("/v1/feedback", "Feedback"),
    ("/v1/fine_tuning", "Graders"),
    ("/admin/train", "Trainer"),
    ("/admin/policies", "Policy versions"),
    ("/admin/feedback", "Quarantine"),
    ("/admin/completions", "Erasure"),
    ("/admin/answers", "Console"),
    ("/admin/canary", "Console"),
    ("/admin/compare", "Console"),
    ("/admin/events", "Console"),
    ("/admin/groups", "Console"),
    ("/admin/metrics", "Console"),
    ("/admin/ratings", "Console"),
    ("/admin/rewards", "Console"),
    ("/admin/steps", "Console"),
    ("/console", "Console"),
    ("/admin/erase", "Erasure"),
    ("/admin/data", "Data and backup"),
    ("/admin/backup", "Data and backup"),
    ("/admin/audit", "Audit"),
    ("/admin/keys", "List of keys"),
    ("/openapi.json", "OpenAPI document"),
    ("/metrics", "Probes and metrics"),
    ("/", "Probes and metrics"),
];

pub fn routes(config: &ServerConfig) -> Vec<ApiRoute> {
    [sampling(), records(), graders(config), operators(), console_routes()]
        .into_iter()
        .flatten()
        .collect()
}

/// The routes that sample or tokenize.
fn sampling() -> Vec<ApiRoute> {
    let said = json!([{"role": "user", "content": "What is 12 + 7?"}]);
    vec![
        route(POST, "/v1/chat/completions", chat::create)
            .named("createChatCompletion", "Sample completions of a conversation")
            .takes("ChatRequest", chat::request::FIELDS)
            .example(json!({"model": "default", "messages": said, "max_tokens": 16}))
            .answers::<ChatCompletion>()
            .streams::<ChatChunk<'static>>()
            .errors(&[404]),
        route(POST, "/v1/completions", text::create)
            .named("createCompletion", "Continue texts or token ids")
            .takes("TextRequest", text::FIELDS)
            .example(json!({"model": "default", "prompt": "12 + 7 =", "max_tokens": 8}))
            .answers::<TextCompletion<'static>>()
            .streams::<TextCompletion<'static>>()
            .errors(&[404]),
        route(POST, "/v1/responses", responses::create)
            .named("createResponse", "Sample a response")
            .takes("ResponseRequest", responses::request::FIELDS)
            .example(json!({
                "model": "default", "input": "What is 12 + 7?", "max_output_tokens": 16,
            }))
            .answers::<ResponseObject>()
            .streams::<ResponseEvent>()
            .errors(&[404]),
        route(POST, "/v1/messages", messages::create)
            .named("createMessage", "Sample the next message, as in Anthropic's API")
            .takes("MessageRequest", messages::request::FIELDS)
            .example(json!({"model": "default", "messages": said, "max_tokens": 16}))
            .answers::<MessageObject>()
            .streams::<MessageEvent>()
            .errors(&[404]),
        route(POST, "/v1/messages/count_tokens", messages::count_tokens)
            .named("countMessageTokens", "Count the tokens of a prompt")
            .takes("MessageCountRequest", messages::request::COUNT_FIELDS)
            .example(json!({"model": "default", "messages": said}))
            .answers::<TokenCount>()
            .errors(&[404]),
        route(POST, "/tokenize", model::tokenize)
            .named("tokenize", "Convert a text or a conversation to token ids")
            .takes("TokenizeRequest", model::FIELDS)
            .example(json!({"prompt": "12 + 7 ="}))
            .answers::<TokenizedText>()
            .errors(&[404]),
        route(POST, "/detokenize", model::detokenize)
            .named("detokenize", "Convert token ids to text")
            .takes("DetokenizeRequest", model::DETOKENIZE_FIELDS)
            .example(json!({"tokens": [1, 2, 3]}))
            .answers::<DetokenizedText>()
            .errors(&[404]),
    ]
}

/// The routes of the model's names, recorded completions and feedback.
fn records() -> Vec<ApiRoute> {
    vec![
        route(GET, "/v1/chat/completions", stored::list)
            .named("listChatCompletions", "List the key's recorded completions")
            .query(stored::COMPLETIONS)
            .answers::<ListPage<StoredCompletion>>(),
        route(GET, "/v1/chat/completions/{id}", stored::retrieve)
            .named("getChatCompletion", "Get a recorded completion")
            .answers::<StoredCompletion>(),
        route(POST, "/v1/chat/completions/{id}", stored::update)
            .named("updateChatCompletion", "Replace the metadata of a recorded completion")
            .takes("ChatCompletionUpdate", stored::UPDATE_FIELDS)
            .example(json!({"metadata": {"answer": "19"}}))
            .answers::<StoredCompletion>(),
        route(DELETE, "/v1/chat/completions/{id}", stored::delete)
            .named("deleteChatCompletion", "Erase a recorded completion")
            .answers::<DeletedCompletion>(),
        route(GET, "/v1/chat/completions/{id}/messages", stored::messages)
            .named("listChatCompletionMessages", "List the messages of a recorded request")
            .query(stored::MESSAGES)
            .answers::<ListPage<StoredMessage>>(),
        route(GET, "/v1/responses/{id}", stored::retrieve_response)
            .named("getResponse", "Get a recorded response")
            .query(stored::RETRIEVE)
            .answers::<ResponseObject>(),
        route(DELETE, "/v1/responses/{id}", stored::delete_response)
            .named("deleteResponse", "Erase a recorded response")
            .answers::<DeletedResponse>(),
        route(GET, "/v1/responses/{id}/input_items", stored::input_items)
            .named("listInputItems", "List the items of a recorded response's input")
            .query(stored::ITEMS)
            .answers::<ListPage<ListedItem>>(),
        route(GET, "/v1/models", model::list)
            .named("listModels", "List the names of the served model")
            .answers::<List<ModelObject>>(),
        route(GET, "/v1/models/{*model}", model::retrieve)
            .named("getModel", "Get one name; it may contain slashes")
            .answers::<ModelObject>(),
        route(POST, "/v1/feedback", feedback::create)
            .named("createFeedback", "Reward a completion or a conversation")
            .takes("FeedbackPost", feedback::posted::FIELDS)
            .takes("PreferencePost", feedback::kinds::PAIR_FIELDS)
            .takes_json("FeedbackBatch", feedback::batch_schema)
            .answers::<FeedbackResponse>()
            .answers::<List<ListedResponse>>()
            .errors(&[404, 422]),
        route(GET, "/v1/feedback", feedback::list)
            .named("listFeedback", "List what the key has posted on a completion")
            .query(feedback::LIST_FIELDS)
            .answers::<List<FeedbackRecord>>()
            .errors(&[404]),
    ]
}

/// The routes of graders, with limits of their own.
fn graders(config: &ServerConfig) -> Vec<ApiRoute> {
    let queue = GraderQueue::new(&config.graders);
    let most = config.graders.max_bytes.min(config.max_body_bytes);
    let limit = (DefaultBodyLimit::max(most), from_fn_with_state(most, check_length));
    let grader = json!({
        "type": "string_check", "name": "equal", "operation": "eq",
        "input": "{{ sample.output_text }}", "reference": "{{ item.answer }}",
    });
    let run = json!({"grader": grader, "model_sample": "19", "item": {"answer": "19"}});
    let routes = [
        route(POST, "/v1/fine_tuning/alpha/graders/run", graders::run)
            .named("runGrader", "Run an OpenAI grader on a text")
            .takes("GraderRun", graders::RUN_FIELDS)
            .example(run)
            .answers::<GradeOutcome>(),
        route(POST, "/v1/fine_tuning/alpha/graders/validate", graders::validate)
            .named("validateGrader", "Check an OpenAI grader")
            .takes("GraderCheck", graders::VALIDATE_FIELDS)
            .example(json!({"grader": grader}))
            .answers::<ValidGrader>(),
    ];
    let limited = routes.into_iter().map(|route| ApiRoute {
        handler: route.handler.layer((Extension(queue.clone()), limit.clone())),
        ..route
    });
    limited.collect()
}

fn operators() -> Vec<ApiRoute> {
    vec![
        route(GET, "/admin/train", operator::status)
            .named("getTrainer", "Get the trainer's status")
            .answers::<TrainStatus>(),
        route(POST, "/admin/train/pause", operator::pause)
            .named("pauseTrainer", "Take no further step")
            .answers::<TrainStatus>()
            .errors(&[409]),
        route(POST, "/admin/train/resume", operator::resume)
            .named("resumeTrainer", "End a pause")
            .answers::<TrainStatus>()
            .errors(&[409]),
        route(POST, "/admin/train/step", operator::step)
            .named("stepTrainer", "Take one step now")
            .answers::<TrainStatus>()
            .errors(&[409]),
        route(GET, "/admin/policies", operator::policies)
            .named("listPolicies", "List every policy version")
            .answers::<PolicyList>(),
        route(POST, "/admin/policies/{version}/activate", operator::activate)
            .named("activatePolicy", "Serve an earlier version")
            .query(operator::ACTIVATE_FIELDS)
            .answers::<PolicyRecord>()
            .errors(&[409]),
        route(POST, "/admin/policies/{version}/pin", |state, version| {
            operator::pin(state, version, true)
        })
        .named("pinPolicy", "Keep a version's files")
        .answers::<PolicyRecord>()
        .errors(&[409]),
        route(POST, "/admin/policies/{version}/unpin", |state, version| {
            operator::pin(state, version, false)
        })
        .named("unpinPolicy", "Let a version's files be deleted")
        .answers::<PolicyRecord>()
        .errors(&[409]),
        route(GET, "/admin/keys", operator::keys)
            .named("listKeys", "List the API keys, their expiry and their last use")
            .answers::<List<ListedKey>>(),
        route(GET, "/admin/feedback/quarantine", operator::list)
            .named("listQuarantine", "List the quarantined keys")
            .answers::<List<QuarantineEntry>>(),
        route(POST, "/admin/feedback/quarantine/{key}", operator::flag)
            .named("quarantineKey", "Train on no feedback of a key")
            .takes("QuarantinePost", operator::FIELDS)
            .example(json!({"reason": "votes for everything"}))
            .answers::<QuarantineEntry>(),
        route(DELETE, "/admin/feedback/quarantine/{key}", operator::release)
            .named("releaseKey", "End a quarantine")
            .answers::<ReleasedKey>(),
        route(DELETE, "/admin/completions/{id}", stored::delete_any)
            .named("eraseCompletion", "Erase a recorded completion of any key")
            .answers::<DeletedCompletion>(),
        route(GET, "/admin/data", data::status)
            .named("getData", "Sizes and rows of the recorded data")
            .answers::<DataStatus>(),
        route(POST, "/admin/erase", data::erase)
            .named("eraseData", "Erase by completion, session, end user, key or date")
            .takes("ErasePost", data::ERASE_FIELDS)
            .example(json!({"before": "2026-01-31", "dry_run": true}))
            .answers::<ErasureReport>()
            .errors(&[404]),
        route(POST, "/admin/backup", data::backup)
            .named("backUpData", "Write a backup of the running daemon")
            .takes("BackupPost", data::BACKUP_FIELDS)
            .example(json!({"name": "before-upgrade"}))
            .answers::<Backup>()
            .errors(&[409]),
        route(GET, "/admin/audit", data::audit_list)
            .named("listActions", "List the actions of operators, newest first")
            .query(data::AUDIT_FIELDS)
            .answers::<AuditList>(),
        route(GET, "/livez", operator::live)
            .named("getLiveness", "Whether the process runs")
            .answers::<ProbeStatus>(),
        route(GET, "/readyz", operator::ready)
            .named("getReadiness", "Whether requests can be served and recorded")
            .answers::<ProbeStatus>()
            .errors(&[503]),
        route(GET, "/metrics", operator::metrics)
            .named("getMetrics", "Metrics in Prometheus' text format")
            .answers_text()
            .errors(&[500]),
        route(GET, "/openapi.json", document)
            .named("getDocument", "This document")
            .answers::<Value>()
            .errors(&[503]),
    ]
}

/// The console, and what only it reads.
fn console_routes() -> Vec<ApiRoute> {
    vec![
        route(GET, "/console", console::page)
            .named("getConsole", "The console, a page for operators")
            .answers_in(&["text/html"]),
        route(GET, "/console/{file}", console::asset)
            .named("getConsoleFile", "A file of the console")
            .answers_in(&["text/css", "text/javascript", "image/svg+xml"]),
        route(GET, "/admin/events", live::events)
            .named("streamOverview", "The state of the daemon each second, as server-sent events")
            .sends::<Overview>(),
        route(GET, "/admin/metrics", operator::metrics)
            .named("readMetrics", "As `/metrics`, with a key and for every `Host`")
            .answers_text(),
        route(GET, "/admin/canary", live::canary)
            .named("getCanary", "The evidence of the canary in progress")
            .answers::<CanaryReport>(),
        route(GET, "/admin/steps", ledger::steps)
            .named("listSteps", "Measurements of the trainer's steps, in order")
            .query(ledger::STEPS)
            .answers::<List<StepSummary>>(),
        route(GET, "/admin/answers", ledger::answers)
            .named("listAnswers", "Recorded prompts with their completions, newest first")
            .query(ledger::ANSWERS)
            .answers::<ListPage<AnswerSummary>>(),
        route(GET, "/admin/answers/{id}", ledger::answer)
            .named("getAnswer", "A recorded prompt with its completions, their tokens and rewards")
            .answers::<AnswerDetail>(),
        route(GET, "/admin/ratings", ledger::ratings)
            .named("listRatings", "Feedback of all keys, newest first")
            .query(ledger::RATINGS)
            .answers::<ListPage<RaterPost>>(),
        route(GET, "/admin/groups", ledger::groups)
            .named("listGroups", "Groups of completions, newest first")
            .query(ledger::GROUPS)
            .answers::<ListPage<GroupSummary>>(),
        route(GET, "/admin/compare", ledger::compare)
            .named("compareVersions", "Recorded completions of two versions for the same prompts")
            .query(ledger::COMPARE)
            .answers::<List<PromptPair>>(),
        route(GET, "/admin/rewards", live::rewards)
            .named("listRewards", "The parts of each route's reward")
            .answers::<List<RouteRewards>>(),
        route(POST, "/admin/rewards/test", live::test_reward)
            .named("testReward", "Score a text with a route's graders")
            .takes("RewardTest", live::TEST_FIELDS)
            .example(json!({"route": "default", "prompt": "What is 12 + 7?", "completion": "19"}))
            .answers::<RewardTestResult>()
            .errors(&[404]),
    ]
}

/// The OpenAPI document as JSON text.
#[derive(Clone)]
pub struct ApiDocument(pub Bytes);

async fn document(Extension(document): Extension<ApiDocument>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], document.0)
}

// The OpenAPI document of the routes.

const JSON: &str = "application/json";

pub fn describe(routes: &[ApiRoute]) -> Value {
    let settings = SchemaSettings::draft2020_12().for_serialize().with(|settings| {
        settings.definitions_path = "/components/schemas".into();
        settings.meta_schema = None;
    });
    let mut builder = Builder {
        generator: settings.into_generator(),
        schemas: Map::new(),
        errors: BTreeMap::new(),
    };
    let mut paths: BTreeMap<String, Map<String, Value>> = BTreeMap::new();
    for route in routes {
        let method = route.method.as_str().to_ascii_lowercase();
        let path = paths.entry(template(route.path)).or_default();
        path.insert(method, builder.operation(route));
    }
    let Builder { mut generator, mut schemas, errors } = builder;
    schemas.extend(generator.take_definitions(true));
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Hone",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Serves a language model and trains it with the rewards of its users.",
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": errors,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    })
}

/// A path in OpenAPI's syntax.
pub fn template(path: &str) -> String {
    path.replace("{*", "{")
}

/// Makes operations and collects their schemas.
struct Builder {
    /// The schemas of responses.
    generator: SchemaGenerator,
    /// The schemas of requests.
    schemas: Map<String, Value>,
    /// The responses that several routes share.
    errors: BTreeMap<String, Value>,
}

impl Builder {
    fn operation(&mut self, route: &ApiRoute) -> Value {
        let mut responses = Map::new();
        responses.insert("200".to_owned(), self.success(route));
        let (kind, body): (_, SchemaOf) = match route.tag() {
            "Messages" => (
                MessageError::schema_name(),
                SchemaGenerator::subschema_for::<MessageError<'static>>,
            ),
            _ => (ApiError::schema_name(), SchemaGenerator::subschema_for::<ApiError>),
        };
        for status in errors_of(route) {
            let name = format!("{kind}{status}");
            let reference = format!("#/components/responses/{name}");
            responses.insert(status.to_string(), json!({"$ref": reference}));
            let error = self.error(body, status);
            self.errors.insert(name, error);
        }
        let mut operation = json!({
            "operationId": route.id,
            "summary": route.summary,
            "tags": [route.tag()],
            "parameters": parameters(route),
            "security": security(route),
            "responses": responses,
        });
        if !route.bodies.is_empty() {
            operation["requestBody"] = self.body(route);
        }
        operation
    }

    fn body(&mut self, route: &ApiRoute) -> Value {
        let shapes = route.bodies.iter().map(|(name, shape)| {
            let schema = match shape {
                RequestShape::Fields(table) => object_schema(table),
                RequestShape::Json(schema) => schema(),
            };
            self.schemas.insert((*name).to_owned(), schema);
            json!({"$ref": format!("#/components/schemas/{name}")})
        });
        let mut content = json!({"schema": any_of(shapes.collect())});
        if let Some(example) = &route.example {
            content["example"] = example.clone();
        }
        json!({"required": true, "content": {JSON: content}})
    }

    fn success(&mut self, route: &ApiRoute) -> Value {
        let mut contents: BTreeMap<&str, Vec<Value>> = BTreeMap::new();
        for (kind, schema) in &route.answers {
            contents.entry(*kind).or_default().push(schema(&mut self.generator).to_value());
        }
        let contents: Map<String, Value> = contents
            .into_iter()
            .map(|(kind, schemas)| (kind.to_owned(), json!({"schema": any_of(schemas)})))
            .collect();
        let mut headers = json!({"x-request-id": {"schema": {"type": "string"}}});
        if route.has_version {
            headers["x-hone-policy-version"] = json!({"schema": {"type": "integer", "minimum": 0}});
        }
        json!({"description": "Success.", "headers": headers, "content": contents})
    }

    fn error(&mut self, body: SchemaOf, status: u16) -> Value {
        let schema = body(&mut self.generator);
        let mut headers = json!({"x-request-id": {"schema": {"type": "string"}}});
        if status == 401 {
            headers["WWW-Authenticate"] = json!({"schema": {"const": "Bearer"}});
        } else if matches!(status, 429 | 503) {
            headers["Retry-After"] =
                json!({"schema": {"type": "integer"}, "description": "Seconds."});
        }
        let content = json!({JSON: {"schema": schema}});
        json!({"description": cause(status), "headers": headers, "content": content})
    }
}

fn any_of(mut schemas: Vec<Value>) -> Value {
    if schemas.len() == 1 { schemas.remove(0) } else { json!({"anyOf": schemas}) }
}

fn parameters(route: &ApiRoute) -> Vec<Value> {
    let in_path = path_parameters(route.path).map(
        |name| json!({"name": name, "in": "path", "required": true, "schema": path_schema(name)}),
    );
    in_path.chain(fields_of(route.query).map(query_parameter)).collect()
}

fn query_parameter(field: &Field) -> Value {
    let schema = field.query_schema();
    let (name, required) = (field.name, field.is_required);
    match name.strip_suffix("[KEY]") {
        None => json!({"name": name, "in": "query", "required": required, "schema": schema}),
        Some(name) => json!({
            "name": name, "in": "query", "schema": schema, "style": "deepObject", "explode": true,
        }),
    }
}

fn path_parameters(path: &'static str) -> impl Iterator<Item = &'static str> {
    let parts = path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
    parts.map(|name| name.trim_start_matches('*'))
}

fn path_schema(name: &str) -> Value {
    match name {
        "version" => json!({"type": "integer", "minimum": 0, "maximum": u64::MAX}),
        "key" => {
            json!({"type": "string", "pattern": "^([0-9a-f]{12}|([0-9a-f]{12})?\\.[0-9a-f]{12})$"})
        }
        _ => json!({"type": "string", "minLength": 1}),
    }
}

/// A key with one of the scopes, in one of two headers, or no key if the server requires none.
fn security(route: &ApiRoute) -> Vec<Value> {
    let Access::Scopes(scopes) = access(route.path, &route.method) else { return Vec::new() };
    let with =
        |scheme: &'static str| scopes.iter().map(move |scope| json!({scheme: [scope.as_str()]}));
    with("bearer").chain(with("apiKey")).chain([json!({})]).collect()
}

/// The statuses of a route's errors.
fn errors_of(route: &ApiRoute) -> BTreeSet<u16> {
    let mut errors: BTreeSet<u16> = route.errors.iter().copied().collect();
    if let Access::Scopes(_) = access(route.path, &route.method) {
        errors.extend([401, 403, 429, 500, 503]);
    }
    if !route.bodies.is_empty() {
        errors.extend([400, 408, 413, 415]);
    }
    if !route.query.is_empty() {
        errors.insert(400);
    }
    if path_parameters(route.path).next().is_some() {
        errors.extend([400, 404]);
    }
    errors
}

fn cause(status: u16) -> &'static str {
    match status {
        400 => "The request is invalid.",
        401 => "There is no key, or it is unknown or expired.",
        403 => "The key lacks the scope of the route, or the server answers only its own machine.",
        404 => "There is no such thing.",
        408 => "The body did not arrive in time.",
        409 => "The trainer or the version is not in a state that permits the request.",
        413 => "The body is too large.",
        415 => "The content type is not `application/json`.",
        422 => {
            "A number is outside of its part's range, the `idempotency_key` was used for something else, or a \
             correction is too long."
        }
        429 => "A limit is reached; see `Retry-After`.",
        503 => "The server starts or shuts down, or accepts no writes; see `Retry-After`.",
        _ => "An internal failure.",
    }
}
