//! Endpoints beside chat completions and feedback on one of them, and what is kept of requests.

use serde_json::Value;

mod completions;
mod feedback;
pub mod messages;
mod models;
mod openapi;
mod stored;
mod storing;
mod tokenize;

/// The message, field and code of an error.
pub(super) fn error(answer: &Value) -> String {
    let text = |key: &str| answer["error"][key].as_str().unwrap_or("-");
    format!("{} | {} | {}", text("message"), text("param"), text("code"))
}
