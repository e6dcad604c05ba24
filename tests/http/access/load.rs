//! Many clients of several keys while one key floods the server.
//!
//! `HONE_LOAD_SECONDS=60 cargo test --release --test http flood -- --nocapture` runs each phase for a minute and
//! compares the memory, which other tests of the process would change.

use std::time::{Duration, Instant};

use reqwest::Client;
use serde_json::json;
use tokio::task::JoinSet;

use hone::config::KeyScope;
use hone_core::memory::resident;

use crate::server::{Server, ask, key};

/// Keys of the clients other than the flooding one.
const KEYS: [&str; 4] = ["a", "b", "c", "d"];
/// Concurrent clients of each of those keys.
const CLIENTS: usize = 50;
/// Concurrent clients of the flooding key: more than its share of the queue.
const FLOOD: usize = 90;
/// Length of a phase in seconds, unless `HONE_LOAD_SECONDS` is set.
const SECONDS: u64 = 3;
/// Growth of the memory that the allocator and the ledger's cache explain.
const GROWTH: u64 = 16 << 20;

/// What the clients of a phase saw.
#[derive(Default)]
struct Seen {
    /// Times to the first token.
    first: Vec<Duration>,
    /// Completions, and refusals with 429.
    answered: usize,
    refused: usize,
}

impl Seen {
    fn add(&mut self, other: Self) {
        self.first.extend(other.first);
        self.answered += other.answered;
        self.refused += other.refused;
    }

    /// The time that 99 of 100 first tokens did not exceed.
    fn p99(&mut self) -> Duration {
        self.first.sort();
        let at = (self.first.len() * 99).div_ceil(100).saturating_sub(1);
        self.first.get(at).copied().unwrap_or_default()
    }
}

/// Sends streaming requests one after the other until `end`. A refused one is sent again after a short
/// pause, whatever `Retry-After` says.
async fn client(client: Client, url: String, key: &'static str, end: Instant) -> Seen {
    let mut seen = Seen::default();
    let mut seed = 0_u64;
    while Instant::now() < end {
        seed += 1;
        let body = ask(json!({"stream": true, "seed": seed}));
        let began = Instant::now();
        let mut response = client.post(&url).bearer_auth(key).json(&body).send().await.unwrap();
        match response.status().as_u16() {
            200 => {}
            429 => {
                assert!(response.headers().contains_key("retry-after"));
                seen.refused += 1;
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
            other => panic!("status {other}"),
        }
        let mut text = String::new();
        let mut first = None;
        while let Some(bytes) = response.chunk().await.unwrap() {
            text.push_str(std::str::from_utf8(&bytes).unwrap());
            // The first event has the role and no text.
            if first.is_none() && text.matches("\"content\":\"").count() > 1 {
                first = Some(began.elapsed());
            }
        }
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
        seen.first.extend(first);
        seen.answered += 1;
    }
    seen
}

/// The length of a phase in seconds, if it is set.
fn chosen_seconds() -> Option<u64> {
    std::env::var("HONE_LOAD_SECONDS").ok().and_then(|text| text.parse().ok())
}

/// What the clients of a phase saw, and the resident memory after a third of it and at its end.
struct Phase {
    /// The clients of the other keys.
    others: Seen,
    /// The clients of the flooding key.
    flood: Seen,
    resident: [u64; 2],
}

/// Runs the clients of the keys, and those of the flooding key if `floods`.
async fn phase(server: &Server, floods: bool) -> Phase {
    let length = Duration::from_secs(chosen_seconds().unwrap_or(SECONDS));
    let end = Instant::now() + length;
    let warm = tokio::spawn(async move {
        tokio::time::sleep(length / 3).await;
        resident()
    });
    let url = server.url("/v1/chat/completions");
    let mut running = JoinSet::new();
    let flood = if floods { FLOOD } else { 0 };
    let keys = KEYS.iter().flat_map(|key| std::iter::repeat_n(*key, CLIENTS));
    for key in keys.chain(std::iter::repeat_n("flood", flood)) {
        let seen = client(server.client.clone(), url.clone(), key, end);
        running.spawn(async move { (key, seen.await) });
    }
    let (mut others, mut flooding) = (Seen::default(), Seen::default());
    while let Some(done) = running.join_next().await {
        let (key, seen) = done.unwrap();
        if key == "flood" { flooding.add(seen) } else { others.add(seen) }
    }
    Phase { others, flood: flooding, resident: [warm.await.unwrap(), resident()] }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_one_key_leaves_the_others_their_share() {
    let server = Server::with(|s| {
        s.fake.slots = 8;
        // The clients find a place beside the whole flood, but not the whole flood beside the clients.
        s.fake.queue = 350;
        s.fake.delay = Duration::from_millis(2);
        let keys = KEYS.iter().chain(&["flood"]);
        s.server.keys = keys.map(|name| key(name, &[KeyScope::Chat])).collect();
    })
    .await;
    let Phase { others: mut alone, .. } = phase(&server, false).await;
    let Phase { others: mut beside, flood, resident } = phase(&server, true).await;
    assert_eq!((alone.refused, beside.refused), (0, 0));
    assert!(flood.answered > 0 && flood.refused > 0, "{} and {}", flood.answered, flood.refused);
    let (before, during) = (alone.p99(), beside.p99());
    println!(
        "p99 to the first token {before:?} alone and {during:?} beside the flood; {} and {} answered; \
         the flood: {} answered, {} refused; {} MiB resident, {} MiB at the end",
        alone.answered,
        beside.answered,
        flood.answered,
        flood.refused,
        resident[0] >> 20,
        resident[1] >> 20
    );
    assert!(during <= 2 * before, "{during:?} beside the flood, {before:?} without");
    // The flood gets about the share of one of five keys.
    assert!(flood.answered < beside.answered / 2, "{} of {}", flood.answered, beside.answered);
    // Every accepted interaction is in the ledger.
    server.store.commit(Vec::new()).await.unwrap();
    let answered = alone.answered + beside.answered + flood.answered;
    assert_eq!(server.store.stats().unwrap().interactions, answered as u64);
    if chosen_seconds().is_some() {
        let [warm, last] = resident;
        assert!(last <= warm + warm / 20 + GROWTH, "{warm} bytes, {last} at the end");
    }
}
