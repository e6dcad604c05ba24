//! Why a model or a dataset of the hub cannot be used.

use std::error::Error;

use hone_core::config::quoted;
use hone_core::files::FileError;

/// Number of configurations or splits that an error lists.
const LISTED: usize = 20;

/// Why a model or a dataset of the hub cannot be used. `repo` is `hf://OWNER/NAME` for a dataset and
/// the id of a model.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// Not an id of the hub.
    #[error("{0:?} is not of the form hf://OWNER/NAME")]
    Id(String),
    /// No answer, after retries.
    #[error(
        "{repo}: the hub at {endpoint} cannot be reached ({reason}); without it, set {instead}"
    )]
    Unreachable {
        /// The model or dataset.
        repo: String,
        /// URL of the hub.
        endpoint: String,
        /// The cause.
        reason: String,
        /// A key that needs no hub.
        instead: &'static str,
    },
    /// Status 401 or 403.
    #[error("{repo}: the hub at {endpoint} refuses access (status {status}): {}", refused(.token))]
    Refused {
        /// The model or dataset.
        repo: String,
        /// URL of the hub.
        endpoint: String,
        /// The status.
        status: u16,
        /// The variable of the token, and whether a token was sent.
        token: (String, bool),
    },
    /// Status 404 for the repository or the revision.
    #[error("{repo} does not exist on {endpoint}{}", or_revision(.revision))]
    Missing {
        /// The model or dataset.
        repo: String,
        /// URL of the hub.
        endpoint: String,
        /// The configured revision; empty for none.
        revision: String,
    },
    /// Any other status than success.
    #[error("{repo}: the hub at {endpoint} answered with status {status} for {file}")]
    Status {
        /// The model or dataset.
        repo: String,
        /// URL of the hub.
        endpoint: String,
        /// The status.
        status: u16,
        /// What was requested.
        file: String,
    },
    /// The answer is not that of a hub.
    #[error("{repo}: {endpoint} does not answer as a hub does: {reason}")]
    Answer {
        /// The model or dataset.
        repo: String,
        /// URL of the hub.
        endpoint: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A download ended early, after retries. The next start continues it.
    #[error("{repo}: the download of {file} ended after {received} bytes: {reason}")]
    Truncated {
        /// The model or dataset.
        repo: String,
        /// The file.
        file: String,
        /// Size of the incomplete file.
        received: u64,
        /// The cause.
        reason: String,
    },
    /// The repository has no file in a format that Hone reads.
    #[error("{repo} has no {what}")]
    Format {
        /// The model or dataset.
        repo: String,
        /// The files that are missing.
        what: &'static str,
    },
    /// The dataset does not have the configuration or the split.
    #[error("{key} is {}: {repo} has {}", quoted(.value), list(.known))]
    Choice {
        /// The configuration key.
        key: &'static str,
        /// Its value.
        value: String,
        /// The dataset, with its configuration if the key is a split.
        repo: String,
        /// The possible values.
        known: Vec<String>,
    },
    /// The token cannot be part of a request.
    #[error("the token in {0} or in the token file must be printable ASCII")]
    Token(String),
    /// The HTTP client cannot be built.
    #[error("the HTTP client cannot be built: {0}")]
    Client(String),
    /// The cache cannot be read or written.
    #[error("hub.cache: {0}")]
    Cache(#[from] FileError),
}

impl HubError {
    /// Whether the same request may succeed later.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Truncated { .. } => true,
            Self::Status { status, .. } => matches!(status, 408 | 416 | 429 | 500..=599),
            _ => false,
        }
    }
}

fn refused((variable, sent): &(String, bool)) -> String {
    if *sent {
        return "the token gives no access to it, or it does not exist".to_owned();
    }
    let variable = if variable.is_empty() { "hub.token_env" } else { variable };
    format!("it is private, gated or does not exist; {variable} is not set")
}

fn or_revision(revision: &str) -> String {
    if revision.is_empty() {
        return String::new();
    }
    format!(", or has no revision {revision}")
}

fn list(known: &[String]) -> String {
    let shown = &known[..known.len().min(LISTED)];
    match (shown, known.len() - shown.len()) {
        ([only], 0) => only.clone(),
        ([first @ .., last], 0) => format!("{} and {last}", first.join(", ")),
        (_, more) => format!("{} and {more} more", shown.join(", ")),
    }
}

/// The innermost cause of an error of the HTTP client, which does not contain the URL.
pub(crate) fn root_cause(error: &reqwest::Error) -> String {
    let mut cause: &dyn Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}
