//! The tracker with a server of MLflow's API that keeps what it gets. `tests/services/run.py` uses a real one.

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, Uri};
use axum::response::{IntoResponse as _, Response};
use parking_lot::Mutex;

use hone_core::config::Secret;
use hone_core::types::StepRecord;
use hone_store::{Op, StoreConfig};

use super::*;

/// The path, authorization and body of each request.
#[derive(Clone, Default)]
struct Server(Arc<Mutex<Vec<(String, String, Value)>>>);

async fn answer_of(
    State(Server(got)): State<Server>,
    uri: Uri,
    headers: HeaderMap,
    body: String,
) -> Response {
    let path = uri.path().trim_start_matches("/api/2.0/mlflow/").to_owned();
    let key = headers.get("authorization").map_or("", |key| key.to_str().unwrap()).to_owned();
    let body: Value = serde_json::from_str(&body).unwrap_or_default();
    let refused = body["run_id"] == "lost" || body["params"].is_array();
    let answer = match path.as_str() {
        "experiments/get-by-name" => (StatusCode::NOT_FOUND, json!({"message": "unknown"})),
        "experiments/create" => (StatusCode::OK, json!({"experiment_id": "7"})),
        "runs/create" => (StatusCode::OK, json!({"run": {"info": {"run_id": "r1"}}})),
        _ if refused => (StatusCode::BAD_REQUEST, json!({"message": "refused"})),
        _ => (StatusCode::OK, json!({})),
    };
    got.lock().push((path, key, body));
    (answer.0, answer.1.to_string()).into_response()
}

impl Server {
    fn take(&self) -> Vec<(String, String, Value)> {
        std::mem::take(&mut *self.0.lock())
    }
}

fn config(data: &Path, address: &str) -> Config {
    let mut config = Config::default();
    data.clone_into(&mut config.data.dir);
    config.server.client_keys = vec!["sesame".to_owned()];
    config.run.mlflow = Some(MlflowServer {
        address: address.to_owned(),
        experiment: "tests".to_owned(),
        run_id: None,
        token: Some(Secret::new("token")),
        user: None,
    });
    config
}

fn step(step: u64) -> Op {
    let metrics = [("part/a b*".to_owned(), 0.5), ("kl".to_owned(), f64::NAN)].into();
    Op::Step(Box::new(StepRecord { step, groups: Vec::new(), metrics, created: 9 }))
}

/// Runs a tracker until its end.
async fn track(config: &Config, store: &Store, metrics: &Arc<Metrics>) {
    let tracker = Tracker::start(config, ("hone serve", "tiny"), Some(store), metrics).unwrap();
    tracker.unwrap().finish(RunStatus::Killed).await;
}

#[tokio::test]
async fn an_outage_loses_no_step_and_a_restart_continues_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let metrics = Arc::new(Metrics::new().unwrap());
    let file = dir.path().join("ledger.redb");
    let store = Store::open(&file, &StoreConfig::default(), Arc::clone(&metrics)).unwrap();
    store.commit_now(vec![step(1), step(2)]).await.unwrap();
    track(&config(dir.path(), "http://127.0.0.1:9"), &store, &metrics).await;
    assert_eq!(metrics.tracker_failed_requests.get(), 1);

    let server = Server::default();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let config = config(dir.path(), &format!("http://{}", listener.local_addr().unwrap()));
    let app = Router::new().fallback(answer_of).with_state(server.clone());
    tokio::spawn(async move { axum::serve(listener, app).await });
    track(&config, &store, &metrics).await;
    let got = server.take();
    assert!(got.iter().all(|(_, key, _)| key == "Bearer token"));
    let paths: Vec<&str> = got.iter().map(|(path, ..)| path.as_str()).collect();
    let logged = |wanted: &str| {
        got.iter()
            .find(|(.., body)| body[wanted].is_array())
            .map(|(.., body)| body[wanted].clone())
            .unwrap()
    };
    assert_eq!(paths[..3], ["experiments/get-by-name", "experiments/create", "runs/create"]);
    assert_eq!(paths.last(), Some(&"runs/update"));
    assert_eq!(got.last().unwrap().2["status"], "KILLED");
    let steps = logged("metrics");
    assert_eq!(steps[1], json!({"key": "part/a b_", "value": 0.5, "timestamp": 9, "step": 1}));
    assert_eq!(steps[2]["value"], "NaN");
    let parameters = logged("params");
    assert!(
        parameters.as_array().unwrap().contains(&json!({"key": "train.lora.r", "value": "16"}))
    );
    assert!(!format!("{got:?}").contains("sesame"));
    assert!(metrics.tracker_failed_requests.get() > 1, "refused parameters are counted");

    // A restart sends only the new step, and to the same run. A run that the server does not have is replaced.
    store.commit_now(vec![step(3)]).await.unwrap();
    track(&config, &store, &metrics).await;
    let got = server.take();
    assert_eq!(
        (&*got[0].0, &got[0].2),
        ("runs/update", &json!({"run_id": "r1", "status": "RUNNING"}))
    );
    assert_eq!(got[1].2["metrics"][0]["step"], 3);
    let sent = Sent { run_id: "lost".to_owned(), step: 3, ..Sent::default() };
    std::fs::write(Sent::file(dir.path()), serde_json::to_vec(&sent).unwrap()).unwrap();
    track(&config, &store, &metrics).await;
    let steps = server.take().into_iter().find(|(.., body)| body["metrics"].is_array()).unwrap();
    assert_eq!(
        (steps.2["run_id"].as_str(), &steps.2["metrics"][0]["step"]),
        (Some("r1"), &json!(1))
    );
}

#[test]
fn the_logs_of_a_run_are_read_after_a_step() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("steps.jsonl");
    std::fs::write(
        &file,
        "{\"step\":0,\"time_ms\":1}\n{\"step\":4,\"time_ms\":2,\"kl\":null}\n{\"st",
    )
    .unwrap();
    let mut log = RunLog::default();
    let mut steps =
        |after| log.after(&file, after).iter().map(|line| line.step).collect::<Vec<_>>();
    assert_eq!((steps(None), steps(Some(0)), steps(Some(4))), (vec![0, 4], vec![4], vec![]));
    // Everything was sent, so the file is read again only when it has grown.
    assert!(steps(None).is_empty());
    let mut end = std::fs::OpenOptions::new().append(true).open(&file).unwrap();
    std::io::Write::write_all(&mut end, b"ep\":5,\"time_ms\":3}\n").unwrap();
    assert_eq!(steps(Some(4)), [5]);
    assert!(RunLog::default().after(&dir.path().join("none"), None).is_empty());
}
