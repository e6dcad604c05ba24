//! Exit codes of the binary, and its behavior when the reader of its output closes the pipe.
#![expect(clippy::unwrap_used, reason = "tests may fail loudly")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

use serde_json::Value;

use hone_core::metrics::Metrics;
use hone_store::{Store, StoreConfig};

fn hone(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hone"));
    command.args(args);
    command
}

fn closed_pipe() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

async fn create_ledger(data: &Path) {
    std::fs::create_dir(data).unwrap();
    let metrics = Arc::new(Metrics::new().unwrap());
    let ledger = data.join(hone::app::LEDGER);
    let store = Store::open(&ledger, &StoreConfig::default(), metrics).unwrap();
    store.close().await.unwrap();
}

#[tokio::test]
async fn a_command_whose_output_is_closed_ends_quietly_with_code_0() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    create_ledger(&data).await;
    let data = data.to_str().unwrap();
    for args in [
        &["--help"][..],
        &["rewards", "list"],
        &["rewards", "--help"],
        &["validate"],
        &["db", "stats", "--data", data],
        &["db", "check", "--data", data],
        &["db", "export", "--data", data],
        &["adapters", "list", "--data", data],
    ] {
        let output = hone(args).stdout(closed_pipe()).output().unwrap();
        assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""), "{args:?}");
    }
}

/// The libraries of CUDA are opened by this command only, if they are there.
#[test]
fn the_device_is_described_and_the_binary_needs_no_cuda_library() {
    let output = hone(&["device"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0));
    for name in ["driver", "NVRTC", "cuBLASLt", "device"] {
        assert!(text.contains(name), "{text}");
    }
    let Ok(output) = Command::new("readelf").args(["-d", env!("CARGO_BIN_EXE_hone")]).output()
    else {
        return hone_core::testing::skip("no readelf");
    };
    let text = String::from_utf8_lossy(&output.stdout).to_lowercase();
    let needed: Vec<&str> = text.lines().filter(|line| line.contains("(needed)")).collect();
    let is_cuda = |line: &&str| ["cuda", "nvrtc", "cublas"].iter().any(|name| line.contains(name));
    assert!(!needed.is_empty() && !needed.iter().any(is_cuda), "{needed:?}");
}

#[test]
fn a_reader_may_close_the_pipe_after_the_first_line() {
    let mut child =
        hone(&["rewards", "list"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut first = [0];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""));
}

#[test]
fn an_error_before_any_output_is_reported_despite_a_closed_pipe() {
    let output = hone(&["db", "stats", "--data", "no-such-directory"])
        .stdout(closed_pipe())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).starts_with("error: "), "{}", stderr(&output));
    assert!(
        !Path::new("no-such-directory").exists(),
        "reading statistics must not create a ledger"
    );
}

#[test]
fn usage_errors_have_code_2_and_failures_code_1() {
    let dir = tempfile::tempdir().unwrap();
    let config = |name: &str, text: &str| {
        let file = dir.path().join(name);
        std::fs::write(&file, text).unwrap();
        file.to_str().unwrap().to_owned()
    };
    let invalid = config("invalid.toml", "[train]\nbeta = -1.0\n");
    let epochs = config("epochs.toml", "[train]\nepochs = 1.5\n");
    let stage = "[dataset]\npath = \"a.jsonl\"\n[[dataset.stage]]\nfilter = \"level =\"\n";
    let filter = config("filter.toml", stage);
    let script = config("script.py", "args = GRPOConfig(beta='high')\n");
    let names = config("names.toml", "[train]\nnum_generations = 8\n");
    for (args, code, text) in [
        (&["serve", "--no-such-flag"][..], 2, "--no-such-flag"),
        (&["adapters", "export"], 2, "--merged"),
        (&["validate", "--config", &invalid], 2, "train.beta"),
        (&["eval", "--config", &invalid], 2, "train.beta"),
        (&["validate", "--config", &filter], 2, "filter"),
        (&["serve", "--config", &epochs], 2, "train.epochs is 1.5: it must be 0 for `hone serve`"),
        (&["train", "--epochs", "1", "--steps", "2"], 2, "--steps"),
        (&["train", "--epochs", "nan"], 2, "train.epochs is NaN: it must be from 0 to"),
        (&["validate", "--config", "no-such-file.toml"], 2, "no-such-file.toml"),
        (&["import-trl", "no-such-file.py"], 2, "no-such-file.py"),
        (&["import-trl", &script], 2, "line 1: beta is \"high\": it must be a number"),
        (&["validate", "--config", &names], 2, "rollout.group_size"),
        (&["adapters", "list", "--data", "no-such-directory"], 1, "no-such-directory"),
    ] {
        let output = hone(args).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(text), "{args:?}: {}", stderr(&output));
    }
}

/// Each is one error of the configuration, which names the key.
#[test]
fn a_device_that_is_not_there_is_refused_with_code_2() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("hone.toml");
    let refused = |device: &str, backend: &str, expected: &str| {
        std::fs::write(&file, format!("[model]\ndevice = \"{device}\"\n")).unwrap();
        let mut command = hone(&["serve", "--bind", "127.0.0.1:0", "--backend", backend]);
        let command = command.arg("--config").arg(&file).arg("--data").arg(dir.path().join("data"));
        let output = command.env("HONE_LOG_LEVEL", "error").output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{device}: {}", stderr(&output));
        let (text, lines) = (stderr(&output), stderr(&output).lines().count());
        assert!(lines == 1 && text.starts_with("error: ") && text.contains(expected), "{text}");
    };
    refused("gpu", "native", "model.device is \"gpu\": it must be \"auto\"");
    let backend = "model.device is \"cuda:0\", which needs engine.backend = \"native\"";
    refused("cuda:0", "mistralrs", backend);
    if hone_cuda::CudaLibrary::Driver.find().is_ok() {
        return hone_core::testing::skip("a driver is installed, so it cannot be missing");
    }
    refused("cuda:0", "native", "`model.device`: CUDA driver not found: looked for libcuda.so");
}

