//! Agent sessions with tools: each turn goes on from the recorded tokens, and a session is trained on as one
//! sequence.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use hone_engine::EngineBackend;

use crate::daemon::Daemon;

/// A session has six turns. A step has two sessions.
const CONFIG: &str = r#"
[policy]
promotion = "direct"
publish_every = 1
[train]
samples_per_step = 12
learning_rate = 0.001
warmup_steps = 0
max_staleness = 100
[log]
level = "warn"
"#;

const TURNS: usize = 6;

const TEMPLATE: &str = r"{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for call in m.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}";

/// The random model with a longer context, a template that shows tools, and one stop token.
fn model(dir: &Path) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/qwen2-tiny");
    let model = dir.join("qwen2-tiny");
    std::fs::create_dir(&model).unwrap();
    for name in ["model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(source.join(name), model.join(name)).unwrap();
    }
    let config = std::fs::read_to_string(source.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["max_position_embeddings"] = json!(2048);
    std::fs::write(model.join("config.json"), config.to_string()).unwrap();
    std::fs::write(model.join("generation_config.json"), "{\"eos_token_id\": 2}").unwrap();
    std::fs::write(model.join("chat_template.jinja"), TEMPLATE).unwrap();
    model
}

/// What was sampled in one turn.
struct Turn {
    prompt: Vec<u32>,
    ids: Vec<u32>,
    logprobs: Vec<f64>,
}

/// A session: the model calls a function in every second turn, and gets its result.
async fn session(daemon: &Daemon, name: &str, seed: u64) -> Vec<Turn> {
    let mut messages = vec![json!({"role": "user", "content": "Add 2 and 3."})];
    let mut turns: Vec<Turn> = Vec::new();
    for turn in 0..TURNS {
        let mut body = json!({
            "model": "default", "messages": messages, "seed": seed + turn as u64, "max_tokens": 150,
            "logprobs": true, "return_token_ids": true, "metadata": {"session_id": name},
            "tools": [{"type": "function", "function": {"name": "add", "parameters": {
                "type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
                "required": ["a"], "additionalProperties": false,
            }}}],
        });
        let calls = turn % 2 == 0;
        if calls {
            body["tool_choice"] = json!("required");
        } else {
            body["guided_regex"] = json!("[a-z ]{8,16}[.]");
        }
        let (status, answer) = daemon.post("/v1/chat/completions", &body).await;
        assert_eq!(status, 200, "{answer}");
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], if calls { "tool_calls" } else { "stop" }, "{answer}");
        let prompt: Vec<u32> = serde_json::from_value(answer["prompt_token_ids"].clone()).unwrap();
        if let Some(before) = turns.last() {
            let before = [&before.prompt[..], &before.ids].concat();
            assert!(prompt.starts_with(&before), "turn {turn} of {name}");
        }
        let content = choice["logprobs"]["content"].as_array().unwrap();
        turns.push(Turn {
            prompt,
            ids: serde_json::from_value(choice["token_ids"].clone()).unwrap(),
            logprobs: content.iter().map(|token| token["logprob"].as_f64().unwrap()).collect(),
        });
        let message = &choice["message"];
        messages.push(message.clone());
        messages.push(if calls {
            let id = &message["tool_calls"][0]["id"];
            json!({"role": "tool", "tool_call_id": id, "content": "5"})
        } else {
            json!({"role": "user", "content": "Go on."})
        });
    }
    turns
}

/// Two sessions of a daemon, which trains on them. Its learner recomputes what the sampler recorded.
async fn recorded(backend: EngineBackend) -> Vec<Turn> {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let daemon = Daemon::start(backend, dir.path(), CONFIG, &["--model", model.to_str().unwrap()]);
    let mut turns = session(&daemon, "good", 0).await;
    turns.extend(session(&daemon, "bad", 100).await);
    let exact = "hone_http_continued_prompts_total{outcome=\"exact\"} 10";
    let metrics = daemon.metrics().await;
    assert!(metrics.lines().any(|line| line == exact), "{backend:?}");
    // One session is enough for a step.
    assert_eq!(daemon.post("/admin/train/pause", &json!({})).await.0, 200);
    for (name, value) in [("good", 1), ("bad", 0)] {
        let feedback = json!({"session_id": name, "name": "thumbs", "value": value});
        let (status, reply) = daemon.post("/v1/feedback", &feedback).await;
        assert_eq!((status, &reply["turns"]), (200, &json!(TURNS)), "{reply}");
    }
    // The first turns of both have one prompt, and so one group.
    daemon.until(|status| status["ready_groups"].as_u64() >= Some(11)).await;
    assert_eq!(daemon.post("/admin/train/resume", &json!({})).await.0, 200);
    let trained = daemon.until(|status| status["step"].as_u64() >= Some(1)).await;
    let metric = |name: &str| trained["metrics"][name].as_f64();
    assert_eq!((metric("samples"), metric("joined_samples")), (Some(12.0), Some(10.0)));
    assert!(metric("sampler_difference_max").unwrap() < 1e-4, "{trained}");
    assert!(metric("grad_norm").unwrap() > 0.0, "{trained}");
    assert_eq!(daemon.terminate(), Some(0));
    turns
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_with_tools_are_the_same_tokens_on_both_engines_and_in_the_trainer() {
    let first = recorded(EngineBackend::Mistralrs).await;
    let second = recorded(EngineBackend::Native).await;
    assert_eq!((first.len(), second.len()), (2 * TURNS, 2 * TURNS));
    for (first, second) in first.iter().zip(&second) {
        assert_eq!((&first.prompt, &first.ids), (&second.prompt, &second.ids));
        for (a, b) in first.logprobs.iter().zip(&second.logprobs) {
            assert!((a - b).abs() < 1e-4, "{a} and {b}");
        }
    }
}
