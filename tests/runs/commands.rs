//! `hone train`, `hone eval`, `hone rewards test` and `hone adapters` through the command line.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::lines;

pub(super) fn hone(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_hone"))
        .args(args)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap()
}

pub(super) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub(super) fn ok(args: &[&str]) -> Output {
    let output = hone(args);
    assert!(output.status.success(), "{args:?}\n{}", text(&output.stderr));
    output
}

const EXAMPLE: [&str; 3] = ["train", "--config", "configs/examples/multi-objective.toml"];

#[test]
fn an_interrupted_run_is_quiet_and_ends_with_130() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_hone"))
        .args(EXAMPLE)
        .args(["--steps", "100000", "--data", dir.path().to_str().unwrap()])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let steps = dir.path().join("run/steps.jsonl");
    // The file exists before the run can be interrupted.
    while std::fs::metadata(&steps).map_or(0, |file| file.len()) == 0 {
        assert!(child.try_wait().unwrap().is_none(), "the run ended before its first step");
        std::thread::sleep(Duration::from_millis(20));
    }
    let interrupted = Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(interrupted.unwrap().success());
    let output = child.wait_with_output().unwrap();
    let shown = text(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{shown}");
    assert!(!shown.contains("ERROR") && !shown.contains("failed"), "{shown}");
    assert!(text(&output.stdout).contains("report  "), "{}", text(&output.stdout));
}

