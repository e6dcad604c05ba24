//! Sampling for clients, which every endpoint that generates text shares.
//!
//! `admit` checks limits before any work. `prompt` makes a prompt's tokens and its record, and decides whether it is kept;
//! `continuation` lets a conversation go on from recorded tokens. `run` samples the
//! choices (each a `choice`, `reading` its tokens in time) and records them; `types` has what it takes and returns. `sse` sends events,
//! `models` has the names of the served model, `tokenize` encodes and decodes texts, and `tokenizer_places` bounds
//! how many long ones are computed at once, for every endpoint.
//! `text` is the endpoint of text completions.
//!
//! Each choice is a separate generation of exactly one policy version. The choices of one request
//! have different versions only if a version was published while some waited for slots. Then
//! `x-hone-policy-version` is the version of the first choice to start (streaming) or of choice 0
//! (otherwise); each streamed chunk's `system_fingerprint` and each ledger record has the version of
//! its own choice.

pub(super) mod admit;
mod choice;
pub(super) mod continuation;
pub(super) mod models;
pub(super) mod prompt;
mod reading;
pub(super) mod recent_turns;
pub(super) mod run;
pub(super) mod sse;
pub(super) mod text;
pub(super) mod tokenize;
pub(super) mod tokenizer_places;
pub(super) mod types;

use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;

use hone_core::types::PolicyVersion;

/// Response header with the policy version.
const VERSION_HEADER: HeaderName = HeaderName::from_static("x-hone-policy-version");

/// Adds the policy version to a response, if it is known.
pub(super) fn with_version(mut response: Response, version: Option<PolicyVersion>) -> Response {
    if let Some(version) = version {
        response.headers_mut().insert(VERSION_HEADER, HeaderValue::from(version.0));
    }
    response
}
