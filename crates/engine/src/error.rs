//! The errors of an engine and of sampling.

use std::fmt::Display;
use std::time::Duration;

use hone_core::types::TokenId;
use hone_model::ModelError;

use crate::grammar::GrammarError;

/// Why a model cannot be served or a request got no completion.
#[derive(Clone, Debug, thiserror::Error)]
pub enum EngineError {
    /// The bounded queue is full. HTTP answers 429.
    #[error("all {slots} slots are busy and {queued} requests are already waiting")]
    Overloaded {
        /// Sequences that can run at once.
        slots: usize,
        /// Live requests in the queue.
        queued: usize,
        /// When the queue will probably have been served.
        retry_after: Duration,
    },
    /// The API key occupies its share of the bounded queue. HTTP answers 429.
    #[error("{own} requests of this key are already waiting, which is its share of the queue")]
    ShareExceeded {
        /// Waiting requests of the key.
        own: usize,
        /// When the queue will probably have been served.
        retry_after: Duration,
    },
    /// More choices at once than an engine without any other request admits. HTTP answers 400.
    #[error("{choices} choices are more than the {most} that can run and wait at once")]
    TooManyChoices {
        /// The choices.
        choices: usize,
        /// Those that an idle engine admits for the API key.
        most: usize,
    },
    /// A live request got no slot in time. HTTP answers 429.
    #[error("no slot became free within {:.0} seconds", waited.as_secs_f64())]
    QueueTimeout {
        /// How long it waited.
        waited: Duration,
        /// When the queue will probably have been served.
        retry_after: Duration,
    },
    /// The prompt fills the context, so that no token can follow it. The words are those of OpenAI and
    /// Anthropic, by which client libraries recognize the error.
    #[error(
        "prompt is too long: this model's maximum context length is {context} tokens, and the prompt has \
         {prompt}"
    )]
    PromptTooLong {
        /// Prompt length in tokens.
        prompt: usize,
        /// Context length in tokens.
        context: usize,
    },
    /// The request is malformed. The sentence names the parameter and its value.
    #[error("{0}")]
    Invalid(String),
    /// The model cannot be served. The sentence names the file, the key and the value.
    #[error("{0}")]
    Model(String),
    /// A live request needed the slot of this shadow request. Repeat it with the same seed.
    #[error("preempted by live traffic")]
    Preempted,
    /// The daemon is shutting down.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// No token can be drawn.
    #[error("engine failure: {0}")]
    Sample(#[from] SampleError),
    /// The engine failed.
    #[error("engine failure: {0}")]
    Internal(String),
}

impl EngineError {
    /// The error of a probe or an activation before a version was staged.
    pub fn nothing_staged() -> Self {
        Self::Invalid("no version is staged".to_owned())
    }

    /// A component of the model failed: a file that cannot be read, parsed or written, the chat template, or the
    /// tokenizer.
    pub fn component(component: impl Display, error: impl Display) -> Self {
        Self::Model(format!("{component}: {error}"))
    }

    /// Whether the queue refuses the request now and may accept it later.
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::Overloaded { .. } | Self::ShareExceeded { .. } | Self::QueueTimeout { .. }
        )
    }

    /// Whether the client's grammar, and neither the model nor the engine, is the cause.
    pub fn is_of_grammar(&self) -> bool {
        matches!(self, Self::Sample(SampleError::Grammar(_)))
    }
}

impl From<GrammarError> for EngineError {
    fn from(error: GrammarError) -> Self {
        match error {
            GrammarError::Busy { places, waiting } => Self::Overloaded {
                slots: places,
                queued: waiting,
                retry_after: Duration::from_secs(1),
            },
            error if error.is_refusal() => Self::Invalid(error.to_string()),
            error => Self::Sample(SampleError::Grammar(error)),
        }
    }
}

impl From<ModelError> for EngineError {
    fn from(error: ModelError) -> Self {
        Self::Model(error.to_string())
    }
}

/// Why no token can be drawn from logits.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SampleError {
    /// A logit is NaN or +inf.
    #[error("the logit of token {id} is {value}")]
    NotFinite {
        /// The first such token.
        id: TokenId,
        /// Its logit.
        value: f32,
    },
    /// Every logit is -inf, or there are no logits.
    #[error("no token has any probability")]
    NoMass,
    /// The request has a bias for a token outside the vocabulary.
    #[error("logit_bias names token {id}; the vocabulary holds {vocab}")]
    UnknownToken {
        /// The token.
        id: TokenId,
        /// Logits per position.
        vocab: usize,
    },
    /// The grammar of the request permits no token, or cannot be followed.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
}
