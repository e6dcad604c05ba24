//! `hone-bench` with few requests.

#![expect(clippy::unwrap_used, reason = "tests may fail loudly")]

use std::process::Command;

use serde_json::Value;

/// Requests of the direct run; one with a canary has twice as many.
const REQUESTS: u64 = 80;

#[test]
fn a_scenario_is_measured_without_failed_requests() {
    measured("mistralrs");
}

#[test]
fn a_scenario_is_measured_without_failed_requests_of_the_native_engine() {
    measured("native");
}

#[test]
fn benchmarks_use_plain_http_whatever_tls_the_environment_sets() {
    let output = Command::new(env!("CARGO_BIN_EXE_hone-bench"))
        .args(["http", "--seconds", "1", "--users", "1", "--tokens", "4", "--json"])
        .env("HONE_SERVER_TLS_CERTIFICATE", "/nonexistent.pem")
        .env("HONE_SERVER_TLS_KEY", "/nonexistent.pem")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn measured(backend: &str) {
    let output = Command::new(env!("CARGO_BIN_EXE_hone-bench"))
        .args(["safety", "--scenarios", "taste-change", "--modes", "direct,canary"])
        .args(["--backend", backend])
        .args(["--requests", &REQUESTS.to_string(), "--json"])
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let runs = report["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 2);
    for (run, (mode, requests)) in runs.iter().zip([("direct", REQUESTS), ("canary", 2 * REQUESTS)])
    {
        assert_eq!((&run["scenario"], &run["seed"]), (&"taste-change".into(), &1.into()));
        assert_eq!((&run["mode"], &run["requests"]), (&mode.into(), &requests.into()));
        assert_eq!(run["failed_requests"], 0, "{run}");
        assert_eq!(run["ratings"], requests, "{run}");
        for key in ["base", "final_satisfaction"] {
            assert!((0.0..=1.0).contains(&run[key].as_f64().unwrap()), "{key}: {run}");
        }
        let number = |key: &str| run["worst_window"][key].as_f64().unwrap();
        let shortfall = number("reference") - number("satisfaction");
        assert!((number("shortfall") - shortfall).abs() < 1e-9, "{run}");
        for key in ["promoted", "rejected", "rolled_back", "steps", "ratings_not_trained"] {
            assert!(run[key].is_u64(), "{key}: {run}");
        }
        assert!(run["minutes"].as_f64().unwrap() > 0.0);
    }
    let checks: Vec<&Value> =
        report["verdicts"].as_array().unwrap().iter().map(|verdict| &verdict["check"]).collect();
    assert_eq!(checks, ["final"]);
    assert_eq!(report["late_feedback"], Value::Array(Vec::new()));
}
