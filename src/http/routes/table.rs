//! Every route.

use axum::Extension;
use axum::extract::DefaultBodyLimit;
use axum::middleware::from_fn_with_state;
use serde_json::{Value, json};

use hone_core::types::PolicyRecord;
use hone_reward::grader::GradeOutcome;
use hone_train::TrainStatus;

use super::document;
use super::route::ApiRoute;
use crate::config::ServerConfig;
use crate::http::body::{List, check_length};
use crate::http::chat::stored::{DeletedCompletion, ListPage, StoredCompletion, StoredMessage};
use crate::http::chat::wire::{ChatChunk, ChatCompletion};
use crate::http::chat::{self, stored};
use crate::http::feedback::{self, FeedbackRecord, FeedbackResponse, ListedResponse};
use crate::http::generate::models::{self, ModelObject};
use crate::http::generate::text::{self, wire::TextCompletion};
use crate::http::generate::tokenize::{self, DetokenizedText, TokenizedText};
use crate::http::messages::wire::{MessageEvent, MessageObject, TokenCount};
use crate::http::messages::{self, MessageError};
use crate::http::operator::ProbeStatus;
use crate::http::operator::admin::{self, PolicyList};
use crate::http::operator::admin::{QuarantineEntry, ReleasedKey};
use crate::http::responses;
use crate::http::responses::events::ResponseEvent;
use crate::http::responses::stored::ListedItem;
use crate::http::responses::wire::{DeletedResponse, ResponseObject};
use crate::http::{GraderQueue, ValidGrader};

/// Every route of a server with this configuration.
pub(super) fn routes(config: &ServerConfig) -> Vec<ApiRoute> {
    let groups = [
        ("Chat completions", chat_completions()),
        ("Text completions", text_completions()),
        ("Responses", responses()),
        ("Messages", messages()),
        ("Tokens", tokens()),
        ("Models", models()),
        ("Feedback", feedback()),
        ("Graders", graders(config)),
        ("Trainer", trainer()),
        ("Policy versions", policies()),
        ("Quarantine", quarantine()),
        ("Erasure", erasure()),
        ("Probes and metrics", probes()),
        ("OpenAPI document", openapi()),
    ];
    let tagged = groups
        .into_iter()
        .flat_map(|(tag, routes)| routes.into_iter().map(move |route| ApiRoute { tag, ..route }));
    tagged.collect()
}

fn chat_completions() -> Vec<ApiRoute> {
    vec![
        ApiRoute::post("/v1/chat/completions", chat::create)
            .named("createChatCompletion", "Sample completions of a conversation")
            .takes("ChatRequest", chat::fields::FIELDS)
            .example(json!({
                "model": "default",
                "messages": [{"role": "user", "content": "What is 12 + 7?"}],
                "max_tokens": 16,
            }))
            .answers::<ChatCompletion>()
            .streams::<ChatChunk<'static>>()
            .with_version()
            .errors(&[404]),
        ApiRoute::get("/v1/chat/completions", stored::list)
            .named("listChatCompletions", "List the key's recorded completions")
            .query(stored::query::COMPLETIONS)
            .answers::<ListPage<StoredCompletion>>(),
        ApiRoute::get("/v1/chat/completions/{id}", stored::retrieve)
            .named("getChatCompletion", "Get a recorded completion")
            .answers::<StoredCompletion>(),
        ApiRoute::post("/v1/chat/completions/{id}", stored::update)
            .named("updateChatCompletion", "Replace the metadata of a recorded completion")
            .takes("ChatCompletionUpdate", stored::UPDATE_FIELDS)
            .example(json!({"metadata": {"answer": "19"}}))
            .answers::<StoredCompletion>(),
        ApiRoute::delete("/v1/chat/completions/{id}", stored::delete)
            .named("deleteChatCompletion", "Erase a recorded completion")
            .answers::<DeletedCompletion>(),
        ApiRoute::get("/v1/chat/completions/{id}/messages", stored::messages)
            .named("listChatCompletionMessages", "List the messages of a recorded request")
            .query(stored::query::MESSAGES)
            .answers::<ListPage<StoredMessage>>(),
    ]
}

