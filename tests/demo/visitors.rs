//! The README's first loop: `hone serve`, and `hone demo --server` in a second terminal.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use serde_json::Value;

/// A running `hone serve`, killed when dropped.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

async fn get(url: &str) -> String {
    reqwest::get(url).await.unwrap().text().await.unwrap()
}

/// Lets the demo's users visit a server with a configuration for some steps. Returns the report, whether the
/// reward rose, and the metrics of the server.
async fn visited(config: &str, steps: u64) -> (Value, bool, String) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("hone.toml");
    std::fs::write(&file, config).unwrap();
    let mut server = Command::new(env!("CARGO_BIN_EXE_hone"));
    server.args(["serve", "--bind", "127.0.0.1:0", "--config"]).arg(&file);
    server.arg("--data").arg(dir.path().join("data")).stdout(Stdio::piped());
    // With the default priority, other tests would leave no processor time to the trainer.
    let mut server = Server(server.env("HONE_TRAIN_PRIORITY", "normal").spawn().unwrap());
    let mut line = String::new();
    BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let url = line.trim().strip_prefix("listening on ").unwrap();
    let report = dir.path().join("report.json");
    let output = Command::new(env!("CARGO_BIN_EXE_hone"))
        .args(["demo", "--server", url, "--steps", &steps.to_string(), "--report"])
        .arg(&report)
        .output()
        .unwrap();
    let shown = String::from_utf8_lossy(&output.stderr).into_owned();
    let text = std::fs::read_to_string(&report);
    assert!(text.is_ok(), "{text:?}: {shown}");
    let text = text.unwrap();
    let status: Value = serde_json::from_str(&get(&format!("{url}/admin/train")).await).unwrap();
    assert_ne!(status["state"], "paused", "the server learns on: {shown}");
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["failed_requests"], 0, "{shown}");
    (report, output.status.success(), get(&format!("{url}/metrics")).await)
}

fn decisions(report: &Value) -> Vec<String> {
    let decisions = report["versions"]["decisions"].as_array().unwrap();
    decisions.iter().map(|decision| decision["detail"].as_str().unwrap().to_owned()).collect()
}

fn value(metrics: &str, series: &str) -> f64 {
    let line = metrics.lines().find(|line| line.starts_with(series));
    line.and_then(|line| line.rsplit(' ').next()).map_or(0.0, |value| value.parse().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_default_configuration_learns_from_thumbs() {
    let (report, improved, metrics) = visited("", 32).await;
    assert!(improved, "{report}");
    assert!(report["versions"]["promoted"].as_u64().unwrap() >= 2, "{report}");
    let rate = value(&metrics, "hone_train_learning_rate ");
    assert!(rate > 1e-3, "the rate follows the size of the model: {rate}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_example_with_feedback_alone_learns() {
    let config = include_str!("../../configs/examples/feedback.toml");
    let (report, improved, _) = visited(config, 40).await;
    assert!(improved, "{report}");
    assert!(report["versions"]["promoted"].as_u64().unwrap() >= 2, "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_example_with_a_canary_decides_and_graders_go_on() {
    let config = include_str!("../../configs/examples/canary.toml");
    // A version takes 5 to 20 steps, as many as ratings wait for; the second one must have ended.
    let (report, _, metrics) = visited(config, 26).await;
    let decisions = decisions(&report);
    let by_ratings = |detail: &&String| detail.starts_with("canary/ratings: ");
    assert!(decisions.iter().filter(by_ratings).count() >= 2, "{decisions:?}");
    assert!(decisions.iter().any(|detail| detail.contains("not worse: ")), "{decisions:?}");
    // More groups than two steps for each version: those that came while a canary ran.
    let displaced = value(&metrics, "hone_train_dropped_groups_total{reason=\"displaced\"}");
    assert!(displaced > 0.0, "{decisions:?}");
}
