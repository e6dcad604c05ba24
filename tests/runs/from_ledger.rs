//! `hone train --from-ledger` on the data directory of a run.

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use hone_core::metrics::Metrics;
use hone_store::{Store, StoreConfig};

use crate::commands::{hone, ok, text};
use crate::lines;

const CONFIG: &str = "configs/examples/multi-objective.toml";

fn path(dir: &Path, name: &str) -> String {
    dir.join(name).to_str().unwrap().to_owned()
}

#[test]
fn a_policy_learns_from_the_records_of_another_run() {
    let dir = tempfile::tempdir().unwrap();
    let (source, data) = (path(dir.path(), "source"), path(dir.path(), "data"));
    let (source, data) = (source.as_str(), data.as_str());
    ok(&["train", "--config", CONFIG, "--data", source, "--steps", "6"]);
    let ledger = dir.path().join("source/ledger.redb");
    let before = std::fs::read(&ledger).unwrap();

    // The configuration is the one that the run saved.
    let args = ["train", "--from-ledger", source, "--data", data, "--holdout", "0.25"];
    let output = ok(&[&args[..], &["--epochs", "3", "--json"]].concat());
    let shown = text(&output.stderr);
    assert!(shown.contains("note: the configuration is ") && shown.contains("held out"), "{shown}");
    assert!(std::fs::read(&ledger).unwrap() == before, "the source's ledger has changed");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["ending"], "finished");
    let recorded = &report["recorded"];
    let count = |name: &str| recorded[name].as_u64().unwrap();
    assert!(recorded["records"]["found"].as_u64().unwrap() >= 6 * 64, "{recorded}");
    assert!(count("train_records") > count("held_out_records"), "{recorded}");
    assert!(count("held_out_prompts") > 0, "{recorded}");
    let gap = |at: &str| {
        let number = |name: &str| recorded[at][name].as_f64().unwrap();
        number("log_ratio_above") - number("log_ratio_below")
    };
    assert!(gap("after") > gap("before") + 0.1, "{recorded}");

    let steps = lines(&dir.path().join("data/run/steps.jsonl"));
    assert_eq!(Some(steps.len()), report["steps"].as_array().map(Vec::len));
    let last = steps.last().unwrap();
    assert!(last["epoch"].as_f64().unwrap() > 2.5 && last["kl"].is_number(), "{last}");
    let evaluations = lines(&dir.path().join("data/run/evaluations.jsonl"));
    assert_eq!(evaluations.len(), 2);
    assert_eq!(evaluations[1]["estimated_reward"], recorded["after"]["reward"]);
    let written = std::fs::read_to_string(dir.path().join("data/run/report/report.md")).unwrap();
    assert!(
        written.contains("## Recorded completions") && written.contains("| KL to the reference "),
        "{written}"
    );

    // The result is a data directory as `hone train` leaves it, and a run can continue from it.
    let listed = ok(&["adapters", "list", "--data", data, "--json"]).stdout;
    let listed: Vec<Value> = serde_json::from_slice(&listed).unwrap();
    let states: Vec<&str> = listed.iter().map(|v| v["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["retired", "active"]);
    let next = (steps.len() + 1).to_string();
    let args = ["train", "--config", CONFIG, "--data", data, "--steps", next.as_str(), "--json"];
    let continued: Value = serde_json::from_slice(&ok(&args).stdout).unwrap();
    assert_eq!(continued["steps"].as_array().unwrap().len(), steps.len() + 1);
}

#[test]
fn errors_name_the_option_and_what_the_ledger_has() {
    let dir = tempfile::tempdir().unwrap();
    let (source, data) = (path(dir.path(), "source"), path(dir.path(), "data"));
    let (source, data) = (source.as_str(), data.as_str());
    ok(&["train", "--config", CONFIG, "--data", source, "--steps", "1"]);
    let ledger = dir.path().join("source/ledger.redb");
    let before = std::fs::read(&ledger).unwrap();
    let missing = path(dir.path(), "missing");
    let missing = missing.as_str();
    let other = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/qwen2-tiny");
    for (args, expected) in [
        (vec!["--route", "users"], "--route is users: the records have the routes default"),
        (vec!["--policy", "70-80"], "--policy is 70-80: the records have the policy versions 0"),
        (
            vec!["--since", "2100-01-01"],
            "--since is 2100-01-01T00:00:00.000Z: the records are from",
        ),
        (
            vec!["--until", "2000-01-01"],
            "--until is 2000-01-01T00:00:00.000Z: the records are from",
        ),
        (vec!["--holdout", "1.5"], "--holdout is 1.5: it must be between 0 and 1"),
        (vec!["--holdout", "0.0000001"], "it holds out none; use a larger share"),
        (vec!["--policy", "7-3"], "it must be a version such as 7, or a range such as 3-7"),
        (vec!["--since", "today"], "it must be a time such as 2026-01-31T08:00:00Z"),
        (vec!["--dataset", "datasets/additions.jsonl"], "cannot be used with"),
        (vec!["--model", other], "the records are of another model"),
    ] {
        let all = ["train", "--config", CONFIG, "--from-ledger", source, "--data", data];
        let output = hone(&[&all[..], &["--epochs", "1"], &args[..]].concat());
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
        assert!(stderr.contains(expected), "{args:?}: {stderr}");
    }
    for (from, to, expected) in [
        (source, source, "which is also the data directory of the run"),
        (missing, data, "ledger.redb does not exist"),
    ] {
        let args = ["train", "--config", CONFIG, "--from-ledger", from, "--data", to];
        let output = hone(&args);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{from}: {stderr}");
        assert!(stderr.contains(expected), "{from}: {stderr}");
    }
    let output = hone(&["train", "--since", "2026-01-01", "--data", data]);
    assert!(text(&output.stderr).contains("--from-ledger"), "{}", text(&output.stderr));
    assert!(std::fs::read(&ledger).unwrap() == before, "the source's ledger has changed");
    // A daemon has the ledger open.
    let daemon = Store::open(&ledger, &StoreConfig::default(), Arc::new(Metrics::new().unwrap()));
    let output = hone(&["train", "--config", CONFIG, "--from-ledger", source, "--data", data]);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("in use by another process; stop its daemon"), "{stderr}");
    drop(daemon.unwrap());
}