fn text_completions() -> Vec<ApiRoute> {
    vec![
        ApiRoute::post("/v1/completions", text::create)
            .named("createCompletion", "Continue texts or token ids")
            .takes("TextRequest", text::request::FIELDS)
            .example(json!({"model": "default", "prompt": "12 + 7 =", "max_tokens": 8}))
            .answers::<TextCompletion<'static>>()
            .streams::<TextCompletion<'static>>()
            .with_version()
            .errors(&[404]),
    ]
}

fn responses() -> Vec<ApiRoute> {
    vec![
        ApiRoute::post("/v1/responses", responses::create)
            .named("createResponse", "Sample a response")
            .takes("ResponseRequest", responses::fields::FIELDS)
            .example(json!({
                "model": "default", "input": "What is 12 + 7?", "max_output_tokens": 16,
            }))
            .answers::<ResponseObject>()
            .streams::<ResponseEvent>()
            .with_version()
            .errors(&[404]),
        ApiRoute::get("/v1/responses/{id}", responses::stored::retrieve)
            .named("getResponse", "Get a recorded response")
            .query(responses::stored::RETRIEVE)
            .answers::<ResponseObject>(),
        ApiRoute::delete("/v1/responses/{id}", responses::stored::delete)
            .named("deleteResponse", "Erase a recorded response")
            .answers::<DeletedResponse>(),
        ApiRoute::get("/v1/responses/{id}/input_items", responses::stored::input_items)
            .named("listInputItems", "List the items of a recorded response's input")
            .query(responses::stored::ITEMS)
            .answers::<ListPage<ListedItem>>(),
    ]
}

fn messages() -> Vec<ApiRoute> {
    let example = |more: Value| {
        let messages = json!([{"role": "user", "content": "What is 12 + 7?"}]);
        let mut example = json!({"model": "default", "messages": messages});
        if let (Some(example), Value::Object(more)) = (example.as_object_mut(), more) {
            example.extend(more);
        }
        example
    };
    vec![
        ApiRoute::post("/v1/messages", messages::create)
            .named("createMessage", "Sample the next message, as in Anthropic's API")
            .takes("MessageRequest", messages::fields::FIELDS)
            .example(example(json!({"max_tokens": 16})))
            .answers::<MessageObject>()
            .streams::<MessageEvent>()
            .with_version()
            .fails_as::<MessageError<'static>>()
            .errors(&[404]),
        ApiRoute::post("/v1/messages/count_tokens", messages::count_tokens)
            .named("countMessageTokens", "Count the tokens of a prompt")
            .takes("MessageCountRequest", messages::fields::COUNT_FIELDS)
            .example(example(json!({})))
            .answers::<TokenCount>()
            .fails_as::<MessageError<'static>>()
            .errors(&[404]),
    ]
}

fn tokens() -> Vec<ApiRoute> {
    vec![
        ApiRoute::post("/tokenize", tokenize::tokenize)
            .named("tokenize", "Convert a text or a conversation to token ids")
            .takes("TokenizeRequest", tokenize::FIELDS)
            .example(json!({"prompt": "12 + 7 ="}))
            .answers::<TokenizedText>()
            .errors(&[404]),
        ApiRoute::post("/detokenize", tokenize::detokenize)
            .named("detokenize", "Convert token ids to text")
            .takes("DetokenizeRequest", tokenize::DETOKENIZE_FIELDS)
            .example(json!({"tokens": [1, 2, 3]}))
            .answers::<DetokenizedText>()
            .errors(&[404]),
    ]
}

fn models() -> Vec<ApiRoute> {
    vec![
        ApiRoute::get("/v1/models", models::list)
            .named("listModels", "List the names of the served model")
            .answers::<List<ModelObject>>(),
        ApiRoute::get("/v1/models/{*model}", models::retrieve)
            .named("getModel", "Get one name; it may contain slashes")
            .answers::<ModelObject>(),
    ]
}