#[test]
fn versions_without_their_ledger_are_refused_and_files_are_private() {
    let dir = tempfile::tempdir().unwrap();
    let run = [&EXAMPLE[..], &["--steps", "1", "--data", dir.path().to_str().unwrap()]].concat();
    ok(&run);
    let ledger = dir.path().join("ledger.redb");
    for name in ["ledger.redb", "adapters", "checkpoints"] {
        let mode = std::fs::metadata(dir.path().join(name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "{name}: {mode:o}");
    }
    let kept = std::fs::read(&ledger).unwrap();
    std::fs::remove_file(&ledger).unwrap();
    let refused = |missing: &str| {
        let output = hone(&run);
        let shown = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{shown}");
        assert!(shown.contains(missing) && shown.contains("from a backup"), "{shown}");
    };
    refused("no ledger.redb");
    std::fs::write(&ledger, kept).unwrap();
    std::fs::remove_dir_all(dir.path().join("checkpoints")).unwrap();
    refused("no checkpoint in checkpoints/");
}

#[test]
fn a_resumed_run_learns_and_is_evaluated() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().to_str().unwrap();
    let config = "configs/examples/multi-objective.toml";
    let first = ok(&["train", "--config", config, "--data", data, "--steps", "4"]);
    let shown = text(&first.stderr);
    assert!(shown.contains("step 4: held-out reward ") && shown.contains(", strict 0."), "{shown}");
    let steps = dir.path().join("run/steps.jsonl");
    assert_eq!(lines(&steps).len(), 4);

    let json = ok(&["train", "--config", config, "--data", data, "--steps", "24", "--json"]).stdout;
    let report: Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(report["ending"], "finished");
    assert_eq!(report["steps"].as_array().unwrap().len(), 24, "both processes' steps");
    let evaluated: Vec<u64> =
        report["held_out"].as_array().unwrap().iter().map(|e| e[0].as_u64().unwrap()).collect();
    assert_eq!(evaluated, [0, 4, 10, 20, 24]);
    let evaluations = lines(&dir.path().join("run/evaluations.jsonl"));
    assert_eq!(evaluations.len(), evaluated.len());
    for part in report["comparisons"].as_array().unwrap().iter().skip(1) {
        let logged = &evaluations[4][&format!("held_out/{}", part["name"].as_str().unwrap())];
        let (logged, mean) = (logged.as_f64().unwrap(), part["after"]["mean"].as_f64().unwrap());
        assert!((logged - mean).abs() < 1e-12, "{part}: {logged}");
    }
    let total = &report["comparisons"][0];
    let gained = total["difference"]["interval"]["low"].as_f64().unwrap();
    assert!(gained > 0.0, "held-out reward rises beyond its 95 % interval: {total}");
    let logged = lines(&steps);
    assert_eq!(
        logged.iter().map(|l| l["step"].as_u64().unwrap()).collect::<Vec<_>>(),
        (1..=24).collect::<Vec<_>>()
    );
    assert!(logged.iter().all(|l| l["kl"].is_number() && l["part/correct"].is_number()));
    // Each step has 8 of the 540 prompts.
    assert!((logged[23]["epoch"].as_f64().unwrap() - 24.0 * 8.0 / 540.0).abs() < 1e-12);
    let written = std::fs::read_to_string(dir.path().join("run/report/report.md")).unwrap();
    assert!(written.contains("\n| reward  ") && written.contains("\n| part correct "), "{written}");
    // The copy of the configuration is complete: with it alone, the run is finished already.
    let copy = dir.path().join("run/config.toml");
    assert!(report["configuration_file"].as_str().unwrap().ends_with("run/config.toml"));
    let saved = std::fs::read_to_string(&copy).unwrap();
    assert!(saved.starts_with("# Configuration of `hone train` from step 5 on."), "{saved}");
    assert!(saved.ends_with(report["configuration_text"].as_str().unwrap()));
    let changed = written.lines().find(|line| line.starts_with("| train.max\\_steps "));
    assert!(
        changed.is_some_and(|row| row.contains("| 24 "))
            && written.contains("optimizer = \"adamw\"")
    );
    let repeated = ok(&["train", "--config", copy.to_str().unwrap(), "--json"]).stdout;
    let repeated: Value = serde_json::from_slice(&repeated).unwrap();
    assert_eq!(repeated["steps"], report["steps"]);
    assert!(dir.path().join("run/best/adapter_model.safetensors").is_file());

    let args = ["eval", "--config", config, "--data", data, "--samples", "4", "--pass-at", "1,4"];
    let shown: Value =
        serde_json::from_slice(&ok(&[&args[..], &["--json"]].concat()).stdout).unwrap();
    assert_eq!((&shown["version"], &shown["part"]), (&24.into(), &"correct".into()));
    let at = |k: usize, policy: &str| shown["pass_at"][k][policy]["mean"].as_f64().unwrap();
    assert!(at(1, "base") > at(0, "base") && at(0, "active") > at(0, "base"), "{shown}");
    let samples = |policy: &str| shown[policy].as_array().unwrap().clone();
    let (active, base) = (samples("active_samples"), samples("base_samples"));
    assert_eq!((active.len(), base.len()), (4, 4));
    assert_eq!(active[0]["prompt"], base[0]["prompt"]);
    assert!(active[0]["parts"]["correct"].is_number(), "{shown}");
    let table = text(&ok(&["eval", "--config", config, "--data", data, "--show", "1"]).stdout);
    // The table wraps the question after some words.
    let question = &active[0]["prompt"].as_str().unwrap()[..12];
    assert!(table.contains("samples of the base model"), "{table}");
    assert!(table.contains("samples of policy version 24"), "{table}");
    assert_eq!(table.matches(question).count(), 2, "{table}");
}

#[test]
fn errors_name_the_key_or_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().to_str().unwrap();
    let config = "configs/examples/correctness.toml";
    for (args, expected) in [
        (vec!["train", "--steps", "3"], "dataset.path is missing"),
        (vec!["train", "--dataset", "no-such.jsonl", "--steps", "3"], "no-such.jsonl"),
        (
            vec!["train", "--dataset", "datasets/additions.jsonl"],
            "train.max_steps and train.epochs are 0: one of them must be set",
        ),
        (
            vec!["train", "--dataset", "datasets/additions.jsonl", "--steps", "3"],
            "rollout.dataset_route = `default` has no reward that can score a completion",
        ),
        (
            vec!["eval", "--config", config, "--pass-at", "9"],
            "--pass-at is 9: it must be from 1 to",
        ),
        (vec!["eval", "--config", config, "--part", "x"], "--part is x: it must be one of correct"),
    ] {
        let output = hone(&[&args[..], &["--data", data]].concat());
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(text(&output.stderr).contains(expected), "{args:?}: {}", text(&output.stderr));
    }
}

