//! Why a model or a dataset of the hub cannot be used.

use std::error::Error;

use hone_core::config::quoted;
use hone_core::files::FileError;

/// Number of configurations or splits that an error lists.
const LISTED: usize = 20;

/// Why a model or a dataset of the hub cannot be used: a sentence that names it. `repo` is
/// `hf://OWNER/NAME` for a dataset and the id of a model.
#[derive(Debug, thiserror::Error)]
#[error("{sentence}")]
pub struct HubError {
    sentence: String,
    pub(crate) kind: HubErrorKind,
}

/// What the crate does about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HubErrorKind {
    /// The hub answered with this status.
    Status(u16),
    /// The repository or the revision does not exist.
    Missing,
    /// The repository has no file in a format that Hone reads.
    Format,
    /// There was no whole answer. The same request may succeed later.
    Interrupted,
    /// Anything else.
    Other,
}

impl HubError {
    pub(crate) fn new(kind: HubErrorKind, sentence: String) -> Self {
        Self { sentence, kind }
    }

    /// An error of [`HubErrorKind::Other`].
    pub(crate) fn other(sentence: String) -> Self {
        Self::new(HubErrorKind::Other, sentence)
    }

    /// `what` are the files that are missing.
    pub(crate) fn format(repo: &str, what: &str) -> Self {
        Self::new(HubErrorKind::Format, format!("{repo} has no {what}"))
    }

    /// The dataset `repo` has the `known` configurations or splits, but not the value of `key`.
    pub(crate) fn choice(key: &str, value: &str, repo: &str, known: &[String]) -> Self {
        Self::other(format!("{key} is {}: {repo} has {}", quoted(value), list(known)))
    }

    /// Whether the same request may succeed later.
    pub(crate) fn is_transient(&self) -> bool {
        matches!(
            self.kind,
            HubErrorKind::Interrupted | HubErrorKind::Status(408 | 416 | 429 | 500..=599)
        )
    }
}

impl From<FileError> for HubError {
    fn from(error: FileError) -> Self {
        Self::other(format!("the cache of the hub: {error}"))
    }
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
