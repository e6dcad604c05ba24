//! One connection to the server, and clients that are slow.

use std::net::SocketAddr;
use std::time::Duration;

use rand::Rng as _;
use rand::seq::IndexedRandom as _;
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use super::Valid;

/// How a client behaves after it has connected.
#[derive(Clone, Copy, Debug)]
pub enum Pace {
    /// Sends everything and reads to the end.
    Normal,
    /// Ends its side of the connection after everything is sent.
    Ends,
    /// Sends a few bytes now and then, and goes away.
    SlowSender,
    /// Reads a few bytes now and then, and goes away.
    SlowReader,
    /// Goes away when everything is sent.
    Leaves,
}

/// What a client sends.
pub struct Attempt {
    pub bytes: Vec<u8>,
    pub pace: Pace,
    /// Whether every response is a refusal.
    pub must_fail: bool,
}

impl Attempt {
    /// The beginning of what is sent.
    pub fn shown(&self) -> String {
        let text = String::from_utf8_lossy(&self.bytes);
        format!("{:?} {}", self.pace, text.chars().take(2000).collect::<String>())
    }

    /// Sends it. Returns the status of the first response, if there is one.
    pub async fn send(&self, addr: SocketAddr) -> Option<u16> {
        let done = timeout(Duration::from_secs(60), self.converse(addr)).await;
        done.unwrap_or_else(|_| panic!("no end of {}", self.shown()))
    }

    async fn converse(&self, addr: SocketAddr) -> Option<u16> {
        let mut stream = TcpStream::connect(addr).await.unwrap();
        let (mut read, mut write) = stream.split();
        let sends = async {
            // The server may have ended the connection already.
            match self.pace {
                Pace::SlowSender => {
                    let step = self.bytes.len().div_ceil(10).max(1);
                    for piece in self.bytes.chunks(step).take(9) {
                        let _ended = write.write_all(piece).await;
                        sleep(Duration::from_millis(100)).await;
                    }
                }
                _ => {
                    let _ended = write.write_all(&self.bytes).await;
                }
            }
            if matches!(self.pace, Pace::Ends | Pace::SlowSender) {
                let _ended = write.shutdown().await;
            }
        };
        let reads = async {
            let mut received = Vec::new();
            match self.pace {
                Pace::Leaves => {}
                Pace::SlowReader => {
                    let mut few = [0; 16];
                    for _ in 0..15 {
                        let count = read.read(&mut few).await.unwrap_or_default();
                        received.extend_from_slice(&few[..count]);
                        sleep(Duration::from_millis(100)).await;
                    }
                }
                _ => {
                    // A connection with unread bytes may be reset.
                    let _ended = read.read_to_end(&mut received).await;
                }
            }
            received
        };
        let ((), received) = tokio::join!(sends, reads);
        let text = String::from_utf8_lossy(&received).into_owned();
        text.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok()
    }
}

/// A POST request with a body, after which the server ends the connection.
pub fn post(path: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

pub fn any_request<'v>(valid: &'v Valid, random: &mut ChaCha8Rng) -> (&'v str, &'v Value) {
    let (path, requests) = valid.0.choose(random).unwrap();
    (path, requests.choose(random).unwrap())
}

/// A client that is slow, or goes away.
pub fn slow(valid: &Valid, random: &mut ChaCha8Rng) -> Attempt {
    let (path, request) = any_request(valid, random);
    let mut bytes = post(path, request.to_string().as_bytes());
    let pace = match random.random_range(0..4) {
        0 => Pace::SlowSender,
        1 => Pace::Leaves,
        2 => {
            // A head without an end.
            bytes.truncate(random.random_range(0..60));
            Pace::Normal
        }
        _ => {
            let body = json!({
                "model": "default", "messages": [{"role": "user", "content": "What is 2 + 3?"}],
                "stream": true, "n": 2, "max_tokens": 200, "ignore_eos": true, "logprobs": true,
                "top_logprobs": 20,
            });
            bytes = post("/v1/chat/completions", body.to_string().as_bytes());
            Pace::SlowReader
        }
    };
    Attempt { bytes, pace, must_fail: false }
}
