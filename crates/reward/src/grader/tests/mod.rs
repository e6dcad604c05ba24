mod schema;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use hone_core::types::Role;

use super::*;
use crate::kinds::tests::samples::with_answer;

/// Returns a fixed answer and records the requests.
struct Judge {
    answer: Result<ModelReply, ModelFailure>,
    asked: Mutex<Vec<ModelRequest>>,
}

#[async_trait]
impl ModelClient for Judge {
    async fn complete(&self, request: &ModelRequest) -> Result<ModelReply, ModelFailure> {
        self.asked.lock().unwrap().push(request.clone());
        self.answer.clone()
    }
}

fn judge(answer: Result<&str, ModelFailure>) -> (Arc<Judge>, Backends) {
    let usage = TokenUsage {
        prompt_tokens: 190,
        total_tokens: 324,
        completion_tokens: 134,
        cached_tokens: 0,
    };
    let reply = |text: &str| ModelReply { text: text.into(), model: "judge-1".into(), usage };
    let judge = Arc::new(Judge { answer: answer.map(reply), asked: Mutex::default() });
    let backends = Backends { model: Some(judge.clone()), code: None };
    (judge, backends)
}

/// Pretends to run code; the source selects the result.
struct Sandbox;

#[async_trait]
impl CodeRunner for Sandbox {
    async fn grade(&self, source: &str, sample: &Value, item: &Value) -> Result<f64, CodeFailure> {
        match source {
            "grade: length" => Ok(sample["output_text"].as_str().unwrap().len() as f64),
            "grade: wanted" => Ok(item["wanted"].as_f64().unwrap()),
            "grade: nan" => Ok(f64::NAN),
            "grade: raise" => Err(CodeFailure::Runtime("ZeroDivisionError".into())),
            _ => Err(CodeFailure::Server("unavailable".into())),
        }
    }
}

fn run_with(backends: Backends, grader: Value, text: &str, item: Value) -> GradeOutcome {
    let grader = Grader::new("", &grader, backends).unwrap();
    futures::executor::block_on(grader.run(&sample(text, Vec::new()), &item))
}

fn run(grader: Value, text: &str, item: Value) -> GradeOutcome {
    let backends = Backends { model: None, code: Some(Arc::new(Sandbox)) };
    run_with(backends, grader, text, item)
}

fn check(operation: &str) -> Value {
    json!({
        "type": "string_check", "name": "check", "operation": operation,
        "input": "{{ sample.output_text }}", "reference": "{{ item.answer }}",
    })
}

fn score_model() -> Value {
    json!({
        "type": "score_model", "name": "judged", "model": "gpt-x", "range": [0, 5],
        "input": [
            {"role": "developer", "content": "Judge."},
            {"role": "user", "content": [{"type": "input_text", "text": "{{ sample.output_text }}"}]},
        ],
        "sampling_params": {"temperature": 0.5, "seed": 42, "max_completions_tokens": 64},
    })
}

#[test]
fn string_checks_compare_as_documented() {
    for (operation, text, answer, wanted) in [
        ("eq", "Paris", "Paris", 1.0),
        ("eq", "paris", "Paris", 0.0),
        ("ne", "paris", "Paris", 1.0),
        ("neq", "Paris", "Paris", 0.0),
        ("like", "It is Paris.", "Paris", 1.0),
        ("like", "It is paris.", "Paris", 0.0),
        ("like", "Paris", "It is Paris.", 0.0),
        ("ilike", "IT IS PARIS", "paris", 1.0),
        ("ilike", "ÉTÉ", "été", 1.0),
        ("ilike", "100%", "_", 0.0),
    ] {
        let outcome = run(check(operation), text, json!({"answer": answer}));
        assert_eq!(outcome.reward, Some(wanted), "{operation} {text} {answer}");
        assert!(!outcome.metadata.errors.any());
    }
}