fn feedback() -> Vec<ApiRoute> {
    vec![
        ApiRoute::post("/v1/feedback", feedback::create)
            .named("createFeedback", "Reward a completion or a conversation")
            .takes("FeedbackPost", feedback::posted::FIELDS)
            .takes("PreferencePost", feedback::pair::FIELDS)
            .takes_json("FeedbackBatch", feedback::batch_schema)
            .answers::<FeedbackResponse>()
            .answers::<List<ListedResponse>>()
            .errors(&[404, 422]),
        ApiRoute::get("/v1/feedback", feedback::list)
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
        ApiRoute::post("/v1/fine_tuning/alpha/graders/run", super::super::run)
            .named("runGrader", "Run an OpenAI grader on a text")
            .takes("GraderRun", super::super::RUN_FIELDS)
            .example(run)
            .answers::<GradeOutcome>(),
        ApiRoute::post("/v1/fine_tuning/alpha/graders/validate", super::super::validate)
            .named("validateGrader", "Check an OpenAI grader")
            .takes("GraderCheck", super::super::VALIDATE_FIELDS)
            .example(json!({"grader": grader}))
            .answers::<ValidGrader>(),
    ];
    let limited = routes.into_iter().map(|route| ApiRoute {
        handler: route.handler.layer((Extension(queue.clone()), limit.clone())),
        ..route
    });
    limited.collect()
}

fn trainer() -> Vec<ApiRoute> {
    vec![
        ApiRoute::get("/admin/train", admin::status)
            .named("getTrainer", "Get the trainer's status")
            .answers::<TrainStatus>(),
        ApiRoute::post("/admin/train/pause", admin::pause)
            .named("pauseTrainer", "Take no further step")
            .answers::<TrainStatus>()
            .errors(&[409]),
        ApiRoute::post("/admin/train/resume", admin::resume)
            .named("resumeTrainer", "End a pause")
            .answers::<TrainStatus>()
            .errors(&[409]),
        ApiRoute::post("/admin/train/step", admin::step)
            .named("stepTrainer", "Take one step now")
            .answers::<TrainStatus>()
            .errors(&[409]),
    ]
}

fn policies() -> Vec<ApiRoute> {
    vec![
        ApiRoute::get("/admin/policies", admin::policies)
            .named("listPolicies", "List every policy version")
            .answers::<PolicyList>(),
        ApiRoute::post("/admin/policies/{version}/activate", admin::activate)
            .named("activatePolicy", "Serve an earlier version")
            .answers::<PolicyRecord>()
            .errors(&[409]),
        ApiRoute::post("/admin/policies/{version}/pin", admin::pin)
            .named("pinPolicy", "Keep a version's files")
            .answers::<PolicyRecord>()
            .errors(&[409]),
        ApiRoute::post("/admin/policies/{version}/unpin", admin::unpin)
            .named("unpinPolicy", "Let a version's files be deleted")
            .answers::<PolicyRecord>()
            .errors(&[409]),
    ]
}

fn quarantine() -> Vec<ApiRoute> {
    vec![
        ApiRoute::get("/admin/feedback/quarantine", super::super::operator::admin::list)
            .named("listQuarantine", "List the quarantined keys")
            .answers::<List<QuarantineEntry>>(),
        ApiRoute::post("/admin/feedback/quarantine/{key}", super::super::operator::admin::flag)
            .named("quarantineKey", "Train on no feedback of a key")
            .takes("QuarantinePost", super::super::operator::admin::FIELDS)
            .example(json!({"reason": "votes for everything"}))
            .answers::<QuarantineEntry>(),
        ApiRoute::delete(
            "/admin/feedback/quarantine/{key}",
            super::super::operator::admin::release,
        )
        .named("releaseKey", "End a quarantine")
        .answers::<ReleasedKey>(),
    ]
}

fn erasure() -> Vec<ApiRoute> {
    let route = ApiRoute::delete("/admin/completions/{id}", stored::delete_any)
        .named("eraseCompletion", "Erase a recorded completion of any key")
        .answers::<DeletedCompletion>();
    vec![route]
}

fn probes() -> Vec<ApiRoute> {
    vec![
        ApiRoute::get("/livez", super::super::operator::live)
            .named("getLiveness", "Whether the process runs")
            .answers::<ProbeStatus>(),
        ApiRoute::get("/readyz", super::super::operator::ready)
            .named("getReadiness", "Whether requests can be served and recorded")
            .answers::<ProbeStatus>()
            .errors(&[503]),
        ApiRoute::get("/metrics", super::super::operator::metrics)
            .named("getMetrics", "Metrics in Prometheus' text format")
            .answers_text()
            .errors(&[500]),
    ]
}

fn openapi() -> Vec<ApiRoute> {
    let route = ApiRoute::get("/openapi.json", document::serve)
        .named("getDocument", "This document")
        .answers::<Value>()
        .errors(&[503]);
    vec![route]
}
