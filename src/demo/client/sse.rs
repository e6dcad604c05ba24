//! Decoder of `text/event-stream` bodies.

/// Incremental decoder of server-sent events. Chunks may end anywhere, also inside a UTF-8 sequence
/// or a line end. Fields other than `data` are ignored, because OpenAI's streams have none. An event
/// that the end of the stream cuts off is dropped, as in the HTML standard.
#[derive(Debug, Default)]
pub struct SseDecoder {
    line: Vec<u8>,
    data: Option<String>,
    after_cr: bool,
}

impl SseDecoder {
    /// Adds the next bytes of the body; returns the `data` of each event that they complete.
    pub fn push(&mut self, bytes: &[u8]) -> Vec<String> {
        let mut events = Vec::new();
        for &byte in bytes {
            let ends_crlf = self.after_cr && byte == b'\n';
            self.after_cr = byte == b'\r';
            match byte {
                b'\n' if ends_crlf => {}
                b'\n' | b'\r' => events.extend(self.end_line()),
                other => self.line.push(other),
            }
        }
        events
    }

    fn end_line(&mut self) -> Option<String> {
        let line = std::mem::take(&mut self.line);
        let line = String::from_utf8_lossy(&line);
        if line.is_empty() {
            return self.data.take();
        }
        let (field, value) = line.split_once(':').unwrap_or((&line, ""));
        if field == "data" {
            let value = value.strip_prefix(' ').unwrap_or(value);
            let lines = self.data.take().map(|before| before + "\n").unwrap_or_default();
            self.data = Some(lines + value);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = ": hello\n\ndata: {\"a\":\"é\"}\n\nevent: x\ndata: one\r\ndata:two\r\n\r\n\
                          data: [DONE]\n\ndata: cut off";

    fn all(chunks: impl Iterator<Item = Vec<u8>>) -> Vec<String> {
        let mut decoder = SseDecoder::default();
        chunks.flat_map(|chunk| decoder.push(&chunk)).collect()
    }

    #[test]
    fn any_chunking_gives_the_same_events() {
        let expected = ["{\"a\":\"é\"}", "one\ntwo", "[DONE]"];
        for size in 1..=STREAM.len() {
            let events = all(STREAM.as_bytes().chunks(size).map(<[u8]>::to_vec));
            assert_eq!(events, expected, "in chunks of {size} bytes");
        }
    }

    #[test]
    fn bare_carriage_returns_end_lines() {
        assert_eq!(all([b"data: a\r\rdata: b\r\r".to_vec()].into_iter()), ["a", "b"]);
    }

    #[test]
    fn empty_data_is_an_event_and_other_fields_are_not() {
        let stream = b"data:\n\ndatabase: no\n\nid: 7\n\n".to_vec();
        assert_eq!(all([stream].into_iter()), [""]);
    }
}