#[test]
fn text_similarity_uses_the_metric_and_ignores_the_threshold() {
    for (name, metric) in crate::text::Metric::ALL {
        let grader = json!({
            "type": "text_similarity", "input": "{{sample.output_text}}", "pass_threshold": 0.99,
            "reference": "the {{ item.animal }} sat", "evaluation_metric": name,
        });
        let outcome = run(grader, "the cat sat down", json!({"animal": "cat"}));
        assert_eq!(outcome.reward, Some(metric.score("the cat sat down", "the cat sat")));
        assert_eq!(
            outcome.metadata.name, "text_similarity",
            "without a name, the type is the name"
        );
    }
}

#[test]
fn the_guides_multi_graders_run() {
    let grader = json!({
        "type": "multi",
        "graders": {
            "name": {
                "name": "name_grader", "type": "text_similarity", "pass_threshold": 0.9,
                "input": "{{sample.output_json.name}}", "reference": "{{item.name}}",
                "evaluation_metric": "fuzzy_match",
            },
            "email": {
                "name": "email_grader", "type": "string_check", "operation": "eq",
                "input": "{{sample.output_json.email}}", "reference": "{{item.email}}",
            },
        },
        "calculate_output": "(name + email) / 2",
    });
    let item = json!({"name": "John Doe", "email": "john.doe@gmail.com"});
    let text = r#"{"name": "John Do", "email": "john.doe@gmail.com"}"#;
    let outcome = run(grader.clone(), text, item.clone());
    let fuzzy = 14.0 / 15.0;
    assert_eq!(outcome.reward, Some((fuzzy + 1.0) / 2.0));
    assert_eq!(outcome.sub_rewards["name"], Some(fuzzy));
    assert_eq!(outcome.sub_rewards["email"], Some(1.0));

    let outcome = run(grader, "not JSON", item);
    assert_eq!(outcome.reward, Some(0.0));
    assert!(outcome.sub_rewards.values().all(|value| *value == Some(0.0)));
    let errors = outcome.metadata.errors;
    assert!(errors.sample_parse_error && !errors.formula_parse_error);
    assert!(!errors.invalid_variable_error && !errors.other_error);
    let detail = errors.sample_parse_error_details.unwrap();
    assert!(detail.ends_with("name is missing") || detail.ends_with("email is missing"));
}

#[test]
fn tool_calls_are_graded() {
    let grader = json!({
        "type": "string_check", "name": "tool", "operation": "eq", "input": "get_acceptors",
        "reference": "{{sample.output_tools[0].function.name}}",
    });
    let grader = Grader::new("", &grader, Backends::default()).unwrap();
    let call = json!({"id": "1", "type": "function", "function": {"name": "get_acceptors", "arguments": "{}"}});
    let called = sample("", vec![call]);
    assert_eq!(called["choices"][0]["message"]["tool_calls"][0]["id"], "1");
    let reward =
        |sample: &Value| futures::executor::block_on(grader.run(sample, &json!({}))).reward;
    assert_eq!(reward(&called), Some(1.0));
    assert_eq!(reward(&sample("no call", Vec::new())), Some(0.0));
}

#[test]
fn only_the_parts_that_a_formula_names_must_have_a_grade() {
    let grader = |formula: &str| {
        json!({
            "type": "multi", "name": "both", "calculate_output": formula,
            "graders": [
                {"type": "python", "name": "raises", "source": "grade: raise"},
                {"type": "python", "name": "length", "source": "grade: length"},
            ],
        })
    };
    let outcome = run(grader("length / 2"), "four", json!({}));
    assert_eq!(outcome.reward, Some(2.0));
    assert!(outcome.metadata.errors.python_grader_runtime_error);
    assert_eq!(run(grader("length + 0 * raises"), "four", json!({})).reward, None);
    let outcome = run(grader("1 / (length - 4)"), "four", json!({}));
    assert_eq!(outcome.reward, None);
    let details = outcome.metadata.errors.formula_parse_error_details;
    assert_eq!(details.as_deref(), Some("division by zero"));
}

