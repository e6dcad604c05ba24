//! What clients of the HTTP surface get from each engine: sampling parameters, streams and the end of the
//! daemon. `tests/http` covers the surface itself with a scripted engine.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Value, json};

use hone_engine::EngineBackend;

use crate::backend::with_each_backend;
use crate::daemon::{Daemon, text};

/// One slot and no queue, and nothing but clients.
const ONE_SLOT: &str = r#"
[engine]
slots = 1
queue = 0
[rollout]
enabled = false
[train]
enabled = false
[log]
level = "error"
"#;

with_each_backend!(
    sampling_parameters_have_their_effect,
    a_stream_equals_the_whole_response,
    prompts_have_the_log_probabilities_of_completions,
    usage_counts_what_the_cache_had,
    a_shutdown_finishes_running_requests,
    a_shutdown_without_grace_ends_running_requests,
);

/// A request with the fields `more`.
fn ask(more: Value) -> Value {
    let mut body = json!({
        "model": "default", "seed": 5, "max_tokens": 24,
        "messages": [{"role": "user", "content": "What is 12 + 7?"}],
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// A long answer: the model's stop tokens are excluded by a bias.
fn long(more: Value) -> Value {
    let mut body = ask(json!({"max_tokens": 400, "logit_bias": {"386": -100, "388": -100}}));
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

async fn chat(daemon: &Daemon, body: &Value) -> Value {
    let (status, answer) = daemon.post("/v1/chat/completions", body).await;
    assert_eq!(status, 200, "{body}: {answer}");
    answer
}

async fn send(daemon: &Daemon, body: &Value) -> reqwest::Response {
    let url = format!("{}/v1/chat/completions", daemon.url);
    reqwest::Client::new().post(url).json(body).send().await.unwrap()
}

/// The texts of all choices, in order.
fn texts(answer: &Value) -> Vec<&str> {
    let choices = answer["choices"].as_array().unwrap().iter();
    choices.map(|choice| choice["message"]["content"].as_str().unwrap()).collect()
}

fn chunks(stream: &str) -> Vec<Value> {
    let events = stream.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
    let chunks = events.filter(|data| *data != "[DONE]");
    chunks.map(|data| serde_json::from_str(data).unwrap()).collect()
}

async fn sampling_parameters_have_their_effect(backend: EngineBackend) {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(backend, dir.path(), "[log]\nlevel = \"error\"\n", &[]);
    let base = chat(&daemon, &ask(json!({}))).await;
    assert_eq!(base["system_fingerprint"], "hone-v0");
    let usage = &base["usage"];
    let [prompt, completion, total] = ["prompt_tokens", "completion_tokens", "total_tokens"]
        .map(|key| usage[key].as_u64().unwrap());
    assert_eq!(prompt + completion, total);
    assert_eq!(text(&chat(&daemon, &ask(json!({}))).await), text(&base), "the seed decides");

    let several = chat(&daemon, &ask(json!({"n": 8}))).await;
    assert_eq!(texts(&several)[0], text(&base), "the first choice has the request's seed");
    let mut distinct = texts(&several);
    distinct.sort_unstable();
    distinct.dedup();
    assert!(distinct.len() > 1, "each choice has a seed: {several}");

    // A whole greedy answer, and where it is cut.
    let greedy = json!({"temperature": 0, "max_tokens": 60});
    let whole = chat(&daemon, &ask(greedy.clone())).await;
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    let whole = text(&whole);
    let middle: String = whole.chars().skip(whole.chars().count() / 2).take(2).collect();
    let mut stopped = ask(greedy);
    stopped["stop"] = json!(["never", middle]);
    let stopped = chat(&daemon, &stopped).await;
    assert_eq!(text(&stopped), &whole[..whole.find(&middle).unwrap()]);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    let short = chat(&daemon, &ask(json!({"temperature": 0, "max_tokens": 3}))).await;
    assert_eq!(short["choices"][0]["finish_reason"], "length");
    assert_eq!(short["usage"]["completion_tokens"], 3);
    // With one candidate left, sampling is greedy.
    for one in [json!({"top_k": 1}), json!({"top_p": 0}), json!({"min_p": 1})] {
        let mut body = ask(one.clone());
        body["max_tokens"] = json!(60);
        assert_eq!(text(&chat(&daemon, &body).await), whole, "{one}");
    }

    // Log-probabilities: natural, the best first, and those of the tokens of the text.
    let body = ask(json!({"temperature": 0, "logprobs": true, "top_logprobs": 3}));
    let answer = chat(&daemon, &body).await;
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    let joined: String = content.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!(joined, text(&answer));
    for token in content {
        let top = token["top_logprobs"].as_array().unwrap();
        let values: Vec<f64> = top.iter().map(|t| t["logprob"].as_f64().unwrap()).collect();
        assert_eq!(values.len(), 3);
        assert!(values[0] <= 0.0 && values.is_sorted_by(|a, b| a >= b), "{token}");
        assert_eq!((&top[0]["token"], &top[0]["logprob"]), (&token["token"], &token["logprob"]));
    }

    // A bias forces a token. Penalties change what a long answer repeats.
    let forced = ask(json!({"logit_bias": {"20": 100}, "max_tokens": 6, "temperature": 0}));
    let forced = chat(&daemon, &forced).await;
    let first = text(&forced).chars().next().unwrap();
    assert!(text(&forced).chars().all(|c| c == first), "{forced}");
    let repeated = chat(&daemon, &long(json!({"temperature": 0}))).await;
    let penalties = json!({"temperature": 0, "presence_penalty": 2, "frequency_penalty": 2});
    assert_ne!(text(&chat(&daemon, &long(penalties)).await), text(&repeated));
    assert_eq!(daemon.terminate(), Some(0));
}

async fn a_stream_equals_the_whole_response(backend: EngineBackend) {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(backend, dir.path(), "[log]\nlevel = \"error\"\n", &[]);
    for more in [json!({}), json!({"n": 3}), json!({"n": 2, "max_tokens": 4}), json!({"stop": "1"})]
    {
        let whole = chat(&daemon, &ask(more.clone())).await;
        let mut body = ask(more.clone());
        body["stream"] = json!(true);
        let stream = send(&daemon, &body).await.text().await.unwrap();
        assert!(stream.ends_with("data: [DONE]\n\n"), "{stream}");
        let chunks = chunks(&stream);
        for choice in whole["choices"].as_array().unwrap() {
            let mine = chunks.iter().map(|chunk| &chunk["choices"][0]);
            let mine: Vec<&Value> = mine.filter(|c| c["index"] == choice["index"]).collect();
            let content: String =
                mine.iter().filter_map(|c| c["delta"]["content"].as_str()).collect();
            assert_eq!(content, choice["message"]["content"], "{more}");
            assert_eq!(mine.last().unwrap()["finish_reason"], choice["finish_reason"], "{more}");
        }
        let versions = chunks.iter().map(|chunk| &chunk["system_fingerprint"]);
        assert!(versions.eq(std::iter::repeat_n(&json!("hone-v0"), chunks.len())), "{stream}");
    }
    assert_eq!(daemon.terminate(), Some(0));
}

async fn usage_counts_what_the_cache_had(backend: EngineBackend) {
    let dir = tempfile::tempdir().unwrap();
    let config = "[rollout]\nenabled = false\n[train]\nenabled = false\n[log]\nlevel = \"error\"\n";
    let daemon = Daemon::start(backend, dir.path(), config, &[]);
    let messages = json!([{"role": "user", "content": "What is 12 + 7? ".repeat(12)}]);
    let body = ask(json!({"messages": messages, "max_tokens": 4}));
    let first = chat(&daemon, &body).await["usage"].clone();
    let second = chat(&daemon, &body).await["usage"].clone();
    let prompt = second["prompt_tokens"].as_u64().unwrap();
    let cached = |usage: &Value| usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    // The last token of a prompt is always computed.
    let known = if backend == EngineBackend::Native { prompt - 1 } else { 0 };
    assert!(cached(&first) < prompt / 2, "{first}");
    assert_eq!(cached(&second), known, "{second}");

    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({"include_usage": true});
    let stream = send(&daemon, &streamed).await.text().await.unwrap();
    assert_eq!(chunks(&stream).last().unwrap()["usage"], second);
    // Of several choices, one computes the prompt.
    let other = json!([{"role": "user", "content": "Add 3 and 4, please. ".repeat(12)}]);
    let several = ask(json!({"messages": other, "max_tokens": 4, "n": 2}));
    let usage = &chat(&daemon, &several).await["usage"];
    assert!(cached(usage) < usage["prompt_tokens"].as_u64().unwrap() / 2, "{usage}");

    // The same prompt on the other endpoints.
    let body = json!({"model": "default", "max_tokens": 4, "messages": messages});
    let (_, answer) = daemon.post("/v1/messages", &body).await;
    let usage = &answer["usage"];
    assert_eq!(usage["cache_read_input_tokens"], known, "{answer}");
    assert_eq!(usage["input_tokens"], prompt - known, "{answer}");
    let body = json!({"model": "default", "max_output_tokens": 4, "input": messages});
    let (_, answer) = daemon.post("/v1/responses", &body).await;
    assert_eq!(answer["usage"]["input_tokens_details"]["cached_tokens"], known, "{answer}");
    let body = json!({"model": "default", "prompt": "12 + 7 = ".repeat(12), "max_tokens": 4});
    daemon.post("/v1/completions", &body).await;
    let (_, answer) = daemon.post("/v1/completions", &body).await;
    let prompt = answer["usage"]["prompt_tokens"].as_u64().unwrap();
    let known = if backend == EngineBackend::Native { prompt - 1 } else { 0 };
    assert_eq!(cached(&answer["usage"]), known, "{answer}");
}

async fn prompts_have_the_log_probabilities_of_completions(backend: EngineBackend) {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(backend, dir.path(), ONE_SLOT, &[]);
    let complete = async |prompt: Value, more: Value| {
        let mut body =
            json!({"model": "default", "prompt": prompt, "temperature": 0, "logprobs": 1});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (status, answer) = daemon.post("/v1/completions", &body).await;
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0].clone()
    };
    let logprobs = |choice: &Value| -> Vec<Option<f64>> {
        serde_json::from_value(choice["logprobs"]["token_logprobs"].clone()).unwrap()
    };
    let text = "What is 12 + 7? It is";
    let sampled = complete(json!(text), json!({"max_tokens": 12, "ignore_eos": true})).await;
    let whole = format!("{text}{}", sampled["text"].as_str().unwrap());
    let scored = complete(json!(whole), json!({"max_tokens": 0, "echo": true})).await;
    assert_eq!(scored["text"], whole);
    let (sampled, scored) = (logprobs(&sampled), logprobs(&scored));
    assert!(scored[0].is_none() && scored.len() > sampled.len());
    // The text of the sampled tokens may be divided in another way, but the sum of the last ones is near.
    let tail = &scored[scored.len() - sampled.len()..];
    for (score, sample) in tail.iter().zip(&sampled) {
        let difference = (score.unwrap() - sample.unwrap()).abs();
        assert!(difference < 1e-3, "{difference}: {tail:?} {sampled:?}");
    }
    assert_eq!(daemon.terminate(), Some(0));
}

/// Alerts and panels need a series before the first event: a rate from nothing is no rate.
#[tokio::test(flavor = "multi_thread")]
async fn metrics_have_every_name_of_the_dashboard_and_the_alerts_from_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(EngineBackend::Native, dir.path(), "", &[]);
    let exported = daemon.metrics().await;
    let series: BTreeSet<&str> = exported
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split(['{', ' ']).next())
        .collect();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("dashboards");
    let mut names = BTreeSet::new();
    for file in ["hone.json", "alerts.yml"] {
        let text = std::fs::read_to_string(root.join(file)).unwrap();
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        names.extend(words.filter(|word| word.starts_with("hone_")).map(str::to_owned));
    }
    assert!(names.len() > 90, "{} names", names.len());
    let missing: Vec<&String> =
        names.iter().filter(|name| !series.contains(name.as_str())).collect();
    assert!(missing.is_empty(), "without a series: {missing:?}");
    assert_eq!(daemon.terminate(), Some(0));
}

async fn a_shutdown_finishes_running_requests(backend: EngineBackend) {
    let dir = tempfile::tempdir().unwrap();
    let config = ONE_SLOT.replace("queue = 0", "queue = 16");
    let daemon = Daemon::start(backend, dir.path(), &config, &[]);
    let mut response = send(&daemon, &long(json!({"stream": true, "n": 4}))).await;
    let mut stream = response.chunk().await.unwrap().unwrap().to_vec();
    let ended = tokio::task::spawn_blocking(move || daemon.terminate());
    while let Some(bytes) = response.chunk().await.unwrap() {
        stream.extend(bytes);
    }
    let stream = String::from_utf8(stream).unwrap();
    assert!(stream.ends_with("data: [DONE]\n\n"), "{stream}");
    let finished =
        chunks(&stream).iter().filter(|c| !c["choices"][0]["finish_reason"].is_null()).count();
    assert_eq!(finished, 4);
    assert_eq!(ended.await.unwrap(), Some(0));
}

async fn a_shutdown_without_grace_ends_running_requests(backend: EngineBackend) {
    let dir = tempfile::tempdir().unwrap();
    let config =
        ONE_SLOT.replace("queue = 0", "queue = 16") + "[server]\nshutdown_grace_seconds = 0\n";
    let daemon = Daemon::start(backend, dir.path(), &config, &[]);
    let mut response = send(&daemon, &long(json!({"stream": true, "n": 8}))).await;
    response.chunk().await.unwrap().unwrap();
    let exit = tokio::task::spawn_blocking(move || daemon.terminate()).await.unwrap();
    assert_eq!(exit, Some(0));
    drop(response);
}