#[test]
fn versions_are_listed_and_exported() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let data = data.to_str().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let config = "configs/examples/multi-objective.toml";
    ok(&["train", "--config", config, "--data", data, "--steps", "2"]);

    let listed = ok(&["adapters", "list", "--data", data, "--json"]).stdout;
    let listed: Vec<Value> = serde_json::from_slice(&listed).unwrap();
    let states: Vec<&str> = listed.iter().map(|v| v["state"].as_str().unwrap()).collect();
    assert_eq!(states.len(), 3, "the base and one a step: {states:?}");
    assert_eq!(states[2], "active");
    assert!(text(&ok(&["adapters", "list", "--data", data]).stdout).contains("active"));

    let export = |more: &[&str]| {
        let mut args = vec!["adapters", "export", "--data", data];
        args.extend(more);
        hone(&args)
    };
    let (merged, peft) = (at("merged"), at("peft"));
    assert!(export(&["--merged", &merged]).status.success());
    for file in ["config.json", "tokenizer.json", "model.safetensors"] {
        assert!(Path::new(&merged).join(file).is_file(), "{file}");
    }
    assert!(export(&["--peft", &peft, "--version", "1"]).status.success());
    assert!(Path::new(&peft).join("adapter_config.json").is_file());
    // The exported model can be trained on.
    ok(&["train", "--config", config, "--model", &merged, "--data", &at("on"), "--steps", "1"]);

    for (args, code, expected) in [
        (&["--peft", &peft][..], 1, "File exists"),
        (&["--merged", &merged], 1, "merged"),
        (&["--peft", "unused", "--version", "9"], 1, "the versions go from 0 to 2"),
        (&["--peft", "unused", "--version", "0"], 1, "is the base model itself"),
        (&[], 2, "--merged"),
    ] {
        let output = export(args);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
        assert!(stderr.contains(expected), "{args:?}: {stderr}");
    }
}

#[test]
fn memory_is_explained_without_a_run() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().to_str().unwrap();
    let config = "configs/examples/multi-objective.toml";
    let explained = ok(&["train", "--config", config, "--data", data, "--explain-memory"]);
    let text = text(&explained.stdout);
    assert!(text.contains("MiB") && text.contains("base weights"), "{text}");
    assert!(!dir.path().join("run").exists(), "nothing was run");
}

#[test]
fn a_daemon_that_does_not_fit_is_explained_and_refused() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().to_str().unwrap();
    let explain = |config: &str| {
        let args = ["serve", "--config", config, "--data", data, "--explain-memory", "--json"];
        serde_json::from_slice::<Value>(&ok(&args).stdout).unwrap()
    };
    let sizes = |plan: &Value, names: &[&str]| -> Vec<u64> {
        names.iter().map(|name| plan[name].as_u64().unwrap()).collect()
    };
    let fits = explain("configs/default.toml");
    let [start, generation, step, usual, staging, peak] =
        sizes(&fits, &["start", "generation", "step", "usual_step", "staging", "peak"])[..]
    else {
        panic!("{fits}")
    };
    assert_eq!(peak, start + generation + step.max(usual + staging));
    let parts = fits["parts"].as_array().unwrap();
    assert!(parts.iter().any(|p| p["part"] == "serving weights" && p["phase"] == "start"));
    assert_eq!(fits["refused"], Value::Null);
    // The native engine alone holds the trainer's weights and adapters, but no other copy.
    let native = ["serve", "--backend", "native", "--data", data, "--explain-memory", "--json"];
    let native: Value = serde_json::from_slice(&ok(&native).stdout).unwrap();
    for (part, held) in
        [("serving weights", false), ("conversations", false), ("sampler cache", true)]
    {
        let found = native["parts"].as_array().unwrap().iter().find(|p| p["part"] == part);
        assert_eq!(found.unwrap()["bytes"] != 0, held, "{part}: {native}");
    }
    assert!(native["start"].as_u64() < fits["start"].as_u64());
    assert!(!dir.path().join(hone::app::LEDGER).exists(), "nothing was started");

    let config = dir.path().join("long.toml");
    std::fs::write(&config, "[train]\nmax_tokens = 16000000\n").unwrap();
    let config = config.to_str().unwrap();
    let reason = explain(config)["refused"].as_str().unwrap().to_owned();
    assert!(reason.starts_with("`train.max_tokens` is 16000000, for which"), "{reason}");
    let refused = hone(&["serve", "--config", config, "--data", data, "--bind", "127.0.0.1:0"]);
    let stderr = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("error: `train.max_tokens` is 16000000, for which"), "{stderr}");
}