#[test]
fn code_returns_a_grade_or_an_error() {
    let python = |source: &str| json!({"type": "python", "source": source});
    let outcome = run(python("grade: wanted"), "", json!({"wanted": -2.5}));
    assert_eq!((outcome.reward, outcome.metadata.errors.any()), (Some(-2.5), false));
    let errors = |source: &str| {
        let outcome = run(python(source), "", json!({}));
        assert_eq!(outcome.reward, None);
        outcome.metadata.errors
    };
    let raised = errors("grade: raise");
    assert!(raised.python_grader_runtime_error);
    assert_eq!(raised.python_grader_runtime_error_details.unwrap(), "ZeroDivisionError");
    let nan = errors("grade: nan").python_grader_runtime_error_details.unwrap();
    assert_eq!(nan, "grade returned NaN, not a finite number");
    let down = errors("grade: down");
    assert!(down.python_grader_server_error);
    assert_eq!(down.python_grader_server_error_type.unwrap(), "unavailable");
    let outcome = run_with(Backends::default(), python("grade"), "", json!({}));
    assert!(outcome.metadata.errors.python_grader_server_error, "no sandbox is no zero");
}

#[test]
fn a_judge_is_asked_and_its_score_read() {
    for (answer, wanted) in [
        (r#"{"steps": [], "result": 2.5}"#, Some(2.5)),
        ("```json\n{\"result\": 9}\n```", Some(5.0)),
        ("-1", Some(0.0)),
        (" 4.5\n", Some(4.5)),
        (r#"{"result": "3"}"#, Some(3.0)),
        (r#"{"result": null}"#, None),
        (r#"{"result": "NaN"}"#, None),
        ("inf", None),
        ("I would say 4", None),
        ("", None),
    ] {
        let (_, backends) = judge(Ok(answer));
        let outcome = run_with(backends, score_model(), "text", json!({}));
        assert_eq!(outcome.reward, wanted, "{answer}");
        assert_eq!(outcome.metadata.errors.model_grader_parse_error, wanted.is_none());
    }
    let (judge, backends) = judge(Ok("1"));
    run_with(backends, score_model(), "{{ item.x }}", json!({"x": "never"}));
    let asked = judge.asked.lock().unwrap().pop().unwrap();
    assert_eq!(asked.model, "gpt-x");
    assert_eq!(asked.messages[0].role, Role::Developer);
    assert_eq!(asked.messages[1].content, "{{ item.x }}", "a completion is no template");
    assert_eq!((asked.sampling.seed, asked.sampling.max_tokens), (Some(42), Some(64)));
    let schema = &asked.response_format["json_schema"]["schema"];
    assert_eq!(schema["properties"]["result"], json!({"type": "number"}));
}

#[test]
fn a_judges_label_passes_or_not() {
    let grader = json!({
        "type": "label_model", "name": "labelled", "model": "gpt-x", "labels": ["good", "bad", "1"],
        "passing_labels": ["good", "1"], "input": [{"role": "user", "content": "?"}],
    });
    for (answer, wanted) in [
        (r#"{"steps": [], "result": "good"}"#, Some(1.0)),
        ("bad", Some(0.0)),
        ("\"good\"", Some(1.0)),
        ("1", Some(1.0)),
        ("Good", None),
        ("neither", None),
    ] {
        let (judge, backends) = judge(Ok(answer));
        let outcome = run_with(backends, grader.clone(), "", json!({}));
        assert_eq!(outcome.reward, wanted, "{answer}");
        let asked = judge.asked.lock().unwrap().pop().unwrap();
        let result = &asked.response_format["json_schema"]["schema"]["properties"]["result"];
        assert_eq!(result["enum"], json!(["good", "bad", "1"]));
    }
}

#[test]
fn without_an_answer_of_the_judge_the_grade_is_missing() {
    let (_, backends) = judge(Err(ModelFailure::Server("timed out".into())));
    let errors = run_with(backends, score_model(), "", json!({})).metadata.errors;
    assert!(errors.model_grader_server_error);
    assert_eq!(errors.model_grader_server_error_details.unwrap(), "timed out");
    let (_, backends) = judge(Err(ModelFailure::Refusal("I cannot".into())));
    let outcome = run_with(backends, score_model(), "", json!({}));
    assert!(outcome.reward.is_none() && outcome.metadata.errors.model_grader_refusal_error);
    let outcome = run_with(Backends::default(), score_model(), "", json!({}));
    assert!(outcome.reward.is_none() && outcome.metadata.errors.model_grader_server_error);
}

#[test]
fn the_outcome_has_openais_shape() {
    let (_, backends) = judge(Ok("1"));
    let mut outcome = run_with(backends, score_model(), "", json!({}));
    assert!(outcome.metadata.execution_time >= 0.0);
    outcome.metadata.execution_time = 0.25;
    let usage = json!({
        "prompt_tokens": 190, "total_tokens": 324, "completion_tokens": 134, "cached_tokens": 0,
    });
    let wanted = json!({
        "reward": 1.0,
        "metadata": {
            "name": "judged",
            "type": "score_model",
            "errors": {
                "formula_parse_error": false, "formula_parse_error_details": null,
                "sample_parse_error": false, "sample_parse_error_details": null,
                "truncated_observation_error": false, "unresponsive_reward_error": false,
                "invalid_variable_error": false, "invalid_variable_error_details": null,
                "other_error": false,
                "python_grader_server_error": false, "python_grader_server_error_type": null,
                "python_grader_runtime_error": false, "python_grader_runtime_error_details": null,
                "model_grader_server_error": false, "model_grader_server_error_details": null,
                "model_grader_refusal_error": false, "model_grader_refusal_error_details": null,
                "model_grader_parse_error": false, "model_grader_parse_error_details": null,
            },
            "execution_time": 0.25,
            "scores": {},
            "token_usage": 324,
            "sampled_model_name": "judge-1",
        },
        "sub_rewards": {},
        "model_grader_token_usage_per_model": {"judge-1": usage},
    });
    assert_eq!(serde_json::to_value(&outcome).unwrap(), wanted);

    let missing = serde_json::to_value(run(check("eq"), "", json!({}))).unwrap();
    assert_eq!(missing["reward"], Value::Null);
    assert_eq!(missing["metadata"]["errors"]["invalid_variable_error"], true);
    assert_eq!(missing["metadata"]["token_usage"], Value::Null);
}

#[test]
fn usage_is_summed_over_the_parts() {
    let part = |name: &str| {
        let mut part = score_model();
        part["name"] = name.into();
        part
    };
    let grader = json!({
        "type": "multi", "name": "two", "graders": [part("a"), part("b")], "calculate_output": "a + b",
    });
    let (_, backends) = judge(Ok("2"));
    let outcome = run_with(backends, grader, "", json!({}));
    assert_eq!(outcome.reward, Some(4.0));
    assert_eq!(outcome.metadata.token_usage, Some(648));
    let usage = &outcome.model_grader_token_usage_per_model["judge-1"];
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (380, 268));
}

#[test]
fn a_grader_scores_as_a_reward_function() {
    let input = |text: &str, answer: &str| with_answer(text, Some(answer));
    let grader = Grader::new("", &check("eq"), Backends::default()).unwrap();
    assert!(grader.models().is_empty() && !grader.needs_code());
    let samples = [
        input("1.50", "1.50"),
        input("007", "007"),
        input("2", "3"),
        input("true", "true"),
        with_answer("1", None),
    ];
    let scores = futures::executor::block_on(grader.score(&samples));
    assert_eq!(scores, [Some(1.0), Some(1.0), Some(0.0), Some(1.0), None]);
}

#[test]
fn metadata_become_an_item() {
    let value = |text: &str| item(&BTreeMap::from([("key".to_owned(), text.to_owned())]));
    for text in ["{\"a\": [1]}", "[1, 2]", "42", "-0.5", "true"] {
        let parsed: Value = serde_json::from_str(text).unwrap();
        assert_eq!(value(text), json!({ "key": parsed }), "{text}");
    }
    for text in ["1.50", "1e3", "007", "null", "x", "", "\"q\""] {
        assert_eq!(value(text), json!({ "key": text }), "{text}");
    }
}
