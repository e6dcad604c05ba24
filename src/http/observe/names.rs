//! What identifies a request in the logs of its client, of proxies and of the server: its id, and the trace of
//! which it is a part.

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use tracing::Span;
use uuid::Uuid;

/// The header with a request's id.
pub(in crate::http) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// Longest id that a client may choose, in characters.
const LONGEST_ID: usize = 128;

/// The id of a request.
#[derive(Clone, Debug)]
pub(in crate::http) struct RequestId(pub(in crate::http) String);

/// The names of a request.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RequestNames {
    id: HeaderValue,
    /// W3C's `traceparent`.
    trace: Option<HeaderValue>,
}

impl RequestNames {
    /// The client's names, if they are well-formed; otherwise a new id, and no trace.
    pub(super) fn of(headers: &HeaderMap) -> Self {
        let found = |name: HeaderName, is_valid: fn(&str) -> bool| {
            headers.get(name).filter(|value| value.to_str().is_ok_and(is_valid)).cloned()
        };
        let id = found(REQUEST_ID, is_id).unwrap_or_else(|| {
            // Letters and digits are a valid value.
            let id = format!("req-{}", Uuid::now_v7().simple());
            HeaderValue::from_str(&id).unwrap_or(HeaderValue::from_static("req"))
        });
        Self { id, trace: found(TRACEPARENT, is_trace) }
    }

    /// The span of the request, whose fields each log line has.
    pub(super) fn span(&self) -> Span {
        let id = self.id.to_str().unwrap_or_default();
        let trace = self.trace.as_ref().and_then(|trace| trace.to_str().ok()?.get(3..35));
        // At the highest level, so that no filter removes it from an error.
        tracing::error_span!("http", id, trace)
    }

    /// The id alone.
    pub(super) fn request_id(&self) -> RequestId {
        RequestId(self.id.to_str().unwrap_or_default().to_owned())
    }

    /// Adds the names to a response.
    pub(super) fn add_to(self, headers: &mut HeaderMap) {
        headers.insert(REQUEST_ID, self.id);
        if let Some(trace) = self.trace {
            headers.insert(TRACEPARENT, trace);
        }
    }
}

/// Whether a client may use this id: it must not disturb a log line.
fn is_id(text: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.:/+=@".contains(&b);
    (1..=LONGEST_ID).contains(&text.len()) && text.bytes().all(plain)
}

/// Whether a text is a `traceparent`: version, trace, span and flags.
fn is_trace(text: &str) -> bool {
    let hex = |part: &str, length: usize| {
        part.len() == length && part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
    };
    let named = |part: &str| part.bytes().any(|b| b != b'0');
    let parts: Vec<&str> = text.split('-').collect();
    let [version, trace, span, flags] = parts[..] else { return false };
    hex(version, 2)
        && version != "ff"
        && hex(trace, 32)
        && named(trace)
        && hex(span, 16)
        && named(span)
        && hex(flags, 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn names(pairs: &[(&'static str, &str)]) -> RequestNames {
        let pairs = pairs.iter().map(|&(name, value)| {
            (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())
        });
        RequestNames::of(&HeaderMap::from_iter(pairs))
    }

    #[test]
    fn well_formed_names_are_kept_and_others_replaced() {
        let kept = names(&[("x-request-id", "a-1.b:2"), ("traceparent", TRACE)]);
        assert_eq!(
            (kept.id, kept.trace.unwrap()),
            (HeaderValue::from_static("a-1.b:2"), HeaderValue::from_static(TRACE))
        );
        for id in ["", "a b", "a\"b", "{x}", &"x".repeat(129)] {
            let new = names(&[("x-request-id", id)]);
            assert!(new.id.to_str().unwrap().starts_with("req-"), "{id}");
            assert_ne!(new, names(&[]));
        }
        for trace in [
            "",
            "x",
            &TRACE.to_uppercase(),
            &TRACE.replace("00-0af", "ff-0af"),
            &TRACE.replace("b7ad6b7169203331", "0000000000000000"),
            &format!("{TRACE}-x"),
        ] {
            assert_eq!(names(&[("traceparent", trace)]).trace, None, "{trace}");
        }
    }
}
