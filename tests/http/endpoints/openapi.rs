//! The OpenAPI document, and responses as it describes them.

use serde_json::{Value, json};

use crate::server::{Server, ask, read};
use crate::streaming::chunks;

const GRADERS: &str = "/v1/fine_tuning/alpha/graders";

/// A document, and the server that it describes.
struct Described {
    server: Server,
    document: Value,
}

impl Described {
    async fn new() -> Self {
        let server = Server::new().await;
        let (status, document) = server.get("/openapi.json").await;
        assert_eq!((status, &document["openapi"]), (200, &json!("3.1.0")));
        Self { server, document }
    }

    fn operation(&self, method: &str, template: &str) -> &Value {
        let operation = &self.document["paths"][template][method];
        assert!(operation.is_object(), "{method} {template}");
        operation
    }

    /// Asserts that a value follows a schema of the document.
    fn check(&self, schema: &Value, value: &Value) {
        let whole = json!({"allOf": [schema], "components": self.document["components"]});
        let validator = jsonschema::validator_for(&whole).unwrap();
        let errors: Vec<_> = validator.iter_errors(value).map(|e| e.to_string()).collect();
        assert!(errors.is_empty(), "{value} does not follow {schema}: {errors:?}");
    }

    /// Sends a request, and asserts that the document has its response. Returns the response.
    async fn send(&self, method: &str, template: &str, path: &str, body: Option<Value>) -> Value {
        let verb = method.to_ascii_uppercase().parse().unwrap();
        let mut request = self.server.client.request(verb, self.server.url(path));
        if let Some(body) = &body {
            request = request.json(body);
        }
        let (status, answer) = read(request.send().await.unwrap()).await;
        let mut response = &self.operation(method, template)["responses"][status.to_string()];
        if let Some(reference) = response["$ref"].as_str() {
            response = self.document.pointer(reference.trim_start_matches('#')).unwrap();
        }
        assert!(response.is_object(), "{method} {path}: {status} {answer}");
        self.check(&response["content"]["application/json"]["schema"], &answer);
        answer
    }

    async fn get(&self, template: &str, path: &str) -> Value {
        self.send("get", template, path, None).await
    }

    async fn post(&self, path: &str, body: Value) -> Value {
        self.send("post", path, path, Some(body)).await
    }
}

/// A request for Anthropic's message.
fn message(more: Value) -> Value {
    let mut body = ask(more);
    body["max_tokens"] = json!(3);
    body
}