#[test]
fn an_imported_configuration_is_valid() {
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("train.py");
    std::fs::write(&script, "args = GRPOConfig(num_generations=4, bf16=True)\n").unwrap();
    let printed = hone(&["import-trl"]).arg(&script).output().unwrap();
    assert_eq!(printed.status.code(), Some(0), "{}", stderr(&printed));
    assert!(stderr(&printed).contains("note: bf16: "), "{}", stderr(&printed));
    let file = dir.path().join("hone.toml");
    let written = hone(&["import-trl", "--output"]).arg(&file).arg(&script).output().unwrap();
    assert_eq!((written.status.code(), written.stdout.as_slice()), (Some(0), &b""[..]));
    assert_eq!(std::fs::read(&file).unwrap(), printed.stdout);
    let valid = hone(&["validate", "--config"]).arg(&file).output().unwrap();
    assert_eq!(valid.status.code(), Some(0), "{}", stderr(&valid));
}

/// The status line of `GET /livez`.
fn livez(address: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(b"GET /livez HTTP/1.1\r\nhost: hone\r\nconnection: close\r\n\r\n").unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    response.lines().next().unwrap_or_default().to_owned()
}

#[test]
fn a_daemon_whose_output_is_closed_keeps_serving() {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = hone(&["serve", "--bind", "127.0.0.1:0", "--data"])
        .arg(dir.path())
        .env("HONE_TRAIN_ENABLED", "false")
        .env("HONE_LOG_FORMAT", "json")
        .stdout(closed_pipe())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut log = BufReader::new(daemon.stderr.take().unwrap()).lines().map(Result::unwrap);
    let mut event = |message: &str| {
        let events = log.by_ref().filter_map(|line| serde_json::from_str::<Value>(&line).ok());
        let mut events = events.filter(|event| event["message"] == message);
        events.next().unwrap_or_else(|| panic!("the daemon ended before it logged {message:?}"))
    };
    let address = event("ready")["addr"].as_str().unwrap().to_owned();
    event("cannot print the address");
    assert_eq!(livez(&address), "HTTP/1.1 200 OK");
    assert_eq!(daemon.try_wait().unwrap(), None, "the daemon has ended");
    let pid = daemon.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    assert_eq!(daemon.wait().unwrap().code(), Some(0));
}

#[tokio::test]
async fn an_export_is_imported_and_no_file_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    create_ledger(Path::new(&path("data"))).await;
    let (data, copy, lines) = (path("data"), path("copy"), path("lines.jsonl"));
    let export = ["db", "export", "--data", &data, "--output", &lines];
    assert!(hone(&export).status().unwrap().success());
    let refused = |args: &[&str], code, reason: &str| {
        let output = hone(args).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}");
        assert!(stderr(&output).contains(reason), "{}", stderr(&output));
    };
    refused(&export, 1, "lines.jsonl cannot be written");
    let import = ["db", "import", &lines, "--data", &copy];
    assert!(hone(&import).status().unwrap().success());
    assert!(hone(&["db", "check", "--data", &copy]).status().unwrap().success());
    refused(&import, 1, "exists already, and is not replaced");
    let columns = ["db", "export", "--data", &data, "--columns", "label"];
    refused(&[&columns[..], &["--format", "parquet"]].concat(), 2, "--output");
    refused(&["db", "export", "--data", &data, "--part", "thumbs"], 2, "--columns");
    refused(&columns, 0, "note: 0 rows written");
    refused(&["db", "inspect", "--data", &data], 1, "needs a terminal");
}

/// The shells' own parsers accept the scripts; a shell that is not installed is skipped.
#[test]
fn the_completions_are_scripts_of_their_shells() {
    let dir = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = hone(&["completions", shell]).output().unwrap();
        let script = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && script.contains("import-trl"), "{shell}");
        let file = dir.path().join(shell);
        std::fs::write(&file, script).unwrap();
        if !["bash", "zsh", "fish"].contains(&shell) {
            continue;
        }
        match Command::new(shell).arg("-n").arg(&file).output() {
            Ok(checked) => assert!(checked.status.success(), "{shell}: {}", stderr(&checked)),
            Err(_) => hone_core::testing::skip(&format!("completions: {shell} is not installed")),
        }
    }
    assert_eq!(hone(&["completions", "tcsh"]).output().unwrap().status.code(), Some(2));
}

#[test]
fn every_command_has_a_manual_page() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("man1");
    let output = hone(&["man", "--to", to.to_str().unwrap()]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    for (page, flag) in
        [("hone", "completions"), ("hone-serve", "explain"), ("hone-db-check", "data")]
    {
        let text = std::fs::read_to_string(to.join(format!("{page}.1"))).unwrap();
        assert!(text.contains(".TH") && text.contains(flag), "{page}: {text}");
    }
}
