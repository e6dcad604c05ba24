//! Why a grammar is refused, and why a sequence cannot follow one.

/// An error of a grammar.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// A JSON schema cannot be enforced exactly. `path` is the JSON pointer of the place.
    #[error("{path}: {reason}")]
    Schema {
        /// The place in the schema, as `#` and a JSON pointer.
        path: String,
        /// The keyword, its value and what is supported.
        reason: String,
    },
    /// Another grammar is malformed, too large, or matches no text.
    #[error("{0}")]
    Refused(String),
    /// Too many grammars wait for their compilation.
    #[error("{waiting} grammars are already waiting for their compilation")]
    Busy {
        /// Grammars that are compiled at once.
        places: usize,
        /// Grammars that wait.
        waiting: usize,
    },
    /// No token continues the text. The grammar never ends it, or the tokenizer cannot spell the rest.
    #[error("the grammar permits no further token")]
    DeadEnd,
    /// The computation failed or exceeded its limits.
    #[error("the grammar cannot be followed: {0}")]
    Failed(String),
}

impl GrammarError {
    /// An [`Self::Schema`] error.
    pub(super) fn schema(path: &str, reason: impl Into<String>) -> Self {
        Self::Schema { path: path.to_owned(), reason: reason.into() }
    }

    /// Whether a client caused it with its grammar before anything was sampled.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Schema { .. } | Self::Refused(_))
    }
}