#[tokio::test(flavor = "multi_thread")]
async fn completions_are_as_described() {
    let described = Described::new().await;
    let chat = "/v1/chat/completions";
    let more = json!({"n": 2, "logprobs": true, "top_logprobs": 2, "return_token_ids": true});
    let completion = described.post(chat, ask(more)).await;
    let id = completion["id"].as_str().unwrap();
    let (one, messages) = (format!("{chat}/{{id}}"), format!("{chat}/{{id}}/messages"));
    let path = format!("{chat}/{id}");
    described.get(chat, &format!("{chat}?limit=1&order=desc")).await;
    described.get(chat, &format!("{chat}?limit=0")).await;
    described.get(&one, &path).await;
    described.get(&one, &format!("{chat}/nothing")).await;
    described.get(&messages, &format!("{path}/messages")).await;
    described.send("post", &one, &path, Some(json!({"metadata": {"a": "b"}}))).await;
    described.send("delete", &one, &path, None).await;
    described.post(chat, ask(json!({"temperature": 3}))).await;
    described.post(chat, ask(json!({"model": "other"}))).await;
    let text = json!({"model": "default", "prompt": ["a", "b"], "logprobs": 2, "max_tokens": 3});
    described.post("/v1/completions", text).await;
    let input =
        json!({"model": "default", "input": "a", "top_logprobs": 2, "max_output_tokens": 3});
    let response = described.post("/v1/responses", input).await;
    let path = format!("/v1/responses/{}", response["id"].as_str().unwrap());
    let (one, items) = ("/v1/responses/{id}", "/v1/responses/{id}/input_items");
    described.get(one, &path).await;
    described.get(items, &format!("{path}/input_items")).await;
    described.send("delete", one, &path, None).await;
    described.get(one, &path).await;
    described.post("/v1/responses", json!({"model": "default"})).await;
    described.post("/v1/messages", message(json!({}))).await;
    described.post("/v1/messages", message(json!({"temperature": 2}))).await;
    described.post("/v1/messages", message(json!({"model": "other"}))).await;
    let count = json!({"model": "default", "messages": [{"role": "user", "content": "a"}]});
    described.post("/v1/messages/count_tokens", count).await;
    described.post("/tokenize", json!({"prompt": "a", "return_token_strs": true})).await;
    described.post("/detokenize", json!({"tokens": [1, 2]})).await;
    described.get("/v1/models", "/v1/models").await;
    described.get("/v1/models/{model}", "/v1/models/default").await;
    described.get("/v1/models/{model}", "/v1/models/%FF").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_are_as_described() {
    let described = Described::new().await;
    let options = json!({"include_usage": true});
    let more = json!({"stream": true, "stream_options": options, "logprobs": true});
    let text = json!({
        "model": "default", "prompt": "a", "max_tokens": 3, "stream": true, "stream_options": options,
    });
    let input = json!({"model": "default", "input": "a", "max_output_tokens": 3, "stream": true});
    for (path, body) in [
        ("/v1/chat/completions", ask(more)),
        ("/v1/completions", text),
        ("/v1/responses", input),
        ("/v1/messages", message(json!({"stream": true}))),
    ] {
        let text = described.server.send(path, &body).await.text().await.unwrap();
        let responses = &described.operation("post", path)["responses"];
        let schema = &responses["200"]["content"]["text/event-stream"]["schema"]["contentSchema"];
        assert!(schema.is_object(), "{responses}");
        let events = chunks(&text);
        assert!(events.len() > 3, "{events:?}");
        events.iter().for_each(|event| described.check(schema, event));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn feedback_is_as_described() {
    let described = Described::new().await;
    let body = ask(json!({"metadata": {"session_id": "s"}}));
    let (_, answer) = described.server.chat(&body).await;
    let id = answer["id"].as_str().unwrap();
    let feedback = "/v1/feedback";
    let rating = json!({"completion_id": id, "name": "thumbs", "value": 1});
    described.post(feedback, rating.clone()).await;
    described.post(feedback, json!({"session_id": "s", "name": "thumbs", "value": 1})).await;
    described.post(feedback, json!({"completion_id": id, "correction": "five"})).await;
    described.post(feedback, json!([rating, {"completion_id": "x"}, 5])).await;
    described.post(feedback, json!({"completion_id": "chatcmpl-0"})).await;
    described.get(feedback, &format!("{feedback}?completion_id={id}")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn graders_and_the_operators_routes_are_as_described() {
    let described = Described::new().await;
    let grader = json!({
        "type": "string_check", "name": "same", "operation": "eq",
        "input": "{{ sample.output_text }}", "reference": "{{ item.answer }}",
    });
    let run = json!({"grader": grader, "item": {"answer": "7"}, "model_sample": "7"});
    described.post(&format!("{GRADERS}/run"), run).await;
    described.post(&format!("{GRADERS}/validate"), json!({"grader": grader})).await;
    described.post(&format!("{GRADERS}/validate"), json!({"grader": {}})).await;
    for action in ["pause", "resume", "step"] {
        let path = format!("/admin/train/{action}");
        described.send("post", &path, &path, None).await;
    }
    described.get("/admin/train", "/admin/train").await;
    described.get("/admin/policies", "/admin/policies").await;
    for (action, version) in [("activate", "1"), ("activate", "2"), ("pin", "9"), ("unpin", "x")] {
        let template = format!("/admin/policies/{{version}}/{action}");
        let path = template.replace("{version}", version);
        described.send("post", &template, &path, None).await;
    }
    let keys = "/admin/feedback/quarantine";
    let (one, path) = (format!("{keys}/{{key}}"), format!("{keys}/2bd806c97f0e"));
    described.send("post", &one, &path, Some(json!({"reason": "a"}))).await;
    described.get(keys, keys).await;
    described.send("delete", &one, &path, None).await;
    described.send("delete", &one, &path, None).await;
    for path in ["/livez", "/readyz", "/openapi.json"] {
        described.get(path, path).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_path_has_exactly_the_methods_of_the_document() {
    let described = Described::new().await;
    let server = &described.server;
    for (template, operations) in described.document["paths"].as_object().unwrap() {
        let path = template.replace(['{', '}'], "");
        for method in ["get", "post", "put", "patch", "delete"] {
            let verb = method.to_ascii_uppercase().parse().unwrap();
            let answer = server.client.request(verb, server.url(&path)).send().await.unwrap();
            let is_allowed = answer.status() != 405;
            assert_eq!(is_allowed, operations[method].is_object(), "{method} {path}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_document_needs_no_key() {
    let server = Server::with(|setup| setup.server.client_keys = vec!["alice".to_owned()]).await;
    assert_eq!(server.get("/openapi.json").await.0, 200);
    assert_eq!(server.get("/v1/models").await.0, 401);
}
