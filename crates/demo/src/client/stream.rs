//! Reads one streamed chat completion and checks that it keeps the API's guarantees.

use std::time::{Duration, Instant};

use serde_json::Value;

use hone_core::types::PolicyVersion;

/// A whole streamed completion.
#[derive(Clone, Debug)]
pub struct StreamedAnswer {
    /// The id that feedback refers to.
    pub completion_id: String,
    /// The text.
    pub text: String,
    /// The policy version that generated it.
    pub version: PolicyVersion,
    /// From sending the request to the first text.
    pub first_token: Duration,
    /// From each piece of text to the next.
    pub gaps: Vec<Duration>,
}

/// The part of a stream that has arrived.
pub(super) struct StreamReader {
    sent: Instant,
    /// Without an id until the first chunk.
    answer: StreamedAnswer,
    /// When the last text arrived, since `sent`.
    last: Option<Duration>,
    finished: bool,
    done: bool,
}

impl StreamReader {
    pub(super) fn new(version: PolicyVersion, sent: Instant) -> Self {
        let answer = StreamedAnswer {
            completion_id: String::new(),
            text: String::new(),
            version,
            first_token: Duration::ZERO,
            gaps: Vec::new(),
        };
        Self { sent, answer, last: None, finished: false, done: false }
    }

    /// Adds the `data` of one event.
    pub(super) fn event(&mut self, data: &str) -> Result<(), String> {
        if self.done {
            return Err("an event after [DONE]".to_owned());
        }
        if data == "[DONE]" {
            self.done = true;
            return Ok(());
        }
        let value: Value = serde_json::from_str(data).map_err(|e| format!("not JSON: {e}"))?;
        if let Some(error) = value.get("error") {
            return Err(format!("the stream failed: {}", error_message(error)));
        }
        let expected = self.answer.version.fingerprint();
        let found = value["system_fingerprint"].as_str();
        if let Some(other) = found.filter(|found| *found != expected) {
            return Err(format!("a chunk of {other} in a stream of {expected}"));
        }
        let id = value["id"].as_str().ok_or("not a chunk: it has no id")?;
        if self.answer.completion_id.is_empty() {
            id.clone_into(&mut self.answer.completion_id);
        } else if self.answer.completion_id != id {
            return Err("the completion's id changed within the stream".to_owned());
        }
        for choice in value["choices"].as_array().into_iter().flatten() {
            let content = choice["delta"]["content"].as_str().unwrap_or_default();
            if !content.is_empty() {
                let now = self.sent.elapsed();
                match self.last.replace(now) {
                    None => self.answer.first_token = now,
                    Some(last) => self.answer.gaps.push(now.saturating_sub(last)),
                }
                self.answer.text.push_str(content);
            }
            self.finished |= !choice["finish_reason"].is_null();
        }
        Ok(())
    }

    /// The answer, if the stream is complete.
    pub(super) fn finish(mut self) -> Result<StreamedAnswer, String> {
        let missing = match (self.done, self.finished) {
            (false, _) => "the stream ended without [DONE]",
            (_, false) => "the stream ended without a finish_reason",
            _ if self.answer.completion_id.is_empty() => "the stream contained no chunk",
            _ => {
                if self.last.is_none() {
                    // Without any text, the end of the stream counts as the first token.
                    self.answer.first_token = self.sent.elapsed();
                }
                return Ok(self.answer);
            }
        };
        Err(missing.to_owned())
    }
}

/// The message of an error object, or the whole object as JSON.
pub(super) fn error_message(error: &Value) -> String {
    match error.get("message").and_then(Value::as_str) {
        Some(message) => message.to_owned(),
        None => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(events: &[&str]) -> Result<StreamedAnswer, String> {
        let mut reader = StreamReader::new(PolicyVersion(3), Instant::now());
        for event in events {
            reader.event(event)?;
        }
        reader.finish()
    }

    const ROLE: &str = r#"{"id":"chatcmpl-1","system_fingerprint":"hone-v3",
        "choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#;
    const TEXT: &str = r#"{"id":"chatcmpl-1","system_fingerprint":"hone-v3",
        "choices":[{"index":0,"delta":{"content":"4"},"finish_reason":null}]}"#;
    const END: &str = r#"{"id":"chatcmpl-1","system_fingerprint":"hone-v3",
        "choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}"#;
    const USAGE: &str = r#"{"id":"chatcmpl-1","choices":[],"usage":{"total_tokens":3}}"#;

    #[test]
    fn a_whole_stream_is_an_answer() {
        let answer = read(&[ROLE, TEXT, TEXT, END, USAGE, "[DONE]"]).unwrap();
        assert_eq!((answer.text.as_str(), answer.completion_id.as_str()), ("44", "chatcmpl-1"));
        assert_eq!(answer.version, PolicyVersion(3));
    }

    #[test]
    fn broken_streams_are_failures() {
        let other = TEXT.replace("hone-v3", "hone-v4");
        let elsewhere = TEXT.replace("chatcmpl-1", "chatcmpl-2");
        let failed = r#"{"error":{"message":"engine failure","type":"server_error"}}"#;
        for (events, reason) in [
            (vec![ROLE, TEXT, END], "without [DONE]"),
            (vec![ROLE, TEXT, "[DONE]"], "without a finish_reason"),
            (vec![ROLE, &other], "hone-v4 in a stream of hone-v3"),
            (vec![ROLE, &elsewhere], "id changed"),
            (vec![ROLE, TEXT, failed], "engine failure"),
            (vec![ROLE, "{"], "not JSON"),
            (vec![END, "[DONE]", TEXT], "after [DONE]"),
        ] {
            let error = read(&events).unwrap_err();
            assert!(error.contains(reason), "{error:?} should contain {reason:?}");
        }
    }
}
