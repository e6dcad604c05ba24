//! `POST /v1/fine_tuning/alpha/graders/{run,validate}`.

use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use axum::Json;
use axum::extract::State;
use axum::routing::post;
use insta::assert_snapshot;
use serde_json::{Value, json};

use hone::config::{GraderLimits, KeyScope};
use hone_core::metrics::Metrics;
use hone_reward::grader::{Backends, ModelClient, ModelFailure, ModelReply, ModelRequest};
use hone_reward::routes::{RouteConfig, RouteList};
use hone_reward::sandbox::{Setup as SandboxSetup, testing};
use hone_reward::tools::GradersConfig;
use hone_reward::{GraderEndpoint, LazySandbox, Routes, Tools};

use crate::server::{Server, eventually, key, ok, within_a_minute};

async fn post_json(server: &Server, path: &str, body: &Value) -> (u16, Value) {
    let url = format!("http://{}/v1/fine_tuning/alpha/graders/{path}", server.addr);
    let response = server.client.post(url).json(body).send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

async fn run(server: &Server, grader: Value, item: Value, sample: &str) -> Value {
    let body = json!({"grader": grader, "item": item, "model_sample": sample});
    ok(post_json(server, "run", &body).await)
}

fn check() -> Value {
    json!({
        "type": "string_check", "name": "same", "operation": "eq",
        "input": "{{ sample.output_text }}", "reference": "{{ item.answer }}",
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_grader_runs_and_responds_in_openais_shape() {
    let server = Server::new().await;
    let graded = run(&server, check(), json!({"answer": "7"}), "7").await;
    assert_eq!(graded["reward"], 1.0);
    let metadata = &graded["metadata"];
    assert_eq!((&metadata["name"], &metadata["type"]), (&json!("same"), &json!("string_check")));
    assert!(metadata["execution_time"].is_number() && metadata["errors"].is_object(), "{graded}");
    assert!(graded["model_grader_token_usage_per_model"].is_object(), "{graded}");

    let multi = json!({
        "type": "multi", "name": "both", "calculate_output": "(same + 1) / 2",
        "graders": {"same": check()},
    });
    let graded = run(&server, multi, json!({"answer": "7"}), "8").await;
    assert_eq!((&graded["reward"], &graded["sub_rewards"]["same"]), (&json!(0.5), &json!(0.0)));

    let (status, answer) = post_json(&server, "validate", &json!({"grader": check()})).await;
    assert_eq!((status, answer), (200, json!({"grader": check()})));
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_name_the_wrong_field_of_a_grader() {
    let server = Server::new().await;
    let mut wrong = check();
    wrong["operation"] = json!("equals");
    let mut lines = Vec::new();
    for (path, body) in [
        ("run", json!({"grader": wrong, "model_sample": "x"})),
        ("validate", json!({})),
        ("run", json!({"grader": check()})),
        ("run", json!({"grader": check(), "model_sample": 5})),
        ("run", json!({"grader": check(), "model_sample": "x", "items": {}})),
        (
            "validate",
            json!({"grader": {"type": "multi", "name": "m", "graders": {"same": check()}, "calculate_output": "same +"}}),
        ),
    ] {
        let (status, answer) = post_json(&server, path, &body).await;
        assert_eq!(status, 400, "{answer}");
        let error = &answer["error"];
        lines.push(format!("{} | {}", error["message"].as_str().unwrap(), error["param"]));
    }
    assert_snapshot!(lines.join("\n"), @r#"
    grader.operation is "equals": it must be one of eq, ne, like, ilike, neq | "grader.operation"
    grader is missing: it must be a grader | "grader"
    model_sample is missing: it must be a completion's text | "model_sample"
    model_sample is 5: it must be a string | "model_sample"
    items is not a field: the fields are grader, item, model_sample, reference_answer | "items"
    grader.calculate_output is "same +": expected a number, a grader's name, a function or "(" at character 7, found the end | "grader.calculate_output"
    "#);
}

/// The requests that the model grader's endpoint received.
#[derive(Clone, Default)]
struct Requests(Arc<Mutex<Vec<Value>>>);

/// An endpoint that always scores 0.75.
async fn judge(State(requests): State<Requests>, Json(body): Json<Value>) -> Json<Value> {
    requests.0.lock().unwrap().push(body);
    let content = json!({"steps": [], "result": 0.75}).to_string();
    Json(json!({
        "model": "judge-2026", "choices": [{"message": {"role": "assistant", "content": content}}],
        "usage": {"prompt_tokens": 11, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
    }))
}

#[tokio::test(flavor = "multi_thread")]
async fn model_graders_use_the_configured_endpoint() {
    let requests = Requests::default();
    let app =
        axum::Router::new().route("/v1/chat/completions", post(judge)).with_state(requests.clone());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base_url = format!("http://{}/v1", listener.local_addr().unwrap());
    let service = tokio::spawn(async move { axum::serve(listener, app).await });
    let config = GradersConfig { base_url, ..GradersConfig::default() };
    let endpoint = GraderEndpoint::new(&config, &Metrics::new().unwrap()).unwrap();
    let tools = Tools { endpoint, ..Tools::default() };
    let server = Server::with(|setup| {
        setup.graders = tools.backends();
        setup.server.graders.models = vec!["judge".to_owned()];
    })
    .await;
    let grader = json!({
        "type": "score_model", "name": "nice", "model": "judge", "range": [0, 1],
        "input": [{"role": "user", "content": "Rate: {{ sample.output_text }}"}],
        "sampling_params": {"temperature": 0.5, "seed": 3},
    });
    let graded = run(&server, grader.clone(), json!({}), "hello").await;
    assert_eq!(graded["reward"], 0.75, "{graded}");
    let usage = &graded["model_grader_token_usage_per_model"]["judge-2026"];
    assert_eq!(
        (&usage["total_tokens"], &usage["cached_tokens"]),
        (&json!(14), &json!(4)),
        "{graded}"
    );
    let body = requests.0.lock().unwrap()[0].clone();
    assert_eq!(body["model"], "judge");
    assert_eq!(body["messages"], json!([{"role": "user", "content": "Rate: hello"}]));
    assert_eq!((&body["temperature"], &body["seed"]), (&json!(0.5), &json!(3)));
    assert_eq!(body["response_format"]["type"], "json_schema");
    let limit = body.get("max_tokens").or(body.get("max_completion_tokens"));
    assert_eq!(limit, Some(&json!(4096)), "the operator's limit: {body}");
    assert!(body.get("top_p").is_none(), "an unset parameter is left to the endpoint: {body}");

    service.abort();
    let _ended = service.await;
    let graded = run(&server, grader, json!({}), "hello").await;
    assert_eq!(graded["reward"], Value::Null, "missing, not zero: {graded}");
    assert_eq!(graded["metadata"]["errors"]["model_grader_server_error"], true, "{graded}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_without_an_endpoint_is_an_error_of_the_grade() {
    let server = Server::with(|setup| {
        setup.graders = Tools::default().backends();
        setup.server.graders.models = vec!["*".to_owned()];
    })
    .await;
    for (model, message) in [("gpt-4o", "graders.base_url"), ("self", "none is served")] {
        let grader = json!({
            "type": "label_model", "name": "l", "model": model, "labels": ["a", "b"],
            "passing_labels": ["a"], "input": [{"role": "user", "content": "a or b?"}],
        });
        let graded = run(&server, grader, json!({}), "x").await;
        assert_eq!(graded["reward"], Value::Null, "{graded}");
        let errors = graded["metadata"]["errors"].to_string();
        assert!(errors.contains(message), "{errors}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_python_grader_starts_the_sandbox() {
    let setup =
        SandboxSetup { launcher: env!("CARGO_BIN_EXE_hone").into(), ..SandboxSetup::default() };
    if testing::sandbox(&setup).await.is_none() {
        return;
    }
    let tools = Tools { python: Some(Arc::new(LazySandbox::new(setup))), ..Tools::default() };
    let server = Server::with(|setup| {
        setup.graders = tools.backends();
        setup.server.graders.python = true;
    })
    .await;
    let source = "def grade(sample, item):\n    return len(sample['output_text']) / item['most']\n";
    let grader = json!({"type": "python", "name": "length", "source": source});
    let graded = run(&server, grader, json!({"most": 8}), "abcd").await;
    assert_eq!(graded["reward"], 0.5, "{graded}");
    let endless = "def grade(sample, item):\n    while True: pass\n";
    let grader = json!({"type": "python", "name": "endless", "source": endless});
    let graded = run(&server, grader, json!({}), "abcd").await;
    assert_eq!(graded["reward"], Value::Null, "{graded}");
    assert_eq!(graded["metadata"]["errors"]["python_grader_runtime_error"], true, "{graded}");
}

/// A model that never answers, and what it was asked.
#[derive(Default)]
struct StuckModel(Mutex<Vec<String>>);

#[async_trait]
impl ModelClient for StuckModel {
    async fn complete(&self, request: &ModelRequest) -> Result<ModelReply, ModelFailure> {
        self.0.lock().unwrap().push(request.model.clone());
        std::future::pending().await
    }
}

/// A grader by a model; it grades with a text comparison too.
fn judged(model: &str) -> Value {
    json!({
        "type": "multi", "name": "both", "calculate_output": "same + judged",
        "graders": {
            "same": check(),
            "judged": {
                "type": "score_model", "name": "judged", "model": model, "range": [0, 1],
                "input": [{"role": "user", "content": "Rate: {{ sample.output_text }}"}],
            },
        },
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn graders_are_limited() {
    let model = Arc::new(StuckModel::default());
    let server = Server::with(|s| {
        s.graders = Backends { model: Some(model.clone()), code: None };
        let models = vec!["judge".to_owned(), "self".to_owned()];
        let limits = GraderLimits { models, concurrency: 1, queue: 1, ..GraderLimits::default() };
        s.server.graders = GraderLimits { max_bytes: 4096, ..limits };
    })
    .await;
    for path in ["run", "validate"] {
        let body = json!({"grader": judged("gpt-4o")});
        let (status, answer) = post_json(&server, path, &body).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!("grader")), "{answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        let expected = "grader asks the model \"gpt-4o\": it must be \"judge\" or \"self\" \
                        (server.graders.models)";
        assert_eq!(message, expected);
    }
    let body =
        json!({"grader": check(), "item": {"answer": "7"}, "model_sample": "7".repeat(4096)});
    assert_eq!(post_json(&server, "run", &body).await.0, 413);
    // One runs, one waits, and a third is refused.
    let body = json!({
        "grader": judged("judge"), "item": {"answer": "7"}, "model_sample": "7",
    });
    let url = server.url("/v1/fine_tuning/alpha/graders/run");
    let send = || tokio::spawn(server.client.post(&url).json(&body).send());
    let first = send();
    eventually("it asks", || model.0.lock().unwrap().len() == 1).await;
    let held = [send(), send(), send()];
    let limited = "hone_http_limited_requests_total{reason=\"graders\"}";
    let refused = || server.metrics.http_limited.with_label_values(&["graders"]).get() == 2;
    eventually("two are refused", refused).await;
    assert_eq!(server.metric(limited).await, Some(2.0));
    let (status, answer) = post_json(&server, "validate", &json!({"grader": check()})).await;
    assert_eq!((status, &answer["error"]["code"]), (429, &json!("rate_limit_exceeded")));
    // The end of the first lets the one that waits run.
    first.abort();
    eventually("the next one asks", || model.0.lock().unwrap().len() == 2).await;
    held.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test(flavor = "multi_thread")]
async fn graders_that_cost_something_need_a_permission() {
    let grader = json!({
        "type": "score_model", "name": "s", "model": "judge", "range": [0, 1],
        "input": [{"role": "user", "content": "Rate: {{ sample.output_text }}"}],
    });
    let route = |grader: &Value| {
        let text = grader.to_string();
        let part = format!("[[reward]]\nname = 'judged'\nkind = 'grader'\ngrader = '{text}'\n");
        toml::from_str::<RouteConfig>(&format!("name = 'default'\n{part}")).unwrap()
    };
    let model = Arc::new(StuckModel::default());
    // The default: no Python, and the models that routes name.
    let by_default = Server::with(|s| {
        s.graders = Backends { model: Some(model.clone()), code: None };
        s.server.graders.max_tokens = 100;
    })
    .await;
    let mut named = grader.clone();
    named["model"] = json!("gpt-expensive-99");
    let source = "def grade(sample, item):\n    return 1\n";
    let python = json!({"type": "python", "name": "p", "source": source});
    let hidden = json!({
        "type": "multi", "name": "m", "calculate_output": "p", "graders": {"p": python.clone()},
    });
    let mut long = grader.clone();
    long["sampling_params"] = json!({"max_completions_tokens": 101});
    for (refused, reason) in [
        (&named, "(server.graders.models)"),
        (&grader, "must be listed (server.graders.models)"),
        (&python, "server.graders.python"),
        (&hidden, "server.graders.python"),
    ] {
        for path in ["run", "validate"] {
            let body = match path {
                "run" => json!({"grader": refused, "model_sample": "x"}),
                _ => json!({"grader": refused}),
            };
            let (status, answer) = post_json(&by_default, path, &body).await;
            let message = answer["error"]["message"].as_str().unwrap();
            assert!(status == 400 && message.contains(reason), "{answer}");
        }
    }
    assert!(model.0.lock().unwrap().is_empty(), "no model was asked");
    let listed = Server::with(|s| {
        s.graders = Backends { model: Some(model.clone()), code: None };
        s.server.graders.max_tokens = 100;
        s.server.graders.models = vec!["judge".to_owned()];
    })
    .await;
    let (status, answer) = post_json(&listed, "validate", &json!({"grader": long})).await;
    assert!(status == 400 && answer.to_string().contains("at most 100 are allowed"), "{answer}");
    ok(post_json(&listed, "validate", &json!({"grader": grader})).await);
    // A route that asks a model permits it. Building the route needs an endpoint.
    let config =
        GradersConfig { base_url: "http://127.0.0.1:9/v1".to_owned(), ..GradersConfig::default() };
    let endpoint = GraderEndpoint::new(&config, &Metrics::new().unwrap()).unwrap();
    let tools = Tools { endpoint, ..Tools::default() };
    let routes = Routes::with(&RouteList(vec![route(&grader)]), &tools).unwrap();
    assert_eq!(routes.models().into_iter().collect::<Vec<_>>(), ["judge"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_key_leaves_places_to_others() {
    let model = Arc::new(StuckModel::default());
    let server = Server::with(|s| {
        s.graders = Backends { model: Some(model.clone()), code: None };
        s.server.graders.models = vec!["judge".to_owned()];
        s.server.keys = vec![key("a", &[KeyScope::Graders]), key("b", &[KeyScope::Graders])];
    })
    .await;
    let url = server.url("/v1/fine_tuning/alpha/graders/run");
    let body = json!({"grader": judged("judge"), "item": {"answer": "7"}, "model_sample": "7"});
    let send = || tokio::spawn(server.client.post(&url).bearer_auth("a").json(&body).send());
    // As many as the queue has places for all.
    let held: Vec<_> = (0..36).map(|_| send()).collect();
    let refused = || server.metrics.http_limited.with_label_values(&["graders"]).get() == 18;
    eventually("half of them are refused", refused).await;
    eventually("all but one of the running places are taken", || {
        model.0.lock().unwrap().len() == 3
    })
    .await;
    // The other key waits for nothing.
    let body = json!({"grader": check(), "item": {"answer": "7"}, "model_sample": "7"});
    for _ in 0..10 {
        let answer = server.client.post(&url).bearer_auth("b").json(&body).send().await.unwrap();
        assert_eq!(answer.status(), 200);
    }
    held.iter().for_each(tokio::task::JoinHandle::abort);
    let free = async {
        while server.client.post(&url).bearer_auth("a").json(&body).send().await.unwrap().status()
            != 200
        {
            tokio::time::sleep(std::time::Duration::from_millis(25)).await;
        }
    };
    within_a_minute("places become free again", free).await;
}