#[test]
fn device_memory_is_explained_and_refused() {
    let (device, libraries) = (["--backend", "native"], crate::fake::command(&crate::fake::ALL));
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("hone.toml");
    std::fs::write(&file, "[model]\ndevice = \"cuda:0\"\n[rollout]\nmax_batch_tokens = 1024\n")
        .unwrap();
    let run = |args: &[&str], settings: &[(&str, &str)]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hone"));
        command.args(args).args(device).arg("--config").arg(&file).arg("--data").arg(dir.path());
        if let Some((libraries, _)) = &libraries {
            let set = libraries.get_envs();
            command.envs(set.filter_map(|(name, value)| Some((name, value?))));
        }
        command.envs(settings.iter().copied()).output().unwrap()
    };
    let serve = ["serve", "--bind", "127.0.0.1:0"];
    let explain = ["serve", "--explain-memory"];
    // The reason is the same as at the start.
    let none = [("HONE_FAKE_DEVICES", "0"), ("LD_LIBRARY_PATH", "")];
    for settings in [&none[..1], &none[1..]] {
        let refused = [&serve[..], &explain[..]].map(|args| run(args, settings));
        let reasons = refused.map(|output| {
            assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
            text(&output.stderr).lines().last().unwrap().to_owned()
        });
        assert!(reasons[0].starts_with("error: `model.device`: "), "{reasons:?}");
        assert_eq!(reasons[0], reasons[1]);
    }
    if libraries.is_none() {
        return;
    }
    let explained = text(&run(&explain, &[]).stdout);
    for part in ["the model", "keys and values", "training passes", "left to the driver", "free"] {
        assert!(explained.contains(&format!("\ncuda:0: {part} ")), "{part}: {explained}");
    }
    for command in ["serve", "train"] {
        let output = run(&[command, "--explain-memory", "--json"], &[]);
        let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
        let parts = plan["device"]["parts"].as_array().unwrap();
        let bytes: u64 = parts.iter().map(|part| part["bytes"].as_u64().unwrap()).sum();
        assert!(bytes > 0 && bytes < 1 << 24, "{plan}");
        assert_eq!((&plan["device"]["free"], &plan["refused"]), (&(1 << 24).into(), &Value::Null));
    }
    // A plan that does not fit is refused with the same words, before the weights are read.
    for memory in ["1000000", "6000000"] {
        let settings = [("HONE_FAKE_MEMORY", memory)];
        let output = run(&[&explain[..], &["--json"]].concat(), &settings);
        let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
        let reason = plan["refused"].as_str().unwrap();
        assert!(reason.starts_with("`model.device`: "), "{reason}");
        assert!(reason.contains(" MiB of device memory are needed, but "), "{reason}");
        assert!(reason.contains("keys and values ") && reason.ends_with(" to less"), "{reason}");
        let refused = run(&serve, &settings);
        assert_eq!(refused.status.code(), Some(1));
        assert!(text(&refused.stderr).contains(&format!("error: {reason}")), "{reason}");
    }
}

