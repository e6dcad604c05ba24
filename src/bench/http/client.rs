//! A client that costs little, so that it hardly changes what is measured beside it: one connection, fixed
//! headers, and responses that are received but not read.

use std::net::SocketAddr;

use anyhow::{Context as _, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// The end of a response's head.
const HEAD_END: &[u8] = b"\r\n\r\n";
/// The end of a response in chunks. JSON has no line breaks within its strings.
const LAST_CHUNK: &[u8] = b"\r\n0\r\n\r\n";

/// A connection that is kept between requests.
pub(super) struct BenchConnection {
    stream: TcpStream,
    addr: SocketAddr,
    received: Vec<u8>,
}

impl BenchConnection {
    pub async fn open(addr: SocketAddr) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(addr).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, addr, received: Vec::new() })
    }

    /// Posts a JSON body to the chat completions and returns the whole response.
    ///
    /// # Errors
    /// If the connection ends or the status is not 200.
    pub async fn post(&mut self, body: &str) -> anyhow::Result<&str> {
        let request = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n{body}",
            self.addr,
            body.len()
        );
        self.stream.write_all(request.as_bytes()).await?;
        self.received.clear();
        while !is_whole(&self.received)? {
            let read = self.stream.read_buf(&mut self.received).await?;
            ensure!(read > 0, "the connection ended within a response");
        }
        let text = std::str::from_utf8(&self.received)?;
        ensure!(text.starts_with("HTTP/1.1 200 "), "not a completion: {text}");
        Ok(text)
    }
}

/// Whether a response has arrived up to its end.
fn is_whole(received: &[u8]) -> anyhow::Result<bool> {
    let end = received.windows(HEAD_END.len()).position(|window| window == HEAD_END);
    let Some(end) = end else { return Ok(false) };
    let head = std::str::from_utf8(received.get(..end).unwrap_or_default())?;
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    match length {
        Some(length) => {
            let length: usize = length.parse().context("the header content-length")?;
            Ok(received.len() >= end + HEAD_END.len() + length)
        }
        None => Ok(received.ends_with(LAST_CHUNK)),
    }
}

#[cfg(test)]
mod tests {
    use super::is_whole;

    #[test]
    fn a_response_ends_with_its_length_or_its_last_chunk() {
        let whole = |text: &str| is_whole(text.as_bytes()).unwrap();
        assert!(!whole("") && !whole("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n"));
        assert!(!whole("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{"));
        assert!(whole("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"));
        let chunks = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\na\n\n";
        assert!(!whole(chunks) && whole(&format!("{chunks}\r\n0\r\n\r\n")));
        assert!(is_whole(b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n").is_err());
    }
}
