//! Reads `text/event-stream` bodies as a client does: bytes in, `data` payloads out.

/// Incremental decoder of server-sent events. Chunk boundaries may fall anywhere, also inside a
/// UTF-8 sequence or a line end. Fields other than `data` are ignored, as OpenAI's streams have
/// none; an event that the stream's end cuts off is dropped, as the HTML standard has it.
#[derive(Debug, Default)]
pub struct SseDecoder {
    line: Vec<u8>,
    data: Option<String>,
    after_cr: bool,
}

impl SseDecoder {
    /// Takes the next bytes of the body; returns the payload of each event they complete.
    pub fn push(&mut self, bytes: &[u8]) -> Vec<String> {
        let mut events = Vec::new();
        for &byte in bytes {
            let second_half_of_crlf = self.after_cr && byte == b'\n';
            self.after_cr = byte == b'\r';
            match byte {
                b'\n' if second_half_of_crlf => {}
                b'\n' | b'\r' => events.extend(self.end_line()),
                other => self.line.push(other),
            }
        }
        events
    }

    fn end_line(&mut self) -> Option<String> {
        let line = std::mem::take(&mut self.line);
        if line.is_empty() {
            return self.data.take();
        }
        let value = line.strip_prefix(b"data")?;
        let value = match value.strip_prefix(b":") {
            Some(value) => value.strip_prefix(b" ").unwrap_or(value),
            None if value.is_empty() => value,
            None => return None,
        };
        let value = String::from_utf8_lossy(value);
        match &mut self.data {
            Some(data) => {
                data.push('\n');
                data.push_str(&value);
            }
            None => self.data = Some(value.into_owned()),
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
