//! The keys of `[graders]`: who answers for the models that OpenAI's graders name.

use serde::{Deserialize, Serialize};

use hone_core::config::describe::Problem;
use hone_core::config::range::between;
use hone_core::config::secret::{Secret, from_environment};

use crate::remote::{CallLimits, call_limits, check_url};

/// What `score_model` and `label_model` graders ask. The model named `self` is this server's own
/// base model; every other name is asked of the endpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GradersConfig {
    /// An OpenAI-compatible endpoint such as `https://api.example/v1`; empty has none.
    pub base_url: String,
    /// Environment variable with the API key; empty sends none.
    pub api_key_env: String,
    /// What the loader found in `api_key_env`.
    #[serde(skip)]
    pub api_key: Option<Secret>,
    /// Questions at once.
    pub max_concurrency: usize,
    /// Milliseconds for one attempt, from connecting to the last byte.
    pub timeout_ms: u64,
    /// Attempts after the first, on a failed connection, 408, 429 and 5xx only.
    pub retries: u32,
    /// Milliseconds before the first retry; each further one waits twice as long, jittered.
    pub backoff_ms: u64,
    /// Longest wait between attempts, in milliseconds; also for `Retry-After`.
    pub max_backoff_ms: u64,
    /// Failed attempts in a row that open the circuit.
    pub breaker_failures: u32,
    /// Milliseconds that an open circuit rests before one request probes the service.
    pub breaker_cooldown_ms: u64,
    /// Longest answer in bytes.
    pub max_response_bytes: usize,
    /// Whether plain http may leave this machine.
    pub allow_http: bool,
}

impl Default for GradersConfig {
    fn default() -> Self {
        Self {
            base_url: String::new(),
            api_key_env: String::new(),
            api_key: None,
            max_concurrency: 4,
            timeout_ms: 60_000,
            retries: 2,
            backoff_ms: 200,
            max_backoff_ms: 10_000,
            breaker_failures: 5,
            breaker_cooldown_ms: 10_000,
            max_response_bytes: 1 << 20,
            allow_http: false,
        }
    }
}

impl GradersConfig {
    /// How the endpoint is called.
    pub fn limits(&self) -> CallLimits {
        call_limits!(self)
    }

    /// Looks up the API key that `api_key_env` names.
    ///
    /// # Errors
    /// The rest of a sentence that begins with the key.
    pub fn resolve(&mut self, lookup: impl Fn(&str) -> Option<String>) -> Result<(), String> {
        self.api_key = from_environment(&self.api_key_env, lookup)?;
        Ok(())
    }

    /// Checks every range.
    ///
    /// # Errors
    /// The first value out of range, with its full key.
    pub fn check(&self) -> Result<(), Problem> {
        if !self.base_url.is_empty() {
            check_url("graders.base_url", &self.base_url, self.allow_http)?;
        }
        between("graders.max_concurrency", self.max_concurrency, 1, 1024)?;
        self.limits().check("graders.")
    }
}