#[test]
fn rewards_are_tested_on_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("completions.jsonl");
    let rows = [
        r#"{"prompt":"2 + 3 = ?","completion":"<reasoning>2 + 3 = 5</reasoning><answer>5</answer>","answer":5}"#,
        r#"{"prompt":"2 + 3 = ?","completion":"six","answer":5}"#,
        r#"{"prompt":"2 + 3 = ?","completion":"<answer>5</answer>"}"#,
    ];
    std::fs::write(&file, rows.join("\n")).unwrap();
    let config = "configs/examples/multi-objective.toml";
    let args = ["rewards", "test", file.to_str().unwrap(), "--config", config];
    let shown: Value =
        serde_json::from_slice(&ok(&[&args[..], &["--json"]].concat()).stdout).unwrap();
    let correct: Vec<&Value> =
        shown["samples"].as_array().unwrap().iter().map(|s| &s["parts"]["correct"]).collect();
    assert_eq!(
        correct,
        [&Value::from(1.0), &Value::from(0.0), &Value::Null],
        "missing is not zero"
    );
    assert_eq!(shown["parts"]["correct"]["missing"], 1);
    let table = text(&ok(&args).stdout);
    assert!(table.contains("2 + 3 = ?") && table.contains("correct"), "{table}");

    std::fs::write(&file, "{\"prompt\":\"x\"}\n").unwrap();
    let output = hone(&args);
    let error = text(&output.stderr);
    assert!(
        !output.status.success() && error.contains("line 1: `completion` is missing"),
        "{error}"
    );
}

