//! The keys of `[graders]`: the endpoint of the models that OpenAI's graders name.

use serde::{Deserialize, Serialize};

use hone_core::config::describe::Problem;
use hone_core::config::range::between;
use hone_core::config::secret::{Secret, from_environment};

use crate::remote::{CallLimits, call_limits, check_url};

/// The models of `score_model` and `label_model` graders. The name `self` is this server's own base
/// model; the endpoint serves every other name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GradersConfig {
    /// An OpenAI-compatible endpoint such as `https://api.example/v1`; empty for none.
    pub base_url: String,
    /// Environment variable that contains the API key; empty sends no key.
    pub api_key_env: String,
    /// The key that the loader read from `api_key_env`.
    #[serde(skip)]
    pub api_key: Option<Secret>,
    /// Requests at the same time.
    pub max_concurrency: usize,
    /// Milliseconds for one attempt, from connecting to the last byte.
    pub timeout_ms: u64,
    /// Retries, only after a failed connection, 408, 429 or 5xx.
    pub retries: u32,
    /// Milliseconds before the first retry; doubles for each further one, with jitter.
    pub backoff_ms: u64,
    /// Longest delay between attempts in milliseconds; also limits `Retry-After`.
    pub max_backoff_ms: u64,
    /// Consecutive failed attempts that open the circuit.
    pub breaker_failures: u32,
    /// Milliseconds that the circuit stays open before one request probes the service.
    pub breaker_cooldown_ms: u64,
    /// Size limit of an answer in bytes.
    pub max_response_bytes: usize,
    /// Whether plain http to other machines is allowed.
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
    /// The endpoint's call limits.
    pub fn limits(&self) -> CallLimits {
        call_limits!(self)
    }

    /// Looks up the environment variable that `api_key_env` names.
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
