//! Sends the users' requests and ratings to a daemon.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::crowd::{Crowd, CrowdCounts, ObservedAnswer, UserVisit};
use crate::demo::client::{Client, ClientError, UserRequest};
use crate::demo::task::MAX_TOKENS;

/// Requests at a time.
const PARALLEL: usize = 4;
/// Longest pause. Prompts of which nothing comes must not end the traffic.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// How often a pausing user looks whether to go on.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);
/// How often the trainer's load is read.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// A pause after a failed request.
const AFTER_FAILURE: Duration = Duration::from_millis(50);

/// Sends every request of `crowd` with `metadata.task` = `task`. With `most_waiting`, users pause while that
/// many prompts and groups wait for the trainer, except during a canary and while training pauses. Returns
/// the answers in the order of their arrival.
pub(super) async fn send(
    client: &Client,
    task: &str,
    most_waiting: Option<u64>,
    crowd: Crowd,
) -> (Vec<ObservedAnswer>, CrowdCounts) {
    let crowd = Arc::new(Mutex::new(crowd));
    let (sender, pause) = watch::channel(false);
    let mut users = JoinSet::new();
    for _ in 0..PARALLEL {
        let (client, crowd) = (client.clone(), Arc::clone(&crowd));
        let (task, pause) = (task.to_owned(), pause.clone());
        users.spawn(async move { ask_all(&client, &task, &crowd, &pause).await });
    }
    let everyone = async { while users.join_next().await.is_some() {} };
    let pacing = async {
        match most_waiting {
            Some(most) => watch_load(client, &sender, most).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = everyone => {}
        () = pacing => {}
    }
    let mut crowd = lock(&crowd);
    (std::mem::take(&mut crowd.answers), std::mem::take(&mut crowd.counts))
}

/// Sets `pause` while `most_waiting` prompts and groups wait for the trainer. Never returns.
async fn watch_load(client: &Client, pause: &watch::Sender<bool>, most_waiting: u64) {
    loop {
        // A failed poll must not stop the users, who count failures.
        let wait = should_pause(client, most_waiting).await.unwrap_or(false);
        pause.send_replace(wait);
        sleep(POLL_INTERVAL).await;
    }
}

async fn should_pause(client: &Client, most_waiting: u64) -> Result<bool, ClientError> {
    let status = client.trainer().await?;
    let waiting = status.queued_prompts + status.in_flight_groups + status.ready_groups;
    if status.settled() || waiting < most_waiting {
        return Ok(false);
    }
    let share = client.metrics().await?.value("hone_policy_canary_share_ratio");
    Ok(share.unwrap_or(0.0) == 0.0)
}

fn lock(crowd: &Mutex<Crowd>) -> MutexGuard<'_, Crowd> {
    crowd.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn ask_all(client: &Client, task: &str, crowd: &Mutex<Crowd>, pause: &watch::Receiver<bool>) {
    loop {
        let Some(visit) = lock(crowd).next() else { return };
        match client.ask(&request(task, &visit)).await {
            Ok(answer) => {
                let version = answer.version.0;
                let due = lock(crowd).answered(&visit, answer.completion_id, version, &answer.text);
                for thumb in due {
                    match client.thumb(&thumb.completion_id, thumb.up).await {
                        Ok(reply) => lock(crowd).rated(reply.trained.unwrap_or(true)),
                        Err(error) => lock(crowd).failed(error.to_string()),
                    }
                }
            }
            Err(error) => {
                lock(crowd).failed(error.to_string());
                sleep(AFTER_FAILURE).await;
            }
        }
        let began = Instant::now();
        while *pause.borrow() && began.elapsed() < LONGEST_PAUSE {
            sleep(CHECK_INTERVAL).await;
        }
    }
}

fn request(task: &str, visit: &UserVisit) -> UserRequest {
    let metadata = [
        ("task", task.to_owned()),
        ("session_id", format!("user-{}", visit.user)),
        ("answer", visit.question.answer().to_string()),
    ];
    UserRequest {
        text: visit.question.text(),
        metadata: metadata
            .map(|(key, value)| (key.to_owned(), value))
            .into_iter()
            .collect::<BTreeMap<_, _>>(),
        temperature: 1.0,
        seed: visit.seed,
        max_tokens: MAX_TOKENS,
        store: true,
    }
}