#[test]
fn rows_in_trls_form_are_tested_without_a_configuration() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let file = dir.path().join(name);
        std::fs::write(&file, text).unwrap();
        file.to_str().unwrap().to_owned()
    };
    let prompt = r#"[{"role":"system","content":"Think."},{"role":"user","content":"2 + 3 = ?"}]"#;
    let good = "<reasoning>r</reasoning><answer>5</answer>";
    let rows = [
        format!(
            r#"{{"prompt":{prompt},"completion":[{{"role":"assistant","content":"{good}"}}],"answer":"5"}}"#
        ),
        format!(
            r#"{{"prompt":{prompt},"completion":{{"role":"assistant","content":"5"}},"answer":"5"}}"#
        ),
        format!(
            r#"{{"messages":[{{"role":"user","content":"2 + 3 = ?"}},{{"role":"assistant","content":"{good}"}}],"answer":"6"}}"#
        ),
    ];
    let run = |args: &[&str]| {
        let data = dir.path().join("data");
        Command::new(env!("CARGO_BIN_EXE_hone"))
            .args([&["rewards", "test"], args].concat())
            .env("HONE_DATA_DIR", data)
            .output()
            .unwrap()
    };
    let array = write("rows.json", &format!("[{}]", rows.join(",")));
    for file in [write("rows.jsonl", &rows.join("\n")), array] {
        let output = run(&[&file, "--json"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let shown: Value = serde_json::from_slice(&output.stdout).unwrap();
        let samples = shown["samples"].as_array().unwrap();
        let of = |part: &str| -> Vec<f64> {
            samples.iter().map(|s| s["parts"][part].as_f64().unwrap()).collect()
        };
        // Without tags the whole completion is the answer.
        assert_eq!(of("correct"), [1.0, 1.0, 0.0]);
        assert_eq!(of("format"), [1.0, 0.0, 1.0]);
        assert_eq!(samples[0]["prompt"], "2 + 3 = ?");
        assert_eq!(samples[2]["completion"], good);
        assert_eq!(samples[0]["extracted"]["correct"], "5");
        assert_eq!(samples[1]["extracted"]["correct"], "5");
        let table = text(&run(&[&file]).stdout);
        assert!(table.lines().next().unwrap().contains("found"), "{table}");
    }
    let file = write("rows.jsonl", &rows[0]);
    let chosen = run(&[&file, "--json", "--kind", "exact_match", "--preset", "question_answering"]);
    let chosen: Value = serde_json::from_slice(&chosen.stdout).unwrap();
    assert_eq!(chosen["parts"]["exact_match"]["estimate"]["mean"], 1.0);

    for (row, code, expected) in [
        (r#"{"completion":[{"role":"user","content":"5"}]}"#, 1, "has no message with the role"),
        (r#"{"completion":5}"#, 1, "line 1: `completion` is 5: it must be a text, a message or"),
        (r#"{"completion":"5","prompt":[{"role":"user"}]}"#, 1, "line 1: `prompt` is no list of"),
    ] {
        let output = run(&[&write("wrong.jsonl", row)]);
        assert_eq!(output.status.code(), Some(code), "{row}");
        assert!(text(&output.stderr).contains(expected), "{row}: {}", text(&output.stderr));
    }
    let output = run(&[&file, "--kind", "exact_mach"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("--kind exact_mach: kind is"));
}

#[test]
fn every_example_configuration_is_valid() {
    let mut files = Vec::new();
    for folder in ["configs/examples", "configs/examples/guides"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
        files.extend(std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()));
    }
    files.retain(|path| path.is_file());
    assert_eq!(files.len(), 19);
    for file in files {
        let mut args = vec!["validate", "--config", file.to_str().unwrap()];
        if file.ends_with("memory-optimized.toml") {
            // Its limit of 256 tokens needs a tokenizer with a larger vocabulary than the embedded one.
            args.push("--config-only");
        }
        ok(&args);
    }
}

#[test]
fn a_self_judge_is_tested_without_a_server() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("hone.toml");
    let judged = dir.path().join("completions.jsonl");
    std::fs::write(
        &config,
        "[[route]]\nname = \"default\"\n[[route.reward]]\nname = \"judged\"\nkind = \"judge\"\n\
         base_url = \"self\"\nrubric = \"custom\"\ntemplate = \"What is 2 + 5?{% if not completion %}!{% endif %}\"\n",
    )
    .unwrap();
    let row = r#"{"prompt": "What is 2 + 3?", "completion": "5"}"#;
    std::fs::write(&judged, format!("{row}\n{row}\n")).unwrap();
    for backend in ["mistralrs", "native"] {
        let output = Command::new(env!("CARGO_BIN_EXE_hone"))
            .args(["rewards", "test", judged.to_str().unwrap(), "--json", "--config"])
            .arg(&config)
            .env("HONE_DATA_DIR", dir.path().join(backend))
            .env("HONE_ENGINE_BACKEND", backend)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        let scored = text(&output.stdout);
        let rows = serde_json::from_str::<Value>(&scored).unwrap()["samples"].clone();
        assert_eq!(rows.as_array().unwrap().len(), 2, "{scored}");
        // The embedded model only adds, so it answers every judge prompt with a number.
        let judged = rows[0]["parts"]["judged"].as_f64().unwrap();
        assert!((0.0..=1.0).contains(&judged), "{scored}");
        assert_eq!(rows[1]["parts"]["judged"], judged, "the same question has the same answer");
    }
}

#[test]
fn a_run_has_the_steps_of_its_epochs() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("hone.toml");
    let rows: String = (0..9)
        .map(|n| format!("{{\"prompt\": \"What is {n} + 2?\", \"answer\": \"\"}}\n"))
        .collect();
    std::fs::write(dir.path().join("prompts.jsonl"), rows).unwrap();
    let text = format!(
        "[dataset]\npath = '{0}/prompts.jsonl'\n[rollout]\nmax_tokens = 40\ngroup_size = 4\n\
         [policy]\npromotion = 'direct'\npublish_every = 1\n\
         [train]\nsamples_per_step = 8\nschedule = 'linear'\nepochs = 0.5\n\
         [[route]]\nname = 'default'\n[[route.reward]]\nname = 'size'\nkind = 'length'\nideal = 12\nspread = 12\n",
        dir.path().display()
    );
    std::fs::write(&config, &text).unwrap();
    let data = dir.path().join("data");
    let args = ["train", "--config", config.to_str().unwrap(), "--data", data.to_str().unwrap()];
    let half = ok(&args);
    assert!(
        self::text(&half.stderr).contains("0.5 epochs of 9 prompts: 3 steps of 8 completions"),
        "{}",
        self::text(&half.stderr)
    );
    let log = data.join("run/steps.jsonl");
    assert_eq!(lines(&log).last().unwrap()["step"], 3);
    ok(&[&args[..], &["--epochs", "1"]].concat());
    let steps = lines(&log);
    assert_eq!(steps.last().unwrap()["step"], 5);
    assert_eq!(steps[3]["epoch"], 4.0 * 8.0 / 36.0);
    assert!(steps[4]["learning_rate"].as_f64() < steps[3]["learning_rate"].as_f64(), "linear");
}
