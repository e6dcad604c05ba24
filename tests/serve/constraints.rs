//! Constrained answers of a random model on both engines, and their groups.

use serde_json::{Value, json};

use hone_engine::EngineBackend;
use hone_engine::testing::random_schema;

use super::backend::with_each_backend;
use super::daemon::{Daemon, text};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/qwen2-tiny");

const CONFIG: &str = r#"
[policy]
promotion = "direct"
publish_every = 1
[rollout]
group_size = 3
max_tokens = 200
[train]
samples_per_step = 6
learning_rate = 0.001
warmup_steps = 0
max_staleness = 100
[log]
level = "warn"
[[route]]
name = "default"
[[route.reward]]
name = "valid"
kind = "json_valid"
[[route.reward]]
name = "length"
kind = "length_range"
max = 40
"#;

with_each_backend!(every_answer_of_a_schema_validates_and_trains);

/// `HONE_SOAK` sets the number of schemas, by default 40.
async fn every_answer_of_a_schema_validates_and_trains(backend: EngineBackend) {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(backend, dir.path(), CONFIG, &["--model", MODEL]);
    let count = std::env::var("HONE_SOAK").ok().and_then(|text| text.parse().ok()).unwrap_or(40);
    let mut ended = 0;
    for seed in 0..count {
        let schema = random_schema(seed);
        let body = json!({
            "model": "default", "seed": seed, "max_tokens": 200,
            "messages": [{"role": "user", "content": "Write JSON."}],
            "response_format": {"type": "json_schema", "json_schema": {
                "name": "answer", "schema": schema,
            }},
        });
        let (status, answer) = daemon.post("/v1/chat/completions", &body).await;
        assert_eq!(status, 200, "{answer}\n{schema}");
        if answer["choices"][0]["finish_reason"] == "stop" {
            ended += 1;
            let value: Value = serde_json::from_str(text(&answer))
                .unwrap_or_else(|error| panic!("{error}: {}\n{schema}", text(&answer)));
            let validator =
                jsonschema::options().should_validate_formats(true).build(&schema).unwrap();
            let errors: Vec<String> =
                validator.iter_errors(&value).map(|error| error.to_string()).collect();
            assert!(errors.is_empty(), "{errors:?}: {}\n{schema}", text(&answer));
        }
    }
    assert!(4 * ended > count, "{ended} of {count} answers ended");
    // The answers and their siblings, under the same grammars, make steps. A step is refused if recorded
    // and recomputed log-probabilities differ.
    let trained = daemon.until(|status| status["step"].as_u64() >= Some(1)).await;
    assert!(trained["last_error"].is_null(), "{trained}");
    assert_eq!(daemon.terminate(), Some(0));
}
