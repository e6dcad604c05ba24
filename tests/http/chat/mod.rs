//! Completions without streaming.

mod constrained_calls;
mod constraints;
mod continuation;
mod reasoning;
mod tools;

use serde_json::{Value, json};

use hone_core::types::{FinishReason, PromptSource, SampleOrigin};
use hone_engine::EngineError;

use crate::server::{Server, ask, id_of, ok};

#[tokio::test(flavor = "multi_thread")]
async fn a_response_has_openais_shape() {
    let server = Server::new().await;
    let response = server.send_chat(&ask(json!({}))).await;
    assert_eq!(response.headers()["x-hone-policy-version"], "0");
    assert_eq!(response.headers()["content-type"], "application/json");
    let mut answer: Value = response.json().await.unwrap();
    assert!(answer["created"].as_u64().unwrap() > 1_700_000_000);
    answer["id"] = json!("ID");
    answer["created"] = json!(0);
    let prompt = server.engine.requests()[0].prompt_ids.len();
    assert_eq!(
        answer,
        json!({
            "id": "ID",
            "object": "chat.completion",
            "created": 0,
            "model": "default",
            "system_fingerprint": "hone-v0",
            "choices": [{
                "index": 0,
                "message": {"role": "assistant", "content": "The answer is 5.", "refusal": null},
                "logprobs": null,
                "finish_reason": "stop",
            }],
            "usage": {"prompt_tokens": prompt, "completion_tokens": 8, "total_tokens": prompt + 8,
                      "prompt_tokens_details": {"cached_tokens": 0}},
        })
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sampled_completion_is_recorded_and_submitted_to_rollout() {
    let server = Server::new().await;
    let body = ask(json!({"metadata": {"answer": "5"}, "temperature": 0.5, "max_tokens": 20}));
    let (_, answer) = server.chat(&body).await;
    let id = id_of(&answer);
    // A commit returns after everything that is queued before it.
    let interaction = server.interaction(id).await;
    assert_eq!(interaction.source, PromptSource::Live);
    assert_eq!(interaction.route, "default");
    assert_eq!(interaction.model, "default");
    assert_eq!(interaction.key_id, None);
    assert_eq!(interaction.metadata["answer"], "5");
    assert_eq!(interaction.template_hash.len(), 16);
    let [sample] = &server.store.samples_of(id).unwrap()[..] else { panic!("one sample") };
    let [request] = &server.engine.requests()[..] else { panic!("one request") };
    assert_eq!(interaction.prompt_ids, request.prompt_ids);
    assert_eq!(sample.params, request.params);
    assert_eq!((request.params.seed, request.params.max_tokens), (5, 20));
    assert_eq!(request.params.temperature, 0.5);
    assert_eq!(sample.text, "The answer is 5.");
    assert_eq!(sample.ids.len(), 8);
    assert_eq!(sample.logprobs.len(), 8);
    assert_eq!(sample.origin, SampleOrigin::Served);
    assert_eq!(sample.finish, FinishReason::Stop);
    assert_eq!(sample.untrainable, None);
    let submitted = server.rollout.submitted();
    assert_eq!(submitted.len(), 1);
    assert_eq!(*submitted[0].0, interaction);
    assert_eq!(&submitted[0].1, std::slice::from_ref(sample));
}

#[tokio::test(flavor = "multi_thread")]
async fn each_choice_has_its_own_seed_and_sample() {
    let server = Server::with(|s| s.fake.slots = 1).await;
    let answer = ok(server.chat(&ask(json!({"n": 3}))).await);
    let texts: Vec<&str> = answer["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["message"]["content"].as_str().unwrap())
        .collect();
    server.store.commit(Vec::new()).await.unwrap();
    let samples = server.store.samples_of(id_of(&answer)).unwrap();
    assert_eq!((texts.len(), samples.len()), (3, 3));
    for sample in &samples {
        assert_eq!(texts[sample.choice as usize], sample.text);
        assert_eq!(sample.text, format!("The answer is {}.", sample.params.seed % 10));
    }
    let mut seeds: Vec<u64> = samples.iter().map(|s| s.params.seed).collect();
    assert!(seeds.contains(&5));
    seeds.sort_unstable();
    seeds.dedup();
    assert_eq!(seeds.len(), 3);
    assert_eq!(answer["usage"]["prompt_tokens"], server.engine.requests()[0].prompt_ids.len());
    assert_eq!(answer["usage"]["completion_tokens"], 24);
    assert_eq!(server.rollout.submitted()[0].1.len(), 3);
    // A request without a seed gets a random one.
    for _ in 0..2 {
        ok(server.chat(&ask(json!({"seed": null}))).await);
    }
    let [.., one, other] = &server.engine.requests()[..] else { panic!() };
    assert_ne!(one.params.seed, other.params.seed);
}

#[tokio::test(flavor = "multi_thread")]
async fn log_probabilities_are_natural_and_leave_the_stop_token_out() {
    let server = Server::new().await;
    let body = ask(json!({"logprobs": true, "top_logprobs": 2}));
    let (_, answer) = server.chat(&body).await;
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    let text: String = content.iter().map(|t| t["token"].as_str().unwrap()).collect();
    assert_eq!(text, "The answer is 5.");
    server.store.commit(Vec::new()).await.unwrap();
    let [sample] = &server.store.samples_of(id_of(&answer)).unwrap()[..] else { panic!() };
    for (token, logprob) in content.iter().zip(&sample.logprobs) {
        assert_eq!(token["logprob"].as_f64().unwrap() as f32, *logprob);
        let bytes: Vec<u8> = serde_json::from_value(token["bytes"].clone()).unwrap();
        assert_eq!(String::from_utf8(bytes).unwrap(), token["token"].as_str().unwrap());
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 2);
        assert_eq!(top[0]["token"], token["token"]);
        assert!(top[0]["logprob"].as_f64() > top[1]["logprob"].as_f64());
    }
    let (_, answer) = server.chat(&ask(json!({"logprobs": true}))).await;
    let first = &answer["choices"][0]["logprobs"]["content"][0];
    assert_eq!(first["top_logprobs"], json!([]));
}

/// The cases are `(fields, text, finish_reason, reason not to train on it)`.
#[tokio::test(flavor = "multi_thread")]
async fn the_finish_reason_and_the_trainability_are_recorded() {
    let server = Server::new().await;
    let whole = "The answer is 5.";
    let cases = [
        (json!({}), whole, "stop", None),
        (json!({"stop": " is"}), "The answer", "stop", None),
        (json!({"stop": ["never", "5"]}), "The answer is ", "stop", None),
        (json!({"stop": []}), whole, "stop", None),
        (json!({"max_tokens": 2}), "The", "length", None),
        (json!({"max_completion_tokens": 3}), "The answer", "length", None),
        (json!({"max_tokens": 3, "max_completion_tokens": 3}), "The answer", "length", None),
        (json!({"temperature": 0}), whole, "stop", Some("greedy")),
        (json!({"top_p": 0.9}), whole, "stop", None),
        (json!({"top_p": 0}), whole, "stop", None),
        (json!({"top_k": 5}), whole, "stop", None),
        (json!({"top_k": -1}), whole, "stop", None),
        (json!({"min_p": 0.1}), whole, "stop", None),
        (json!({"presence_penalty": 1}), whole, "stop", Some("penalty")),
        (json!({"frequency_penalty": -1}), whole, "stop", Some("penalty")),
        (json!({"logit_bias": {"7": 3}}), whole, "stop", Some("logit_bias")),
    ];
    for (fields, text, finish, untrainable) in cases {
        let (status, answer) = server.chat(&ask(fields.clone())).await;
        assert_eq!(status, 200, "{fields}: {answer}");
        let choice = &answer["choices"][0];
        assert_eq!(choice["message"]["content"], text, "{fields}");
        assert_eq!(choice["finish_reason"], finish, "{fields}");
        server.store.commit(Vec::new()).await.unwrap();
        let [sample] = &server.store.samples_of(id_of(&answer)).unwrap()[..] else { panic!() };
        assert_eq!(sample.untrainable.as_deref(), untrainable, "{fields}");
        // The fake keeps half of the mass at each token if it truncates.
        let truncates = fields.as_object().unwrap().keys().any(|key| {
            ["top_p", "top_k", "min_p"].contains(&key.as_str()) && fields["top_k"] != -1
        });
        let kept = if truncates { vec![0.5; sample.ids.len()] } else { Vec::new() };
        assert_eq!(sample.kept, kept, "{fields}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fields_of_sdks_without_effect_are_accepted() {
    let server = Server::new().await;
    let body = json!({
        "model": "fake",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be "},
                                           {"type": "text", "text": "brief."}]},
            {"role": "user", "content": "Hi", "name": "ann"},
            {"role": "assistant", "content": "Yes?", "refusal": null, "annotations": [],
             "tool_calls": null},
            {"role": "user", "content": "Bye"},
        ],
        "user": "ann", "store": true, "parallel_tool_calls": true, "service_tier": "auto",
        "tools": [], "tool_choice": "none", "functions": null, "response_format": {"type": "text"},
        "modalities": ["text"], "reasoning_effort": "low", "best_of": 1, "seed": -1,
        "stream": false, "stream_options": null, "logprobs": false, "top_logprobs": 0,
    });
    let answer = ok(server.chat(&body).await);
    assert_eq!(answer["model"], "fake");
    assert_eq!(server.engine.requests()[0].params.seed, u64::MAX);
    let (interaction, _) = server.rollout.submitted().remove(0);
    assert_eq!(interaction.messages[0].content, "Be brief.");
    assert_eq!(interaction.messages.len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_errors_map_to_status_codes() {
    let server = Server::new().await;
    let cases = [
        (EngineError::Internal("secret detail".to_owned()), 500, "server_error"),
        (EngineError::ShuttingDown, 503, "server_error"),
        (EngineError::Invalid("no".to_owned()), 400, "invalid_request_error"),
    ];
    for (error, status, kind) in cases {
        server.engine.fail_next_generation(error);
        let (found, answer) = server.chat(&ask(json!({}))).await;
        assert_eq!((found, &answer["error"]["type"]), (status, &json!(kind)));
        assert!(!answer.to_string().contains("secret detail"), "{answer}");
    }
    // An engine error is not a client's disconnect, and rollout receives nothing.
    assert_eq!(server.metrics.http_disconnects.get(), 0);
    assert!(server.rollout.submitted().is_empty());
    let long = "word ".repeat(600);
    let (status, answer) =
        server.chat(&ask(json!({"messages": [{"role": "user", "content": long}]}))).await;
    assert_eq!(status, 400);
    assert_eq!(answer["error"]["code"], "context_length_exceeded");
    assert_eq!(answer["error"]["param"], "messages");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_is_answered_in_openais_error_shape() {
    let server = Server::with(|s| {
        s.fake.script = std::sync::Arc::new(|request, _| match request.params.seed {
            5 => panic!("planned"),
            _ => "fine".to_owned(),
        });
    })
    .await;
    let (status, answer) = server.chat(&ask(json!({}))).await;
    assert_eq!(status, 500);
    assert_eq!(answer["error"]["code"], "internal_error");
    assert_eq!(server.chat(&ask(json!({"seed": 6}))).await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn time_to_first_token_is_labeled_with_the_trainers_activity() {
    let server = Server::new().await;
    server.chat(&ask(json!({}))).await;
    server.trainer.training.store(true, std::sync::atomic::Ordering::SeqCst);
    server.chat(&ask(json!({}))).await;
    let streamed = server.send_chat(&ask(json!({"stream": true, "n": 2}))).await;
    assert!(streamed.text().await.unwrap().ends_with("data: [DONE]\n\n"));
    let count = "hone_http_time_to_first_token_seconds_count";
    assert_eq!(server.metric(&format!("{count}{{trainer=\"idle\"}}")).await, Some(1.0));
    assert_eq!(server.metric(&format!("{count}{{trainer=\"training\"}}")).await, Some(2.0));
    let prompt = server.engine.requests()[0].prompt_ids.len() as f64;
    assert_eq!(server.metric("hone_http_prompt_tokens_total").await, Some(3.0 * prompt));
    assert_eq!(server.metric("hone_http_completion_tokens_total").await, Some(32.0));
    let requests = "hone_http_requests_total{code=\"200\",route=\"/v1/chat/completions\"}";
    assert_eq!(server.metric(requests).await, Some(3.0));
    assert_eq!(server.metric("hone_http_requests_in_flight").await, Some(1.0));
}
